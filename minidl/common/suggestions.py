"""Hints in errors about unknown names: an equivalent expression, or the nearest name."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# Equivalents of torch's functions, and of layers in forward, by name in lower case without underscores; x and y are
# tensors, other names are torch's arguments.
EXPRESSIONS = {
    "adjoint": "x.mT",
    "argwhere": "x.nonzero()",
    "broadcastto": "x.expand(size)",
    "channelshuffle": "x.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)",
    "clampmax": "x.clamp(max=max)",
    "clampmin": "x.clamp(min=min)",
    "cosh": "(x.exp() + (-x).exp()) / 2",
    "diff": "x[..., 1:] - x[..., :-1]",
    "dist": "(x - y).norm(p)",
    "erfc": "1 - x.erf()",
    "exp2": "2**x",
    "fix": "x.trunc()",
    "fmax": "ops.where(x.isnan(), y, ops.where(y.isnan(), x, ops.maximum(x, y)))",
    "fmin": "ops.where(x.isnan(), y, ops.where(y.isnan(), x, ops.minimum(x, y)))",
    "ger": "x.outer(vec2)",
    "hypot": "(x * x + y * y).sqrt()",
    "isin": "(x.unsqueeze(-1) == y.flatten()).any(-1)",
    "isneginf": "x == -math.inf",
    "isposinf": "x == math.inf",
    "ldexp": "x * 2**y",
    "moveaxis": "x.movedim(source, destination)",
    "nanmean": "ops.where(x.isnan(), 0.0, x).sum() / (~x.isnan()).sum()",
    "nansum": "ops.where(x.isnan(), 0.0, x).sum()",
    "numel": "x.numel()",
    "parameterstovector": "ops.cat([p.flatten() for p in parameters])",
    "positive": "+x",
    "ravel": "x.flatten()",
    "rsub": "y - x",
    "sgn": "x.sign()",
    "sinh": "(x.exp() - (-x).exp()) / 2",
    "swapdims": "x.swapaxes(dim0, dim1)",
    "take": "x.flatten()[index]",
    "takealongdim": "x.gather(dim, indices)",
    "tan": "x.sin() / x.cos()",
    "threshold": "ops.where(x > threshold, x, value)",
}
# Other equivalents. A name with * at its end matches all names with that prefix.
INSTEAD = {
    "Bilinear": "Linear(in1 * in2, out) of (x.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)",
    "CircularPad*": "ops.pad with mode='circular'",
    "DataParallel": "minidl train --devices",
    "Generator": "seed= where random numbers are drawn, or minidl.manual_seed before",
    "Lazy*": "the layer without Lazy, with its number of inputs",
    "Softmax2d": "Softmax(dim=1)",
    "SparseAdam": "Adam(lazy=True)",
    "UpsamplingBilinear2d": "Upsample(mode='bilinear', align_corners=True)",
    "UpsamplingNearest2d": "Upsample",
    "amp": "minidl.amp, as torch.amp",
    "compile": "minidl.capture(step), which records a step; operations are compiled already",
    "eye_": "x.copy_(minidl.eye(*x.shape)) under minidl.no_grad()",
    "functional": "grad with create_graph=True",
    "fuse_conv_bn_eval": "nn.fold_batch_norms(model)",
    "gradcheck": "minidl.check_grads",
    "gradgradcheck": "minidl.check_grads of a function that calls grad with create_graph=True",
    "pack_sequence": "pack_padded_sequence(pad_sequence(sequences), [len(x) for x in sequences])",
    "parametrize": "utils.remove_weight_norm to remove a norm, or an expression of the parameters in forward()",
    "torch": "import minidl.torch, which nothing else imports",
    "unpack_sequence": "pad_packed_sequence(sequence, batch_first=True), and the first `length` steps of each row",
    "unpad_sequence": "[x[:n] for x, n in zip(padded_sequences, lengths.tolist())], with batch_first=True",
    "utils": "torch.utils.data, which works as it is; see minidl.data.to_device",
    "vector_to_parameters": "p.copy_(part.reshape(p.shape)) of the parts vector.split(sizes), under minidl.no_grad()",
}
_MODULES = (
    "Tensor", "amp", "autograd", "cuda", "linalg", "nn", "nn.Module", "nn.functional", "nn.init", "nn.utils", "optim",
    "optim.lr_scheduler",
)  # fmt: skip


@functools.cache
def of_torch() -> frozenset[str]:
    """Return all names of torch, which are never corrected to a similar name."""
    torch = importlib.import_module("torch")
    modules = torch, *operator.attrgetter(*_MODULES)(torch)
    return frozenset(name for module in modules for name in dir(module))


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `name`, ignoring case; None without one, or if torch has `name`."""
    by_lower = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.lower(), by_lower, 1, 0.7)
    return by_lower[near[0]] if near and name not in of_torch() else None


def hint(module: str, name: str, names: Iterable[str]) -> str:
    """Return the hint for an unknown name of a module, to append to the error."""
    names = list(names)
    expression = EXPRESSIONS.get(name.lower().replace("_", "") if name in of_torch() else "")
    equivalent = next(
        (v for k, v in INSTEAD.items() if name == k or (k[-1] == "*" and name.startswith(k[:-1]))), expression
    )
    if equivalent is not None:
        return f"; write {equivalent}"
    if name.endswith("_") and name[:-1] in names:
        return f"; write x = {name[:-1]}(x)"
    near = f"{name}_" if f"{name}_" in names else nearest(name, names)
    return f"; did you mean {near}?" if near else f": minidl does not provide it; see dir({module})"


def attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for an unknown name of a module of minidl."""
    if name.startswith("_"):
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return AttributeError(f"{module} has no {name}{hint(module, name, names)}")


def argument(called: str, function: Callable[..., Any], keywords: Mapping[str, Any]) -> TypeError | None:
    """Return the error for an unknown keyword argument of a function, None if there is none."""
    parameters = inspect.signature(function).parameters
    if any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        return None
    accepted = [n for n, p in parameters.items() if n != "self" and p.kind != p.VAR_POSITIONAL]
    for name in keywords:
        if name not in accepted:
            near = nearest(name, accepted)
            end = f"did you mean {near}?" if near else f"it takes {', '.join(accepted) or 'none'}"
            return TypeError(f"{called}: there is no argument {name!r}; {end}")
    return None
