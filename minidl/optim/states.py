"""The state of an optimiser in torch's form, and with flat names for the files of runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minidl.kernels.update import HYPER, STATES, Update
from minidl.optim import groups as of_groups

_WITHOUT_STEP = ("sgd", "muon")  # torch's state of these rules has no step, and its buffer may be None


@dataclass(frozen=True)
class TorchState:
    """A state in torch's form: values by parameter index, settings by group, and minidl's counters."""

    state: dict[int, Mapping[str, Any]]
    groups: list[dict[str, Any]]
    counters: Mapping[str, torch.Tensor]


def to_torch(
    update: Update, read: Callable[[int, torch.Tensor], torch.Tensor] = lambda index, tensor: tensor
) -> dict[int, dict[str, Any]]:
    """Return by parameter index its states and master, as `read` returns them, and its steps (float32, on the CPU).
    Waits for the device."""
    steps = update.steps.to("cpu", torch.float32).unbind()
    states: dict[int, dict[str, Any]] = {}
    for index, step in enumerate(steps):
        values: dict[str, Any] = {} if update.rule in _WITHOUT_STEP else {"step": step}
        values.update({name: read(index, tensors[index]) for name, tensors in update.kept.items()})
        if update.rule == "sgd" and values and float(step) == 0.0:
            values["momentum_buffer"] = None  # as torch has it before the first step
        if update.rule in ("nadam", "nadamw"):
            values["mu_product"] = _momentum_product(int(step), *update.hyper[index].tolist())
        master = update.masters[index]
        if master is not None:
            values["master"] = read(index, master)
        states[index] = values
    return states


def _momentum_product(steps: int, *numbers: float) -> torch.Tensor:
    """Return what torch keeps for NAdam: the product of the momenta of all steps, which the kernel computes itself."""
    beta1, decay, product = numbers[HYPER["beta1"].value], numbers[HYPER["momentum_decay"].value], 1.0
    for step in range(1, steps + 1):
        product *= beta1 * (1 - 0.96 ** (step * decay) / 2)
        if product < 1e-45:  # 0 in float32
            break
    return torch.tensor(product)


def counters(update: Update) -> dict[str, torch.Tensor]:
    """Return the counters that all parameters of an optimiser share."""
    return {"skipped": update.skipped} | ({} if update.scale is None else {"loss_scale": update.scale})


def read_torch(name: str, state: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], update: Update) -> TorchState:
    """Return a state in torch's form, checked against the groups. Raises ValueError if it does not fit."""
    decoupled, counted = update.rule in ("adamw", "nadamw", "radamw"), counters(update).keys()
    saved = state["param_groups"]
    if len(saved) != len(groups):
        raise ValueError(f"{name}: the state has {len(saved)} parameter groups, expected {len(groups)}")
    indices: dict[Any, int] = {}
    for index, (group, current) in enumerate(zip(saved, groups, strict=True)):
        if len(group["params"]) != len(current["params"]):
            raise ValueError(
                f"{name}: group {index} of the state has {len(group['params'])} parameters, expected "
                f"{len(current['params'])}"
            )
        indices.update({key: i for i, key in enumerate(group["params"], len(indices))})
    unknown = [key for key in state["state"] if key not in indices]
    if unknown:
        raise ValueError(f"{name}: the state has values of {unknown}, which no group names")
    extra = state.get("minidl", {})
    optimizer = extra.get("optimizer", name)
    if optimizer != name:
        raise ValueError(f"{name}: the state is of {optimizer!r}, expected {name!r}")
    if "minidl" in state:
        missing, unknown = sorted(counted - extra.keys()), sorted(extra.keys() - counted - {"optimizer"})
        if missing or unknown:
            raise ValueError(
                f"{name}: the state does not fit: missing {', '.join(missing) or 'nothing'}, unknown "
                f"{', '.join(unknown) or 'nothing'}"
            )
    return TorchState(
        {indices[key]: values for key, values in state["state"].items()},
        [of_groups.of_torch(name, group, current, decoupled) for group, current in zip(saved, groups, strict=True)],
        {key: value for key, value in extra.items() if key != "optimizer"},
    )


def check(name: str, state: Mapping[int, Mapping[str, Any]], update: Update, needed: Sequence[str]) -> None:
    """Raise ValueError if a state in torch's form lacks a needed tensor, or has one of another shape."""
    for index, values in state.items():
        names = {key for key, value in values.items() if value is not None} - {"step", "master", "mu_product"}
        missing, unknown = set(needed) - names, names - set(STATES[update.rule])
        begins = not names or (update.rule == "sgd" and not unknown)
        if unknown or (missing and not begins):
            raise ValueError(
                f"{name}: the state of parameter {index} has {', '.join(sorted(names))}, expected {', '.join(needed)}"
            )
        for key in (*sorted(names), *({"master"} & values.keys())):
            if values[key].shape != update.shapes[index][0]:
                raise ValueError(
                    f"{name}: {key} of parameter {index} is {list(values[key].shape)}, expected "
                    f"{list(update.shapes[index][0])}"
                )


def load_torch(update: Update, params: Sequence[torch.Tensor], saved: TorchState) -> None:
    """Copy a state that was checked; buffers that torch has not created yet get their initial value."""
    for index, param in enumerate(params):
        values = saved.state.get(index, {})
        for key, tensors in update.kept.items():
            value = values.get(key)
            if value is None:
                tensors[index].fill_(update.initial)
            else:
                update.put(index, tensors[index], value)
        counted = update.rule not in _WITHOUT_STEP
        steps = float(values.get("step", 0.0)) if counted else values.get("momentum_buffer") is not None
        update.steps[index].fill_(int(steps))
        master = update.masters[index]
        if master is not None:
            update.put(index, master, values.get("master", param))
    update.skipped.zero_()
    for key, value in counters(update).items():
        if key in saved.counters:
            value.copy_(saved.counters[key])


def to_flat(name: str, update: Update, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state as `Optimizer.flat_state` describes it."""
    tensors = _tensors(update).items()
    return {**_settings(name, groups), **{key: update.whole(index, tensor) for key, (index, tensor) in tensors}}


def _settings(name: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of all groups by flat name; without a dampening of 0, which older files do not have."""
    settings: dict[str, Any] = {"optimizer": name}
    for index, group in enumerate(groups):
        for key, value in of_groups.flat(name, group).items():
            if key != "dampening" or value != 0.0:
                settings[f"group.{index}.{key}"] = value
    return settings


def load_flat(name: str, update: Update, groups: Sequence[dict[str, Any]], state: Mapping[str, Any]) -> None:
    """Load what `to_flat` returned. Raises ValueError, before anything is changed, if it does not fit."""
    if state.get("optimizer") != name:
        raise ValueError(f"{name}: the state is of {state.get('optimizer')!r}, expected {name!r}")
    tensors = _tensors(update)
    expected = _settings(name, groups).keys() | tensors.keys()
    missing, unknown = sorted(expected - state.keys()), sorted(state.keys() - expected)
    if missing or unknown:
        raise ValueError(
            f"{name}: the state does not fit these parameters: missing {', '.join(missing) or 'nothing'}, "
            f"unknown {', '.join(unknown) or 'nothing'}"
        )
    for key, (index, tensor) in tensors.items():
        value, shape = state[key], tensor.shape if index is None else update.shapes[index][0]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, tensor.dtype):
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            raise ValueError(f"{name}: state {key} is {got}, expected {tensor.dtype} {list(shape)}")
    numbers = [_read_numbers(name, state, index, group) for index, group in enumerate(groups)]
    for key, (index, tensor) in tensors.items():
        update.put(index, tensor, state[key])
    for group, read in zip(groups, numbers, strict=True):
        group.update(read)


def _read_numbers(name: str, state: Mapping[str, Any], index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a group in a flat state."""
    current = of_groups.flat(name, group)
    numbers = {key: state.get(f"group.{index}.{key}", current[key]) for key in current}
    settings: dict[str, Any] = {key: value for key, value in numbers.items() if key not in ("beta1", "beta2")}
    if "betas" in group:
        settings["betas"] = (numbers["beta1"], numbers["beta2"])
    of_groups.flat(name, settings)
    return settings


def _tensors(update: Update) -> dict[str, tuple[int | None, torch.Tensor]]:
    """Return by flat name the index of the parameter (None for counters) and the tensor."""
    tensors: dict[str, tuple[int | None, torch.Tensor]] = {"steps": (None, update.steps)}
    tensors.update({name: (None, tensor) for name, tensor in counters(update).items()})
    for name, values in update.kept.items():
        tensors.update({f"{name}.{index}": (index, tensor) for index, tensor in enumerate(values)})
    tensors.update({f"master.{i}": (i, master) for i, master in enumerate(update.masters) if master is not None})
    return tensors
