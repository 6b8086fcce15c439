"""`accelerate` and `restore`: switch torch's layers to classes whose forward calls minidl's operators, and back."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch import nn

from minidl.runtime import launch
from minidl.torch import measuring
from minidl.torch.layer import Accelerated, Layer
from minidl.torch.layers import CLASSES

_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


class Line(NamedTuple):
    """How a module runs: `how` is "operator" or "torch"; `note` is the reason."""

    module: str
    kind: str
    how: str
    note: str


class Report(tuple[Line, ...]):
    """A line for each module that computes; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        columns = list(zip(*(("module", "class", "runs as", ""), *self), strict=True))
        widths = [max(map(len, column)) for column in columns]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                for row in zip(*columns, strict=True)]  # fmt: skip
        counts = {how: sum(line.how == how for line in self) for how in ("operator", "torch")}
        rows.append(", ".join(f"{how}: {count}" for how, count in counts.items()))
        return "\n".join(rows)


def accelerate(model: nn.Module, example: Any = None) -> nn.Module:
    """Return the same model, whose layers compute with minidl's kernels; `report(model)` lists them.

    The class of each torch layer becomes a subclass of it; parameters, buffers, hooks and `state_dict` do not change.
    Nothing is traced: forward runs at each call, and a changed, patched or replaced layer computes torch's result.
    Results of convolutions, and of batch norms and pools after them, are channels-last: use `reshape` or `flatten`
    instead of `view`.
    `torch.compile(model, backend="minidl")` fuses layers with later operations.

    example: the model's input, or a tuple of its arguments, on a GPU. The model runs on it once, and each layer is
    timed on its inputs with torch's kernels and minidl's, forward and, in training mode, backward; layers that are
    slower with minidl stay torch's. Without an example all supported layers are switched, except kinds that were slower
    in benchmarks; `Linear` passes inputs of few rows to torch.
    On a CPU kernels are interpreted, for tests. Raises TypeError for anything but a module of torch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate: expected a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}; "
            "minidl's modules already use these kernels"
        )
    restore(model)
    reasons = {module: _refusal(module) for module in model.modules()}
    layers = [module for module, why in reasons.items() if why == ""]
    if example is None:
        reasons.update((module, CLASSES[type(module)]._minidl_slow_reason(module)) for module in layers)
    else:
        reasons.update(measuring.slower(model, example, layers))
    for module in layers:
        if reasons[module] == "":
            module.__class__ = CLASSES[type(module)]
    _reports[model] = _new_report(model, reasons)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `accelerate`, and return the same model."""
    for module in model.modules():
        if isinstance(module, Accelerated):
            module.__class__ = _torch_class(type(module))
    _reports.pop(model, None)
    return model


def _torch_class(kind: Any) -> Any:
    """Return torch's class for minidl's, or a new one for a subclass that torch created (parametrizations, FSDP)."""
    if "_minidl_torch_class" in vars(kind):
        return kind._minidl_torch_class
    bases = tuple(_torch_class(base) if hasattr(base, "_minidl_torch_class") else base for base in kind.__bases__)
    members = {name: each for name, each in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, members)


def report(model: nn.Module) -> Report:
    """Return how each module of an accelerated model runs."""
    stored = _reports.get(model)
    if stored is None and not any(isinstance(module, Accelerated) for module in model.modules()):
        note = "not accelerated: call minidl.torch.accelerate first"
        return Report([Line("(the model)", type(model).__name__, "torch", note)])
    return stored if stored is not None else _new_report(model, {})


def _refusal(module: nn.Module) -> str | None:
    """Return why a module stays torch's, "" if it can be switched, None if it is not worth a line."""
    kind = type(module)
    if kind in CLASSES:
        if "forward" in vars(module):
            return "its forward is replaced"
        dtypes = {p.dtype for p in module.parameters(recurse=False)}
        wrong = [dtype for dtype in dtypes if not dtype.is_floating_point or dtype.itemsize == 1]
        return f"dtype {wrong[0]}" if wrong else CLASSES[kind]._minidl_refusal(module)
    if isinstance(module, nn.MultiheadAttention):
        return "no operator: torch projects its inputs and computes the attention"
    if any(True for _ in module.children()):
        return None
    base = next((cls for cls in CLASSES if issubclass(kind, cls)), None)
    if base is not None:
        return f"a subclass of {base.__name__}"
    return "no operator" if any(True for _ in module.parameters()) else None


def _new_report(model: nn.Module, reasons: dict[nn.Module, Any]) -> Report:
    lines = []
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            lines.append(Line(name or "(the model)", type(module).__name__, "operator", ""))
        elif why := reasons.get(module):
            lines.append(Line(name or "(the model)", type(module).__name__, "torch", why))
    if launch.INTERPRETED:
        lines.append(Line("", "", "", "kernels are interpreted, for tests only"))
    return Report(lines)
