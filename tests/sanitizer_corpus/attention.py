import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def attention(
    q, k, v, out, lse, n_q, n_k, scale, D: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    i = tl.program_id(0) * BQ + tl.arange(0, BQ)
    d = tl.arange(0, D)
    b_q = tl.load(q + (head * n_q + i[:, None]) * D + d[None, :], mask=i[:, None] < n_q, other=0.0)
    top = tl.full((BQ,), float("-inf"), tl.float32)
    total = tl.zeros((BQ,), tl.float32)
    acc = tl.zeros((BQ, D), tl.float32)
    end = n_k
    if CAUSAL:
        end = tl.minimum(n_k, (tl.program_id(0) + 1) * BQ)
    for start in range(0, end, BK):
        j = start + tl.arange(0, BK)
        if FORM == "mask of a whole block":
            m = (tl.arange(0, BK) < n_k)[:, None]
        else:
            m = (j < n_k)[:, None]
        b_k = tl.load(k + (head * n_k + j[:, None]) * D + d[None, :], mask=m, other=0.0)
        s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        s = tl.where(j[None, :] < n_k, s, float("-inf"))
        if CAUSAL:
            s = tl.where(j[None, :] <= i[:, None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, axis=1))
        p = tl.exp(s - higher[:, None])
        old = tl.exp(top - higher)
        if FORM == "undefined values":
            b_v = tl.load(v + (head * n_k + j[:, None]) * D + d[None, :], mask=m)
        else:
            b_v = tl.load(v + (head * n_k + j[:, None]) * D + d[None, :], mask=m, other=0.0)
        acc = tl.dot(p, b_v, acc * old[:, None], input_precision="ieee")
        total = total * old + tl.sum(p, axis=1)
        top = higher
    if FORM == "rows unmasked":
        tl.store(lse + head * n_q + i, top + tl.log(total))
    else:
        tl.store(lse + head * n_q + i, top + tl.log(total), mask=i < n_q)
    tl.store(out + (head * n_q + i[:, None]) * D + d[None, :], acc / total[:, None], mask=i[:, None] < n_q)


@triton.jit
def combine(parts, lse, out, n, D: tl.constexpr, SPLITS: tl.constexpr):
    row = tl.program_id(0)
    s = tl.arange(0, SPLITS)
    d = tl.arange(0, D)
    b = tl.load(lse + s * n + row)
    w = tl.exp(b - tl.max(b, axis=0))
    b_parts = tl.load(parts + (s[:, None] * n + row) * D + d[None, :])
    tl.store(out + row * D + d, tl.sum(b_parts * (w / tl.sum(w, axis=0))[:, None], axis=0))


def launch(form="plain", causal=False, n_q=24, n_k=24, q=None, out=None):
    q = torch.randn(2, n_q, 16) if q is None else q
    k, v, lse = torch.randn(2, n_k, 16), torch.randn(2, n_k, 16), torch.empty(2, n_q)
    out = torch.empty_like(q) if out is None else out
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grid = triton.cdiv(n_q, 16), 2
    attention[grid](q, k, v, out, lse, n_q, n_k, 0.25, D=16, BQ=16, BK=16, FORM=form, CAUSAL=causal)
    return out, want


def launch_split(splits):
    q, k, v = torch.randn(1, 10, 16), torch.randn(4, 20, 16), torch.randn(4, 20, 16)
    parts, lse, out = torch.empty(4, 10, 16), torch.empty(4, 10), torch.empty(10, 16)
    every = q.expand(4, 10, 16).contiguous()
    attention[(1, splits)](every, k, v, parts, lse, 10, 20, 0.25, D=16, BQ=16, BK=16, FORM="plain", CAUSAL=False)
    combine[(10,)](parts, lse, out, 10, D=16, SPLITS=4)
    want = torch.nn.functional.scaled_dot_product_attention(q, k.view(1, 80, 16), v.view(1, 80, 16))[0]
    return out, want


@cases.bug("loop")
def mask_of_the_keys_does_not_move_with_the_block():
    launch("mask of a whole block")


@cases.bug("undefined lanes")
def values_past_the_end_are_multiplied_by_zero():
    launch("undefined values")


@cases.bug("bounds")
def sums_of_padded_queries_are_stored():
    launch("rows unmasked")


@cases.bug("grid")
def one_split_of_the_keys_is_never_computed():
    launch_split(3)


@cases.clean("padding")
def keys_and_queries_fill_no_block():
    return launch(n_q=20, n_k=45)


@cases.clean("skipped blocks")
def blocks_above_the_diagonal_are_never_read():
    return launch(causal=True)


@cases.clean("in place")
def output_takes_the_place_of_the_queries():
    q = torch.randn(2, 24, 16)
    return launch(q=q, out=q)


@cases.clean("fresh memory")
def all_splits_of_the_keys_are_combined():
    return launch_split(4)
