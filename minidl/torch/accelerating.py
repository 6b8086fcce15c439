"""`accelerate` and `restore`: modules of torch get classes whose forward calls minidl's operators, and theirs back."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from minidl.runtime import launch
from minidl.torch import fusing, measuring
from minidl.torch.blocks import NORMS
from minidl.torch.fusing import Fused
from minidl.torch.layers import CLASSES, Accelerated, Layer, _Conv
from minidl.torch.measuring import Unit

# The modules that get our classes, those that get classes with blocks, and why others have none.
_Chosen = tuple[set[nn.Module], dict[nn.Module, type[Fused]], dict[nn.Module, str]]
_reports: weakref.WeakKeyDictionary[nn.Module, Report] = weakref.WeakKeyDictionary()


class Line(NamedTuple):
    """What a module got: `how` "operator", "block" (it is computed in one) or "torch", and why or with what."""

    module: str
    kind: str
    how: str
    note: str


class Report(tuple[Line, ...]):
    """A line for each module that computes something, and for each that holds blocks; prints as a table."""

    __slots__ = ()

    def __str__(self) -> str:
        columns = list(zip(*(("module", "class", "runs as", ""), *self), strict=True))
        widths = [max(map(len, column)) for column in columns]
        rows = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
                for row in zip(*columns, strict=True)]  # fmt: skip
        counts = {how: sum(line.how == how for line in self) for how in ("operator", "block", "torch")}
        rows.append(", ".join(f"{how}: {count}" for how, count in counts.items()))
        return "\n".join(rows)


def accelerate(model: nn.Module, example: Any = None, fuse: bool = True) -> nn.Module:
    """The same model, whose layers compute with minidl's kernels; `report(model)` tells which do and why others do not.

    Layers of torch get another class, a subclass of their own; parameters, buffers, hooks and `state_dict` stay. The
    weights of convolutions are put in channels-last memory, and results of convolutions, batch norms and pools lie so,
    as those of `model.to(memory_format=torch.channels_last)`: use `reshape` or `flatten` where forward has `view`.
    With `fuse` a convolution, its batch norm, a sum and an activation are one operator where torch.fx can trace the
    module that holds them.

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
    ours, fused, untraced = _chosen(model, reasons, fuse)
    if example is None:
        reasons.update((module, CLASSES[type(module)]._minidl_slower(module)) for module in ours)
        ours, fused, untraced = _chosen(model, reasons, fuse)
    else:
        reasons.update(measuring.slower(model, example, _units(ours, fused)))
        ours, fused, untraced = _chosen(model, reasons, fuse)
    for module in ours:
        module.__class__ = CLASSES[type(module)]
        if isinstance(module, _Conv):
            _lay(module)
    for module, kind in fused.items():
        module.__class__ = kind
    for module in _outermost(model):
        if not isinstance(module, Accelerated) and any(isinstance(m, NORMS) for m in ours):
            module.__class__ = fusing.whole(module)
        if isinstance(module, Accelerated) and not isinstance(module, Layer):
            type(module)._minidl_folds = fusing.pairs(module)
    _reports[model] = _told(model, {**reasons, **untraced, **{module: why for module, why in reasons.items() if why}})
    return model


def restore(model: nn.Module) -> nn.Module:
    """The same model as torch has it: what `accelerate` changed is undone."""
    for module in model.modules():
        if isinstance(module, Accelerated):
            weight = module._parameters.get("weight")  # not one that a parametrization computes
            if vars(module).pop("_minidl_lay", False) and weight is not None:
                weight.data = weight.data.contiguous()
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
    """What each module of an accelerated model runs as."""
    known = _reports.get(model)
    if known is None and not any(isinstance(module, Accelerated) for module in model.modules()):
        told = "not accelerated: call minidl.torch.accelerate first"
        return Report([Line("(the model)", type(model).__name__, "torch", told)])
    return known if known is not None else _told(model, {})


def _outermost(model: nn.Module) -> Iterator[nn.Module]:
    """The model, or what a module of torch that holds it holds."""
    if type(model).__module__.startswith("torch.nn.") and not isinstance(model, nn.Sequential):
        for child in model.children():
            yield from _outermost(child)
    else:
        yield model


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


def _chosen(model: nn.Module, reasons: dict[nn.Module, str | None], fuse: bool) -> _Chosen:
    ours = {module for module, why in reasons.items() if why == ""}
    fused: dict[nn.Module, type[Fused]] = {}
    untraced: dict[nn.Module, str] = {}
    if fuse:
        _find(model, ours, fused, untraced)
    return ours, fused, untraced


def _units(ours: set[nn.Module], fused: dict[nn.Module, type[Fused]]) -> Iterator[Unit]:
    """What is timed: blocks, and the other layers that take one tensor."""
    left = {module for module in ours if not isinstance(module, nn.CrossEntropyLoss)}
    for module, kind in fused.items():
        for each in kind._minidl_blocks:
            layer, norm = (None if name is None else module.get_submodule(name) for name in (each.layer, each.norm))
            left.difference_update(part for part in (layer, norm) if part is not None)
            yield Unit(layer, norm, (each.act, each.slope), each.sum)
    for module in left:
        yield Unit(None, module) if isinstance(module, NORMS) else Unit(module, None)


def _find(module: nn.Module, ours: set[nn.Module], fused: dict[Any, Any], untraced: dict[nn.Module, str]) -> None:
    """Classes with blocks for a module and all that it holds."""
    if module in fused or module in untraced or not any(True for _ in module.children()):
        return
    own = type(module).__module__.startswith("torch.nn.") and not isinstance(module, nn.Sequential)
    made, why = (None, "a module of torch") if own else fusing.fuse(module, ours.__contains__)
    if made is not None:
        fused[module] = made
    elif why != fusing.NOTHING:
        untraced[module] = why
        for child in module.children():
            _find(child, ours, fused, untraced)
        return
    for child in fusing.parts(module):
        _find(child, ours, fused, untraced)


def _lay(module: Any) -> None:
    """Put a weight in channels-last memory, where nothing else has its memory."""
    weight = module.weight
    whole = weight.numel() * weight.element_size() == weight.untyped_storage().nbytes()
    if type(weight) is not nn.Parameter or not weight.is_contiguous() or not whole:
        return
    last = weight.data.movedim(1, -1)
    if not last.is_contiguous():
        weight.data = last.contiguous().movedim(-1, 1)
        vars(module)["_minidl_lay"] = True


def _told(model: nn.Module, reasons: dict[nn.Module, Any]) -> Report:
    in_blocks: dict[str, str] = {}
    lines = []
    for name, module in model.named_modules():
        if isinstance(module, Fused):
            for each in module._minidl_blocks:
                prefix = f"{name}." if name else ""
                for part in (each.layer, each.norm):
                    if part:
                        in_blocks[prefix + part] = str(each)
    for name, module in model.named_modules():
        kind = type(module).__name__
        why = reasons.get(module)
        if isinstance(module, Layer):
            lines.append(Line(name, kind, *(("block", in_blocks[name]) if name in in_blocks else ("operator", ""))))
        elif isinstance(module, Fused):
            lines.append(Line(name or "(the model)", kind, "blocks", _parts(module)))
        elif why and (why != "a module of torch"):
            lines.append(Line(name or "(the model)", kind, "torch", why))
    if launch.INTERPRETED:
        lines.append(Line("", "", "", "kernels are interpreted, which is for tests"))
    return Report(lines)


def _parts(module: Fused) -> str:
    """How many blocks a module has, and its scaled sums."""
    blocks, sums = module._minidl_blocks, module._minidl_sums
    return ", ".join([f"{len(blocks)}"] * bool(blocks or not sums) + [str(each) for each in sums])
