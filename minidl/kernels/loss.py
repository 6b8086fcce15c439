"""Element-wise losses, and the reductions that all losses share.

Squared error: (x - t)^2. Binary cross-entropy of logits with w and the weight v of positives:

    w ((1 - t) x + (1 + (v - 1) t) log(1 + exp(-x))) = w (|x| h + (1 + (v - 1) t) log1p(exp(-|x|))),
    h = 1 - t for x >= 0, v t for x < 0:      no exponential overflows and no large numbers cancel

Sums are made of partial sums, one per program, added in order by one more program. The loss of rows is in
`cross_entropy`.
"""

import torch
import triton
import triton.language as tl

from minidl.runtime import check, early, launch
from minidl.runtime.early import wait

REDUCTIONS = ("mean", "sum", "none")
# The most programs that sum the weights of cross-entropy's targets: each later program adds up their sums.
SHARES = tl.constexpr(256)


@triton.jit
def share_sum(p_sum, count, ACC: tl.constexpr):
    """The sum of at most SHARES numbers."""
    o = tl.arange(0, SHARES)
    return tl.sum(tl.load(p_sum + o, mask=o < count, other=0.0).to(ACC), axis=0)


@triton.jit
def total_kernel(
    p_part, p_sum, p_loss, p_divisor, parts, count, EARLY: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """The sum of the parts over `count`, or over the sum of `count` numbers at p_sum, which is kept in p_divisor."""
    wait(EARLY)
    b_total = tl.zeros((BLOCK_N,), ACC)
    for n in range(0, parts, BLOCK_N):
        o = n + tl.arange(0, BLOCK_N).to(tl.int64)
        b_total += tl.load(p_part + o, mask=o < parts, other=0.0)  # [BLOCK_N]
    total = tl.sum(b_total, axis=0)
    if p_sum is None:
        total = total / count
    else:
        divisor = share_sum(p_sum, count, ACC)
        total = total / divisor
        tl.store(p_divisor, divisor)
    tl.store(p_loss, total.to(p_loss.dtype.element_ty))


@triton.jit
def log1p(e):
    """log(1 + e) for 0 <= e <= 1, to a few units in the last place.

    It is 2 artanh(e / (2 + e)), whose series has positive terms with ratios of at most 1/9.
    """
    TERMS: tl.constexpr = 17 if e.dtype == tl.float64 else 8
    z = e / (2.0 + e)
    b_p = tl.full(e.shape, 1.0 / (2 * TERMS - 1), e.dtype)
    for k in tl.static_range(1, TERMS):
        b_p = b_p * (z * z) + 1.0 / (2 * (TERMS - k) - 1)
    return 2.0 * z * b_p


@triton.jit
def load_or_one(p, o, m, ACC: tl.constexpr):
    """A run of an operand, ones where there is none."""
    if p is None:
        return tl.full(o.shape, 1.0, ACC)
    else:
        return tl.load(p + o, mask=m, other=0.0).to(ACC)


@triton.jit
def element_loss_kernel(
    p_x, p_t, p_w, p_v, p_loss, n,
    BINARY: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Squared error or binary cross-entropy, of each element or summed over the program's run."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_t = tl.load(p_t + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    if BINARY:
        b_v = load_or_one(p_v, o, m, ACC)
        b_h = tl.where(b_x < 0.0, b_v * b_t, 1.0 - b_t)
        b_soft = log1p(tl.exp(-tl.abs(b_x)))
        b_loss = load_or_one(p_w, o, m, ACC) * (tl.abs(b_x) * b_h + (1.0 + (b_v - 1.0) * b_t) * b_soft)
    else:
        b_loss = (b_x - b_t) * (b_x - b_t)
    if EACH:
        tl.store(p_loss + o, b_loss.to(p_loss.dtype.element_ty), mask=m)
    else:
        tl.store(p_loss + tl.program_id(0), tl.sum(tl.where(m, b_loss, 0.0), axis=0))


@triton.jit
def element_loss_grad_kernel(
    p_dy, p_x, p_t, p_w, p_v, p_dx, p_dt, n, count,
    BINARY: tl.constexpr, EACH: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dx and dt (either may be None) from dy of each element, or the one dy of a sum over `count`."""
    o = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = o < n
    b_x = tl.load(p_x + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    b_t = tl.load(p_t + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    if EACH:
        b_dy = tl.load(p_dy + o, mask=m, other=0.0).to(ACC)  # [BLOCK_N]
    else:
        b_dy = tl.load(p_dy).to(ACC) / count
    if BINARY:
        b_dy = b_dy * load_or_one(p_w, o, m, ACC)
        b_v = load_or_one(p_v, o, m, ACC)
        b_e = tl.exp(-tl.abs(b_x))
        if p_dx is not None:
            # sigmoid(x) (1 - t) - v t sigmoid(-x); the smaller of the two sigmoids is e / (1 + e)
            b_large = tl.where(b_x < 0.0, b_v * b_t, 1.0 - b_t)
            b_small = tl.where(b_x < 0.0, 1.0 - b_t, b_v * b_t)
            b_dx = (b_large - b_e * b_small) / (1.0 + b_e)
            b_dx = b_dy * tl.where(b_x < 0.0, b_dx * -1.0, b_dx)
            tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
        if p_dt is not None:
            b_soft = log1p(b_e) + tl.where(b_x < 0.0, b_x * -1.0, 0.0)
            b_dt = b_dy * ((b_v - 1.0) * b_soft - b_x)
            tl.store(p_dt + o, b_dt.to(p_dt.dtype.element_ty), mask=m)
    else:
        b_dx = b_dy * (2.0 * (b_x - b_t))
        if p_dx is not None:
            tl.store(p_dx + o, b_dx.to(p_dx.dtype.element_ty), mask=m)
        if p_dt is not None:
            tl.store(p_dt + o, (b_dx * -1.0).to(p_dt.dtype.element_ty), mask=m)


def mse_loss(x: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """(x - target)^2, its mean, or its sum, in x's dtype.

    Raises TypeError for dtypes, ValueError for shapes, devices or a reduction that do not fit.
    """
    _check_elements("mse_loss", x, target, reduction)
    return _element_loss(x, target, None, None, reduction, binary=False)


def mse_loss_grad(
    dy: torch.Tensor, x: torch.Tensor, target: torch.Tensor, reduction: str = "mean",
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """(dx, dtarget) of `mse_loss`, None for what is not needed; dy has the loss's shape."""
    return _element_loss_grad(dy, x, target, None, None, reduction, needs, binary=False)


def binary_cross_entropy_with_logits(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Binary cross-entropy of sigmoid(x) with targets in [0, 1], its mean, or its sum, in x's dtype.

    `weight` (a factor for each element) and `pos_weight` (a factor for the target's part) broadcast to x's shape.
    Raises as `mse_loss`.
    """
    _check_elements("binary_cross_entropy_with_logits", x, target, reduction, weight=weight, pos_weight=pos_weight)
    return _element_loss(x, target, weight, pos_weight, reduction, binary=True)


def binary_cross_entropy_with_logits_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    pos_weight: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """(dx, dtarget) of `binary_cross_entropy_with_logits`, None for what is not needed; dy has the loss's shape."""
    return _element_loss_grad(dy, x, target, weight, pos_weight, reduction, needs, binary=True)


def add_up(parts, loss, sums, count, divisor):
    """Write the sum of the parts over the divisor into `loss`, see `total_kernel`."""
    tile = launch.tile("loss", parts.dtype, N=parts.numel())
    acc = tl.float64 if parts.dtype == torch.float64 else tl.float32
    launch.run(
        total_kernel, (1,), parts, sums, loss, divisor, parts.numel(), count, ACC=acc, **early.options(), **tile.options
    )


def _element_loss(x, target, weight, pos_weight, reduction, binary):
    operands = _spread(x, target, weight, pos_weight)
    n = x.numel()
    each = reduction == "none"
    loss = torch.empty(x.shape if each else (), dtype=x.dtype, device=x.device)
    tile = launch.tile("loss", x.dtype, N=n)
    programs = launch.cdiv(n, tile["BLOCK_N"])
    parts = loss if each else torch.empty(programs, dtype=launch.acc_torch(x.dtype), device=x.device)
    launch.run(
        element_loss_kernel, (programs,), *operands, parts, n,
        BINARY=binary, EACH=each, ACC=launch.acc(x.dtype), **tile.options,
    )  # fmt: skip
    if not each:
        add_up(parts, loss, None, n if reduction == "mean" else 1, None)
    return loss


def _element_loss_grad(dy, x, target, weight, pos_weight, reduction, needs, binary):
    operands = _spread(x, target, weight, pos_weight)
    grads = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) if need else None for need in needs)
    n = x.numel()
    tile = launch.tile("loss", x.dtype, N=n)
    launch.run(
        element_loss_grad_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), dy.contiguous(), *operands, *grads, n,
        n if reduction == "mean" else 1, BINARY=binary, EACH=reduction == "none", ACC=launch.acc(x.dtype),
        **tile.options,
    )  # fmt: skip
    return grads


def _spread(x, *operands):
    """All operands with x's elements in order; None stays None."""
    return x.contiguous(), *(None if t is None else t.expand(x.shape).contiguous() for t in operands)


def check_reduction(op, reduction):
    """Raises ValueError for a reduction that is none of REDUCTIONS."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"{op}: unknown reduction {reduction!r}; known: {', '.join(REDUCTIONS)}")


def _check_elements(op, x, target, reduction, **factors):
    factors = {name: t for name, t in factors.items() if t is not None}
    check.floating(op, input=x, target=target, **factors)
    check.same(op, input=x, target=target, **factors)
    check_reduction(op, reduction)
    if x.shape != target.shape:
        raise ValueError(f"{op}: target has shape {list(target.shape)}, expected input's shape {list(x.shape)}")
    for name, t in factors.items():
        try:
            t.expand(x.shape)
        except RuntimeError as error:
            raise ValueError(
                f"{op}: {name} has shape {list(t.shape)}, which does not broadcast to input's {list(x.shape)}"
            ) from error
