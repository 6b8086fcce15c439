"""Cases of flag-gems: torch's operations. Its launchers know compiled kernels alone, so that what they ask a kernel for
is added to interpreted ones, and its own tuner is Triton's."""

import inspect
import sys
import textwrap
import types

import torch
import triton
import triton.runtime.jit
from triton.runtime.interpreter import InterpretedFunction

from tests.trials.foreign.case import Cases, graded, pairs, several
from tests.trials.foreign.shim import pretend_gpu


def libtuner(configs, key, prune_configs_by=None, reset_to_zero=None, restore_value=None, **_):
    return triton.autotune(configs, key, prune_configs_by, reset_to_zero, restore_value)


def source(kernel):
    """Without what stands above the definition, as of a compiled kernel."""
    text = textwrap.dedent(inspect.getsource(kernel.fn))
    return text[text.index("def ") :]


def imported():
    """The package, by way of a module in place of its tuner and with interpreted kernels in place of compiled ones."""
    tuner = types.ModuleType("flag_gems.utils.libentry")
    tuner.libtuner, tuner.libentry = libtuner, lambda: lambda function: function
    tuner.LibEntry = tuner.LibTuner = type("Unused", (), {})
    sys.modules[tuner.__name__] = tuner
    InterpretedFunction.cache_key = property(lambda kernel: f"{kernel.fn.__module__}.{kernel.fn.__qualname__}")
    InterpretedFunction.src = property(source)
    InterpretedFunction.__globals__ = property(lambda kernel: kernel.fn.__globals__)
    compiled, triton.runtime.jit.JITFunction = triton.runtime.jit.JITFunction, InterpretedFunction
    try:
        import flag_gems
    finally:
        triton.runtime.jit.JITFunction = compiled
    return flag_gems.ops


pretend_gpu()
gems = imported()
cases = Cases()


@cases.add
def pointwise():
    x, y = torch.randn(7, 33), torch.randn(7, 33)
    return pairs(gems.add, torch.add, x, y) + pairs(gems.exp, torch.exp, x)


@cases.add
def softmaxes():
    told = []
    for shape, dim in (((5, 37), -1), ((3, 21, 9), 1), ((2, 5000), -1)):
        x, g = torch.randn(shape), torch.randn(shape)
        told += pairs(lambda x, d=dim: gems.softmax(x, d), lambda x, d=dim: x.softmax(d), x)
        told += pairs(lambda x, d=dim: gems.log_softmax(x, d), lambda x, d=dim: x.log_softmax(d), x)
        y = x.softmax(dim)
        told += pairs(
            lambda g, y, d=dim: gems.softmax_backward(g, y, d, torch.float32),
            lambda g, y, d=dim: y * (g - (g * y).sum(d, keepdim=True)), g, y,
        )  # fmt: skip
    return told


@cases.add
def sums_and_means():
    told = []
    for shape in ((5, 37), (3, 21, 9), (2, 3000)):
        x = torch.randn(shape)
        told += pairs(gems.sum, torch.sum, x) + pairs(gems.mean, torch.mean, x)
        told += pairs(lambda x: gems.sum_dim(x, [1]), lambda x: x.sum(1), x)
        told += pairs(lambda x: gems.sum_dim(x, [0]), lambda x: x.sum(0), x)
        told += pairs(lambda x: gems.mean_dim(x, [1]), lambda x: x.mean(1), x)
        told += pairs(lambda x: gems.var_mean(x, [1]), lambda x: torch.var_mean(x, [1]), x)
        told += pairs(lambda x: gems.vector_norm(x, 2, [1]), lambda x: x.norm(2, 1), x)
        told += pairs(lambda x: gems.prod_dim(x, 1), lambda x: x.prod(1), x)
        told += pairs(lambda x: gems.std(x, 1), lambda x: x.std(1), x)
    return told


@cases.add
def products():
    a, b, c = torch.randn(37, 41), torch.randn(41, 29), torch.randn(37, 29)
    told = pairs(gems.mm, torch.mm, a, b) + pairs(gems.mm, torch.mm, a.T.contiguous().T, b)
    told += pairs(gems.addmm, torch.addmm, c, a, b)
    return told + pairs(gems.addmv, torch.addmv, torch.randn(37), a, torch.randn(41))


@cases.add
def norms():
    x, w, b = torch.randn(5, 37), torch.randn(37), torch.randn(37)
    told = pairs(
        lambda x, w, b: gems.layer_norm(x, [37], w, b)[0],
        lambda x, w, b: torch.nn.functional.layer_norm(x, [37], w, b), x, w, b,
    )  # fmt: skip
    told += graded(
        lambda x, w: gems.rms_norm(x, [37], w), lambda x, w: torch.nn.functional.rms_norm(x, [37], w, 1e-5), x, w
    )
    image, scale, shift = torch.randn(2, 6, 5, 5), torch.randn(6), torch.randn(6)
    told += pairs(
        lambda x, w, b: gems.group_norm(x, w, b, 2, 6, 25, 3)[0],
        lambda x, w, b: torch.nn.functional.group_norm(x, 3, w, b), image, scale, shift,
    )  # fmt: skip
    return told


@cases.add
def batch_norm():
    image, scale, shift, mean, var = torch.randn(2, 6, 5, 5), *torch.rand(4, 6)
    return pairs(
        lambda x, w, b, m, v: gems.batch_norm(x, w, b, m.clone(), v.clone(), True, 0.1, 1e-5)[0],
        lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b, True), image, scale, shift, mean, var,
    )  # fmt: skip


@cases.add
def batch_norm_without_running_statistics():
    image, scale, shift = torch.randn(2, 6, 5, 5), torch.randn(6), torch.randn(6)
    return pairs(
        lambda x, w, b: gems.batch_norm(x, w, b, training=True, momentum=0.1, eps=1e-5)[0],
        lambda x, w, b: torch.nn.functional.batch_norm(x, None, None, w, b, True), image, scale, shift,
    )  # fmt: skip


def one_by_one(table):
    """A case of each function of a table: one of them that cannot run hides no other."""
    for name, (call, want) in table.items():
        cases[name] = lambda call=call, want=want: list(zip(several(call()), several(want()), strict=True))


X, PLACES = torch.randn(7, 33, generator=torch.manual_seed(1)), torch.randint(0, 33, (7, 5))
one_by_one({
    "argmax": (lambda: gems.argmax(X, 1), lambda: X.argmax(1)),
    "max": (lambda: gems.max(X), X.max),
    "max_dim": (lambda: gems.max_dim(X, 1), lambda: X.max(1)),
    "amax": (lambda: gems.amax(X, [1]), lambda: X.amax(1)),
    "any_dim": (lambda: gems.any_dim(X > 2, 1), lambda: (X > 2).any(1)),
    "count_nonzero": (lambda: gems.count_nonzero(X > 0), (X > 0).sum),
    "cumsum": (lambda: gems.cumsum(X, 1), lambda: X.cumsum(1)),
    "cummax": (lambda: gems.cummax(X, 1), lambda: X.cummax(1)),
    "flip": (lambda: gems.flip(X, [0, 1]), lambda: X.flip(0, 1)),
    "triu": (lambda: gems.triu(X, 1), lambda: X.triu(1)),
    "tril": (lambda: gems.tril(X, -1), lambda: X.tril(-1)),
    "cat": (lambda: gems.cat([X, X[:3]], 0), lambda: torch.cat([X, X[:3]], 0)),
    "tile": (lambda: gems.tile(X, [2, 3]), lambda: X.tile(2, 3)),
    "gather": (lambda: gems.gather(X, 1, PLACES), lambda: X.gather(1, PLACES)),
    "index_select": (lambda: gems.index_select(X, 1, PLACES[0]), lambda: X.index_select(1, PLACES[0])),
    "scatter": (lambda: gems.scatter(X, 1, PLACES[:, :1], X[:, :1]), lambda: X.scatter(1, PLACES[:, :1], X[:, :1])),
    "diag": (lambda: gems.diag(X[0], 2), lambda: X[0].diag(2)),
    "nonzero": (lambda: gems.nonzero(X > 0), (X > 0).nonzero),
    "masked_select": (lambda: gems.masked_select(X, X > 0), lambda: X[X > 0]),
    "repeat_interleave": (lambda: gems.repeat_interleave_self_int(X, 3, 1), lambda: X.repeat_interleave(3, 1)),
    "topk": (lambda: gems.topk(X, 5), lambda: X.topk(5)),
    "sort": (lambda: gems.sort(X), X.sort),
    "isin": (lambda: gems.isin(PLACES, torch.tensor([2, 5])), lambda: torch.isin(PLACES, torch.tensor([2, 5]))),
    "bmm": (lambda: gems.bmm(X[None], X.T[None]), lambda: torch.bmm(X[None], X.T[None])),
    "mv": (lambda: gems.mv(X, X[0]), lambda: X @ X[0]),
    "dot": (lambda: gems.dot(X[0], X[1]), lambda: X[0] @ X[1]),
    "kron": (lambda: gems.kron(X[:3, :5], X[:2, :3]), lambda: torch.kron(X[:3, :5], X[:2, :3])),
})  # fmt: skip


@cases.add
def embedding():
    weight, i = torch.randn(21, 37), torch.randint(0, 21, (3, 5))
    told = [(gems.embedding(weight, i), weight[i])]
    gradient, wanted = torch.randn(3, 5, 37), torch.zeros(21, 37)
    wanted.index_add_(0, i.view(-1), gradient.view(-1, 37))
    return [*told, (gems.embedding_backward(gradient, i, 21), wanted)]


@cases.add
def convolutions():
    image, kernel = torch.randn(2, 3, 9, 11), torch.randn(4, 3, 3, 3)
    return graded(
        lambda x, w: gems.conv2d(x, w, None, 1, 1), lambda x, w: torch.conv2d(x, w, None, 1, 1), image, kernel
    )


@cases.add
def attention():
    q, k, v = (torch.randn(2, 2, 37, 32) for _ in range(3))
    return pairs(
        lambda q, k, v: gems.scaled_dot_product_attention(q, k, v, is_causal=True),
        lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), q, k, v,
    )  # fmt: skip


@cases.add
def losses():
    told = []
    for rows in (9, 300):
        logits, labels = torch.randn(rows, 21), torch.randint(0, 21, (rows,))
        loss, _ = gems.nll_loss_forward(logits, labels, None, 1, -100)
        told += [(loss, torch.nn.functional.nll_loss(logits, labels))]
    x, y = torch.randn(7, 33), torch.randn(7, 33)
    return [*told, (gems.mse_loss(x, y), (x - y).square().mean())]
