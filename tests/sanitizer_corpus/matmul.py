import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def matmul(
    a, b, c, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr = "right",
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    m_m = (m < M)[:, None]
    m_n = (n < N)[None, :]
    if FORM == "wrapped":
        m_a = m % M
        n_b = n % N
    elif FORM == "hinted":
        m_a = tl.max_contiguous(tl.multiple_of(m % M, BM), BM)
        n_b = n % N
    else:
        m_a = m
        n_b = n
    p_a = a + m_a[:, None] * a_m + k[None, :] * a_k
    p_b = b + k[:, None] * b_k + n_b[None, :] * b_n
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        left = K - start
        if FORM == "wrapped" or FORM == "hinted":
            b_a = tl.load(p_a, mask=k[None, :] < left, other=0.0)
            b_b = tl.load(p_b, mask=k[:, None] < left, other=0.0)
        elif FORM == "no mask along k":
            b_a = tl.load(p_a, mask=m_m, other=0.0)
            b_b = tl.load(p_b, mask=m_n, other=0.0)
        elif FORM == "no other":
            b_a = tl.load(p_a, mask=m_m & (k[None, :] < left))
            b_b = tl.load(p_b, mask=m_n & (k[:, None] < left))
        elif FORM == "other once":
            b_a = tl.where(k[None, :] < left, tl.load(p_a, mask=m_m & (k[None, :] < left)), 0.0)
            b_b = tl.load(p_b, mask=m_n & (k[:, None] < left), other=0.0)
        elif FORM == "length kept":
            b_a = tl.load(p_a, mask=m_m & (k[None, :] < K), other=0.0)
            b_b = tl.load(p_b, mask=m_n & (k[:, None] < K), other=0.0)
        else:
            b_a = tl.load(p_a, mask=m_m & (k[None, :] < left), other=0.0)
            b_b = tl.load(p_b, mask=m_n & (k[:, None] < left), other=0.0)
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
        p_a += BK * a_k
        p_b += BK * b_k
    tl.store(c + m[:, None] * c_m + n[None, :] * c_n, acc, mask=m_m & m_n)


def launch(a, b, c, form="right"):
    (M, K), N = a.shape, b.shape[1]
    grid = triton.cdiv(M, 32), triton.cdiv(N, 32)
    matmul[grid](a, b, c, M, N, K, *a.stride(), *b.stride(), *c.stride(), BM=32, BN=32, BK=16, FORM=form)
    return c, a @ b


@cases.bug("loop")
def last_step_along_k_without_mask():
    launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "no mask along k")


@cases.bug("undefined lanes")
def undefined_tail_along_k_is_multiplied():
    launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "no other")


@cases.bug("loop")
def mask_along_k_does_not_shrink():
    launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "length kept")


@cases.bug("alignment")
def wrapped_rows_said_to_be_contiguous():
    launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "hinted")


@cases.clean("padding")
def no_size_is_a_multiple_of_its_tile():
    return launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70))


@cases.clean("wrapped indices")
def rows_beyond_the_end_wrap_around():
    return launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "wrapped")


@cases.clean("undefined lanes unused")
def undefined_tail_is_replaced_before_the_product():
    return launch(torch.randn(50, 40), torch.randn(40, 70), torch.empty(50, 70), "other once")


@cases.clean("strides")
def transposed_operands_and_a_column_slice_as_output():
    return launch(torch.randn(40, 50).t(), torch.randn(70, 40).t(), torch.zeros(50, 100)[:, 20:90])
