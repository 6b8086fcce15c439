"""torch's optimisers with minidl's step, which updates all parameters of a device in one launch.

    optimizer = minidl.torch.optim.AdamW(model.parameters(), lr=1e-3)

Each class is a subclass of torch's class of the same name, with the same arguments, parameter groups, hooks, schedulers
and `GradScaler`; `state_dict` is interchangeable. Only `step` differs. Before the update, two small launches measure
the gradients and count steps. Learning rates and other numbers are on the device and updated when they change; a
learning rate that is a tensor is read in each step, also in a CUDA graph. float16 and bfloat16 parameters have float32
states and masters; a master is copied again if torch's version counter shows that its parameter changed between steps
(a change through `.data` is overwritten). Groups may differ in all numbers; groups that differ in nesterov, amsgrad,
centered, maximize or Muon's iterations need separate launches.

Raises ValueError for `differentiable` and for parameters that are not dense in memory; TypeError for parameters that
are not floating-point and for sparse gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch

from minidl.kernels.update import HYPER, SCRATCH, STATES, Update
from minidl.optim.groups import FLAGS, adjustment, iterations, numbers

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Muon", "RMSprop"]

_MASTER, _DECOUPLED = "master", "decoupled_weight_decay"


class _Part(NamedTuple):
    """The parameters `first` to `end` of an update, which belong to a group, and the group's numbers on the device."""

    group: dict[str, Any]
    first: int
    end: int
    sent: dict[str, float]


class _Unit(NamedTuple):
    """One update: its parameters, their versions after the last step, and the indices that have entries in `state`."""

    update: Update
    params: list[torch.Tensor]
    parts: list[_Part]
    versions: list[int]
    begun: set[int]


class _OneLaunch(torch.optim.Optimizer):
    """A mixin that replaces `step` of a torch optimiser."""

    _rule: ClassVar[str]
    _optional: ClassVar[dict[str, str]] = {}  # states needed only if a setting is above 0, by setting
    _units: list[_Unit] | None = None
    _key: Any = None
    _state_count = 0
    # Also with `fused`: GradScaler checks for infinite gradients itself, and skips the step.
    _step_supports_amp_scaling = property(lambda self: False, lambda self, value: None)

    def __init_subclass__(cls) -> None:
        """Wrap `step` so that hooks are called, as torch does for its own classes."""
        super().__init_subclass__()
        if not getattr(cls.step, "hooked", False):
            cls.step = torch.optim.Optimizer.profile_hook_step(cls.step)  # type: ignore[method-assign]
            cls.step.hooked = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; `closure` first computes the loss and gradients, and the loss is
        returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for unit in self._ready():
                self._step(unit)
        self._state_count = len(self.state)
        return loss

    def _step(self, unit: _Unit) -> None:
        update, params = unit.update, unit.params
        for part in unit.parts:
            _send(update, part)
        grads = [param.grad for param in params]
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise TypeError(f"{type(self).__name__}: a gradient is {grad.layout}; use torch.optim for it")
            master = update.masters[index]
            if master is not None and param._version != unit.versions[index]:
                master.copy_(param)
        update(params, grads)
        torch.autograd.graph.increment_version([p for p, g in zip(params, grads, strict=True) if g is not None])
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            unit.versions[index] = param._version
            if grad is not None and index not in unit.begun and (state := _live(update, index)):
                self.state[param].update(state)
                unit.begun.add(index)

    def _ready(self) -> list[_Unit]:
        """Return the updates; rebuild them from `state` if parameters or settings that select launches changed."""
        key = [
            (self._flags(group), [bool(group[k]) for k in self._optional],
             [(id(p), p.dtype, p.device, p.stride()) for p in group["params"]])
            for group in self.param_groups
        ]  # fmt: skip
        if self._units is None or key != self._key or len(self.state) != self._state_count or self._replaced():
            self._units, self._key = list(self._new_units()), key
        return self._units

    def _replaced(self) -> bool:
        """Return whether `state` has other tensors than the updates."""
        return any(
            self.state[unit.params[index]].get(name) is not tensor
            for unit in self._units or ()
            for index in unit.begun
            for name, tensor in _live(unit.update, index).items()
        )

    def _new_units(self) -> Iterator[_Unit]:
        by_launch: dict[Any, list[tuple[dict[str, Any], list[torch.Tensor]]]] = {}
        for group in self.param_groups:
            if group.get("differentiable"):
                raise ValueError(f"{type(self).__name__}: differentiable=True is not supported")
            for device in dict.fromkeys(p.device for p in group["params"]):
                params = [p for p in group["params"] if p.device == device]
                by_launch.setdefault((device, self._flags(group)), []).append((group, params))
        for (_, flags), members in by_launch.items():
            groups = [group for group, _ in members]
            params = [p for _, group_params in members for p in group_params]
            unsupported = next((p for p in params if type(p.data) is not torch.Tensor), None)
            if unsupported is not None:
                raise TypeError(
                    f"{type(self).__name__}: a parameter is a {type(unsupported.data).__name__}; use torch.optim for it"
                )
            settings = dict(flags)
            rule = "adamw" if settings.get(_DECOUPLED) else self._rule
            update = Update(rule, [p.detach() for p in params], self._states_of(groups))
            update.skip = False
            update.nesterov, update.maximize = settings.get("nesterov", False), settings.get("maximize", False)
            update.third = settings.get("centered", False) or settings.get("amsgrad", False)
            self._prepare(update, members)
            parts, first = [], 0
            for group, group_params in members:
                parts.append(_Part(group, first, first + len(group_params), {}))
                first += len(group_params)
            begun = {index for index, param in enumerate(params) if self._take(update, index, param)}
            yield _Unit(update, params, parts, [p._version for p in params], begun)

    def _flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """Return the settings of a group that select launches."""
        return tuple((key, bool(group[key])) for key in (*FLAGS, _DECOUPLED) if key in group)

    def _prepare(self, update: Update, members: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        """Set the attributes of a new update of these groups that are not numbers."""

    def _states_of(self, groups: list[dict[str, Any]]) -> list[str]:
        unused = {state for key, state in self._optional.items() if not any(group[key] for group in groups)}
        return [state for state in STATES[self._rule] if state not in unused]

    def _take(self, update: Update, index: int, param: torch.Tensor) -> bool:
        """Move a parameter's entry in `state` into the update's memory; return whether there is one."""
        state = self.state.get(param)
        if not state:
            if "initial_accumulator_value" in self.defaults:  # a parameter that was added later
                update.states["sum"][index].fill_(self.defaults["initial_accumulator_value"])
            return False
        for name, tensors in update.states.items():
            if state.get(name) is not None:
                tensors[index].copy_(state[name])
        step = state["step"] if "step" in state else state.get("momentum_buffer") is not None
        update.steps[index].fill_(int(step))
        master = update.masters[index]
        if master is not None and state.get(_MASTER) is not None:
            master.copy_(state[_MASTER])
        state.update(_live(update, index))
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._units = None

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, with "master" for 16-bit parameters. Synchronises with the device."""
        result = super().state_dict()
        result["state"] = {
            key: {name: value.to("cpu", torch.float32) if name == "step" else value for name, value in values.items()}
            for key, values in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch casts states to the parameters' dtype, but those of 16-bit parameters are float32.
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(keys, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor) and name != "step" and param.dtype.itemsize == 2:
                    self.state[param][name] = value.to(param.device, copy=True)
        self._units = None


def _send(update: Update, part: _Part) -> None:
    """Copy a group's changed numbers to the device."""
    for key, value in numbers(update.rule, part.group).items():
        if key not in HYPER:
            continue
        if isinstance(value, torch.Tensor):
            update.hyper[part.first : part.end, HYPER[key].value].copy_(value)
        elif part.sent.get(key) != value:
            update.set(key, value, part.first, part.end)
            part.sent[key] = value
    update.decay = update.decay or part.group.get("weight_decay", 0.0) != 0.0
    update.dampened = update.dampened or part.group.get("dampening", 0.0) != 0.0


def _live(update: Update, index: int) -> dict[str, torch.Tensor]:
    """Return the state of a parameter, views of the update's memory."""
    state = {name: tensors[index] for name, tensors in update.states.items() if name != SCRATCH}
    if update.rule not in ("sgd", "muon"):
        state["step"] = update.steps[index]
    master = update.masters[index]
    return state if master is None else {**state, _MASTER: master}


class SGD(_OneLaunch, torch.optim.SGD):
    """`torch.optim.SGD`, whose step is one launch."""

    _rule = "sgd"
    _optional: ClassVar = {"momentum": "momentum_buffer"}


class RMSprop(_OneLaunch, torch.optim.RMSprop):
    """`torch.optim.RMSprop`, whose step is one launch."""

    _rule = "rmsprop"
    _optional: ClassVar = {"momentum": "momentum_buffer", "centered": "grad_avg"}


class Adagrad(_OneLaunch, torch.optim.Adagrad):
    """`torch.optim.Adagrad`, whose step is one launch."""

    _rule = "adagrad"


class Adam(_OneLaunch, torch.optim.Adam):
    """`torch.optim.Adam`, whose step is one launch."""

    _rule = "adam"
    _optional: ClassVar = {"amsgrad": "max_exp_avg_sq"}


class AdamW(_OneLaunch, torch.optim.AdamW):
    """`torch.optim.AdamW`, whose step is one launch."""

    _rule = "adamw"
    _optional: ClassVar = {"amsgrad": "max_exp_avg_sq"}


class Muon(_OneLaunch, torch.optim.Muon):
    """`torch.optim.Muon`, with float32 iterations (torch: bfloat16) of all matrices of a size at once."""

    _rule = "muon"

    def _flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (*super()._flags(group), ("newton", iterations([group])), ("adjust", group["adjust_lr_fn"]))

    def _prepare(self, update: Update, members: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        group = members[0][0]
        update.newton = iterations([group])
        for index, param in enumerate(param for _, params in members for param in params):
            update.set("adjust", adjustment(group["adjust_lr_fn"], *param.shape), index, index + 1)
