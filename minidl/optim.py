"""Optimisers and learning rate schedules, with torch's names and formulas; the arithmetic is in `kernels/update/`.

    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, max_norm=1.0)
    schedule = optim.CosineLR(optimizer, T_max=1000, warmup=100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

Beyond torch: clipping (`max_norm`) and the guard against gradients that are not finite belong to the update itself, and
gradients that touch few rows of a matrix are used as they are. The result equals that of the dense gradient; with
`lazy=True` only the rows seen change, their moments included, as in torch.optim.SparseAdam.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from minidl.kernels import update
from minidl.rows import RowGrad
from minidl.tensor import Tensor

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
    """What all optimisers share. Make one of its subclasses.

    `params` are leaf Tensors, or groups as in torch: dicts with "params" and any numbers of their own.
    `param_groups` are those groups with every number filled in; numbers changed there count from the next step on.
    Learning rate, number of steps and all other numbers live on the device, so a CUDA graph can hold a step.

    max_norm    clip the gradients of a step so that their joint 2-norm is at most this
    lazy        a gradient of few rows changes only those rows and their moments (weight decay included)
    loss_scale  gradients are those of the loss times `self.loss_scale`, a number on the device that starts with this
                value: call loss.backward(optimizer.loss_scale). It is halved where a gradient is not finite, and
                doubled after 2,000 finite steps. For float16, which cannot hold small gradients

    Where any gradient is not finite a step changes nothing but `skipped`. float16 and bfloat16 parameters have float32
    masters among the state. Raises ValueError for no parameters, one given twice, one that an operation made or one
    that is neither contiguous nor in torch.channels_last, and for a number out of its range; TypeError for parameters
    that are not floating Tensors.
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
        for group in _groups(name, params):
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
            _check_number(name, "max_norm", max_norm)
        if loss_scale is not None:
            _check_number(name, "loss_scale", loss_scale)
        self._update = update.Update(
            self._rule, [p.data for p in self._params], states,
            nesterov=nesterov, max_norm=max_norm, lazy=lazy, initial=initial, loss_scale=loss_scale,
        )  # fmt: skip
        self.max_norm, self.lazy = max_norm, lazy
        self._on_device: list[dict[str, float]] = [{} for _ in self.param_groups]
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
        _check_number(type(self).__name__, "lr", value)
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
                    f"{type(self).__name__}: momentum was 0 when the optimizer was made, so it keeps no velocities; "
                    "give a momentum there, and set it to 0 until it is wanted"
                )
            for key, value in numbers.items():
                if known.get(key) != value:
                    self._update.set(key, value, first, end)
                    known[key] = value
        self._update.decay = any(group.get("weight_decay", 0.0) != 0.0 for group in self.param_groups)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises RuntimeError when a parameter was moved or converted after the optimiser was made.
        """
        self._synchronize()
        grads = [
            update.Rows(grad.rows, grad.values) if isinstance(grad, RowGrad) else grad
            for grad in (param.raw_grad for param in self._params)
        ]
        self._update([param.data for param in self._params], grads)
        changed = [param.data for param, grad in zip(self._params, grads, strict=True) if grad is not None]
        torch.autograd.graph.increment_version(changed)

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
        """What the loss of the next step is multiplied by, float32 of shape [] on the device; None without scaling."""
        scale = self._update.scale
        return None if scale is None else Tensor(scale[update.LOSS_SCALE.value])

    @property
    def skipped(self) -> int:
        """How many steps changed nothing because a gradient was not finite. Waits for the device."""
        return int(self._update.skipped)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on besides parameters and gradients: tensors and numbers under flat names.

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


class SGD(Optimizer):
    """b = momentum b + g, p -= lr b; with Nesterov's momentum p -= lr (g + momentum b). Sutskever et al., ICML 2013.

    `weight_decay` adds weight_decay p to the gradient. As torch.optim.SGD with dampening 0.
    """

    _rule = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        groups = _groups("SGD", params)
        momenta = [group.get("momentum", momentum) for group in groups]
        if nesterov and any(value == 0.0 for value in momenta):
            raise ValueError("SGD: nesterov needs a momentum above 0, got 0")
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, nesterov=nesterov,
            states=["momentum_buffer"] if any(value != 0.0 for value in momenta) else [],
        )  # fmt: skip


class RMSprop(Optimizer):
    """s = alpha s + (1 - alpha) g^2, p -= lr g / (sqrt(s) + eps). Hinton, Coursera 2012, lecture 6e.

    `centered` subtracts the square of a running mean of g from s (Graves, arXiv 1308.0850); `momentum` gathers the
    steps; `weight_decay` adds weight_decay p to the gradient. As torch.optim.RMSprop.
    """

    _rule = "rmsprop"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        groups = _groups("RMSprop", params)
        states = ["square_avg"]
        if any(group.get("momentum", momentum) != 0.0 for group in groups):
            states.append("momentum_buffer")
        if centered:
            states.append("grad_avg")
        super().__init__(
            groups, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=states,
        )  # fmt: skip


class Adagrad(Optimizer):
    """s += g^2, p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). Duchi et al., JMLR 12.

    s starts at `initial_accumulator_value`; `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adagrad.
    """

    _rule = "adagrad"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        _check_number("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        super().__init__(
            params, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=["sum"], initial=initial_accumulator_value,
        )  # fmt: skip


class Adam(Optimizer):
    """m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p -= lr m' / (sqrt(v') + eps). arXiv 1412.6980.

    m' and v' are m and v divided by 1 - beta^t; `weight_decay` adds weight_decay p to the gradient. As
    torch.optim.Adam.
    """

    _rule = "adam"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=["exp_avg", "exp_avg_sq"],
        )  # fmt: skip


class AdamW(Adam):
    """Adam with weight decay apart from the gradient: first p *= 1 - lr weight_decay. arXiv 1711.05101.

    As torch.optim.AdamW.
    """

    _rule = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, max_norm=max_norm, lazy=lazy, loss_scale=loss_scale)


class Schedule:
    """A learning rate as a function of the number of steps made: every group's own rate times `factor(step)`.

    Making one sets the rate of step 0. Call `step()` once after each optimizer step. During the first `warmup` steps
    the rate rises in a straight line, ending at the full rate with step warmup - 1.
    """

    def __init__(self, optimizer: Optimizer, warmup: int = 0) -> None:
        name = type(self).__name__
        if warmup < 0:
            raise ValueError(f"{name}: warmup is {warmup}, expected a number of steps of at least 0")
        self.optimizer, self.warmup = optimizer, warmup
        self.base_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        self._step = 0
        self._apply()

    def factor(self, step: int) -> float:
        """The share of the full rate at a step, warm-up aside."""
        raise NotImplementedError

    def lr(self, step: int | None = None) -> float:
        """The rate of the first group at a step (default: now)."""
        return self._rates(self._step if step is None else step)[0]

    def get_last_lr(self) -> list[float]:
        """The rate of every group now."""
        return self._rates(self._step)

    def step(self) -> None:
        """Count a step and set the optimizer's rates."""
        self._step += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the rates that the schedule scales."""
        return {"schedule": type(self).__name__, "step": self._step, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state_dict` returned. Raises ValueError for another schedule's state."""
        name = type(self).__name__
        if state.get("schedule") != name or len(state.get("base_lrs", ())) != len(self.base_lrs):
            raise ValueError(
                f"{name}: the state is of {state.get('schedule')!r} with {len(state.get('base_lrs', ()))} groups, "
                f"expected {name!r} with {len(self.base_lrs)}"
            )
        self._step, self.base_lrs = int(state["step"]), [float(rate) for rate in state["base_lrs"]]
        self._apply()

    def _rates(self, step: int) -> list[float]:
        share = (step + 1) / self.warmup if step < self.warmup else self.factor(step)
        return [rate * share for rate in self.base_lrs]

    def _apply(self) -> None:
        self.optimizer._set_rates(self._rates(self._step))


class ConstantLR(Schedule):
    """The full rate, after warm-up. (torch's ConstantLR lowers the rate for the first steps: that is `warmup` here.)"""

    def factor(self, step: int) -> float:
        return 1.0


class StepLR(Schedule):
    """The rate times gamma after every `step_size` steps, counted from the end of warm-up. As torch's StepLR."""

    def __init__(self, optimizer: Optimizer, step_size: int, gamma: float = 0.1, warmup: int = 0) -> None:
        if step_size < 1:
            raise ValueError(f"StepLR: step_size is {step_size}, expected a number of steps of at least 1")
        self.step_size, self.gamma = step_size, gamma
        super().__init__(optimizer, warmup)

    def factor(self, step: int) -> float:
        return self.gamma ** ((step - self.warmup) // self.step_size)


class _Falling(Schedule):
    """From the full rate at the end of warm-up to `eta_min` at step T_max, and there from then on."""

    def __init__(self, optimizer: Optimizer, T_max: int, eta_min: float = 0.0, warmup: int = 0) -> None:
        if T_max <= warmup:
            raise ValueError(
                f"{type(self).__name__}: T_max is {T_max}, expected more than the {warmup} steps of warmup"
            )
        if eta_min < 0.0:
            raise ValueError(f"{type(self).__name__}: eta_min is {eta_min}, expected at least 0")
        self.T_max, self.eta_min = T_max, eta_min
        super().__init__(optimizer, warmup)

    def _gone(self, step: int) -> float:
        """The share of the way from the end of warm-up to T_max."""
        return min(1.0, (step - self.warmup) / (self.T_max - self.warmup))

    def _rates(self, step: int) -> list[float]:
        if step < self.warmup:
            return super()._rates(step)
        share = self.factor(step)
        return [self.eta_min + (rate - self.eta_min) * share for rate in self.base_lrs]


class CosineLR(_Falling):
    """Half a cosine from the full rate at the end of warm-up to `eta_min` at step T_max. Loshchilov and Hutter, 2017.

    torch's CosineAnnealingLR, but for warm-up and the end: past T_max it stays at eta_min.
    """

    def factor(self, step: int) -> float:
        return 0.5 * (1.0 + math.cos(math.pi * self._gone(step)))


class LinearLR(_Falling):
    """A straight line from the full rate at the end of warm-up to `eta_min` at step T_max, and there from then on."""

    def factor(self, step: int) -> float:
        return 1.0 - self._gone(step)


def _groups(name: str, params: Params) -> list[dict[str, Any]]:
    """The groups of what an optimiser is given, each with its list of parameters."""
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


def _check_number(name: str, key: str, value: Any) -> None:
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
        _check_number(name, key, value)
    return {key: float(value) for key, value in found.items()}


def _read_numbers(name: str, state: Mapping[str, Any], index: int, group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a group as a state has them."""
    flat = {key: state[f"group.{index}.{key}"] for key in _flat(name, group)}
    read: dict[str, Any] = {key: value for key, value in flat.items() if key not in ("beta1", "beta2")}
    if "betas" in group:
        read["betas"] = (flat["beta1"], flat["beta2"])
    _flat(name, read)
    return read
