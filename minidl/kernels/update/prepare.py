"""The kernel `prepare`: the norm of the gradients, the factor that clips and unscales them, and the counts of steps."""

import triton
import triton.language as tl

from minidl.kernels.update.kernels import COLUMNS, FINITE, NORM, SCALE, USED
from minidl.runtime.dependent_launch import wait

# The scale of the loss and the finite steps since it changed, float32.
LOSS_SCALE, GOOD_STEPS = map(tl.constexpr, range(2))
GROWTH_INTERVAL = tl.constexpr(2000)
MOST_SCALE = tl.constexpr(2.0**24)


# The number of blocks changes between steps, so the kernel is not specialised for multiples of 16.
@triton.jit(do_not_specialize=["partials"])
def prepare_kernel(
    p_partial, partials, p_table, p_steps, p_control, p_skipped, p_scale, count,
    MAX_NORM: tl.constexpr, SKIP: tl.constexpr, EARLY: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    skipped = tl.load(p_skipped)
    b_total = tl.zeros((BLOCK,), dtype=tl.float64)
    for i in range(0, partials, BLOCK):
        o = i + tl.arange(0, BLOCK)
        b_total += tl.load(p_partial + o, mask=o < partials, other=0.0)  # [BLOCK]
    norm = tl.sqrt(tl.sum(b_total))
    # An integer, because the interpreter converts a bool that it broadcasts to a block to float.
    finite = tl.where(norm < float("inf"), 1, 0)
    if p_scale is not None:
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
        scale = MAX_NORM / (norm + 1e-6)
        scale = tl.where(scale > 1.0, 1.0, scale)  # a compiled tl.minimum would lose NaN
    if p_scale is not None:
        scale *= unscale
    tl.store(p_control + SCALE, scale)
    tl.store(p_skipped, skipped + 1 - finite)
    if not SKIP:
        finite = tl.maximum(finite, 1)
    tl.store(p_control + FINITE, finite.to(tl.float64))
    for i in range(0, count, BLOCK_P):
        o_p = i + tl.arange(0, BLOCK_P)
        m_p = o_p < count
        b_used = tl.load(p_table + o_p * COLUMNS + USED, mask=m_p, other=0) != 0  # [BLOCK_P]
        b_step = tl.load(p_steps + o_p, mask=m_p, other=0) + tl.where(b_used, finite, 0)
        tl.store(p_steps + o_p, b_step, mask=m_p)
