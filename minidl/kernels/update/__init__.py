"""Optimiser updates: SGD, RMSprop, Adagrad, Adam and AdamW for all parameters of a model in one launch.

    g is the gradient times the clip scale (-g to maximise), plus weight_decay * p (AdamW: p *= 1 - lr weight_decay)
    SGD        b = momentum b + (1 - dampening) g (at first b = g)
               p -= lr b         (Nesterov: p -= lr (g + momentum b))
    RMSprop    s = alpha s + (1 - alpha) g^2                   d = g / (sqrt(s) + eps)
               centered: a += (1 - alpha) (g - a), and sqrt(s - a^2) replaces sqrt(s)
               p -= lr d, with momentum b = momentum b + d     p -= lr b
    Adagrad    s += g^2                                        p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)
    Adam(W)    m += (1 - beta1) (g - m)    v = beta2 v + (1 - beta2) g^2
               amsgrad: the largest v so far replaces v
               p -= lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Adamax     m as in Adam, u = max(beta2 u, |g| + eps)       p -= lr / (1 - beta1^t) m / u
    RAdam(W)   m and v as in Adam, rho = 2 / (1 - beta2) - 1, r = rho - 2 t beta2^t / (1 - beta2^t)
               p -= lr / (1 - beta1^t) m, for r > 5 times the root of
               (r - 4) (r - 2) rho (1 - beta2^t) / ((rho - 4) (rho - 2) r), over sqrt(v) + eps
    NAdam(W)   m and v as in Adam, mu_t = beta1 (1 - 0.96^(t momentum_decay) / 2), P_t = mu_1 .. mu_t
               p -= lr ((1 - mu_t) / (1 - P_t) g + mu_(t+1) / (1 - P_(t+1)) m) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Muon       b += (1 - momentum) (g - b), d = b (Nesterov: g + momentum (b - g)); d = its Newton-Schulz iterations,
               see `newton`; p -= lr adjust d, after p *= 1 - lr weight_decay

as torch.optim computes them. Duchi et al., JMLR 12 (Adagrad); Hinton, Coursera 2012, lecture 6e (RMSprop); Kingma and
Ba, arXiv 1412.6980 (Adam, Adamax); Loshchilov and Hutter, arXiv 1711.05101 (AdamW); Liu et al., arXiv 1908.03265
(RAdam); Dozat, ICLR workshop 2016 (NAdam).

A step is three launches (the first and the last once per dtype):
    measure    computes the sum of squares of every block of the gradients, in float64, where float32 cannot overflow;
               one extra program computes the corrected learning rates
    prepare    one program adds the sums in order, computes the norm, the clip scale min(1, max_norm / (norm + 1e-6)),
               whether all is finite, and counts the step of every parameter that has a gradient. (In the last program
               of `measure`, this would take one atomic operation per program.)
    update     changes parameters and moments; with `skip`, nothing if a gradient has an infinity or NaN
Gradients of a scaled loss (needed for small gradients in float16) are divided by the scale, which `prepare` adapts:
it halves after an overflow and doubles after GROWTH_INTERVAL finite steps in a row (Micikevicius et al., arXiv
1710.03740).
The host reads nothing back, so a CUDA graph can contain a step. Learning rates and other hyperparameters of a parameter
are a row of `hyper` on the device. `kernels` and `prepare` have the kernels, `plans` the lists that they read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.update import kernels
from minidl.kernels.update.kernels import NORM, NUMBERS, measure_kernel, update_kernel
from minidl.kernels.update.newton import orthogonalise
from minidl.kernels.update.plans import Part, Plan, Plans, Rows
from minidl.kernels.update.prepare import GROWTH_INTERVAL, LOSS_SCALE, prepare_kernel
from minidl.kernels.update.rules import HYPER, RULES, SCRATCH, STATES, Step
from minidl.runtime import dependent_launch, launch

__all__ = ["GROWTH_INTERVAL", "HYPER", "LOSS_SCALE", "NORM", "RULES", "SCRATCH", "STATES", "Part", "Rows", "Update"]


class Update:
    """The state of an optimiser on the device, and its launches.

    `params` are floating tensors on one device, contiguous or channels-last, updated in place; they may be views.
    States and, for float16 and bfloat16, `masters` are float32 (float64 for float64), one per parameter with its
    strides. `hyper` is float64 [parameters, NUMBERS], `steps` int64 [parameters], `skipped` int64 [1] (the number of
    steps skipped for an infinite or NaN gradient), `control` float64 [3] (norm, scale and finiteness of the last
    gradient). With a `loss_scale`, gradients are of the loss times `scale[0]`; `scale` is float32 [2], see LOSS_SCALE.
    After `share_out`, states and masters are parts.

    `states` selects from STATES[rule]; `initial` fills them. Attributes that may change between steps: `decay` (whether
    any weight decays), `nesterov`, `dampened`, `maximize`, `third` (use the third state: centered, amsgrad), `skip`
    (skip a step that is not finite).
    Raises ValueError for a parameter with other strides or for two devices, TypeError unless parameters are floating.
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
        self.rule, self.nesterov, self.max_norm, self.lazy = rule, nesterov, max_norm, lazy
        self.decay = self.dampened = self.maximize = False
        self.skip, self.third = True, not {"grad_avg", "max_exp_avg_sq"}.isdisjoint(states)
        self.device, self.initial = params[0].device, initial
        self.part: Part | None = None
        self.shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._orders: list[torch.memory_format] = []
        self.states: dict[str, list[torch.Tensor]] = {name: [] for name in states}
        self.masters: list[torch.Tensor | None] = []
        self.newton: tuple[tuple[float, float, float], int, float] = ((3.4445, -4.775, 2.0315), 5, 1e-7)
        self._batches: list[torch.Tensor] = []  # Muon: directions by shape
        self.hyper = torch.zeros(0, NUMBERS.value, dtype=torch.float64, device=self.device)
        self.steps = torch.zeros(0, dtype=torch.int64, device=self.device)
        self.skipped = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.control = torch.zeros(3, dtype=torch.float64, device=self.device)
        self.scale: torch.Tensor | None = None
        if loss_scale is not None:
            self.scale = torch.zeros(2, dtype=torch.float32, device=self.device)
            self.scale[LOSS_SCALE.value].fill_(loss_scale)
        self.add(params)

    def add(self, params: Sequence[torch.Tensor]) -> None:
        """Add parameters. CUDA graphs of an earlier step become invalid."""
        first = len(self.shapes)
        orders = [self._order(index, param) for index, param in enumerate(params, first)]
        self._orders.extend(orders)
        self.shapes.extend((param.shape, param.dtype) for param in params)
        for tensors in self.states.values():
            tensors.extend(self._state(param, order) for param, order in zip(params, orders, strict=True))
        if self.rule == "muon":
            self._batch_directions(first, params)
        self.masters.extend(
            None
            if param.dtype == launch.acc_torch(param.dtype)
            else self._part_of(param.to(launch.acc_torch(param.dtype), copy=True, memory_format=order))
            for param, order in zip(params, orders, strict=True)
        )
        self.hyper = torch.cat([self.hyper, self.hyper.new_zeros(len(params), NUMBERS.value)])
        self.steps = torch.cat([self.steps, self.steps.new_zeros(len(params))])
        self._rates = self.hyper.new_zeros(len(self.shapes), kernels.RATES.value)
        self._plan()

    def _batch_directions(self, first: int, params: Sequence[torch.Tensor]) -> None:
        """Allocate the directions of all matrices of a shape in one tensor, for `orthogonalise`."""
        by_shape: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for index, param in enumerate(params, first):
            by_shape.setdefault((param.shape, launch.acc_torch(param.dtype)), []).append(index)
        for (shape, dtype), indices in by_shape.items():
            batch = torch.zeros(len(indices), *shape, dtype=dtype, device=self.device)
            self._batches.append(batch)
            for index, part in zip(indices, batch.unbind(), strict=True):
                self.states[SCRATCH][index] = part

    def keep(self, name: str, params: Sequence[torch.Tensor]) -> None:
        """Add a state of STATES[rule], unless it exists."""
        if name not in self.states:
            self.states[name] = [self._state(*pair) for pair in zip(params, self._orders, strict=True)]
            self._plan()
            if self.rule == "sgd":
                self.steps.zero_()  # step 0 initialises the buffer

    def _order(self, index: int, param: torch.Tensor) -> torch.memory_format:
        check.floating(f"parameter {index}", data=param)
        if param.device != self.device:
            raise ValueError(
                f"parameter {index} is on {param.device} and parameter 0 on {self.device}: "
                "an optimizer updates parameters of one device"
            )
        order = check.memory_order(param)
        if order is None:
            raise ValueError(
                f"parameter {index} of shape {list(param.shape)} has strides {param.stride()}: make it contiguous"
            )
        return order

    def _state(self, param: torch.Tensor, order: torch.memory_format) -> torch.Tensor:
        dtype = launch.acc_torch(param.dtype)
        return self._part_of(torch.full_like(param, self.initial, dtype=dtype, memory_format=order))

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.part is None else self.part.of(tensor).clone()

    def share_out(self, part: Part) -> None:
        """Store and update only a part from now on; gradients stay complete and must not be `Rows`. Not for Muon, whose
        iterations need complete matrices. CUDA graphs of an earlier step become invalid."""
        self.part = part
        self.states = {name: [self._part_of(tensor) for tensor in tensors] for name, tensors in self.states.items()}
        self.masters = [None if master is None else self._part_of(master) for master in self.masters]
        self._plan()

    def whole(self, index: int | None, kept: torch.Tensor) -> torch.Tensor:
        """Return a complete state or master with the parameter's layout, on the CPU if it is shared out.

        Tensors that belong to no parameter (index None) are returned unchanged."""
        if self.part is None or index is None:
            return kept
        shape, order = self.shapes[index][0], self._orders[index]
        return self.part.whole(kept, torch.empty(shape, dtype=kept.dtype, device="meta", memory_format=order))

    def put(self, index: int | None, kept: torch.Tensor, value: torch.Tensor) -> None:
        """Copy a value from `whole` back to the state `kept`."""
        if self.part is not None and index is not None:
            value = self.part.of(value.contiguous(memory_format=self._orders[index]))
        kept.copy_(value)

    def _plan(self) -> None:
        columns = dict(zip(STATES[self.rule], (kernels.STATE_0, kernels.STATE_1, kernels.STATE_2), strict=False))
        by_column = {columns[name]: tensors for name, tensors in self.states.items()}
        self._plans = Plans(by_column, self.masters, self.device, self.lazy, self.part)

    @property
    def kept(self) -> dict[str, list[torch.Tensor]]:
        """The states that the next step depends on (all but SCRATCH)."""
        return {name: tensors for name, tensors in self.states.items() if name != SCRATCH}

    def set(self, name: str, value: float, first: int, end: int) -> None:
        """Set a hyperparameter (a key of HYPER) for the parameters from `first` up to `end`, exclusive."""
        self.hyper[first:end, HYPER[name].value].fill_(value)

    def __call__(self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]) -> None:
        """Update `params`, the tensors from the constructor, with gradients of their shapes and dtypes.

        A parameter without a gradient (None) does not change. Raises RuntimeError for a parameter whose shape, strides,
        dtype or device changed.
        """
        for index, (param, expected) in enumerate(zip(params, self.shapes, strict=True)):
            unchanged = (param.shape, param.dtype) == expected and param.device == self.device
            if not unchanged or check.memory_order(param) != self._orders[index]:
                raise RuntimeError(
                    f"parameter {index} is {param.dtype} {list(param.shape)} on {param.device} with strides "
                    f"{param.stride()}, but was {expected[1]} {list(expected[0])} on {self.device} when the optimizer "
                    "was made: make the optimizer after moving or converting the model"
                )
        grads = [_in_order(grad, param, order) for grad, param, order in zip(grads, params, self._orders, strict=True)]
        if all(grad is None for grad in grads):
            return
        plans, table = self._plans(params, grads)
        partials = sum(plan.measure.count for plan in plans)
        partial = torch.empty(partials, dtype=torch.float64, device=self.device)
        tile = launch.tile("update_prepare", torch.float64, P=len(params))
        first, rule = 0, RULES.get(self.rule, kernels.MUON)
        for plan in plans:
            blocks, rates = plan.measure, plan is plans[0]
            launch.run(
                measure_kernel, (blocks.count + rates,), plan.like, table, table[blocks.start :], partial[first:],
                self.hyper, self.steps, self._rates if rates else None, len(params), RULE=rule,
                HAS_ROWS=plan.rows, BLOCK_P=tile["BLOCK_P"], **dependent_launch.options(), **blocks.tile.options,
            )  # fmt: skip
            first += blocks.count
        launch.run(
            prepare_kernel, (1,), partial, partials, table, self.steps, self.control, self.skipped, self.scale,
            len(params), MAX_NORM=self.max_norm, SKIP=self.skip,
            **dependent_launch.options(), **tile.options,
        )  # fmt: skip
        self._change(plans, table, rule)
        if self.rule == "muon":
            for batch in self._batches:
                orthogonalise(batch, *self.newton)
            self._change(plans, table, kernels.MUON_STEP)
        launch.note_indirect(lambda: self._memory(params, grads))

    def _change(self, plans: Sequence[Plan], table: torch.Tensor, rule: tl.constexpr) -> None:
        for plan in plans:
            dtype, blocks = plan.like.dtype, plan.update
            step = Step(
                rule.value, launch.acc(dtype), plan.rows.value, "momentum_buffer" in self.states, self.decay,
                self.nesterov, self.dampened, self.maximize, self.third,
            )  # fmt: skip
            launch.run(
                update_kernel, (blocks.count,), plan.like, table[blocks.slots :], table[blocks.start :], self.hyper,
                self._rates, self.control, step=step,
                # Same results in both block sizes: in a b + c d either product might be contracted with the sum.
                enable_fp_fusion=False, **dependent_launch.options(), **blocks.tile.options,
            )  # fmt: skip

    def _memory(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
    ) -> Iterator[torch.Tensor]:
        """Yield all memory that an update reads or writes by addresses in its table."""
        yield from params
        for grad in grads:
            if grad is not None:
                yield from (grad.rows, grad.values) if isinstance(grad, Rows) else (grad,)
        everything: list[Sequence[torch.Tensor | None]] = [self.masters, *self.states.values()]
        yield from (tensor for tensors in everything for tensor in tensors if tensor is not None)


def _in_order(
    grad: torch.Tensor | Rows | None, param: torch.Tensor, order: torch.memory_format
) -> torch.Tensor | Rows | None:
    """Return the gradient in the parameter's memory order, copied if necessary."""
    if isinstance(grad, Rows):
        return Rows(grad.rows.contiguous(), grad.values.contiguous())
    if grad is None or check.memory_order(grad) == order:
        return grad
    return torch.empty_like(param, memory_format=order).copy_(grad)
