"""The rows for matrices: products, activations, softmax, cross-entropy and the training of a text network."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional as F

from minidl import nn, ops, optim
from minidl.kernels import bias_act, cross_entropy, gemm, softmax
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor
from minidl.testing.cases.matrices import BENCHMARK, DOCUMENTS
from minidl.testing.specs.bounds import dot_unit, gamma, holds
from minidl.tools.bench import peers, sides
from minidl.tools.bench.measure import Row, Work, floor_ms, input_sets

DEVICE = "cuda"


def rows() -> Iterator[Row]:
    """Yield the rows in order."""
    for (M, N, K), goal in zip(BENCHMARK, (1.02, 1.0, 1.0, 1.0, 1.15, 1.15, 1.15), strict=True):
        yield f"gemm {M}x{N}x{K}", goal, partial(_gemm, M, N, K, torch.bfloat16)
    for kind in ("AB", "AB^T", "A^TB"):
        yield f"gemm tf32 8192 {kind}", 1.0, partial(_gemm, 8192, 8192, 8192, torch.float32, "tf32", kind)
    yield "gemm float32 4096", 1.8, partial(_gemm, 4096, 4096, 4096, torch.float32, "tf32x3")
    yield "linear bias gelu 8192", 1.05, _linear_gelu
    for act in ("relu", "gelu", "sigmoid", "tanh"):
        yield f"bias {act} 16384x8192", 1.0, partial(_bias_act, act)
    for M, N, goal in (
        (65536, 128, 1.2), (65536, 1024, 1.05), (32768, 4096, 1.02), (8192, 16384, 1.02), (4096, 65536, 1.3),
        (2048, 131072, 1.3),
    ):  # fmt: skip
        yield f"softmax {M}x{N}", goal, partial(_softmax, M, N)
    yield "cross-entropy forward+backward 8192x32000", 1.4, _cross_entropy
    yield "text training step 1024x65 of 32754, 128 hidden", 4.0, _text_step


def _randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def _gemm(M: int, N: int, K: int, dtype: torch.dtype, precision: str | None = None, kind: str = "AB") -> Work:
    size = dtype.itemsize * (M * K + K * N + M * N)
    pairs = []
    for _ in range(input_sets(size)):
        a = _randn(K, M, dtype=dtype).t() if kind == "A^TB" else _randn(M, K, dtype=dtype)
        b = _randn(N, K, dtype=dtype).t() if kind == "AB^T" else _randn(K, N, dtype=dtype)
        pairs.append((a, b))
    tf32 = precision == "tf32"

    def torch_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        torch.backends.cuda.matmul.fp32_precision = "tf32" if tf32 else "ieee"
        return torch.matmul(a, b)

    def judge(c: torch.Tensor, against: Callable[..., torch.Tensor] | None = None) -> bool:
        a, b = pairs[0]
        exact = a.double() @ b.double()
        # The error must not exceed cuBLAS's float32 error.
        if against is not None and not (c.double() - exact).norm() <= (against(a, b).double() - exact).norm():
            return False
        unit = 2.0**-10 if tf32 else 0.0
        # The tile decides the summation depth; K is above that of every tile and split.
        bound = (gamma(64 + K // 16, dot_unit(dtype)) + 2 * unit + unit**2) * (a.double().abs() @ b.double().abs())
        return holds(c, exact, bound)

    return Work(
        f"gemm {kind} {M}x{N}x{K}" + (f" {precision}" if precision else ""), str(dtype).removeprefix("torch."),
        [partial(gemm.gemm, a, b, precision=precision) for a, b in pairs],
        {"torch.matmul": [partial(torch_product, a, b) for a, b in pairs]},
        floor_ms(size, 2.0 * M * N * K, precision or "bfloat16"),
        partial(judge, against=torch_product if precision == "tf32x3" else None),
        # Other projects multiply float32 without tf32.
        others=None if tf32 else lambda: peers.products(pairs), judge_others=judge,
    )  # fmt: skip


def _linear_gelu() -> Work:
    n, dtype = 8192, torch.bfloat16
    x, w, b = _randn(n, n, dtype=dtype), _randn(n, n, dtype=dtype) / n**0.5, _randn(n, dtype=dtype)

    def judge(y: torch.Tensor) -> bool:
        z = x.double() @ w.double().t() + b.double()
        bound = gamma(64 + n // 64, dot_unit(dtype)) * (x.double().abs() @ w.double().abs().t() + b.double().abs())
        exact = F.gelu(z)
        # |gelu'| is below 1.13 everywhere; erf and the products add a few units of |z|.
        bound = 1.13 * bound + 8 * 2.0**-24 * z.abs()
        return holds(y, exact, bound)

    return Work(
        "linear bias gelu 8192x8192x8192", "bfloat16", [lambda: gemm.gemm(x, w.t(), b, "gelu")],
        sides.eager_and_compiled(lambda: F.gelu(F.linear(x, w, b))), floor_ms(2.0 * 3 * n * n, 2.0 * n**3), judge,
    )  # fmt: skip


def _bias_act(act: str) -> Work:
    M, N, dtype = 16384, 8192, torch.float16
    x, b = _randn(M, N, dtype=dtype), _randn(N, dtype=dtype)
    function = {"relu": F.relu, "gelu": F.gelu, "sigmoid": torch.sigmoid, "tanh": torch.tanh}[act]
    return Work(
        f"bias {act} {M}x{N}", "float16", [lambda: bias_act.bias_act(x, b, act)],
        sides.eager_and_compiled(lambda: function(x + b)), floor_ms(2.0 * 2 * M * N),
        lambda y: sides.right("bias_act", y[:1024], x[:1024], b, act),
    )  # fmt: skip


def _softmax(M: int, N: int) -> Work:
    dtype = torch.float16
    xs = [_randn(M, N, dtype=dtype) for _ in range(input_sets(2 * 2 * M * N))]

    def judge(y: torch.Tensor) -> bool:
        exact = torch.softmax(xs[0][:512].double(), -1)
        # exp of a difference d is off by |d| u plus a few units; the sum adds its depth.
        return holds(y[:512], exact, gamma(40 + N // 1024, 2.0**-22) * exact)

    return Work(
        f"softmax {M}x{N}", "float16", [partial(softmax.softmax, x) for x in xs],
        sides.eager_and_compiled(lambda x: torch.softmax(x, -1), [(x,) for x in xs]),
        floor_ms(2.0 * 2 * M * N), judge, others=lambda: peers.softmax(xs),
    )  # fmt: skip


def _cross_entropy() -> Work:
    M, N, dtype = 8192, 32000, torch.bfloat16
    x = _randn(M, N, dtype=dtype)
    target = torch.randint(N, (M,), device=DEVICE)
    leaf = x.clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, target)

    def judge(result: tuple[torch.Tensor, torch.Tensor]) -> bool:
        value, grad = result
        z = x.double().requires_grad_()
        exact, exact_grad = sides.torch_gradients(loss, [z])
        error = gamma(80, 2.0**-22) * (exact_grad.abs() + torch.softmax(z.detach(), -1) / M)
        expected = float(exact.detach())
        return holds(grad, exact_grad, error) and abs(float(value) - expected) <= 2.0**-8 * expected

    return Work(
        f"cross-entropy forward+backward {M}x{N}", "bfloat16",
        [partial(cross_entropy.cross_entropy, x, target, with_grad=True)],
        sides.eager_and_compiled(loss, call=lambda function: sides.torch_gradients(function, [leaf])),
        floor_ms(2.0 * 2 * M * N), judge, others=lambda: peers.cross_entropy(x, target),
    )  # fmt: skip


def _text_step() -> Work:
    (count, nonzeros, columns), hidden, classes = DOCUMENTS, 128, 4
    # Documents of unit norm.
    generator = torch.Generator().manual_seed(0)
    col = torch.stack([torch.randperm(columns, generator=generator)[:nonzeros].sort().values for _ in range(count)])
    val = torch.rand(count, nonzeros, generator=generator)
    val = val / val.norm(dim=1, keepdim=True)
    crow = torch.arange(count + 1, dtype=torch.int32) * nonzeros
    x = CSR.from_torch(crow, col.reshape(-1).to(torch.int32), val.reshape(-1), (count, columns)).to(DEVICE)
    y = Tensor(torch.randint(classes, (count,), generator=generator).to(DEVICE))
    model = nn.MLP(columns, [hidden], classes, sparse=True)
    adam = optim.Adam(model.parameters(), lr=1e-3)

    ours = sides.training_step(adam, lambda: ops.cross_entropy(model(x), y))

    class Peer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.EmbeddingBag(columns, hidden, mode="sum", include_last_offset=True)
            self.bias = torch.nn.Parameter(torch.zeros(hidden))
            self.out = torch.nn.Linear(hidden, classes)

        def forward(self) -> torch.Tensor:
            z = self.embed(col, crow, per_sample_weights=x.val) + self.bias
            return F.cross_entropy(self.out(torch.relu(z)), y.data)

    col, crow = x.col.long(), x.crow.long()
    peer = Peer().to(DEVICE)
    fused = torch.optim.Adam(peer.parameters(), lr=1e-3, fused=True, capturable=True)
    theirs = sides.training_step(fused, peer)

    keys = ["embed.weight", "bias", "out.weight", "out.bias"]
    peer.load_state_dict(dict(zip(keys, model.state_dict().values(), strict=True)))

    def judge(loss: Tensor) -> bool:
        expected = float(theirs().detach())
        return abs(float(loss) - expected) <= 1e-5 * abs(expected)

    weights = columns * hidden
    # The dense moments and weights are read and written once, the gathered rows read twice.
    moved = 6 * 4.0 * weights + 2 * 4.0 * count * nonzeros * hidden
    return Work(
        "text training step 1024x65 of 32754, 128 hidden", "float32", [ours],
        {"torch EmbeddingBag, fused Adam": [theirs]}, floor_ms(moved), judge, whole_step=True,
    )  # fmt: skip
