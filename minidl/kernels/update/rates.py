"""The corrections of RAdam and the momenta of NAdam, from the steps b_t of parameters."""

import triton
import triton.language as tl

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
def rectification(b_t, b_beta2, b_left):
    """Return what corrects the variance of RAdam's step, 0 while v is a mean of too few; b_left is 1 - beta2^t."""
    b_limit = 2.0 / (1.0 - b_beta2) - 1.0
    b_length = b_limit - 2.0 * b_t * (1.0 - b_left) / b_left
    b_ratio = (b_length - 4.0) * (b_length - 2.0) * b_limit / ((b_limit - 4.0) * (b_limit - 2.0) * b_length)
    return tl.sqrt(tl.where(b_length > 5.0, b_ratio, 0.0))
