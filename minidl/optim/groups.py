"""Parameter groups of optimisers: their settings and the allowed ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from minidl.compilation import capture
from minidl.tensors import Tensor

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Tensor]]

# Settings that select the kernel; the others are numbers that the kernel reads.
FLAGS = ("nesterov", "amsgrad", "centered", "maximize")
# Settings of torch's groups without effect here: implementations, of which minidl has one, and initial states.
_IGNORED = {
    "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "initial_accumulator_value",
}  # fmt: skip
# Entries of schedulers and users.
_NOTES = {
    "name", "param_names", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr",
}  # fmt: skip

_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda v: v >= 0.0, "at least 0"),
    "weight_decay": (lambda v: v >= 0.0, "at least 0"),
    "momentum": (lambda v: v >= 0.0, "at least 0"),
    "dampening": (lambda v: True, "that is finite"),
    "alpha": (lambda v: 0.0 <= v <= 1.0, "from 0 to 1"),
    "beta1": (lambda v: 0.0 <= v < 1.0, "from 0 to below 1"),
    "beta2": (lambda v: 0.0 <= v < 1.0, "from 0 to below 1"),
    "eps": (lambda v: v >= 0.0, "at least 0"),
    "lr_decay": (lambda v: v >= 0.0, "at least 0"),
    "momentum_decay": (lambda v: v >= 0.0, "at least 0"),
    "max_norm": (lambda v: v > 0.0, "above 0"),
    "loss_scale": (lambda v: 1.0 <= v <= 2.0**24 and math.frexp(v)[0] == 0.5, "from 1 to 2^24, a power of two"),
    "initial_accumulator_value": (lambda v: v >= 0.0, "at least 0"),
}


class Group(dict[str, Any]):
    """The settings of a group. They cannot change while a step is captured: replays would not repeat the change."""

    def __init__(self, name: str, settings: Mapping[str, Any]) -> None:
        super().__init__(settings)
        self._name = name

    def __reduce__(self) -> Any:
        return Group, (self._name, dict(self))

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self or self[key] != value:
            check_not_recording(self._name, key)
        super().__setitem__(key, value)


def check_not_recording(name: str, what: str) -> None:
    """Raise RuntimeError inside a captured step, whose replays would not repeat a change."""
    if capture.recording():
        raise RuntimeError(
            f"{name}: {what} changes inside a captured step, and a replay would not "
            "repeat it: change it outside the step, as by schedule.step() after it"
        )


def read_groups(name: str, params: Params) -> list[dict[str, Any]]:
    """Return the groups in the argument of an optimiser, each with its list of parameters."""
    if isinstance(params, Tensor):
        raise TypeError(f"{name}: params is a Tensor, expected a list of Tensors")
    items = list(params)
    if not any(isinstance(item, Mapping) for item in items):
        return [read_group(name, {"params": items})]
    for item in items:
        if not isinstance(item, Mapping) or "params" not in item:
            raise TypeError(f"{name}: got groups and a {type(item).__name__}, expected dicts with a key 'params' only")
    return [read_group(name, item) for item in items if isinstance(item, Mapping)]


def read_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group with a list of its parameters; pairs of `named_parameters()` become "params" and "param_names"."""
    if "params" not in group:
        raise TypeError(f"{name}: a group is a dict with a key 'params', this one has {', '.join(group) or 'none'}")
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    settings = {**group, "params": params}
    if params and all(isinstance(item, tuple) and len(item) == 2 for item in params):
        settings["param_names"], settings["params"] = [key for key, _ in params], [tensor for _, tensor in params]
    return settings


def check_params(name: str, params: Sequence[Any]) -> None:
    """Raise ValueError or TypeError unless all are distinct leaf Tensors."""
    if not params:
        raise ValueError(f"{name}: there are no parameters; pass model.parameters() or a list of Tensors")
    seen: dict[int, int] = {}
    for index, param in enumerate(params):
        if isinstance(param, torch.Tensor):
            raise TypeError(
                f"{name}: parameter {index} is a torch tensor; expected a minidl Tensor, such as the "
                f"parameters of minidl's modules. torch.optim.{name} updates torch tensors"
            )
        if not isinstance(param, Tensor):
            raise TypeError(f"{name}: parameter {index} is a {type(param).__name__}, expected a Tensor")
        if not param.is_leaf:
            raise ValueError(
                f"{name}: parameter {index} of shape {list(param.shape)} is the result of an operation; "
                "pass the leaf tensors it was computed from, or .detach() it"
            )
        if id(param) in seen:
            raise ValueError(f"{name}: parameters {seen[id(param)]} and {index} are the same tensor; pass it once")
        seen[id(param)] = index


def check_number(name: str, key: str, value: Any) -> None:
    """Raise ValueError for a value out of the range of the setting `key`."""
    holds, text = _LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and holds(float(value))):
        raise ValueError(f"{name}: {key} is {value!r}, expected a number {text}")


def check_options(name: str, differentiable: bool, loss_scale: Any, skip_nonfinite: bool) -> None:
    """Raise ValueError for options of an optimizer that are out of range, do not fit together or are not supported."""
    if differentiable:
        raise ValueError(f"{name}: differentiable is not supported: gradients do not pass through a step")
    if loss_scale is not None:
        check_number(name, "loss_scale", loss_scale)
        if not skip_nonfinite:
            raise ValueError(f"{name}: loss_scale requires skip_nonfinite=True: the scale is found by skipping steps")


def filled(name: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group completed by `defaults`. Raises ValueError for a setting that is unknown or out of its range."""
    unknown = set(group) - set(defaults) - _NOTES - {"params"}
    if unknown:
        raise ValueError(f"{name}: a group has {', '.join(sorted(unknown))}; known: {', '.join(defaults)}")
    settings = {"params": group["params"], **defaults, **group}
    flat(name, settings)
    return settings


def flat(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a group, betas as beta1 and beta2. Raises ValueError for one out of its range."""
    values = numbers(name, group)
    for key, value in values.items():
        check_number(name, key, value)
    return {key: float(value) for key, value in values.items()}


def numbers(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group unchecked, betas as beta1 and beta2."""
    values: dict[str, Any] = {}
    for key, value in group.items():
        if key == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"{name}: betas is {value!r}, expected two numbers")
            values["beta1"], values["beta2"] = value
        elif key in _LIMITS:
            values[key] = value
    return values


def flags(name: str, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, bool]:
    """Return the flags that all groups share. Raises ValueError if groups differ: one launch updates all of them."""
    result = {}
    for key in FLAGS:
        if key in defaults:
            values = {bool(group[key]) for group in groups}
            if len(values) > 1:
                raise ValueError(
                    f"{name}: groups differ in {key}, and one launch updates all: create an optimizer for each"
                )
            result[key] = values.pop()
    if (
        result.get("nesterov")
        and "dampening" in defaults
        and any(group["momentum"] == 0.0 or group["dampening"] != 0.0 for group in groups)
    ):
        raise ValueError(f"{name}: nesterov requires a momentum above 0 and a dampening of 0")
    return result


def of_torch(name: str, group: Mapping[str, Any], current: Mapping[str, Any], decoupled: bool) -> dict[str, Any]:
    """Return the settings of a group in torch's form. Raises ValueError for a setting that minidl does not support."""
    if group.get("decoupled_weight_decay") and not decoupled:
        instead = "use AdamW" if name == "Adam" else "create the optimizer with it"
        raise ValueError(f"{name}: the state has decoupled_weight_decay=True: {instead}")
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params" or key in _IGNORED:
            continue
        if key == "betas":
            value = tuple(map(float, value))
        elif key in _LIMITS:
            value = float(value)  # torch's may be tensors
        settings[key] = value
    filled(name, {**settings, "params": []}, {key: value for key, value in current.items() if key != "params"})
    return settings


def adjustment(kind: str | None, rows: int, columns: int) -> float:
    """Return the factor of Muon's learning rate for a matrix. Raises ValueError for an unknown `kind`."""
    if kind not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Muon: adjust_lr_fn is {kind!r}, expected 'original', 'match_rms_adamw' or None")
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))


def iterations(groups: list[dict[str, Any]]) -> tuple[tuple[float, float, float], int, float]:
    """Return the settings of Muon's iterations, (coefficients, steps, eps). Raises ValueError if groups differ."""
    settings = {(tuple(map(float, g["ns_coefficients"])), g["ns_steps"], float(g["eps"])) for g in groups}
    if len(settings) > 1:
        raise ValueError("Muon: groups differ in ns_coefficients, ns_steps or eps: create an optimizer for each")
    ((coefficients, steps, eps),) = settings
    if len(coefficients) != 3:
        raise ValueError(f"Muon: ns_coefficients are {coefficients}, expected three numbers")
    if type(steps) is not int or not 0 <= steps < 100:
        raise ValueError(f"Muon: ns_steps is {steps!r}, expected an integer from 0 to below 100")
    return coefficients, steps, eps
