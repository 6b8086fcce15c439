"""`accelerate` and `restore`: layers of torch get classes whose forward calls minidl's operators, and theirs back."""

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
    """What a module got: `how` "operator" or "torch", and why."""

    module: str
    kind: str
    how: str
    note: str


class Report(tuple[Line, ...]):
    """A line for each module that computes something; prints as a table."""

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
    """Return the same model, whose layers compute with minidl's kernels; `report(model)` tells which do.

    Layers of torch get another class, a subclass of their own; parameters, buffers, hooks and `state_dict` stay as
    they are. Nothing is traced: forward runs at each call, and a layer that was changed, patched or exchanged computes
    what torch's would. Results of convolutions, batch norms and pools lie in channels-last memory: use `reshape` or
    `flatten` where forward has `view`. `torch.compile(model, backend="minidl")` fuses layers with what follows them.

    example: the model's input, or a tuple of its arguments, on a GPU. The model is run with it once, and each layer is
    timed on what it got, forward and, if the model is in training, back, on torch's kernels and on these; it stays
    torch's where these are slower. Without one all layers are taken that kernels exist for, but for kinds that were
    slower at drawn shapes; `Linear` leaves inputs of few rows to torch.
    On a CPU kernels are interpreted, which is for tests. Raises TypeError for what is no module of torch.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"accelerate: expected a torch.nn.Module, got {type(model).__module__}.{type(model).__qualname__}; "
            "minidl's own modules have these kernels already"
        )
    restore(model)
    reasons = {module: _refuses(module) for module in model.modules()}
    layers = [module for module, why in reasons.items() if why == ""]
    if example is None:
        reasons.update((module, CLASSES[type(module)]._minidl_slower(module)) for module in layers)
    else:
        reasons.update(measuring.slower(model, example, layers))
    for module in layers:
        if reasons[module] == "":
            module.__class__ = CLASSES[type(module)]
    _reports[model] = _told(model, reasons)
    return model


def restore(model: nn.Module) -> nn.Module:
    """Return the same model as torch has it: what `accelerate` changed is undone."""
    for module in model.modules():
        if isinstance(module, Accelerated):
            module.__class__ = _torchs(type(module))
    _reports.pop(model, None)
    return model


def _torchs(kind: Any) -> Any:
    """torch's class of one of ours, or one like those that torch (parametrizations, FSDP) has made from ours."""
    if "_minidl_torchs" in vars(kind):
        return kind._minidl_torchs
    bases = tuple(_torchs(base) if hasattr(base, "_minidl_torchs") else base for base in kind.__bases__)
    members = {name: each for name, each in vars(kind).items() if name not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, bases, members)


def report(model: nn.Module) -> Report:
    """Return what each module of an accelerated model runs as."""
    known = _reports.get(model)
    if known is None and not any(isinstance(module, Accelerated) for module in model.modules()):
        told = "not accelerated: call minidl.torch.accelerate first"
        return Report([Line("(the model)", type(model).__name__, "torch", told)])
    return known if known is not None else _told(model, {})


def _refuses(module: nn.Module) -> str | None:
    """Why a module stays torch's, empty where it need not; None for one of which nothing is to be said."""
    kind = type(module)
    if kind in CLASSES:
        if "forward" in vars(module):
            return "its forward is replaced"
        dtypes = {p.dtype for p in module.parameters(recurse=False)}
        wrong = [dtype for dtype in dtypes if not dtype.is_floating_point or dtype.itemsize == 1]
        return f"dtype {wrong[0]}" if wrong else CLASSES[kind]._minidl_refuses(module)
    if isinstance(module, nn.MultiheadAttention):
        return "no operator: torch projects its inputs and computes the attention"
    if any(True for _ in module.children()):
        return None
    known = next((each for each in CLASSES if issubclass(kind, each)), None)
    if known is not None:
        return f"a class of its own, made from {known.__name__}"
    return "no operator" if any(True for _ in module.parameters()) else None


def _told(model: nn.Module, reasons: dict[nn.Module, Any]) -> Report:
    lines = []
    for name, module in model.named_modules():
        if isinstance(module, Layer):
            lines.append(Line(name or "(the model)", type(module).__name__, "operator", ""))
        elif why := reasons.get(module):
            lines.append(Line(name or "(the model)", type(module).__name__, "torch", why))
    if launch.INTERPRETED:
        lines.append(Line("", "", "", "kernels are interpreted, which is for tests"))
    return Report(lines)
