"""torch's optimisers whose step is minidl's: all parameters of a device are updated in one launch.

    optimizer = minidl.torch.optim.AdamW(model.parameters(), lr=1e-3)

Each class is torch's of the same name: its arguments, parameter groups, hooks, schedulers, `GradScaler` and
`state_dict`, which torch's own loads and the other way. What differs is `step`. Two small launches before that of the
update measure the gradients and count. Learning rates and other numbers are kept on the device, where a step finds them
changed; a learning rate that is a tensor is read in each step, also in a CUDA graph. float16 and bfloat16 parameters
have float32 states and masters, which are made anew from a parameter that torch's version counters find changed between
steps (a change by `.data` is overwritten). Groups may differ in all numbers; those that differ in nesterov, amsgrad,
centered, maximize or Muon's iterations are updated apart.

Raises ValueError for `differentiable`, and for parameters that are not dense in memory; TypeError for parameters that
are not floating, and for sparse gradients.
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
    """Parameters of a group that an update has, from `first` up to `end`, and the group's numbers on the device."""

    group: dict[str, Any]
    first: int
    end: int
    known: dict[str, float]


class _Unit(NamedTuple):
    """One update: its parameters, their versions as the last step left them, and those whose states are in `state`."""

    own: Update
    params: list[torch.Tensor]
    parts: list[_Part]
    versions: list[int]
    begun: set[int]


class _OneLaunch(torch.optim.Optimizer):
    """`step` for a class of torch that comes after this one."""

    _rule: ClassVar[str]
    _optional: ClassVar[dict[str, str]] = {}  # states that are kept only where a setting is above 0, by the setting
    _units: list[_Unit] | None = None
    _made_for: Any = None
    _kept = 0
    # Also with `fused`: GradScaler is to look for infinite gradients itself, and to leave out the step.
    _step_supports_amp_scaling = property(lambda self: False, lambda self, value: None)

    def __init_subclass__(cls) -> None:
        """As torch does with the step of a class that is first made: hooks are called."""
        super().__init_subclass__()
        if not getattr(cls.step, "hooked", False):
            cls.step = torch.optim.Optimizer.profile_hook_step(cls.step)  # type: ignore[method-assign]
            cls.step.hooked = True  # type: ignore[attr-defined]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; `closure` computes the loss and its gradients first, and is
        what is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for unit in self._ready():
                self._step(unit)
        self._kept = len(self.state)
        return loss

    def _step(self, unit: _Unit) -> None:
        own, params = unit.own, unit.params
        for part in unit.parts:
            _send(own, part)
        grads = [param.grad for param in params]
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise TypeError(f"{type(self).__name__}: a gradient is {grad.layout}; torch.optim takes such")
            master = own.masters[index]
            if master is not None and param._version != unit.versions[index]:
                master.copy_(param)
        own(params, grads)
        torch.autograd.graph.increment_version([p for p, g in zip(params, grads, strict=True) if g is not None])
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            unit.versions[index] = param._version
            if grad is not None and index not in unit.begun and (kept := _live(own, index)):
                self.state[param].update(kept)
                unit.begun.add(index)

    def _ready(self) -> list[_Unit]:
        """The updates; made again from `state` where parameters or what chooses launches changed."""
        key = [
            (self._flags(group), [bool(group[k]) for k in self._optional],
             [(id(p), p.dtype, p.device, p.stride()) for p in group["params"]])
            for group in self.param_groups
        ]  # fmt: skip
        if self._units is None or key != self._made_for or len(self.state) != self._kept or self._replaced():
            self._units, self._made_for = list(self._made()), key
        return self._units

    def _replaced(self) -> bool:
        """Whether `state` holds other tensors than the updates'."""
        return any(
            self.state[unit.params[index]].get(name) is not each
            for unit in self._units or ()
            for index in unit.begun
            for name, each in _live(unit.own, index).items()
        )

    def _made(self) -> Iterator[_Unit]:
        alike: dict[Any, list[tuple[dict[str, Any], list[torch.Tensor]]]] = {}
        for group in self.param_groups:
            if group.get("differentiable"):
                raise ValueError(f"{type(self).__name__}: differentiable is not built: gradients do not pass a step")
            for device in dict.fromkeys(p.device for p in group["params"]):
                params = [p for p in group["params"] if p.device == device]
                alike.setdefault((device, self._flags(group)), []).append((group, params))
        for (_, flags), members in alike.items():
            groups = [group for group, _ in members]
            params = [p for _, of_group in members for p in of_group]
            odd = next((p for p in params if type(p.data) is not torch.Tensor), None)
            if odd is not None:
                raise TypeError(
                    f"{type(self).__name__}: a parameter is a {type(odd.data).__name__}; torch.optim takes it"
                )
            chosen = dict(flags)
            rule = "adamw" if chosen.get(_DECOUPLED) else self._rule
            own = Update(rule, [p.detach() for p in params], self._states_of(groups))
            own.skip = False
            own.nesterov, own.maximize = chosen.get("nesterov", False), chosen.get("maximize", False)
            own.third = chosen.get("centered", False) or chosen.get("amsgrad", False)
            self._prepare(own, members)
            parts, first = [], 0
            for group, of_group in members:
                parts.append(_Part(group, first, first + len(of_group), {}))
                first += len(of_group)
            begun = {index for index, param in enumerate(params) if self._take(own, index, param)}
            yield _Unit(own, params, parts, [p._version for p in params], begun)

    def _flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        """What in a group chooses the launches."""
        return tuple((key, bool(group[key])) for key in (*FLAGS, _DECOUPLED) if key in group)

    def _prepare(self, own: Update, members: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        """Set what a new update of these groups has beside numbers."""

    def _states_of(self, groups: list[dict[str, Any]]) -> list[str]:
        spared = {state for key, state in self._optional.items() if not any(group[key] for group in groups)}
        return [state for state in STATES[self._rule] if state not in spared]

    def _take(self, own: Update, index: int, param: torch.Tensor) -> bool:
        """Copy what `state` has of a parameter into its update's memory, and put that there; whether it has any."""
        kept = self.state.get(param)
        if not kept:
            if "initial_accumulator_value" in self.defaults:  # a parameter that was added later
                own.states["sum"][index].fill_(self.defaults["initial_accumulator_value"])
            return False
        for name, tensors in own.states.items():
            if kept.get(name) is not None:
                tensors[index].copy_(kept[name])
        begun = kept["step"] if "step" in kept else kept.get("momentum_buffer") is not None
        own.steps[index].fill_(int(begun))
        master = own.masters[index]
        if master is not None and kept.get(_MASTER) is not None:
            master.copy_(kept[_MASTER])
        kept.update(_live(own, index))
        return True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._units = None

    def state_dict(self) -> dict[str, Any]:
        """As torch's, and "master" for parameters of 16 bits. Waits for the device."""
        found = super().state_dict()
        found["state"] = {
            key: {name: value.to("cpu", torch.float32) if name == "step" else value for name, value in kept.items()}
            for key, kept in found["state"].items()
        }
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch has made states of the parameters' dtype, which for 16 bits is not theirs.
        given = [key for group in state_dict["param_groups"] for key in group["params"]]
        params = [param for group in self.param_groups for param in group["params"]]
        for key, param in zip(given, params, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor) and name != "step" and param.dtype.itemsize == 2:
                    self.state[param][name] = value.to(param.device, copy=True)
        self._units = None


def _send(own: Update, part: _Part) -> None:
    """Put a group's numbers on the device, where they changed."""
    for key, value in numbers(own.rule, part.group).items():
        if key not in HYPER:
            continue
        if isinstance(value, torch.Tensor):
            own.hyper[part.first : part.end, HYPER[key].value].copy_(value)
        elif part.known.get(key) != value:
            own.set(key, value, part.first, part.end)
            part.known[key] = value
    own.decay = own.decay or part.group.get("weight_decay", 0.0) != 0.0
    own.dampened = own.dampened or part.group.get("dampening", 0.0) != 0.0


def _live(own: Update, index: int) -> dict[str, torch.Tensor]:
    """What is kept of a parameter, the update's own memory."""
    found = {name: tensors[index] for name, tensors in own.states.items() if name != SCRATCH}
    if own.rule not in ("sgd", "muon"):
        found["step"] = own.steps[index]
    master = own.masters[index]
    return found if master is None else {**found, _MASTER: master}


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
    """For matrices. The iterations are float32 (torch's bfloat16), of all matrices of a size at once."""

    _rule = "muon"

    def _flags(self, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
        return (*super()._flags(group), ("newton", iterations([group])), ("adjust", group["adjust_lr_fn"]))

    def _prepare(self, own: Update, members: list[tuple[dict[str, Any], list[torch.Tensor]]]) -> None:
        group = members[0][0]
        own.newton = iterations([group])
        for index, param in enumerate(param for _, params in members for param in params):
            own.set("adjust", adjustment(group["adjust_lr_fn"], *param.shape), index, index + 1)
