import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def dropout(x, out, kept, n, p, seed, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    keep = tl.rand(seed, i) > p
    if FORM == "loads kept only":
        b = tl.load(x + i, mask=m & keep)
        b = tl.where(keep, b / (1 - p), 0.0)
    elif FORM == "multiplies":
        b = tl.load(x + i, mask=m & keep) * keep.to(tl.float32) / (1 - p)
    else:
        b = tl.where(keep, tl.load(x + i, mask=m, other=0.0) / (1 - p), 0.0)
    if FORM == "stores kept only":
        tl.store(out + i, b, mask=m & keep)
    else:
        tl.store(out + i, b, mask=m)
    tl.store(kept + i, keep, mask=m)


@triton.jit
def pack_kept(kept, bits, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(kept + i, mask=i < n, other=0).to(tl.int32)
    words = tl.reshape(b << (i % 32), (BLOCK // 32, 32))
    w = tl.program_id(0) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    if WIDE:
        tl.store(bits + w, tl.sum(words, axis=1), mask=w * 32 < n)
    else:
        tl.store(bits + w, tl.sum(words, axis=1))


@triton.jit
def apply_kept(x, kept, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(kept + i, mask=i < n, other=0)
    tl.store(out + i, tl.where(k != 0, tl.load(x + i, mask=i < n, other=0.0), 0.0), mask=i < n)


def launch(out, form="plain", blocks=5):
    x, kept = torch.randn(300), torch.empty(300, dtype=torch.int8)
    want = x / 0.7
    dropout[(blocks,)](x, out, kept, 300, 0.3, 7, BLOCK=64, FORM=form)
    return x, kept, want


def launch_pack(wide):
    kept, bits = torch.ones(300, dtype=torch.int8), torch.empty(10, dtype=torch.int32)
    pack_kept[(3,)](kept, bits, 300, BLOCK=128, WIDE=wide)
    return bits


@cases.bug("undefined lanes")
def undefined_values_times_zero():
    launch(torch.empty(300), "multiplies")


@cases.bug("uninitialised")
def dropped_places_keep_what_fresh_memory_held():
    out, again = torch.empty(300), torch.empty(300)
    _, kept, _ = launch(out, "stores kept only")
    apply_kept[(5,)](out, torch.ones_like(kept), again, 300, BLOCK=64)


@cases.bug("grid")
def flags_of_the_last_block_are_read_but_never_made():
    out = torch.empty(300)
    x, kept, _ = launch(out, blocks=4)
    apply_kept[(5,)](x, kept, out, 300, BLOCK=64)


@cases.bug("bounds")
def packed_words_of_the_last_block_past_the_end():
    launch_pack(wide=False)


@cases.clean("undefined lanes unused")
def dropped_places_are_not_loaded():
    out = torch.empty(300)
    _, kept, want = launch(out, "loads kept only")
    return out, want * kept


@cases.clean("fresh memory")
def dropped_places_hold_zeros_already():
    out = torch.zeros(300)
    _, kept, want = launch(out, "stores kept only")
    return out, want * kept


@cases.clean("fresh memory")
def flags_of_a_first_launch():
    out = torch.empty(300)
    x, kept, _ = launch(out)
    apply_kept[(5,)](x, kept, out, 300, BLOCK=64)
    return out, x * kept


@cases.clean("masked surplus")
def packed_words_of_the_last_block_are_masked():
    want = torch.full((10,), -1, dtype=torch.int32)
    want[9] = (1 << 12) - 1
    return launch_pack(wide=True), want
