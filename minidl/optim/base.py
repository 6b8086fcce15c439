"""The base of all optimisers: parameter groups, the step, and the state that a run resumes from."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from minidl import captured
from minidl.kernels import update
from minidl.later import settle_all
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor

Params = Iterable[Tensor] | Iterable[Mapping[str, Any]]

_LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "lr": (lambda v: v >= 0.0, "at least 0"),
    "weight_decay": (lambda v: v >= 0.0, "at least 0"),
    "momentum": (lambda v: v >= 0.0, "at least 0"),
    "alpha": (lambda v: 0.0 <= v <= 1.0, "from 0 to 1"),
    "beta1": (lambda v: 0.0 <= v < 1.0, "from 0 to below 1"),
    "beta2": (lambda v: 0.0 <= v < 1.0, "from 0 to below 1"),
    "eps": (lambda v: v >= 0.0, "at least 0"),
    "lr_decay": (lambda v: v >= 0.0, "at least 0"),
    "max_norm": (lambda v: v > 0.0, "above 0"),
    "loss_scale": (lambda v: 1.0 <= v <= 2.0**24 and math.frexp(v)[0] == 0.5, "from 1 to 2^24, a power of two"),
    "initial_accumulator_value": (lambda v: v >= 0.0, "at least 0"),
}


class Optimizer:
    """The base class of all optimisers; use one of its subclasses.

    `params` are leaf Tensors, or groups as in torch: dicts with "params" and any settings of their own.
    `param_groups` are these groups with all settings filled in; changes there take effect at the next step.
    Learning rate, step count and all other numbers are kept on the device, so that a CUDA graph can contain a step.

    max_norm    clip the gradients of a step so that their joint 2-norm is at most this
    lazy        a gradient of few rows changes only those rows and their moments (weight decay included)
    loss_scale  the initial factor of dynamic loss scaling, for float16, which cannot hold small gradients: call
                loss.backward(optimizer.loss_scale). The factor is halved when a gradient is not finite, and doubled
                after 2,000 finite steps

    A step with a gradient that is not finite changes nothing but `skipped`. The state of float16 and bfloat16
    parameters includes float32 masters. Raises ValueError for no parameters, for one that is given twice, is no leaf or
    is neither contiguous nor in torch.channels_last, and for a number out of its range; TypeError for parameters that
    are not floating Tensors.
    """

    _rule: str

    def __init__(
        self,
        params: Params,
        numbers: Mapping[str, float | tuple[float, float]],
        *,
        max_norm: float | None,
        lazy: bool,
        states: Sequence[str],
        nesterov: bool = False,
        initial: float = 0.0,
        loss_scale: float | None = None,
    ) -> None:
        name = type(self).__name__
        self.param_groups: list[dict[str, Any]] = []
        self._bounds: list[tuple[int, int]] = []
        self._params: list[Tensor] = []
        for group in read_groups(name, params):
            unknown = set(group) - set(numbers) - {"params"}
            if unknown:
                raise ValueError(f"{name}: a group has {', '.join(sorted(unknown))}; known: {', '.join(numbers)}")
            full = {"params": group["params"], **numbers, **{key: group[key] for key in group if key != "params"}}
            _flat(name, full)
            first = len(self._params)
            self._params.extend(full["params"])
            self._bounds.append((first, len(self._params)))
            self.param_groups.append(full)
        _check_params(name, self._params)
        if max_norm is not None:
            check_number(name, "max_norm", max_norm)
        if loss_scale is not None:
            check_number(name, "loss_scale", loss_scale)
        self._update = update.Update(
            self._rule, [p.data for p in self._params], states,
            nesterov=nesterov, max_norm=max_norm, lazy=lazy, initial=initial, loss_scale=loss_scale,
        )  # fmt: skip
        self.max_norm, self.lazy = max_norm, lazy
        self._on_device: list[dict[str, float]] = [{} for _ in self.param_groups]
        self._captured_without_decay = False
        self._synchronize()

    def __repr__(self) -> str:
        lines = [f"{type(self).__name__} of {sum(p.numel() for p in self._params)} values"]
        for group in self.param_groups:
            numbers = ", ".join(f"{key}={value}" for key, value in group.items() if key != "params")
            lines.append(f"  {len(group['params'])} parameters: {numbers}")
        return "\n".join(lines)

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

    def _synchronize(self) -> None:
        """Copy the numbers that have changed to the device."""
        for group, (first, end), known in zip(self.param_groups, self._bounds, self._on_device, strict=True):
            numbers = _flat(type(self).__name__, group)
            if numbers.get("momentum", 0.0) != 0.0 and "momentum_buffer" not in self._update.states:
                raise ValueError(
                    f"{type(self).__name__}: momentum was 0 when the optimizer was made, so it has no momentum_buffer; "
                    "make it with a momentum above 0, and set that to 0 until it is needed"
                )
            for key, value in numbers.items():
                if known.get(key) != value:
                    if captured.recording():
                        raise RuntimeError(
                            f"{type(self).__name__}: {key} changes inside a captured step, and a replay would not "
                            "repeat it: change it outside the step, as by schedule.step() after it"
                        )
                    self._update.set(key, value, first, end)
                    known[key] = value
        self._update.decay = any(group.get("weight_decay", 0.0) != 0.0 for group in self.param_groups)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises RuntimeError when a parameter was moved or converted after the optimiser was made.
        """
        settle_all()
        self._synchronize()
        captured.at_replay(self._prepare_replay)
        if captured.recording() and not self._update.decay:
            self._captured_without_decay = True
        grads = [
            update.Rows(grad.rows, grad.values) if isinstance(grad, RowGrad) else grad
            for grad in (param.raw_grad for param in self._params)
        ]
        self._update([param.data for param in self._params], grads)
        changed = [param.data for param, grad in zip(self._params, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(changed)

    def _prepare_replay(self) -> None:
        """What `step` does on the host, before a graph that contains it runs again."""
        self._synchronize()
        if self._captured_without_decay and self._update.decay:
            raise ValueError(
                f"{type(self).__name__}: weight_decay was 0 when the step was captured, so the graph has none: capture "
                "the step again, or start with a weight_decay above 0"
            )
        torch.autograd.graph.increment_version([param.data for param in self._params])

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for param in self._params:
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
        """The number of steps skipped because a gradient was not finite. Waits for the device."""
        return int(self._update.skipped)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides parameters and gradients: tensors and numbers with flat names.

        The tensors are the optimiser's own: copy them to keep them. Names: "steps", "skipped", "<state>.<parameter>"
        (states as torch calls them, and "master"), "group.<group>.<number>", "loss_scale" where there is one (the scale
        and the finite steps since it changed), and "optimizer", the class.
        """
        found: dict[str, Any] = {"optimizer": type(self).__name__}
        for index, group in enumerate(self.param_groups):
            for key, value in _flat(type(self).__name__, group).items():
                found[f"group.{index}.{key}"] = value
        found.update(self._tensors())
        return found

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned; values are copied into the optimiser's own memory.

        Raises ValueError, before anything is changed, for a state of another optimiser or of other parameters.
        """
        name = type(self).__name__
        if state.get("optimizer") != name:
            raise ValueError(f"{name}: the state is of {state.get('optimizer')!r}, expected {name!r}")
        expected = self.state_dict()
        missing, unknown = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
        if missing or unknown:
            raise ValueError(
                f"{name}: the state does not fit these parameters: missing {', '.join(missing) or 'nothing'}, "
                f"unknown {', '.join(unknown) or 'nothing'}"
            )
        tensors = self._tensors()
        for key, own in tensors.items():
            given = state[key]
            if not isinstance(given, torch.Tensor) or (given.shape, given.dtype) != (own.shape, own.dtype):
                got = f"{given.dtype} {list(given.shape)}" if isinstance(given, torch.Tensor) else repr(given)
                raise ValueError(f"{name}: state {key} is {got}, expected {own.dtype} {list(own.shape)}")
        numbers = [_read_numbers(name, state, index, group) for index, group in enumerate(self.param_groups)]
        for key, own in tensors.items():
            own.copy_(state[key])
        for group, read in zip(self.param_groups, numbers, strict=True):
            group.update(read)
        self._synchronize()

    def _tensors(self) -> dict[str, torch.Tensor]:
        found = {"steps": self._update.steps, "skipped": self._update.skipped}
        if self._update.scale is not None:
            found["loss_scale"] = self._update.scale
        for name, states in self._update.states.items():
            found.update({f"{name}.{index}": state for index, state in enumerate(states)})
        found.update({f"master.{i}": master for i, master in enumerate(self._update.masters) if master is not None})
        return found


def read_groups(name: str, params: Params) -> list[dict[str, Any]]:
    """The parameter groups of an optimiser's argument, each with its list of parameters."""
    if isinstance(params, Tensor):
        raise TypeError(f"{name}: params is a Tensor, expected a list of them")
    given = list(params)
    if not any(isinstance(item, Mapping) for item in given):
        return [{"params": given}]
    for item in given:
        if not isinstance(item, Mapping) or "params" not in item:
            raise TypeError(f"{name}: got groups and a {type(item).__name__}, expected dicts with a key 'params' only")
    return [
        {**item, "params": [item["params"]] if isinstance(item["params"], Tensor) else list(item["params"])}
        for item in given
        if isinstance(item, Mapping)
    ]


def _check_params(name: str, params: Sequence[Any]) -> None:
    if not params:
        raise ValueError(f"{name}: there are no parameters; give it model.parameters(), or a list of Tensors")
    seen: dict[int, int] = {}
    for index, param in enumerate(params):
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
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and holds(value)):
        raise ValueError(f"{name}: {key} is {value!r}, expected a number {text}")


def _flat(name: str, group: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a group, betas as beta1 and beta2. Raises ValueError for one out of its range."""
    found: dict[str, float] = {}
    for key, value in group.items():
        if key == "betas":
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ValueError(f"{name}: betas is {value!r}, expected two numbers")
            found["beta1"], found["beta2"] = value
        elif key != "params":
            found[key] = value
    for key, value in found.items():
        check_number(name, key, value)
    return {key: float(value) for key, value in found.items()}


def _read_numbers(name: str, state: Mapping[str, Any], index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as a state has them."""
    flat = {key: state[f"group.{index}.{key}"] for key in _flat(name, group)}
    read: dict[str, Any] = {key: value for key, value in flat.items() if key not in ("beta1", "beta2")}
    if "betas" in group:
        read["betas"] = (flat["beta1"], flat["beta2"])
    _flat(name, read)
    return read
