"""Optimiser updates: SGD, RMSprop, Adagrad, Adam and AdamW for all parameters of a model in one launch.

    g is the gradient times the clip scale, plus weight_decay * p (for AdamW p *= 1 - lr weight_decay instead)
    SGD        b = momentum b + g                              p -= lr b         (Nesterov: p -= lr (g + momentum b))
    RMSprop    s = alpha s + (1 - alpha) g^2                   d = g / (sqrt(s) + eps)
               centered: a += (1 - alpha) (g - a), and sqrt(s - a^2) in place of sqrt(s)
               p -= lr d, with momentum b = momentum b + d     p -= lr b
    Adagrad    s += g^2                                        p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
    Adam(W)    m += (1 - beta1) (g - m)    v = beta2 v + (1 - beta2) g^2
               p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

as torch.optim computes them. Duchi et al., JMLR 12 (Adagrad); Hinton, Coursera 2012, lecture 6e (RMSprop); Kingma and
Ba, arXiv 1412.6980 (Adam); Loshchilov and Hutter, arXiv 1711.05101 (AdamW).

A step is three launches (the first and the last once per dtype):
    measure    sums of squares of every block of the gradients, in float64: squares of float32 cannot overflow there;
               meanwhile a program of the first corrects the rates
    prepare    one program adds the sums in order, finds the norm, the clip scale min(1, max_norm / (norm + 1e-6)) and
               whether all is finite, and counts the step of every parameter that has a gradient. (If the last program
               of `measure` did this, both would take 15 us on an H200 in place of 10.5, for one atomic per program.)
    update     changes parameters and moments, or nothing at all if a gradient has an infinity or NaN
Gradients of a scaled loss (float16 would lose the small ones) are divided by the scale, which `prepare` then adapts:
it halves when a gradient overflows and doubles after GROWTH_INTERVAL finite steps in a row (Micikevicius et
al., arXiv 1710.03740).
Nothing is read back by the host, so a CUDA graph can hold a step. Learning rates and all other numbers of a parameter
are a row of `hyper` on the device. `kernels` has the kernels, `plans` the lists of memory and blocks that they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from minidl.kernels.update.kernels import (
    GROWTH_INTERVAL,
    HYPER,
    LOSS_SCALE,
    NORM,
    NUMBERS,
    RULES,
    STATE_0,
    STATE_1,
    STATE_2,
    measure_kernel,
    prepare_kernel,
    update_kernel,
)
from minidl.kernels.update.plans import Plans, Rows
from minidl.runtime import check, early, launch

__all__ = ["GROWTH_INTERVAL", "HYPER", "LOSS_SCALE", "NORM", "RULES", "STATES", "Rows", "Update"]

# What a rule keeps beside a parameter, in the order of the columns of the table.
STATES = {
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}


class Update:
    """The state of an optimiser on the device, and its launches.

    `params` are floating tensors on one device, contiguous or in torch.channels_last, updated in place; they may be
    views. States and, for float16 and bfloat16, `masters` are float32 (float64 for float64), one per parameter and in
    its strides. `hyper` float64 [parameters, NUMBERS], `steps` int64 [parameters], `skipped` int64 [1]: the number of
    steps skipped for an infinite or NaN gradient, `control` float64 [3]: norm, scale and finiteness of the last
    gradient. With a `loss_scale`, gradients are those of the loss times `scale[0]`; `scale` is float32 [2], see
    LOSS_SCALE.

    `states` names those to keep out of STATES[rule]; `initial` fills them. Raises ValueError for a parameter of other
    strides or parameters on two devices, TypeError for one that is not floating.
    """

    def __init__(
        self,
        rule: str,
        params: Sequence[torch.Tensor],
        states: Sequence[str],
        *,
        nesterov: bool = False,
        max_norm: float | None = None,
        lazy: bool = False,
        initial: float = 0.0,
        loss_scale: float | None = None,
    ) -> None:
        self._orders: list[torch.memory_format] = []
        for index, param in enumerate(params):
            check.floating(f"parameter {index}", data=param)
            if param.device != params[0].device:
                raise ValueError(
                    f"parameter {index} is on {param.device} and parameter 0 on {params[0].device}: "
                    "an optimizer updates parameters of one device"
                )
            order = check.memory_order(param)
            if order is None:
                raise ValueError(
                    f"parameter {index} of shape {list(param.shape)} has strides {param.stride()}: make it contiguous"
                )
            self._orders.append(order)
        self.rule, self.nesterov, self.max_norm, self.lazy = rule, nesterov, max_norm, lazy
        self.device = params[0].device
        self.shapes = [(param.shape, param.dtype) for param in params]
        self.states = {
            name: [
                torch.full_like(param, initial, dtype=launch.acc_torch(param.dtype), memory_format=order)
                for param, order in zip(params, self._orders, strict=True)
            ]
            for name in states
        }
        self.masters = [
            None
            if param.dtype == launch.acc_torch(param.dtype)
            else param.to(launch.acc_torch(param.dtype), copy=True, memory_format=order)
            for param, order in zip(params, self._orders, strict=True)
        ]
        count = len(params)
        self.hyper = torch.zeros(count, NUMBERS.value, dtype=torch.float64, device=self.device)
        self.steps = torch.zeros(count, dtype=torch.int64, device=self.device)
        self.skipped = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.control = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.scale: torch.Tensor | None = None
        if loss_scale is not None:
            self.scale = torch.zeros(2, dtype=torch.float32, device=self.device)
            self.scale[LOSS_SCALE.value].fill_(loss_scale)
        self.decay = False
        self._rates = torch.zeros(count, 2, dtype=torch.float64, device=self.device)
        columns = dict(zip(STATES[rule], (STATE_0, STATE_1, STATE_2), strict=False))
        own = {columns[name]: tensors for name, tensors in self.states.items()}
        self._plans = Plans(own, self.masters, self.device, lazy)

    def set(self, name: str, value: float, first: int, end: int) -> None:
        """Set a number (a key of HYPER) for the parameters from `first` up to `end`, exclusive."""
        self.hyper[first:end, HYPER[name].value].fill_(value)

    def __call__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]) -> None:
        """Update `params`, the tensors this was made for, with gradients of their shapes and dtypes.

        A parameter without a gradient (None) is left alone. Raises RuntimeError for a parameter that has changed its
        shape, strides, dtype or device since.
        """
        for index, (param, made_for) in enumerate(zip(params, self.shapes, strict=True)):
            same = (param.shape, param.dtype) == made_for and param.device == self.device
            if not same or check.memory_order(param) != self._orders[index]:
                raise RuntimeError(
                    f"parameter {index} was {made_for[1]} {list(made_for[0])} on {self.device} when the optimizer was "
                    f"made and is {param.dtype} {list(param.shape)} on {param.device}, "
                    f"with strides {param.stride()}, now: "
                    "make the optimizer after moving or converting the model"
                )
        grads = [_in_order(grad, param, order) for grad, param, order in zip(grads, params, self._orders, strict=True)]
        if all(grad is None for grad in grads):
            return
        plans, table = self._plans(params, grads)
        partials = sum(plan.measure.count for plan in plans)
        partial = torch.empty(partials, dtype=torch.float64, device=self.device)
        tile = launch.tile("update_prepare", torch.float64, P=len(params))
        first = 0
        for plan in plans:
            blocks, rates = plan.measure, plan is plans[0]
            launch.run(
                measure_kernel, (blocks.count + rates,), plan.like, table, table[blocks.start :], partial[first:],
                self.hyper, self.steps, self._rates, len(params), RULE=RULES[self.rule], HAS_ROWS=plan.rows,
                FIRST=rates, BLOCK_P=tile["BLOCK_P"], **early.options(), **blocks.tile.options,
            )  # fmt: skip
            first += blocks.count
        launch.run(
            prepare_kernel, (1,), partial, partials, table, self.steps, self.control, self.skipped, self.scale,
            len(params), MAX_NORM=self.max_norm, HAS_SCALE=self.scale is not None, **early.options(), **tile.options,
        )  # fmt: skip
        for plan in plans:
            dtype, blocks = plan.like.dtype, plan.update
            launch.run(
                update_kernel, (blocks.count,), plan.like, table, table[blocks.start :], self.hyper, self._rates,
                self.control, RULE=RULES[self.rule], DECAY=self.decay,
                HAS_MOMENTUM="momentum_buffer" in self.states, NESTEROV=self.nesterov,
                CENTERED="grad_avg" in self.states, HAS_MASTER=dtype != launch.acc_torch(dtype),
                HAS_ROWS=plan.rows, ACC=launch.acc(dtype), **early.options(), **blocks.tile.options,
            )  # fmt: skip
        launch.pointed_at(lambda: self._memory(params, grads))

    def _memory(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
    ) -> Iterator[torch.Tensor]:
        """All memory that an update reads or writes by addresses in its table."""
        yield from params
        for grad in grads:
            if grad is not None:
                yield from (grad.rows, grad.values) if isinstance(grad, Rows) else (grad,)
        for tensors in (self.masters, *self.states.values()):
            yield from (tensor for tensor in tensors if tensor is not None)


def _in_order(
    grad: torch.Tensor | Rows | None, param: torch.Tensor, order: torch.memory_format
) -> torch.Tensor | Rows | None:
    """The gradient in the parameter's memory order, copied if necessary."""
    if isinstance(grad, Rows):
        return Rows(grad.rows.contiguous(), grad.values.contiguous())
    if grad is None or check.memory_order(grad) == order:
        return grad
    return torch.empty_like(param, memory_format=order).copy_(grad)
