import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def quantise(x, q, scale, n, group, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    row = tl.program_id(0)
    g = tl.program_id(1)
    c = tl.arange(0, BLOCK)
    i = g * group + c
    m = (c < group) & (i < n)
    if FORM == "no other":
        b = tl.load(x + row * n + i, mask=m)
    else:
        b = tl.load(x + row * n + i, mask=m, other=0.0)
    s = tl.max(tl.abs(b), axis=0) / 127
    if FORM == "block for group":
        m = i < n
    tl.store(q + row * n + i, tl.floor(b / s + 0.5).to(tl.int8), mask=m)
    tl.store(scale + row * tl.num_programs(1) + g, s)


@triton.jit
def dequantise(q, scale, out, n, group, groups, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    row = tl.program_id(0)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    if FORM == "rounded up":
        g = (i + group - 1) // group
    else:
        g = i // group
    b = tl.load(q + row * n + i, mask=m, other=0).to(tl.float32)
    tl.store(out + row * n + i, b * tl.load(scale + row * groups + g, mask=m, other=0.0), mask=m)


@triton.jit
def pack_nibbles(q, packed, n, BLOCK: tl.constexpr, PAIRS: tl.constexpr):
    if PAIRS:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        low = tl.load(q + 2 * i, mask=2 * i < n, other=0)
        high = tl.load(q + 2 * i + 1, mask=2 * i + 1 < n, other=0)
        tl.store(packed + i, (low & 15) | (high << 4), mask=2 * i < n)
    else:
        i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        b = tl.load(q + i, mask=i < n, other=0) & 15
        old = tl.load(packed + i // 2, mask=i < n, other=0)
        tl.store(packed + i // 2, old | (b << (i % 2 * 4).to(tl.int8)), mask=i < n)


def launch(form="plain", n=50, group=20, back="plain"):
    x, groups = torch.randn(4, n), triton.cdiv(n, group)
    q, scale, out = torch.empty(4, n, dtype=torch.int8), torch.empty(4, groups), torch.empty(4, n)
    quantise[(4, groups)](x, q, scale, n, group, BLOCK=32, FORM=form)
    dequantise[(4, 2)](q, scale, out, n, group, groups, BLOCK=32, FORM=back)
    padded = torch.nn.functional.pad(x, (0, groups * group - n)).view(4, groups, group)
    s = padded.abs().amax(2, keepdim=True) / 127
    return out, ((padded / s + 0.5).floor() * s).flatten(1)[:, :n]


def launch_pack(n, pairs):
    q, packed = torch.randint(0, 8, (n,), dtype=torch.int8), torch.zeros(triton.cdiv(n, 2), dtype=torch.int8)
    pack_nibbles[(2,)](q, packed, n, BLOCK=32, PAIRS=pairs)
    even = torch.nn.functional.pad(q, (0, n % 2))
    return packed, even[::2] | even[1::2] << 4


@cases.bug("undefined lanes")
def scale_of_lanes_nobody_loaded():
    launch("no other")


@cases.bug("race of programs")
def padded_group_overwrites_the_next():
    launch("block for group")


@cases.bug("off by one")
def scale_of_the_group_rounded_up():
    launch(back="rounded up")


@cases.bug("race of lanes")
def two_lanes_share_a_byte():
    launch_pack(51, pairs=False)


@cases.clean("padding")
def last_group_is_short():
    return launch()


@cases.clean("padding")
def group_fills_its_block():
    return launch(n=64, group=32, form="block for group")


@cases.clean("overlapping reads")
def one_lane_makes_a_byte():
    return launch_pack(51, pairs=True)


@cases.clean("reinterpreted memory")
def bytes_of_wider_numbers():
    wide, out = torch.arange(1, 41, dtype=torch.int32), torch.empty(4, 40)
    bytes_, ones = wide.view(torch.int8), torch.ones(4, 2)
    dequantise[(4, 2)](bytes_, ones, out, 40, 20, 2, BLOCK=32)
    return out, bytes_.view(4, 40).float()
