"""The layout of the memory that the kernels of an update share, and the rates of a step.

The kernels read a table of addresses, a list of blocks, and numbers of every parameter.
"""

import triton
import triton.language as tl

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

# Rates of a parameter, float64, that change with its steps; `update` has their use.
RATES = tl.constexpr(3)

# How gradients of few rows are used.
NO_ROWS, DENSE_MOMENTS, LAZY = map(tl.constexpr, range(3))

# Indices of `control`, the results of `prepare`.
NORM, SCALE, FINITE = map(tl.constexpr, range(3))

LOG_096 = tl.constexpr(-0.040821994520255166)  # of NAdam's momentum
TERMS = tl.constexpr(16)  # of a product that are computed at once


@triton.jit
def nadam_momentum(b_t, b_beta1, b_decay):
    """Return the momentum of step t, beta1 (1 - 0.96^(t momentum_decay) / 2)."""
    return b_beta1 * (1.0 - 0.5 * tl.exp(b_t * b_decay * LOG_096))


@triton.jit
def momentum_product(b_t, b_beta1, b_decay):
    """Return the product of the momenta of all steps up to t [BLOCK_P]; below 2^-64 only its size."""
    b_sum = tl.zeros_like(b_t)
    b_log = tl.log(b_beta1)
    terms = tl.max(tl.where(b_t * b_log > -44.4, b_t, 0.0)).to(tl.int32)
    for i in range(0, terms, TERMS):
        b_i = (i + 1 + tl.arange(0, TERMS)).to(tl.float64)[None, :]
        b_factor = 1.0 - 0.5 * tl.exp(b_i * b_decay[:, None] * LOG_096)
        b_sum += tl.sum(tl.where(b_i <= b_t[:, None], tl.log(b_factor), 0.0), axis=1)
    return tl.exp(b_t * b_log + b_sum)


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
                # The length of the running mean, and what corrects its variance (0: too short to use the variance).
                b_limit = 2.0 / (1.0 - b_beta2) - 1.0
                b_length = b_limit - 2.0 * b_t * (1.0 - b_left) / b_left
                b_long = b_length > 5.0
                b_ratio = (b_length - 4.0) * (b_length - 2.0) * b_limit
                b_ratio = tl.where(b_long, b_ratio / ((b_limit - 4.0) * (b_limit - 2.0) * b_length), 0.0)
                b_correction *= tl.sqrt(b_ratio)
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
