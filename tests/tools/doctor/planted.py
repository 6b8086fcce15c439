"""Kernels for the offline compile, with faults and without."""

import triton
import triton.language as tl


@triton.jit
def add_one_kernel(p_x, p_y, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o, tl.load(p_x + o, mask=o < n, other=0.0) + 1.0, mask=o < n)


@triton.jit
def product_kernel(p_a, p_b, p_c, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """One block of a product: with BLOCK 256 in 8 warps, the sums alone want 256 registers of the 255 there are."""
    o = tl.arange(0, BLOCK)
    o_k = tl.arange(0, BLOCK_K)
    b_c = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        m_k = k + o_k < K
        b_a = tl.load(p_a + o[:, None] * K + (k + o_k)[None, :], mask=m_k[None, :], other=0.0)  # [BLOCK, BLOCK_K]
        b_b = tl.load(p_b + (k + o_k)[:, None] * BLOCK + o[None, :], mask=m_k[:, None], other=0.0)  # [BLOCK_K, BLOCK]
        b_c = tl.dot(b_a, b_b, b_c, input_precision="ieee")
    tl.store(p_c + o[:, None] * BLOCK + o[None, :], b_c)


@triton.jit
def across_kernel(p_a, p_b, p_c, K, SUM: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """a^T b of float32 in boxes, of which a is transposed in registers; SUM of the products in registers, too."""
    d_a = tl.make_tensor_descriptor(p_a, [K, BLOCK], [BLOCK, 1], [BLOCK_K, BLOCK])
    d_b = tl.make_tensor_descriptor(p_b, [BLOCK, K], [K, 1], [BLOCK, BLOCK_K])
    b_c = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        b_a = tl.abs(d_a.load([k, 0])).T
        b_b = d_b.load([0, k]).T
        if SUM:
            b_c += tl.dot(b_a, b_b, input_precision="tf32") * (K > 0).to(tl.float32)
        else:
            b_c = tl.dot(b_a, b_b, b_c, input_precision="tf32")
    o = tl.arange(0, BLOCK)
    tl.store(p_c + o[:, None] * BLOCK + o[None, :], b_c)


@triton.jit
def broken_kernel(p_x, BLOCK: tl.constexpr):
    tl.store(p_x + tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK))


@triton.jit
def hasty_kernel(p_x, BLOCK: tl.constexpr):
    """Lets the next launch begin, and reads before it waits for the launch before it."""
    o = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_launch_dependents()
    b_x = tl.load(p_x + o)
    tl.extra.cuda.gdc_wait()
    tl.store(p_x + o, b_x + 1.0)


@triton.jit
def patient_kernel(p_x, BLOCK: tl.constexpr):
    """The same with nothing read before the wait."""
    o = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()
    tl.store(p_x + o, tl.load(p_x + o) + 1.0)


@triton.jit
def constant_kernel(p_x, WHERE: tl.constexpr, BLOCK: tl.constexpr):
    """float64 values that meet 0.1: a float32 in what WHERE names, but for the last three."""
    o = tl.arange(0, BLOCK)
    b_x = tl.load(p_x + o)
    if WHERE == "maximum":
        b_x = tl.maximum(b_x, 0.1)
    elif WHERE == "comparison":
        b_x = tl.where(b_x < 0.1, 0.0, b_x)
    elif WHERE == "two numbers":
        b_x = b_x * tl.where(b_x < 0.0, 0.1, 1.0)
    elif WHERE == "float32":
        b_x = b_x + (tl.sqrt(o.to(tl.float32)) + 0.1)
    elif WHERE == "mask":
        b_x = b_x * tl.where(tl.sqrt(o.to(tl.float32)) < 0.1, 2.0, 1.0)
    elif WHERE == "operator":
        b_x = b_x * 0.1 + tl.where(b_x < 0.5, b_x, 0.1)
    else:
        b_x = tl.maximum(b_x, tl.full((BLOCK,), 0.1, b_x.dtype))
    tl.store(p_x + o, b_x)
