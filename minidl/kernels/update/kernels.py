"""The kernels `measure` and `update`, and the layout of the memory that they share with `prepare`.

They read a table of addresses, one row of COLUMNS int64 per parameter, and a list of blocks. A block is BLOCK_R rows
(BLOCK_R_SMALL in a small parameter) by BLOCK_C columns; other tensors are split into rows of BLOCK_C. For a gradient of
few rows of a matrix, `position` maps each row of the matrix to its index in the gradient. `measure` writes it and
nothing clears it: an entry is valid only if `rows` has that row at that index (Briggs and Torczon, ACM LOPLAS 2, 1993).
Rows without a gradient get g = 0, as in torch; with `lazy` they and their moments stay. Negative `rows` are padding.
"""

import triton
import triton.language as tl

from minidl.kernels.update.blocks import block_offsets, load_state, pointer, store_state
from minidl.kernels.update.rates import momentum_product, nadam_momentum, rectification
from minidl.runtime.dependent_launch import wait

SGD, RMSPROP, ADAGRAD, ADAM, ADAMW, MUON, MUON_STEP = map(tl.constexpr, range(7))
ADAMAX, RADAM, RADAMW, NADAM, NADAMW = map(tl.constexpr, range(7, 12))

# Columns of the table of addresses. WIDTH: columns of a matrix whose gradient is rows, else 0; SEEN: number of rows in
# the gradient; USED: 0 if there is no gradient in this step.
COLUMNS = tl.constexpr(16)
PARAM, MASTER, STATE_0, STATE_1, STATE_2, NUMEL, WIDTH, GRAD, GRAD_NUMEL, ROWS, SEEN, POSITION, USED = map(
    tl.constexpr, range(13)
)
# In a list of blocks, parameter << 32 | block; LARGE marks a block of BLOCK_R rows in memory that allows vectors.
LARGE = tl.constexpr(2**31)

# Columns of the numbers of a parameter, float64.
NUMBERS = tl.constexpr(8)
LR, WEIGHT_DECAY, MOMENTUM, ALPHA, BETA1, BETA2, EPS, LR_DECAY = map(tl.constexpr, range(8))

# Rates of a parameter, float64, that change with its steps; `update` has their use. One is padding: with rows of three
# the addresses spill registers.
RATES = tl.constexpr(4)

# How gradients of few rows are used.
NO_ROWS, DENSE_MOMENTS, LAZY = map(tl.constexpr, range(3))

# Indices of `control`, the results of `prepare`.
NORM, SCALE, FINITE = map(tl.constexpr, range(3))


@triton.jit
def sum_of_squares(
    p_slot, i_block, DTYPE: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    o_r, o_c, width, i_c = block_offsets(tl.load(p_slot + WIDTH), i_block, BLOCK_V, BLOCK_R, BLOCK_C)
    o = o_r * width + o_c
    m = (o < tl.multiple_of(tl.load(p_slot + GRAD_NUMEL), BLOCK_V)) & (o_c < width)
    b_g = tl.load(pointer(p_slot, GRAD, DTYPE, BLOCK_V) + o, mask=m, other=0.0)  # [BLOCK_R, BLOCK_C]
    if b_g.dtype.primitive_bitwidth < 32:
        b_g = b_g.to(tl.float32)
    b_g = b_g.to(tl.float64)
    if HAS_ROWS == DENSE_MOMENTS:
        m_r = (o_r < tl.load(p_slot + SEEN)) & (i_c == 0)
        b_row = tl.load(pointer(p_slot, ROWS, tl.int32, 1) + o_r, mask=m_r, other=-1)  # [BLOCK_R, 1]
        tl.store(pointer(p_slot, POSITION, tl.int32, 1) + b_row, o_r.to(tl.int32), mask=m_r & (b_row >= 0))
    return tl.sum(b_g * b_g)


@triton.jit
def next_rates(p_table, p_hyper, p_steps, p_rates, count, RULE: tl.constexpr, BLOCK_P: tl.constexpr):
    """Write the corrected rates of the next step; nothing reads them if the gradients are not finite."""
    for i in range(0, count, BLOCK_P):
        o_p = i + tl.arange(0, BLOCK_P)
        m_p = o_p < count
        b_used = tl.load(p_table + o_p * COLUMNS + USED, mask=m_p, other=0) != 0  # [BLOCK_P]
        b_t = (tl.load(p_steps + o_p, mask=m_p, other=0) + tl.where(b_used, 1, 0)).to(tl.float64)
        p_numbers = p_hyper + o_p * NUMBERS
        b_rate = tl.load(p_numbers + LR, mask=m_p, other=0.0)
        if RULE == ADAGRAD:
            b_rate /= 1.0 + (b_t - 1.0) * tl.load(p_numbers + LR_DECAY, mask=m_p, other=0.0)
        if RULE == SGD:
            # As in torch, the first step and steps without momentum have no dampening.
            b_undampened = (b_t <= 1.0) | (tl.load(p_numbers + MOMENTUM, mask=m_p, other=0.0) == 0.0)
            b_dampening = tl.load(p_numbers + LR_DECAY, mask=m_p, other=0.0)
            tl.store(p_rates + RATES * o_p + 1, tl.where(b_undampened, 1.0, 1.0 - b_dampening), mask=m_p)
        if RULE == MUON:
            b_adjust = tl.load(p_numbers + ALPHA, mask=m_p, other=0.0)
            tl.store(p_rates + RATES * o_p + 1, b_rate * b_adjust, mask=m_p)
        if RULE >= ADAM and RULE != MUON:
            b_beta1 = tl.load(p_numbers + BETA1, mask=m_p, other=0.5)
            b_beta2 = tl.load(p_numbers + BETA2, mask=m_p, other=0.5)
            b_left = 1.0 - tl.exp(b_t * tl.log(b_beta2))
            b_correction = tl.sqrt(b_left)
            if (RULE == RADAM) | (RULE == RADAMW):
                b_correction *= rectification(b_t, b_beta2, b_left)
            if (RULE == NADAM) | (RULE == NADAMW):
                b_decay = tl.load(p_numbers + LR_DECAY, mask=m_p, other=0.0)
                b_product = momentum_product(b_t, b_beta1, b_decay)
                b_now, b_next = nadam_momentum(b_t, b_beta1, b_decay), nadam_momentum(b_t + 1.0, b_beta1, b_decay)
                tl.store(p_rates + RATES * o_p + 2, b_rate * (1.0 - b_now) / (1.0 - b_product), mask=m_p)
                b_rate *= b_next / (1.0 - b_product * b_next)
            else:
                b_rate /= 1.0 - tl.exp(b_t * tl.log(b_beta1))
            tl.store(p_rates + RATES * o_p + 1, b_correction, mask=m_p)
        tl.store(p_rates + RATES * o_p, b_rate, mask=m_p)


@triton.jit
def measure_kernel(
    p_like, p_table, p_blocks, p_partial, p_hyper, p_steps, p_rates, count,
    RULE: tl.constexpr, HAS_ROWS: tl.constexpr, EARLY: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_R_SMALL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the sum of squares of a block; an extra program computes the rates unless p_rates is None."""
    wait(EARLY)
    DTYPE: tl.constexpr = p_like.dtype.element_ty
    i_list = tl.program_id(0)
    if p_rates is not None:
        i_list -= 1
        if i_list < 0:
            next_rates(p_table, p_hyper, p_steps, p_rates, count, RULE, BLOCK_P)
    if i_list >= 0:
        packed = tl.load(p_blocks + i_list)
        p_slot = p_table + (packed >> 32) * COLUMNS
        i_block = packed & (LARGE - 1)
        if (packed & LARGE) != 0:
            total = sum_of_squares(p_slot, i_block, DTYPE, HAS_ROWS, BLOCK_V, BLOCK_R, BLOCK_C)
        else:
            total = sum_of_squares(p_slot, i_block, DTYPE, HAS_ROWS, 1, BLOCK_R_SMALL, BLOCK_C)
        tl.store(p_partial + i_list, total)


@triton.jit
def update_block(
    p_slot, i_block, p_numbers, p_rate, p_control,
    step: tl.constexpr, DTYPE: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    RULE: tl.constexpr = step.RULE
    ACC: tl.constexpr = step.ACC
    HAS_MASTER: tl.constexpr = DTYPE != ACC
    o_r, o_c, width, _ = block_offsets(tl.load(p_slot + WIDTH), i_block, BLOCK_V, BLOCK_R, BLOCK_C)
    # If the gradient is not finite, the end is 0 and nothing changes.
    end = tl.multiple_of(tl.where(tl.load(p_control + FINITE) != 0.0, tl.load(p_slot + NUMEL), 0), BLOCK_V)
    o_g = o_r
    m_r = o_r >= 0
    m_g = m_r
    if step.HAS_ROWS != NO_ROWS:
        p_rows = pointer(p_slot, ROWS, tl.int32, 1)
        seen = tl.load(p_slot + SEEN)
        in_rows = tl.load(p_slot + WIDTH) != 0
        if step.HAS_ROWS == LAZY:
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
        # A parameter that was changed by the user differs from its rounded master and replaces it.
        b_now = tl.load(p_p, mask=m, other=0.0).to(ACC)
        b_p = tl.where(b_p.to(DTYPE).to(ACC) == b_now, b_p, b_now)
    b_g = tl.load(pointer(p_slot, GRAD, DTYPE, BLOCK_V) + (o_g * width + o_c), mask=m & m_g, other=0.0).to(ACC)
    b_g *= tl.load(p_control + SCALE).to(ACC)
    if step.MAXIMIZE:
        b_g = -b_g
    if step.DECAY and RULE != MUON:
        if (RULE == ADAMW) | (RULE == MUON_STEP) | (RULE == RADAMW) | (RULE == NADAMW):
            b_p *= (1.0 - lr * weight_decay).to(ACC)
        else:
            # Without decay, infinite weights must not become NaN by a product with 0.
            b_g += weight_decay.to(ACC) * tl.where(weight_decay != 0.0, b_p, 0.0)
    eps = tl.load(p_numbers + EPS).to(ACC)
    if RULE == SGD:
        if step.HAS_MOMENTUM:
            momentum = tl.load(p_numbers + MOMENTUM).to(ACC)
            p_b = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
            if step.DAMPENED:
                b_b = momentum * load_state(p_b, m) + tl.load(p_rate + 1).to(ACC) * b_g
            else:
                b_b = momentum * load_state(p_b, m) + b_g
            store_state(p_b, b_b, m)
            if step.NESTEROV:
                b_g += momentum * b_b
            else:
                b_g = b_b
        b_p -= rate * b_g
    elif RULE == RMSPROP:
        alpha = tl.load(p_numbers + ALPHA)
        p_s = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_s = alpha.to(ACC) * load_state(p_s, m) + (1.0 - alpha).to(ACC) * (b_g * b_g)
        store_state(p_s, b_s, m)
        if step.THIRD:  # centered
            p_a = pointer(p_slot, STATE_2, ACC, BLOCK_V) + o
            b_a = load_state(p_a, m)
            b_a += (1.0 - alpha).to(ACC) * (b_g - b_a)
            store_state(p_a, b_a, m)
            # Rounding may make the variance negative.
            b_s -= b_a * b_a
            b_s = tl.where(b_s < 0.0, 0.0, b_s)
        b_d = b_g / (tl.sqrt(b_s) + eps)
        if step.HAS_MOMENTUM:
            p_b = pointer(p_slot, STATE_1, ACC, BLOCK_V) + o
            b_d += tl.load(p_numbers + MOMENTUM).to(ACC) * load_state(p_b, m)
            store_state(p_b, b_d, m)
        b_p -= rate * b_d
    elif RULE == ADAGRAD:
        p_s = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_s = load_state(p_s, m) + b_g * b_g
        store_state(p_s, b_s, m)
        b_p -= rate * (b_g / (tl.sqrt(b_s) + eps))
    elif RULE == MUON:
        momentum = tl.load(p_numbers + MOMENTUM)
        p_b = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_b = load_state(p_b, m)
        b_b += (1.0 - momentum).to(ACC) * (b_g - b_b)
        store_state(p_b, b_b, m)
        if step.NESTEROV:
            b_b = b_g + momentum.to(ACC) * (b_b - b_g)
        tl.store(pointer(p_slot, STATE_1, ACC, BLOCK_V) + o, b_b, mask=m)
    elif RULE == MUON_STEP:
        b_d = tl.load(pointer(p_slot, STATE_1, ACC, BLOCK_V) + o, mask=m, other=0.0)  # [BLOCK_R, BLOCK_C]
        b_p -= tl.load(p_rate + 1).to(ACC) * b_d
    else:
        beta1 = tl.load(p_numbers + BETA1)
        beta2 = tl.load(p_numbers + BETA2)
        p_m = pointer(p_slot, STATE_0, ACC, BLOCK_V) + o
        b_m = load_state(p_m, m)
        # Interpolate from the nearer end: m + (g - m) would keep m's rounding error.
        b_d = b_g - b_m
        b_m = tl.where(beta1 > 0.5, b_m + (1.0 - beta1).to(ACC) * b_d, b_g - beta1.to(ACC) * b_d)
        store_state(p_m, b_m, m)
        p_v = pointer(p_slot, STATE_1, ACC, BLOCK_V) + o
        if RULE == ADAMAX:
            b_v = tl.maximum(beta2.to(ACC) * load_state(p_v, m), tl.abs(b_g) + eps, propagate_nan=tl.PropagateNan.ALL)
            store_state(p_v, b_v, m)
            b_root = b_v
        else:
            b_v = beta2.to(ACC) * load_state(p_v, m) + (1.0 - beta2).to(ACC) * (b_g * b_g)
            store_state(p_v, b_v, m)
            if step.THIRD:  # amsgrad
                p_x = pointer(p_slot, STATE_2, ACC, BLOCK_V) + o
                b_v = tl.maximum(load_state(p_x, m), b_v, propagate_nan=tl.PropagateNan.ALL)
                store_state(p_x, b_v, m)
            correction = tl.load(p_rate + 1).to(ACC)
            if (RULE == RADAM) | (RULE == RADAMW):
                b_root = tl.where(correction > 0.0, (tl.sqrt(b_v) + eps) / correction, 1.0)
            else:
                b_root = tl.sqrt(b_v) / correction + eps
        if (RULE == NADAM) | (RULE == NADAMW):
            b_p -= tl.load(p_rate + 2).to(ACC) * (b_g / b_root)
        b_p -= rate * (b_m / b_root)
    if RULE != MUON:
        tl.store(p_w, b_p, mask=m)
        if HAS_MASTER:
            tl.store(p_p, b_p.to(DTYPE), mask=m)


@triton.jit
def update_kernel(
    p_like, p_table, p_blocks, p_hyper, p_rates, p_control, step: tl.constexpr, EARLY: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_R_SMALL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    DTYPE: tl.constexpr = p_like.dtype.element_ty
    packed = tl.load(p_blocks + tl.program_id(0))
    i_param = packed >> 32
    i_block = packed & (LARGE - 1)
    p_slot = p_table + i_param * COLUMNS
    p_numbers = p_hyper + i_param * NUMBERS
    p_rate = p_rates + i_param * RATES
    # Small parameters, and those that are not 16-byte aligned, are accessed element by element.
    if (packed & LARGE) != 0:
        update_block(p_slot, i_block, p_numbers, p_rate, p_control, step, DTYPE, BLOCK_V, BLOCK_R, BLOCK_C)
    else:
        update_block(p_slot, i_block, p_numbers, p_rate, p_control, step, DTYPE, 1, BLOCK_R_SMALL, BLOCK_C)
