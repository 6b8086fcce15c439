"""The state of an optimiser as torch writes it, and with flat names as runs write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels.update import STATES, Update
from minidl.optim import groups as of_groups

_WITHOUT_STEP = ("sgd", "muon")  # torch's state of these has a buffer, which may not have begun, and no step


@dataclass(frozen=True)
class Given:
    """A state in torch's form: what is kept by parameter, what groups set, and our own counters."""

    state: dict[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    counters: Mapping[str, torch.Tensor]


def to_torch(
    own: Update, read: Callable[[int, torch.Tensor], torch.Tensor] = lambda index, kept: kept
) -> dict[int, dict[str, Any]]:
    """By parameter: its states, its steps (float32, on the CPU) and its master, as `read` gives them. Waits for the
    device."""
    steps = own.steps.to("cpu", torch.float32).unbind()
    found: dict[int, dict[str, Any]] = {}
    for index, step in enumerate(steps):
        kept: dict[str, Any] = {} if own.rule in _WITHOUT_STEP else {"step": step}
        kept.update({name: read(index, tensors[index]) for name, tensors in own.kept.items()})
        if own.rule == "sgd" and kept and float(step) == 0.0:
            kept["momentum_buffer"] = None  # as torch has it before the first step
        master = own.masters[index]
        if master is not None:
            kept["master"] = read(index, master)
        found[index] = kept
    return found


def counters(own: Update) -> dict[str, torch.Tensor]:
    """What an optimiser counts for all its parameters."""
    return {"skipped": own.skipped} if own.scale is None else {"skipped": own.skipped, "loss_scale": own.scale}


def read_torch(name: str, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], of: Update) -> Given:
    """A state in torch's form, checked against the groups. Raises ValueError."""
    decoupled, counted = of.rule == "adamw", counters(of).keys()
    given = state["param_groups"]
    if len(given) != len(groups):
        raise ValueError(f"{name}: the state has {len(given)} parameter groups, expected {len(groups)}")
    places: dict[Any, int] = {}
    for index, (group, own) in enumerate(zip(given, groups, strict=True)):
        if len(group["params"]) != len(own["params"]):
            raise ValueError(
                f"{name}: group {index} of the state has {len(group['params'])} parameters, expected "
                f"{len(own['params'])}"
            )
        places.update({key: place for place, key in enumerate(group["params"], len(places))})
    unknown = [key for key in state["state"] if key not in places]
    if unknown:
        raise ValueError(f"{name}: the state has values of {unknown}, which no group names")
    more = state.get("minidl", {})
    made_by = more.get("optimizer", name)
    if made_by != name:
        raise ValueError(f"{name}: the state is of {made_by!r}, expected {name!r}")
    if "minidl" in state:
        missing, unknown = sorted(counted - more.keys()), sorted(more.keys() - counted - {"optimizer"})
        if missing or unknown:
            raise ValueError(
                f"{name}: the state does not fit: missing {', '.join(missing) or 'nothing'}, unknown "
                f"{', '.join(unknown) or 'nothing'}"
            )
    return Given(
        {places[key]: kept for key, kept in state["state"].items()},
        [of_groups.of_torch(name, group, own, decoupled) for group, own in zip(given, groups, strict=True)],
        {key: value for key, value in more.items() if key != "optimizer"},
    )


def check(name: str, state: Mapping[int, Mapping[str, Any]], own: Update, needed: Sequence[str]) -> None:
    """Raises ValueError where a state in torch's form lacks what is needed, or has it in other shapes."""
    for index, kept in state.items():
        found = {key for key, value in kept.items() if value is not None} - {"step", "master"}
        missing, unknown = set(needed) - found, found - set(STATES[own.rule])
        begins = not found or (own.rule == "sgd" and not unknown)
        if unknown or (missing and not begins):
            raise ValueError(
                f"{name}: the state of parameter {index} has {', '.join(sorted(found))}, expected {', '.join(needed)}"
            )
        for key in (*sorted(found), *({"master"} & kept.keys())):
            if kept[key].shape != own.shapes[index][0]:
                raise ValueError(
                    f"{name}: {key} of parameter {index} is {list(kept[key].shape)}, expected "
                    f"{list(own.shapes[index][0])}"
                )


def load_torch(own: Update, params: Sequence[torch.Tensor], given: Given) -> None:
    """Copy a state that was checked; what torch has not begun yet begins anew."""
    for index, param in enumerate(params):
        kept = given.state.get(index, {})
        for key, tensors in own.kept.items():
            value = kept.get(key)
            if value is None:
                tensors[index].fill_(own.initial)
            else:
                own.put(index, tensors[index], value)
        counted = own.rule not in _WITHOUT_STEP
        begun = float(kept.get("step", 0.0)) if counted else kept.get("momentum_buffer") is not None
        own.steps[index].fill_(int(begun))
        master = own.masters[index]
        if master is not None:
            own.put(index, master, kept.get("master", param))
    own.skipped.zero_()
    for key, value in counters(own).items():
        if key in given.counters:
            value.copy_(given.counters[key])


def to_flat(name: str, own: Update, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """See `Optimizer.flat_state`."""
    return {**_settings(name, groups), **{key: own.whole(index, kept) for key, (index, kept) in _tensors(own).items()}}


def _settings(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A dampening of 0 is left out, as before there was one."""
    found: dict[str, Any] = {"optimizer": name}
    for index, group in enumerate(groups):
        for key, value in of_groups.flat(name, group).items():
            if key != "dampening" or value != 0.0:
                found[f"group.{index}.{key}"] = value
    return found


def load_flat(name: str, own: Update, groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Copy what `to_flat` returned. Raises ValueError, before anything is changed."""
    if state.get("optimizer") != name:
        raise ValueError(f"{name}: the state is of {state.get('optimizer')!r}, expected {name!r}")
    tensors = _tensors(own)
    expected = _settings(name, groups).keys() | tensors.keys()
    missing, unknown = sorted(expected - state.keys()), sorted(state.keys() - expected)
    if missing or unknown:
        raise ValueError(
            f"{name}: the state does not fit these parameters: missing {', '.join(missing) or 'nothing'}, "
            f"unknown {', '.join(unknown) or 'nothing'}"
        )
    for key, (index, tensor) in tensors.items():
        given, shape = state[key], tensor.shape if index is None else own.shapes[index][0]
        if not isinstance(given, torch.Tensor) or (given.shape, given.dtype) != (shape, tensor.dtype):
            got = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
            raise ValueError(f"{name}: state {key} is {got}, expected {tensor.dtype} {list(shape)}")
    numbers = [_read_numbers(name, state, index, group) for index, group in enumerate(groups)]
    for key, (index, tensor) in tensors.items():
        own.put(index, tensor, state[key])
    for group, read in zip(groups, numbers, strict=True):
        group.update(read)


def _read_numbers(name: str, state: Mapping[str, Any], index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as a flat state has them."""
    own = of_groups.flat(name, group)
    found = {key: state.get(f"group.{index}.{key}", own[key]) for key in own}
    read: dict[str, Any] = {key: value for key, value in found.items() if key not in ("beta1", "beta2")}
    if "betas" in group:
        read["betas"] = (found["beta1"], found["beta2"])
    of_groups.flat(name, read)
    return read


def _tensors(own: Update) -> dict[str, tuple[int | None, torch.Tensor]]:
    """By name the parameter, if it is of one, and what is kept."""
    found: dict[str, tuple[int | None, torch.Tensor]] = {"steps": (None, own.steps)}
    found.update({name: (None, tensor) for name, tensor in counters(own).items()})
    for name, tensors in own.kept.items():
        found.update({f"{name}.{index}": (index, tensor) for index, tensor in enumerate(tensors)})
    found.update({f"master.{i}": (i, master) for i, master in enumerate(own.masters) if master is not None})
    return found
