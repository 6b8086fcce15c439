"""Element-wise losses.

    squared error        (x - t)^2                      absolute error   |x - t|
    smooth L1            d^2 / (2 beta) where d = |x - t| is below beta, else d - beta / 2
    Huber                d^2 / 2 where d is at most delta, else delta (d - delta / 2)
    binary, of x in      -w (t log x + (1 - t) log(1 - x)), logarithms of at least -100
    divergence           t (log t - x), or exp(t) (t - x) of targets that are logarithms

Binary cross-entropy of logits with w and the weight v of positives:

    w ((1 - t) x + (1 + (v - 1) t) log(1 + exp(-x))) = w (|x| h + (1 + (v - 1) t) log1p(exp(-|x|))),
    h = 1 - t for x >= 0, v t for x < 0:      no exponential overflows and no large numbers cancel

One forward and one backward kernel compute all of them, selected by the constant KIND. Each program writes a partial
sum; `loss_total` adds them. Losses of rows are in `cross_entropy`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minidl.kernels import check
from minidl.kernels.activation import log1p
from minidl.kernels.loss_total import check_reduction, write_total
from minidl.runtime import launch
from minidl.runtime.launch_cache.replay import replayed

SQUARED, LOGITS, ABSOLUTE, SMOOTH, HUBER, BINARY, DIVERGENCE, LOG_DIVERGENCE = map(tl.constexpr, range(8))


class Form(NamedTuple):
    """Constants: which loss, beta or delta, and whether the loss of each element is stored, not their sum."""

    KIND: int
    BETA: float
    EACH: bool


@triton.jit
def load_or_one(p, o, m, ACC: tl.constexpr):
    """Load a block of an operand, or ones if it is None."""
    if p is None:
        return tl.full(o.shape, 1.0, ACC)
    else:
        return tl.load(p + o, mask=m, other=0.0).to(ACC)


@triton.jit
def constant_like(NUMBER: tl.constexpr, like):
    """Return a number as a block with the shape and dtype of `like`: comparisons treat Python numbers as float32."""
    return tl.full(like.shape, NUMBER, like.dtype)


@triton.jit
def log_at_least(b_log):
    """Return a logarithm clamped to at least -100; NaN stays NaN."""
    return tl.where(b_log < -100.0, -100.0, b_log)


@triton.jit
def both_logs(b_x):
    """Return log x and log(1 - x), at least -100: by 1 - x if it is exact, else by the series of log1p."""
    b_small = tl.where(b_x > 0.5, 0.5, b_x)
    b_rest = tl.where(b_x > 0.5, tl.log(1.0 - b_x), log1p(b_small * -1.0))
    # A negative x has a logarithm of 1 - x, but is no probability.
    return log_at_least(tl.log(b_x)), log_at_least(tl.where(b_x < 0.0, float("nan"), b_rest))


@triton.jit
def element_loss(b_x, b_t, b_w, b_v, form: tl.constexpr):
    """Return the loss of each element; only binary losses use b_w and b_v."""
    if form.KIND == SQUARED:
        return (b_x - b_t) * (b_x - b_t)
    elif form.KIND == ABSOLUTE:
        return tl.abs(b_x - b_t)
    elif form.KIND == SMOOTH:
        b_d = tl.abs(b_x - b_t)
        return tl.where(b_d < constant_like(form.BETA, b_d), b_d * (b_d / form.BETA) * 0.5, b_d - 0.5 * form.BETA)
    elif form.KIND == HUBER:
        b_d = tl.abs(b_x - b_t)
        return tl.where(b_d <= constant_like(form.BETA, b_d), b_d * b_d * 0.5, (b_d - 0.5 * form.BETA) * form.BETA)
    elif form.KIND == BINARY:
        b_log, b_rest = both_logs(b_x)
        return b_w * ((b_t - 1.0) * b_rest - b_t * b_log)
    elif form.KIND == DIVERGENCE:
        return tl.where(b_t == 0.0, b_t * b_x * -1.0, b_t * (tl.log(b_t) - b_x))
    elif form.KIND == LOG_DIVERGENCE:
        return tl.exp(b_t) * (b_t - b_x)
    else:
        b_h = tl.where(b_x < 0.0, b_v * b_t, 1.0 - b_t)
        b_soft = log1p(tl.exp(-tl.abs(b_x)))
        return b_w * (tl.abs(b_x) * b_h + (1.0 + (b_v - 1.0) * b_t) * b_soft)


@triton.jit
def element_loss_grads(b_x, b_t, b_w, b_v, form: tl.constexpr):
    """Return the derivatives of `element_loss` by x and by t."""
    if form.KIND == BINARY:
        b_log, b_rest = both_logs(b_x)
        b_size = b_x * (1.0 - b_x)
        # torch's smallest divisor, a float32 in float64 too
        b_size = tl.where(b_size < 1e-12, tl.full(b_size.shape, 9.999999960041972e-13, b_size.dtype), b_size)
        return b_w * ((b_x - b_t) / b_size), b_w * (b_rest - b_log)
    elif form.KIND == DIVERGENCE:
        return b_t * -1.0, tl.log(b_t) - b_x + 1.0
    elif form.KIND == LOG_DIVERGENCE:
        b_e = tl.exp(b_t)
        return b_e * -1.0, b_e * (b_t - b_x + 1.0)
    elif form.KIND == LOGITS:
        # sigmoid(x) (1 - t) - v t sigmoid(-x); the smaller of the two sigmoids is e / (1 + e)
        b_e = tl.exp(-tl.abs(b_x))
        b_large = tl.where(b_x < 0.0, b_v * b_t, 1.0 - b_t)
        b_small = tl.where(b_x < 0.0, 1.0 - b_t, b_v * b_t)
        b_dx = (b_large - b_e * b_small) / (1.0 + b_e)
        b_soft = log1p(b_e) + tl.where(b_x < 0.0, b_x * -1.0, 0.0)
        return b_w * tl.where(b_x < 0.0, b_dx * -1.0, b_dx), b_w * ((b_v - 1.0) * b_soft - b_x)
    else:
        b_d = b_x - b_t
        b_sign = (b_d > 0.0).to(b_d.dtype) - (b_d < 0.0).to(b_d.dtype)
        if form.KIND == SQUARED:
            b_dx = 2.0 * b_d
        elif form.KIND == ABSOLUTE:
            b_dx = b_sign
        elif form.KIND == SMOOTH:
            b_dx = tl.where(tl.abs(b_d) >= constant_like(form.BETA, b_d), b_sign, b_d / form.BETA)  # NaN stays NaN
        else:
            b_dx = tl.where(tl.abs(b_d) > constant_like(form.BETA, b_d), b_sign * form.BETA, b_d)
        return b_dx, b_dx * -1.0


@triton.jit
def element_loss_kernel(
    p_x, p_t, p_w, p_v, p_loss, n, form: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write the loss of each element, or the sum over the program's block."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_t = tl.load(p_t + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_loss = element_loss(b_x, b_t, load_or_one(p_w, o, m, ACC), load_or_one(p_v, o, m, ACC), form)
    if form.EACH:
        tl.store(p_loss + o, b_loss.to(p_loss.dtype.element_ty), mask=m)
    else:
        tl.store(p_loss + tl.program_id(0), tl.sum(tl.where(m, b_loss, 0.0), axis=0))


@triton.jit
def element_loss_grad_kernel(
    p_dy, p_x, p_t, p_w, p_v, p_dx, p_dt, n, count, form: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Write dx and dt (either may be None) from dy of each element, or from one dy (None means 1) over `count`."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_t = tl.load(p_t + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    if p_dy is None:
        b_dy = tl.full((), 1.0, ACC) / count
    elif form.EACH:
        b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    else:
        b_dy = tl.load(p_dy).to(ACC) / count
    b_dx, b_dt = element_loss_grads(b_x, b_t, load_or_one(p_w, o, m, ACC), load_or_one(p_v, o, m, ACC), form)
    if p_dx is not None:
        tl.store(p_dx + o, (b_dy * b_dx).to(p_dx.dtype.element_ty), mask=m)
    if p_dt is not None:
        tl.store(p_dt + o, (b_dy * b_dt).to(p_dt.dtype.element_ty), mask=m)


# The KIND of each operation.
KINDS = {
    "mse_loss": SQUARED, "l1_loss": ABSOLUTE, "smooth_l1_loss": SMOOTH, "huber_loss": HUBER,
    "binary_cross_entropy": BINARY, "binary_cross_entropy_with_logits": LOGITS, "kl_div": DIVERGENCE,
}  # fmt: skip


class Loss(NamedTuple):
    """An element-wise loss: operation name, reduction, beta or delta, and whether targets are logarithms."""

    op: str
    reduction: str = "mean"
    beta: float = 1.0
    log_target: bool = False

    @property
    def each(self) -> bool:
        """Whether the result has the loss of each element."""
        return self.reduction == "none"

    def count(self, x: torch.Tensor) -> int:
        """Return the divisor of the sum."""
        if self.reduction == "batchmean":
            return x.shape[0] if x.dim() else 1
        return x.numel() if self.reduction == "mean" else 1

    @property
    def form(self) -> Form:
        """The constants, with BETA 1 for losses without it. Smooth L1 with beta 0 is the absolute error."""
        kind = LOG_DIVERGENCE if self.log_target else KINDS[self.op]
        if kind == SMOOTH and self.beta == 0:
            kind = ABSOLUTE
        return Form(kind.value, float(self.beta) if kind in (SMOOTH, HUBER) else 1.0, self.each)


@replayed
def elements_loss(
    how: Loss, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Return the loss of each element of x, their mean, or their sum, in x's dtype; target has x's shape.

    `weight` is a factor per element of binary losses, `pos_weight` a factor of the positive part with logits. Both
    broadcast to x's shape. Raises TypeError for dtypes, ValueError for shapes, devices or options that do not fit.
    """
    _check(how, x, target, weight=weight, pos_weight=pos_weight)
    operands = _expand(x, target, weight, pos_weight)
    n = x.numel()
    loss = torch.empty(x.shape if how.each else (), dtype=x.dtype, device=x.device)
    tile = launch.tile("loss", x.dtype, N=n)
    programs = launch.cdiv(n, tile["BLOCK_N"])
    parts = loss if how.each else torch.empty(programs, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(
        element_loss_kernel, (programs,), *operands, parts, n, form=how.form, ACC=launch.acc(x.dtype), **tile.options
    )  # fmt: skip
    if not how.each:
        write_total(parts, loss, None, how.count(x))
    return loss


@replayed
def elements_loss_grad(
    how: Loss, dy: torch.Tensor | None, x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None,
    pos_weight: torch.Tensor | None = None, needs: Sequence[bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """Return (dx, dtarget) of `elements_loss`, None if not needed; dy has the loss's shape, None means 1."""
    operands = _expand(x, target, weight, pos_weight)
    dx, dt = (torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None for need in needs)
    n = x.numel()
    tile = launch.tile("loss", x.dtype, N=n)
    launch.run(
        element_loss_grad_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), None if dy is None else dy.contiguous(),
        *operands, dx, dt, n, how.count(x), form=how.form, ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    return dx, dt


def _expand(x, *operands):
    """Return all operands expanded to x's shape and contiguous; None stays None."""
    return x.contiguous(), *(None if t is None else t.expand(x.shape).contiguous() for t in operands)


def _check(how, x, target, **factors):
    op, least = how.op, 0 if how.op == "smooth_l1_loss" else None
    factors = {name: t for name, t in factors.items() if t is not None}
    check.floating(op, input=x, target=target, **factors)
    check.same(op, input=x, target=target, **factors)
    if not (op == "kl_div" and how.reduction == "batchmean"):
        check_reduction(op, how.reduction)
    if not (how.beta > 0 or how.beta == least):
        name, text = ("beta", "0 or more") if least == 0 else ("delta", "above 0")
        raise ValueError(f"{op}: {name} is {how.beta}, expected a number {text}")
    if x.shape != target.shape:
        raise ValueError(f"{op}: target has shape {list(target.shape)}, expected input's shape {list(x.shape)}")
    for name, t in factors.items():
        try:
            t.expand(x.shape)
        except RuntimeError as error:
            raise ValueError(
                f"{op}: {name} has shape {list(t.shape)}, which does not broadcast to input's {list(x.shape)}"
            ) from error
