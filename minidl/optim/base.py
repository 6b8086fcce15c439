"""The base of all optimisers: parameter groups, the step, and the state that a run resumes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch

from minidl.autograd import enable_grad
from minidl.autograd.deferred import settle_all
from minidl.compilation import capture
from minidl.kernels import update
from minidl.optim import groups as of_groups
from minidl.optim import replays, states
from minidl.optim.groups import Params, check_number, read_group, read_groups
from minidl.optim.skips import Skips
from minidl.runtime import launch
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

# Attributes that `_start` creates, and `step`, which torch's schedulers replace.
_RECREATED = ("_adjusted", "_bounds", "_device_values", "_params", "_skips", "_update", "step")
_UNREAD = ("self", "__class__", "params", "foreach", "fused", "capturable", "decoupled_weight_decay")


class Optimizer(torch.optim.Optimizer):
    """The base class of all optimisers; use one of its subclasses. torch's schedulers take it as one of torch's.

    `params` are leaf Tensors, pairs of `named_parameters()`, or groups as in torch: dicts with "params" and their own
    settings. `param_groups` are these groups with all settings; changes there take effect at the next step. Learning
    rate, step count and all other numbers are on the device, so a CUDA graph can contain a step. One launch updates all
    groups, so they share `nesterov`, `amsgrad`, `centered` and `maximize`.

    max_norm       clip the gradients of a step so that their joint 2-norm is at most this
    lazy           a row-sparse gradient changes only its rows and their moments (weight decay included)
    loss_scale     the initial factor of dynamic loss scaling, for float16, in which small gradients underflow: call
                   loss.backward(optimizer.loss_scale). The factor is halved when a gradient is not finite, and doubled
                   after 2,000 finite steps
    skip_nonfinite  a step with a gradient that is not finite changes only `skipped`. The first one raises a
                   NotFiniteWarning, on a GPU up to 64 steps later; not with loss scaling, which skips steps to find
                   the scale, nor with `warns = False`. False: update as torch does, so weights become NaN

    `foreach`, `fused` and `capturable` are accepted and ignored: an update is always one launch, which a CUDA graph can
    contain. The state of float16 and bfloat16 parameters includes float32 masters.

    Raises ValueError without parameters, for a parameter that occurs twice, is no leaf or is neither contiguous nor in
    torch.channels_last, for a number out of its range and for `differentiable`; TypeError for parameters that are not
    floating Tensors.
    """

    _rule: str
    _dense = False  # whether row-sparse gradients become dense
    _optional: ClassVar[dict[str, str]] = {}  # states that exist only if a setting is above 0, by setting

    def __init__(self, params: Params, defaults: Mapping[str, Any]) -> None:
        """`defaults`: the `locals()` of a subclass; arguments that are not read here are settings of a group."""
        if not hasattr(self, "_rule"):
            raise TypeError(
                f"{type(self).__name__}: Optimizer is the base of minidl's optimisers, each of which has a kernel; "
                "write a class without a base, whose step() changes parameters with p.sub_(...) under minidl.no_grad()"
            )
        defaults = {key: value for key, value in defaults.items() if key not in _UNREAD}
        max_norm, loss_scale = defaults.pop("max_norm"), defaults.pop("loss_scale")
        skip_nonfinite, lazy = defaults.pop("skip_nonfinite"), defaults.pop("lazy", False)
        initial, name = defaults.pop("initial_accumulator_value", 0.0), type(self).__name__
        of_groups.check_options(name, defaults.pop("differentiable", False), loss_scale, skip_nonfinite)
        self.defaults = defaults
        self.skip_nonfinite, self.max_norm, self.lazy = skip_nonfinite, max_norm, lazy
        self.warns = skip_nonfinite and loss_scale is None
        self._of_update = {"lazy": lazy, "initial": initial, "loss_scale": loss_scale}
        self._start(of_groups.filled(name, group, defaults) for group in read_groups(name, params))

    def _start(self, groups: Iterable[dict[str, Any]]) -> None:
        """Create the state for groups of parameters with all settings."""
        name = type(self).__name__
        self.param_groups: list[dict[str, Any]] = []
        self._bounds: list[tuple[int, int]] = []
        self._params: list[Tensor] = []
        for group in groups:
            self._append(group)
        of_groups.check_params(name, self._params)
        of_groups.flags(name, self.param_groups, self.defaults)
        self._update = update.Update(
            self._rule, [p.data for p in self._params], self._states_of(self.param_groups), **self._of_update
        )
        self._device_values: list[dict[str, float]] = []
        self._skips = Skips(self._update)
        self._synchronize()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} of {sum(p.numel() for p in self._params)} values"]
        for group in self.param_groups:
            numbers = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            lines.append(f"  {len(group['params'])} parameters: {numbers}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        """Return settings, parameters and `state_dict()`, for a copy or a pickle."""
        if self._update.part is not None:
            raise TypeError(f"{type(self).__name__}: the state is sharded across processes; save its state_dict()")
        return {**{k: v for k, v in vars(self).items() if k not in _RECREATED}, "state": self.state_dict()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({key: value for key, value in state.items() if key not in ("state", "param_groups")})
        self._start(state["param_groups"])
        self.load_state_dict(state["state"])

    @property
    def lr(self) -> float:
        """The learning rate of the first group. Setting it sets it for all groups, on the device too."""
        return float(self.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        check_number(type(self).__name__, "lr", value)
        self._set_rates([value] * len(self.param_groups))

    def _set_rates(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self._synchronize()

    def _append(self, group: dict[str, Any]) -> None:
        self._bounds.append((len(self._params), len(self._params) + len(group["params"])))
        self._params.extend(group["params"])
        self.param_groups.append(of_groups.Group(type(self).__name__, group))

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add parameters with their own settings. Captured steps must be captured again."""
        name = type(self).__name__
        group = of_groups.filled(name, read_group(name, param_group), self.defaults)
        of_groups.check_params(name, [*self._params, *group["params"]])
        of_groups.flags(name, [*self.param_groups, group], self.defaults)
        self._update.add([param.data for param in group["params"]])
        self._append(group)
        self._device_values = []  # `hyper` is another tensor now
        self._synchronize()

    def _states_of(self, groups: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the states that at least one group needs."""
        unused = {state for key, state in self._optional.items() if not any(group[key] for group in groups)}
        return [state for state in update.STATES[self._rule] if state not in unused]

    def _synchronize(self) -> None:
        """Copy changed numbers to the device."""
        name, kernel = type(self).__name__, self._update
        if len(self._device_values) != len(self.param_groups):
            self._device_values = [{} for _ in self.param_groups]
        flags = of_groups.flags(name, self.param_groups, self.defaults)
        for group, (first, end), on_device in zip(self.param_groups, self._bounds, self._device_values, strict=True):
            for key, value in of_groups.flat(name, group).items():
                if on_device.get(key) != value:
                    of_groups.check_not_recording(name, key)
                    kernel.set(key, value, first, end)
                    on_device[key] = value
        for state in self._states_of(self.param_groups):
            if state not in kernel.states:
                of_groups.check_not_recording(name, state)
                kernel.keep(state, [param.data for param in self._params])
        if self.max_norm is not None:
            check_number(name, "max_norm", self.max_norm)
        kernel.max_norm, kernel.skip = self.max_norm, self.skip_nonfinite
        kernel.nesterov, kernel.maximize = flags.get("nesterov", False), flags.get("maximize", False)
        kernel.third = flags.get("centered", False) or flags.get("amsgrad", False)
        kernel.decay = any(group.get("weight_decay", 0.0) != 0.0 for group in self.param_groups)
        kernel.dampened = any(group.get("dampening", 0.0) != 0.0 for group in self.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. `closure` computes the loss and its gradients first.

        Returns the result of `closure`. Raises RuntimeError if a parameter was moved or converted after the optimiser
        was created.
        """
        loss = None
        if closure is not None:
            with enable_grad():
                loss = closure()
        settle_all()
        self._synchronize()
        capture.at_replay(self._prepare_replay)
        if capture.recording():
            capture.at_replay(partial(replays.check, type(self).__name__, self._update, replays.launched(self._update)))
        grads: list[Any] = [param.raw_grad for param in self._params]
        for i, grad in enumerate(grads):
            if isinstance(grad, RowGrad):
                grads[i] = grad.dense() if self._dense else update.Rows(grad.rows, grad.values)
        self._update([param.data for param in self._params], grads)
        changed = [param.data for param, grad in zip(self._params, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(changed)
        if self._update.part is not None:
            self._update.part.join(changed)
        if not capture.recording():
            self._warn_skipped()
        return loss

    def _warn_skipped(self) -> None:
        # Recorded launches count nothing, and their tensors may have no memory.
        if self.warns and self.skip_nonfinite and not launch.for_other_target():
            self.warns = not self._skips.warn(type(self).__name__)

    def _prepare_replay(self) -> None:
        """Do the host's part of `step` before a graph that contains it is replayed."""
        self._synchronize()
        self._warn_skipped()
        torch.autograd.graph.increment_version([param.data for param in self._params])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set the gradients of all parameters to None, or with `set_to_none=False` to zero."""
        for param in self._params:
            if not set_to_none and isinstance(param.raw_grad, torch.Tensor):
                param.raw_grad.zero_()
                param._recorded_grad = None
            else:
                param.grad = None

    @property
    def grad_norm(self) -> Tensor:
        """The joint 2-norm of the gradients of the last step before clipping, float64 of shape [], on the device."""
        return Tensor(self._update.control[update.NORM.value].clone())

    @property
    def loss_scale(self) -> Tensor | None:
        """The factor for the loss of the next step, float32 of shape [] on the device; None without loss scaling."""
        scale = self._update.scale
        return None if scale is None else Tensor(scale[update.LOSS_SCALE.value])

    @property
    def skipped(self) -> int:
        """The number of steps whose gradient was not finite. Waits for the device."""
        return int(self._update.skipped)

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:  # type: ignore[override]
        """The state of each parameter, as in torch, or of this process's shard; the tensors are not copies."""
        values = states.to_torch(self._update)
        return {param: values[index] for index, param in enumerate(self._params)}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the next step depends on besides parameters and gradients, in torch's form.

        {"state": {parameter: {name: tensor}}, "param_groups": [...]}, which torch's optimiser of the same name loads,
        and "minidl": the class, the number of skipped steps, and "loss_scale" where there is one (the scale and the
        finite steps since it changed). State tensors are not copies: clone them to keep them. Waits for the device. If
        the state is sharded (`distributed.shard_optimizer`), every process must call this; the first gets the full
        state, on the CPU, the others {}.
        """
        groups = [
            {**group, "params": list(range(*bounds))}
            for group, bounds in zip(self.param_groups, self._bounds, strict=True)
        ]
        extra = {"optimizer": type(self).__name__, **states.counters(self._update)}
        return self._on_first_process(
            {"state": states.to_torch(self._update, self._update.whole), "param_groups": groups, "minidl": extra}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, here or in torch; values are copied into the optimiser's memory.

        Raises ValueError, before anything is changed, for a state of another optimiser or of other parameters.
        """
        if "param_groups" not in state_dict:
            self.load_flat_state(state_dict)
            return
        name = type(self).__name__
        saved = states.read_torch(name, state_dict, self.param_groups, self._update)
        settings = [{**old, **new} for old, new in zip(self.param_groups, saved.groups, strict=True)]
        of_groups.flags(name, settings, self.defaults)
        states.check(name, saved.state, self._update, [s for s in self._states_of(settings) if s != update.SCRATCH])
        for group, new in zip(self.param_groups, saved.groups, strict=True):
            group.update(new)
        self._synchronize()
        states.load_torch(self._update, [param.data for param in self._params], saved)
        self._skips.reported = self.skipped

    def _on_first_process(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self._update.part is None or self._update.part.first else {}

    def flat_state(self) -> dict[str, Any]:
        """Return the state as tensors and numbers with flat names, for safetensors and JSON; as `state_dict`.

        The tensors are not copies. Names: "steps", "skipped", "<state>.<parameter>" (torch's names of
        states, and "master"), "group.<group>.<number>", "loss_scale" where there is one, and "optimizer", the class.
        """
        return self._on_first_process(states.to_flat(type(self).__name__, self._update, self.param_groups))

    def load_flat_state(self, state: Mapping[str, Any]) -> None:
        """Load what `flat_state` returned; as `load_state_dict`."""
        states.load_flat(type(self).__name__, self._update, self.param_groups, state)
        self._synchronize()
        self._skips.reported = self.skipped

    def _no_hooks(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} has no hooks: call functions around step() or state_dict()")

    register_step_pre_hook = register_step_post_hook = _no_hooks
    register_state_dict_pre_hook = register_state_dict_post_hook = _no_hooks
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _no_hooks
