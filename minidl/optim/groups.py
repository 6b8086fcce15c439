"""Parameter groups of optimisers: what they may hold, and in what ranges."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from minidl.compilation import capture
from minidl.tensors import Tensor

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Tensor]]

# What in a group chooses the launches, not a number that they read.
FLAGS = ("nesterov", "amsgrad", "centered", "maximize")
# What groups of torch have beside: ways of computing, of which there is one here, and how states began. Below, what
# schedulers and people note.
_IGNORED = {
    "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "initial_accumulator_value",
}  # fmt: skip
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
    "max_norm": (lambda v: v > 0.0, "above 0"),
    "loss_scale": (lambda v: 1.0 <= v <= 2.0**24 and math.frexp(v)[0] == 0.5, "from 1 to 2^24, a power of two"),
    "initial_accumulator_value": (lambda v: v >= 0.0, "at least 0"),
}


class Group(dict[str, Any]):
    """The settings of some parameters. They do not change while a step is recorded: its replays would not repeat it."""

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
    """The parameter groups of an optimiser's argument, each with its list of parameters."""
    if isinstance(params, Tensor):
        raise TypeError(f"{name}: params is a Tensor, expected a list of them")
    given = list(params)
    if not any(isinstance(item, Mapping) for item in given):
        return [read_group(name, {"params": given})]
    for item in given:
        if not isinstance(item, Mapping) or "params" not in item:
            raise TypeError(f"{name}: got groups and a {type(item).__name__}, expected dicts with a key 'params' only")
    return [read_group(name, item) for item in given if isinstance(item, Mapping)]


def read_group(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with a list of its parameters; of `named_parameters()`, their names are kept beside."""
    if "params" not in group:
        raise TypeError(f"{name}: a group is a dict with a key 'params', this one has {', '.join(group) or 'none'}")
    params = group["params"]
    params = [params] if isinstance(params, Tensor) else list(params)
    found = {**group, "params": params}
    if params and all(isinstance(item, tuple) and len(item) == 2 for item in params):
        found["param_names"], found["params"] = [key for key, _ in params], [tensor for _, tensor in params]
    return found


def check_params(name: str, params: Sequence[Any]) -> None:
    if not params:
        raise ValueError(f"{name}: there are no parameters; give it model.parameters(), or a list of Tensors")
    seen: dict[int, int] = {}
    for index, param in enumerate(params):
        if isinstance(param, torch.Tensor):
            raise TypeError(
                f"{name}: parameter {index} is a tensor of torch, which torch.optim.{name} updates; expected a minidl "
                "Tensor, as the parameters of minidl's modules are"
            )
        if not isinstance(param, Tensor):
            raise TypeError(f"{name}: parameter {index} is a {type(param).__name__}, expected a Tensor")
        if not param.is_leaf:
            raise ValueError(
                f"{name}: parameter {index} of shape {list(param.shape)} was made by an operation; "
                "give the tensors it was made from, or .detach() it"
            )
        if id(param) in seen:
            raise ValueError(f"{name}: parameters {seen[id(param)]} and {index} are the same tensor; give it once")
        seen[id(param)] = index


def check_number(name: str, key: str, value: Any) -> None:
    holds, text = _LIMITS[key]
    if isinstance(value, bool) or not isinstance(value, Real) or not (math.isfinite(value) and holds(float(value))):
        raise ValueError(f"{name}: {key} is {value!r}, expected a number {text}")


def filled(name: str, group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group with the settings it lacks. Raises ValueError for a setting that is not known or out of its range."""
    unknown = set(group) - set(defaults) - _NOTES - {"params"}
    if unknown:
        raise ValueError(f"{name}: a group has {', '.join(sorted(unknown))}; known: {', '.join(defaults)}")
    full = {"params": group["params"], **defaults, **group}
    flat(name, full)
    return full


def flat(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a group, betas as beta1 and beta2. Raises ValueError for one out of its range."""
    found = numbers(name, group)
    for key, value in found.items():
        check_number(name, key, value)
    return {key: float(value) for key, value in found.items()}


def numbers(name: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as they are given, betas as beta1 and beta2."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if key == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"{name}: betas is {value!r}, expected two numbers")
            found["beta1"], found["beta2"] = value
        elif key in _LIMITS:
            found[key] = value
    return found


def flags(name: str, groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> dict[str, bool]:
    """The flags that all groups have in common. Raises ValueError where they differ: one launch updates all."""
    found = {}
    for key in FLAGS:
        if key in defaults:
            values = {bool(group[key]) for group in groups}
            if len(values) > 1:
                raise ValueError(f"{name}: groups differ in {key}, and one launch updates all: make an optimizer each")
            found[key] = values.pop()
    if (
        found.get("nesterov")
        and "dampening" in defaults
        and any(group["momentum"] == 0.0 or group["dampening"] != 0.0 for group in groups)
    ):
        raise ValueError(f"{name}: nesterov needs a momentum above 0, got 0, or a dampening other than 0")
    return found


def of_torch(name: str, group: Mapping[str, Any], own: Mapping[str, Any], decoupled: bool) -> dict[str, Any]:
    """What a group of a state of torch's form sets in our own one. Raises ValueError for what cannot be set."""
    if group.get("decoupled_weight_decay") and not decoupled:
        raise ValueError(f"{name}: the state decays weights apart from gradients (decoupled_weight_decay): use AdamW")
    read: dict[str, Any] = {}
    for key, value in group.items():
        if key == "params" or key in _IGNORED:
            continue
        if key == "betas":
            value = tuple(map(float, value))
        elif key in _LIMITS:
            value = float(value)  # torch's may be tensors
        read[key] = value
    filled(name, {**read, "params": []}, {key: value for key, value in own.items() if key != "params"})
    return read


def adjustment(kind: str | None, rows: int, columns: int) -> float:
    """What Muon's rate of a matrix is multiplied by. Raises ValueError for a kind that there is not."""
    if kind not in (None, "original", "match_rms_adamw"):
        raise ValueError(f"Muon: adjust_lr_fn is {kind!r}, expected 'original', 'match_rms_adamw' or None")
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / max(1, columns)))


def iterations(groups: list[dict[str, Any]]) -> tuple[tuple[float, float, float], int, float]:
    """The settings of Muon's iterations that all groups share. Raises ValueError."""
    found = {(tuple(map(float, g["ns_coefficients"])), g["ns_steps"], float(g["eps"])) for g in groups}
    if len(found) > 1:
        raise ValueError("Muon: groups differ in ns_coefficients, ns_steps or eps: make an optimizer each")
    ((coefficients, steps, eps),) = found
    if len(coefficients) != 3:
        raise ValueError(f"Muon: ns_coefficients are {coefficients}, expected three numbers")
    if type(steps) is not int or not 0 <= steps < 100:
        raise ValueError(f"Muon: ns_steps is {steps!r}, expected an integer from 0 to below 100")
    return coefficients, steps, eps
