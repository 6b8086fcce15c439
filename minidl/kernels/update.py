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
    measure    sums of squares of every block of the gradients, in float64: squares of float32 cannot overflow there
    prepare    one program adds them in order, finds the norm, the clip scale min(1, max_norm / (norm + 1e-6)) and
               whether all is finite, counts the step of every parameter that has a gradient, and corrects the rates
    update     changes parameters and moments; where a gradient is not finite it changes nothing at all
Gradients of a scaled loss (float16 would lose the small ones) are divided by the scale, which `prepare` then adapts:
half of it where a gradient is not finite, twice as much after GROWTH_INTERVAL finite steps in a row (Micikevicius et
al., arXiv 1710.03740).
Nothing is read back by the host, so a CUDA graph can hold a step. Learning rates and all other numbers of a parameter
are a row of `hyper` on the device.

The kernels find their memory through a table of addresses, one row of COLUMNS int64 per parameter, and a list of
blocks. A block is BLOCK_R rows (BLOCK_R_SMALL in a small parameter) by BLOCK_C columns; memory without rows is cut
into rows of BLOCK_C. Where the gradient has few rows of a matrix, `position` tells for each row of the matrix where it
stands in the gradient. It is written by `measure` and never cleared: an entry holds only if `rows` names that row there
(Briggs and Torczon, ACM LOPLAS 2, 1993). Rows without a gradient get g = 0, as torch's dense update does; with `lazy`
only the rows seen change, moments included. A negative entry of `rows` is padding and is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from minidl.kernels import check, launch

SGD = tl.constexpr(0)
RMSPROP = tl.constexpr(1)
ADAGRAD = tl.constexpr(2)
ADAM = tl.constexpr(3)
ADAMW = tl.constexpr(4)
RULES = {"sgd": SGD, "rmsprop": RMSPROP, "adagrad": ADAGRAD, "adam": ADAM, "adamw": ADAMW}

# Columns of the table of addresses.
COLUMNS = tl.constexpr(16)
PARAM = tl.constexpr(0)
MASTER = tl.constexpr(1)
STATE_0 = tl.constexpr(2)
STATE_1 = tl.constexpr(3)
STATE_2 = tl.constexpr(4)
NUMEL = tl.constexpr(5)
WIDTH = tl.constexpr(6)  # columns of a matrix whose gradient is rows, else 0
GRAD = tl.constexpr(7)
GRAD_NUMEL = tl.constexpr(8)
ROWS = tl.constexpr(9)
SEEN = tl.constexpr(10)  # number of rows in the gradient
POSITION = tl.constexpr(11)
USED = tl.constexpr(12)  # 0: no gradient in this step

# In a list of blocks, parameter << 32 | block; LARGE marks a block of BLOCK_R rows in memory that allows vectors.
LARGE = tl.constexpr(2**31)

# Columns of the numbers of a parameter, float64.
NUMBERS = tl.constexpr(8)
LR = tl.constexpr(0)
WEIGHT_DECAY = tl.constexpr(1)
MOMENTUM = tl.constexpr(2)
ALPHA = tl.constexpr(3)
BETA1 = tl.constexpr(4)
BETA2 = tl.constexpr(5)
EPS = tl.constexpr(6)
LR_DECAY = tl.constexpr(7)
HYPER = {
    "lr": LR, "weight_decay": WEIGHT_DECAY, "momentum": MOMENTUM, "alpha": ALPHA, "beta1": BETA1, "beta2": BETA2,
    "eps": EPS, "lr_decay": LR_DECAY,
}  # fmt: skip

# The scale of the loss and the finite steps since it changed, float32.
LOSS_SCALE = tl.constexpr(0)
GOOD_STEPS = tl.constexpr(1)
GROWTH_INTERVAL = tl.constexpr(2000)
MOST_SCALE = tl.constexpr(2.0**24)

# How gradients of few rows are used.
NO_ROWS = tl.constexpr(0)
DENSE_MOMENTS = tl.constexpr(1)
LAZY = tl.constexpr(2)

NORM = tl.constexpr(0)
SCALE = tl.constexpr(1)
FINITE = tl.constexpr(2)

# The extent of memory without rows, for the tile table.
WIDE = 2**31


@triton.jit
def place(p_slot, i_block, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """Rows [BLOCK_R, 1] and columns [1, BLOCK_C] of a block, and the number of columns."""
    width = tl.load(p_slot + WIDTH)
    width = tl.multiple_of(tl.where(width == 0, BLOCK_C, width), BLOCK_V)
    across = (width + BLOCK_C - 1) // BLOCK_C
    o_r = (i_block // across) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_c = (i_block % across) * BLOCK_C + tl.arange(0, BLOCK_C)
    return o_r[:, None], o_c[None, :], width


@triton.jit
def pointer(p_slot, COLUMN: tl.constexpr, like: tl.constexpr, BLOCK_V: tl.constexpr):
    """The address in a column of the table, as a pointer to values of type `like`."""
    BYTES: tl.constexpr = 16 if BLOCK_V > 1 else 1
    return tl.multiple_of(tl.load(p_slot + COLUMN).to(tl.pointer_type(like)), BYTES)


@triton.jit
def sum_of_squares(
    p_slot, i_block, DTYPE: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    o_r, o_c, width = place(p_slot, i_block, BLOCK_V, BLOCK_R, BLOCK_C)
    o = o_r * width + o_c
    m = (o < tl.multiple_of(tl.load(p_slot + GRAD_NUMEL), BLOCK_V)) & (o_c < width)
    b_g = tl.load(pointer(p_slot, GRAD, DTYPE, BLOCK_V) + o, mask=m, other=0.0)  # [BLOCK_R, BLOCK_C]
    if b_g.dtype.primitive_bitwidth < 32:
        b_g = b_g.to(tl.float32)
    b_g = b_g.to(tl.float64)
    if HAS_ROWS == DENSE_MOMENTS:
        # Blocks side by side write the same positions.
        m_r = o_r < tl.load(p_slot + SEEN)
        b_row = tl.load(pointer(p_slot, ROWS, tl.int32, 1) + o_r, mask=m_r, other=-1)  # [BLOCK_R, 1]
        tl.store(pointer(p_slot, POSITION, tl.int32, 1) + b_row, o_r.to(tl.int32), mask=m_r & (b_row >= 0))
    return tl.sum(b_g * b_g)


@triton.jit
def measure_kernel(
    p_like, p_table, p_blocks, p_partial, HAS_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_R_SMALL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_like.dtype.element_ty
    packed = tl.load(p_blocks + tl.program_id(0))
    p_slot = p_table + (packed >> 32) * COLUMNS
    i_block = packed & (LARGE - 1)
    if (packed & LARGE) != 0:
        total = sum_of_squares(p_slot, i_block, DTYPE, HAS_ROWS, BLOCK_V, BLOCK_R, BLOCK_C)
    else:
        total = sum_of_squares(p_slot, i_block, DTYPE, HAS_ROWS, 1, BLOCK_R_SMALL, BLOCK_C)
    tl.store(p_partial + tl.program_id(0), total)


# The number of blocks changes from step to step: kernels are not compiled again for multiples of 16 of it.
@triton.jit(do_not_specialize=["partials"])
def prepare_kernel(
    p_partial, partials, p_table, p_hyper, p_steps, p_rates, p_control, p_skipped, p_scale, count,
    RULE: tl.constexpr, MAX_NORM: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    b_total = tl.zeros((BLOCK,), dtype=tl.float64)
    for i in range(0, partials, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_total += tl.load(p_partial + o, mask=o < partials, other=0.0)  # [BLOCK]
    norm = tl.sqrt(tl.sum(b_total))
    # An integer: the interpreter makes floats of a truth value that it spreads over a block.
    finite = tl.where(norm < float("inf"), 1, 0)
    if HAS_SCALE:
        loss_scale = tl.load(p_scale + LOSS_SCALE)
        good = tl.load(p_scale + GOOD_STEPS) + 1.0
        rest = good < GROWTH_INTERVAL
        grown = tl.where(rest, loss_scale, tl.minimum(2.0 * loss_scale, MOST_SCALE))
        tl.store(p_scale + LOSS_SCALE, tl.where(finite != 0, grown, tl.maximum(0.5 * loss_scale, 1.0)))
        tl.store(p_scale + GOOD_STEPS, tl.where((finite != 0) & rest, good, 0.0))
        unscale = 1.0 / loss_scale.to(tl.float64)
        norm *= unscale
    tl.store(p_control + NORM, norm)
    scale = 1.0
    if MAX_NORM is not None:
        scale = tl.minimum(MAX_NORM / (norm + 1e-6), 1.0)
    if HAS_SCALE:
        scale *= unscale
    tl.store(p_control + SCALE, scale)
    tl.store(p_control + FINITE, finite.to(tl.float64))
    tl.store(p_skipped, tl.load(p_skipped) + 1 - finite)
    for i in range(0, count, BLOCK_P):
        o_p = i + tl.arange(0, BLOCK_P)
        m_p = o_p < count
        b_used = tl.load(p_table + o_p * COLUMNS + USED, mask=m_p, other=0) != 0  # [BLOCK_P]
        b_step = tl.load(p_steps + o_p, mask=m_p, other=0) + tl.where(b_used, finite, 0)
        tl.store(p_steps + o_p, b_step, mask=m_p)
        b_t = b_step.to(tl.float64)
        p_numbers = p_hyper + o_p * NUMBERS
        b_rate = tl.load(p_numbers + LR, mask=m_p, other=0.0)
        if RULE == ADAGRAD:
            b_rate /= 1.0 + (b_t - 1.0) * tl.load(p_numbers + LR_DECAY, mask=m_p, other=0.0)
        if RULE >= ADAM:  # and AdamW
            b_rate /= 1.0 - tl.exp(b_t * tl.log(tl.load(p_numbers + BETA1, mask=m_p, other=0.5)))
            b_correction = tl.sqrt(1.0 - tl.exp(b_t * tl.log(tl.load(p_numbers + BETA2, mask=m_p, other=0.5))))
            tl.store(p_rates + 2 * o_p + 1, b_correction, mask=m_p)
        tl.store(p_rates + 2 * o_p, b_rate, mask=m_p)


@triton.jit
def update_block(
    p_slot, i_block, p_numbers, p_rate, p_control,
    RULE: tl.constexpr, DECAY: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    CENTERED: tl.constexpr, HAS_MASTER: tl.constexpr, HAS_ROWS: tl.constexpr,
    DTYPE: tl.constexpr, ACC: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    o_r, o_c, width = place(p_slot, i_block, BLOCK_V, BLOCK_R, BLOCK_C)
    # Nothing is touched where the gradient is not finite: then no element lies before the end.
    end = tl.multiple_of(tl.where(tl.load(p_control + FINITE) != 0.0, tl.load(p_slot + NUMEL), 0), BLOCK_V)
    o_g = o_r
    m_r = o_r >= 0
    m_g = m_r
    if HAS_ROWS != NO_ROWS:
        p_rows = pointer(p_slot, ROWS, tl.int32, 1)
        seen = tl.load(p_slot + SEEN)
        in_rows = tl.load(p_slot + WIDTH) != 0
        if HAS_ROWS == LAZY:
            b_row = tl.load(p_rows + o_r, mask=o_r < seen, other=-1).to(tl.int64)  # [BLOCK_R, 1]
            o_r = tl.where(in_rows, b_row, o_r)
            m_r = o_r >= 0
            m_g = m_r
        else:
            m_p = o_r * width < tl.where(in_rows, end, 0)
            b_at = tl.load(pointer(p_slot, POSITION, tl.int32, 1) + o_r, mask=m_p, other=0).to(tl.int64)
            b_row = tl.load(p_rows + b_at, mask=m_p & (b_at < seen), other=-1)
            m_g = tl.where(in_rows, b_row, o_r) == o_r
            o_g = tl.where(in_rows, b_at, o_r)
    o = o_r * width + o_c
    m = (o < end) & (o_c < width) & m_r
    p_p = pointer(p_slot, PARAM, DTYPE, BLOCK_V) + o
    p_w = p_p
    if HAS_MASTER:
        p_w = pointer(p_slot, MASTER, ACC, BLOCK_V) + o
    lr = tl.load(p_numbers + LR)
    rate = tl.load(p_rate).to(ACC)
    weight_decay = tl.load(p_numbers + WEIGHT_DECAY)
    b_p = tl.load(p_w, mask=m, other=0.0)  # [BLOCK_R, BLOCK_C]
    if HAS_MASTER:
        # A parameter that was set from outside since is no longer its master, rounded.
        b_now = tl.load(p_p, mask=m, other=0.0).to(ACC)
        b_p = tl.where(b_p.to(DTYPE).to(ACC) == b_now, b_p, b_now)
    b_g = tl.load(pointer(p_slot, GRAD, DTYPE, BLOCK_V) + (o_g * width + o_c), mask=m & m_g, other=0.0).to(ACC)
    b_g *= tl.load(p_control + SCALE).to(ACC)
    if DECAY:
        if RULE == ADAMW:
            b_p *= (1.0 - lr * weight_decay).to(ACC)
        else:
            # A group without decay has infinite weights too, of which 0 times as much would be NaN.
            b_g += weight_decay.to(ACC) * tl.where(weight_decay != 0.0, b_p, 0.0)
    eps = tl.load(p_numbers + EPS).to(ACC)
    if RULE == SGD:
        if HAS_MOMENTUM:
            momentum = tl.load(p_numbers + MOMENTUM).to(ACC)
            p_b = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
            b_b = momentum * tl.load(p_b, mask=m, other=0.0) + b_g
            tl.store(p_b, b_b, mask=m)
            if NESTEROV:
                b_g += momentum * b_b
            else:
                b_g = b_b
        b_p -= rate * b_g
    elif RULE == RMSPROP:
        alpha = tl.load(p_numbers + ALPHA)
        p_s = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_s = alpha.to(ACC) * tl.load(p_s, mask=m, other=0.0) + (1.0 - alpha).to(ACC) * (b_g * b_g)
        tl.store(p_s, b_s, mask=m)
        if CENTERED:
            p_a = pointer(p_slot, STATE_2, ACC, BLOCK_V) + o
            b_a = tl.load(p_a, mask=m, other=0.0)
            b_a += (1.0 - alpha).to(ACC) * (b_g - b_a)
            tl.store(p_a, b_a, mask=m)
            # The variance is not negative; its rounding may be.
            b_s = tl.maximum(b_s - b_a * b_a, 0.0)
        b_d = b_g / (tl.sqrt(b_s) + eps)
        if HAS_MOMENTUM:
            p_b = pointer(p_slot, STATE_1, ACC, BLOCK_V) + o
            b_d += tl.load(p_numbers + MOMENTUM).to(ACC) * tl.load(p_b, mask=m, other=0.0)
            tl.store(p_b, b_d, mask=m)
        b_p -= rate * b_d
    elif RULE == ADAGRAD:
        p_s = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_s = tl.load(p_s, mask=m, other=0.0) + b_g * b_g
        tl.store(p_s, b_s, mask=m)
        b_p -= rate * (b_g / (tl.sqrt(b_s) + eps))
    else:
        beta1 = tl.load(p_numbers + BETA1)
        beta2 = tl.load(p_numbers + BETA2)
        p_m = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_m = tl.load(p_m, mask=m, other=0.0)
        # From the nearer end: m + (g - m) would keep m's rounding error.
        b_d = b_g - b_m
        b_m = tl.where(beta1 > 0.5, b_m + (1.0 - beta1).to(ACC) * b_d, b_g - beta1.to(ACC) * b_d)
        tl.store(p_m, b_m, mask=m)
        p_v = pointer(p_slot, STATE_1, ACC, BLOCK_V) + o
        b_v = beta2.to(ACC) * tl.load(p_v, mask=m, other=0.0) + (1.0 - beta2).to(ACC) * (b_g * b_g)
        tl.store(p_v, b_v, mask=m)
        b_p -= rate * (b_m / (tl.sqrt(b_v) / tl.load(p_rate + 1).to(ACC) + eps))
    tl.store(p_w, b_p, mask=m)
    if HAS_MASTER:
        tl.store(p_p, b_p.to(DTYPE), mask=m)


@triton.jit
def update_kernel(
    p_like, p_table, p_blocks, p_hyper, p_rates, p_control,
    RULE: tl.constexpr, DECAY: tl.constexpr, HAS_MOMENTUM: tl.constexpr, NESTEROV: tl.constexpr,
    CENTERED: tl.constexpr, HAS_MASTER: tl.constexpr, HAS_ROWS: tl.constexpr, ACC: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_R_SMALL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = p_like.dtype.element_ty
    packed = tl.load(p_blocks + tl.program_id(0))
    i_param = packed >> 32
    i_block = packed & (LARGE - 1)
    p_slot = p_table + i_param * COLUMNS
    p_numbers = p_hyper + i_param * NUMBERS
    p_rate = p_rates + i_param * 2
    # A parameter that is small, or not made of whole vectors of 16 bytes, goes element by element.
    if (packed & LARGE) != 0:
        update_block(
            p_slot, i_block, p_numbers, p_rate, p_control, RULE, DECAY, HAS_MOMENTUM, NESTEROV, CENTERED,
            HAS_MASTER, HAS_ROWS, DTYPE, ACC, BLOCK_V, BLOCK_R, BLOCK_C,
        )  # fmt: skip
    else:
        update_block(
            p_slot, i_block, p_numbers, p_rate, p_control, RULE, DECAY, HAS_MOMENTUM, NESTEROV, CENTERED,
            HAS_MASTER, HAS_ROWS, DTYPE, ACC, 1, BLOCK_R_SMALL, BLOCK_C,
        )  # fmt: skip


STATES = {
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq"),
}


@dataclass(frozen=True)
class Rows:
    """The gradient of a matrix by rows: `values` [U, C] belong to the distinct `rows` int32 [U].

    A negative row is padding: its values must be 0, since the norm counts them.
    """

    rows: torch.Tensor
    values: torch.Tensor


class Update:
    """The state of an optimiser on the device, and its launches.

    `params` are floating tensors on one device, contiguous or in torch.channels_last, updated in place; they may be
    views. States and, for float16 and bfloat16, `masters` are float32 (float64 for float64), one per parameter and in
    its strides. `hyper` float64
    [parameters, NUMBERS], `steps` int64 [parameters], `skipped` int64 [1]: how many steps met a gradient that was not
    finite, `control` float64 [3]: norm of the last gradient, what it is multiplied by, whether it was finite. With a
    `loss_scale`, gradients are those of the loss times `scale[0]`; `scale` is float32 [2], see LOSS_SCALE.

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
        self._positions: dict[int, torch.Tensor] = {}
        self._table = _DeviceList(self.device)
        self._made_for: Any = None
        self._made: tuple[list[_Plan], torch.Tensor] = ([], self.steps)

    def set(self, name: str, value: float, first: int, end: int) -> None:
        """Give a number (a key of HYPER) to the parameters from `first` to before `end`."""
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
        slots = array("q")
        for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
            slots.extend(self._slot(index, param, grad))
        plans, table = self._plans(slots, params, grads)
        partials = sum(plan.measure.count for plan in plans)
        partial = torch.empty(partials, dtype=torch.float64, device=self.device)
        first = 0
        for plan in plans:
            blocks = plan.measure
            launch.run(
                measure_kernel, (blocks.count,), plan.like, table, table[blocks.start :], partial[first:],
                HAS_ROWS=plan.rows, **blocks.tile.options,
            )  # fmt: skip
            first += blocks.count
        tile = launch.tile("update_prepare", torch.float64, P=len(params))
        launch.run(
            prepare_kernel, (1,), partial, partials, table, self.hyper, self.steps, self._rates, self.control,
            self.skipped, self.scale, len(params), RULE=RULES[self.rule], MAX_NORM=self.max_norm,
            HAS_SCALE=self.scale is not None, **tile.options,
        )  # fmt: skip
        for plan in plans:
            dtype, blocks = plan.like.dtype, plan.update
            launch.run(
                update_kernel, (blocks.count,), plan.like, table, table[blocks.start :], self.hyper, self._rates,
                self.control, RULE=RULES[self.rule], DECAY=self.decay,
                HAS_MOMENTUM="momentum_buffer" in self.states, NESTEROV=self.nesterov,
                CENTERED="grad_avg" in self.states, HAS_MASTER=dtype != launch.acc_torch(dtype),
                HAS_ROWS=plan.rows, ACC=launch.acc(dtype), **blocks.tile.options,
            )  # fmt: skip

    def _slot(self, index: int, param: torch.Tensor, grad: torch.Tensor | Rows | None) -> list[int]:
        """The parameter's row of the table."""
        master = self.masters[index]
        memory = {PARAM: param, MASTER: param if master is None else master}
        own = STATES[self.rule]
        for name, states in self.states.items():
            memory[(STATE_0, STATE_1, STATE_2)[own.index(name)]] = states[index]
        slot = [0] * COLUMNS.value
        slot[NUMEL.value] = param.numel()
        width = 0
        if isinstance(grad, Rows):
            memory[GRAD] = grad.values
            width = grad.values.shape[1]
            slot[WIDTH.value] = width
            slot[SEEN.value] = len(grad.rows)
            slot[ROWS.value] = grad.rows.data_ptr()
            slot[POSITION.value] = 0 if self.lazy else self._position(index, param).data_ptr()
        elif grad is not None:
            memory[GRAD] = grad
        if grad is not None:
            slot[USED.value] = 1
            slot[GRAD_NUMEL.value] = memory[GRAD].numel()
        for column, tensor in memory.items():
            slot[column.value] = tensor.data_ptr()
        return slot

    def _position(self, index: int, param: torch.Tensor) -> torch.Tensor:
        if index not in self._positions:
            self._positions[index] = torch.zeros(param.shape[0], dtype=torch.int32, device=self.device)
        return self._positions[index]

    def _plans(
        self, slots: array[int], params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
    ) -> tuple[list[_Plan], torch.Tensor]:
        """The launches per dtype, and the table with their lists of blocks, made again only when something moved."""
        capturing = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        tiles = {dtype: _tiles(dtype, params, grads) for dtype in dict.fromkeys(param.dtype for param in params)}
        key = (slots, tiles)
        if not capturing and key == self._made_for:
            self._table.prepare_capture()
            return self._made
        values = array("q", slots)
        plans = []
        for dtype, pair in tiles.items():
            used = [i for i, param in enumerate(params) if param.dtype == dtype and grads[i] is not None]
            if used:
                plans.append(self._plan(used, params, grads, pair, values))
        if capturing:
            return plans, self._table.captured(values)
        self._made_for, self._made = key, (plans, self._table.hold(values))
        self._table.prepare_capture()
        return self._made

    def _plan(
        self,
        used: list[int],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor | Rows | None],
        tiles: tuple[launch.Tile, launch.Tile],
        values: array[int],
    ) -> _Plan:
        """The launches for the parameters `used`; their lists of blocks are added to `values`."""
        by_rows = {i: grad.values for i in used if isinstance(grad := grads[i], Rows)}
        measured = {i: by_rows.get(i, params[i]) for i in used}
        updated = measured if self.lazy else {i: params[i] for i in used}
        lists = []
        for tile, visited in zip(tiles, (measured, updated), strict=True):
            start = len(values)
            for i, tensor in visited.items():
                whole = _whole(values[i * COLUMNS.value : (i + 1) * COLUMNS.value], tile["BLOCK_V"])
                _add_blocks(values, i, tensor.numel(), by_rows[i].shape[1] if i in by_rows else 0, whole, tile)
            lists.append(_Blocks(tile, start, len(values) - start))
            # Lists begin at multiples of 16 bytes: Triton compiles a variant for pointers that do not.
            values.extend([0] * (len(values) % 2))
        rows = (LAZY if self.lazy else DENSE_MOMENTS) if by_rows else NO_ROWS
        return _Plan(params[used[0]], rows, measure=lists[0], update=lists[1])


@dataclass(frozen=True)
class _Blocks:
    """What a launch visits: where its list of blocks begins in the table, and how many there are."""

    tile: launch.Tile
    start: int
    count: int


@dataclass(frozen=True)
class _Plan:
    """The launches for the parameters of one dtype, that of `like`."""

    like: torch.Tensor
    rows: tl.constexpr
    measure: _Blocks
    update: _Blocks


class _DeviceList:
    """int64 numbers made by the host, on the device."""

    GRAPHS = 16

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held = torch.empty(0, dtype=torch.int64, device=device)
        # Memory for CUDA graphs, on the device and pinned on the host, and how much of it is taken.
        self._pool = self._held, self._held
        self._taken = 0
        self._captured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hold(self, values: array[int]) -> torch.Tensor:
        """The numbers; valid until the next call."""
        host = torch.frombuffer(values, dtype=torch.int64)
        if self._device.type == "cpu":
            return host
        count = len(values)
        if self._held.numel() < count:
            self._held = torch.empty(triton.next_power_of_2(count), dtype=torch.int64, device=self._device)
        # Pageable memory is staged before the call returns, so `values` may go.
        self._held[:count].copy_(host, non_blocking=True)
        return self._held

    def prepare_capture(self) -> None:
        """Keep room for the numbers of a CUDA graph: memory cannot be pinned during capture."""
        if self._taken + self._held.numel() > self._pool[0].numel():
            size = self.GRAPHS * self._held.numel()
            pinned = torch.empty(size, dtype=torch.int64, pin_memory=True)
            self._pool = torch.empty(size, dtype=torch.int64, device=self._device), pinned
            self._taken = 0

    def captured(self, values: array[int]) -> torch.Tensor:
        """The numbers for a CUDA graph being captured, which copies them again at every replay: kept for good.

        Raises RuntimeError when there is no room for them.
        """
        count = len(values)
        if self._taken + count > self._pool[0].numel():
            raise RuntimeError(
                "an optimizer step of these shapes cannot be captured in a CUDA graph yet: run one outside the graph"
            )
        held, pinned = (part[self._taken : self._taken + count] for part in self._pool)
        pinned.copy_(torch.frombuffer(values, dtype=torch.int64))
        held.copy_(pinned, non_blocking=True)
        self._captured.append((held, pinned))
        # The next one begins at a multiple of 16 bytes again.
        self._taken += count + count % 2
        return held


def _in_order(
    grad: torch.Tensor | Rows | None, param: torch.Tensor, order: torch.memory_format
) -> torch.Tensor | Rows | None:
    """A gradient whose values follow one another as the parameter's do, copied where they do not."""
    if isinstance(grad, Rows):
        return Rows(grad.rows.contiguous(), grad.values.contiguous())
    if grad is None or check.memory_order(grad) == order:
        return grad
    return torch.empty_like(param, memory_format=order).copy_(grad)


def _tiles(
    dtype: torch.dtype, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | Rows | None]
) -> tuple[launch.Tile, launch.Tile]:
    """Tiles of `measure` and `update`, for the widest gradient by rows; BLOCK_V is how many values make 16 bytes."""
    widths = [g.values.shape[1] for p, g in zip(params, grads, strict=True) if p.dtype == dtype and isinstance(g, Rows)]
    extents = {"C": max(widths, default=WIDE), "V": 16 // dtype.itemsize}
    return launch.tile("update_measure", dtype, **extents), launch.tile("update", dtype, **extents)


def _whole(slot: array[int], vector: int) -> bool:
    """Whether all memory of a parameter is made of whole vectors of that many values."""
    counts = (slot[NUMEL.value], slot[WIDTH.value])
    addresses = (PARAM, MASTER, STATE_0, STATE_1, STATE_2, GRAD)
    return vector == 1 or (
        all(count % vector == 0 for count in counts) and all(slot[column.value] % 16 == 0 for column in addresses)
    )


def _add_blocks(values: array[int], index: int, numel: int, width: int, whole: bool, tile: launch.Tile) -> None:
    """Add the blocks of `numel` values in rows of `width`; large ones where at least half of one is filled."""
    width = width or tile["BLOCK_C"]
    large = whole and 2 * numel >= tile["BLOCK_R"] * tile["BLOCK_C"]
    rows = triton.cdiv(triton.cdiv(numel, width), tile["BLOCK_R" if large else "BLOCK_R_SMALL"])
    first = (index << 32) + large * LARGE.value
    values.extend(range(first, first + rows * triton.cdiv(width, tile["BLOCK_C"])))
