"""A script with kernels for `minidl doctor --compile FILE.py`: fine ones, and one for each thing that it tells."""

import torch
import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(out + o, tl.load(x + o, mask=m, other=0.0) + tl.load(y + o, mask=m, other=0.0), mask=m)


@triton.jit
def product(a, b, c, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """BLOCK rows of a times BLOCK columns of b: five stages of 128 x 64 fit into an sm_80, not an sm_86."""
    o, o_k = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    b_c = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        b_a = tl.load(a + o[:, None] * K + (k + o_k)[None, :])  # [BLOCK, BLOCK_K]
        b_b = tl.load(b + (k + o_k)[:, None] * BLOCK + o[None, :])  # [BLOCK_K, BLOCK]
        b_c = tl.dot(b_a, b_b, b_c)
    tl.store(c + o[:, None] * BLOCK + o[None, :], b_c)


@triton.jit
def summed(b_x):
    return b_x.sum(0) + tl.max(b_x, 0)


@triton.jit
def total(x, out, N: tl.constexpr):
    tl.store(out, summed(tl.load(x + tl.arange(0, N))))


@triton.jit
def narrow(a, c):
    """A product over 4: the interpreter and AMD's matrix instructions take it, NVIDIA's want 16."""
    o, o_k = tl.arange(0, 16), tl.arange(0, 4)
    b_a = tl.load(a + o[:, None] * 4 + o_k[None, :])
    tl.store(c + o[:, None] * 16 + o[None, :], tl.dot(b_a, b_a.T))


@triton.autotune(
    [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((64, 1), (128, 2), (256, 4))], key=["n"]
)
@triton.heuristics({"EVEN": lambda named: named["n"] % named["BLOCK"] == 0})
@triton.jit
def doubled(x, out, n, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = (o < n) | EVEN
    tl.store(out + o, 2 * tl.load(x + o, mask=m, other=0.0), mask=m)


def applied(function):
    @triton.jit
    def apply(x, N: tl.constexpr):
        o = tl.arange(0, N)
        tl.store(x + o, function(tl.load(x + o)))

    return apply


@triton.jit
def negative(b_x):
    return -b_x


@triton.jit
def absolute(b_x):
    return tl.abs(b_x)


@triton.jit
def called(x, FUNCTION: tl.constexpr, KIND: tl.constexpr):
    tl.store(x + tl.arange(0, 16), FUNCTION(tl.load(x + tl.arange(0, 16)).to(KIND)))


if __name__ == "__main__":
    x, out = torch.ones(1024), torch.empty(1024)
    add[(8,)](x, x, out, 1024, BLOCK=128)
    add[(8,)](x, x, out, 1000, BLOCK=128)
    assert out[0] == 2
    a = torch.ones(128, 128, dtype=torch.float16)
    product[(1,)](a, a, torch.empty(128, 128), 128, BLOCK=128, BLOCK_K=64, num_warps=8, num_stages=5)
    doubled[lambda meta: (triton.cdiv(1024, meta["BLOCK"]),)](x, out, 1000)
    for function in (negative, absolute, negative):
        applied(function)[(1,)](x, 64)
    called[(1,)](x, negative, tl.float32)
    total[(1,)](x, out, N=16)
    narrow[(1,)](a, torch.empty(16, 16))
