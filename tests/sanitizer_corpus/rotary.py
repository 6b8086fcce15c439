import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def rotate(q, cos, sin, positions, out, heads, half, q_token, HALF: tl.constexpr, FORM: tl.constexpr = "plain"):
    token = tl.program_id(0)
    head = tl.program_id(1)
    c = tl.arange(0, HALF)
    m = c < half
    if FORM == "from positions":
        at = tl.load(positions + token)
    elif FORM == "from narrow positions":
        at = tl.load(positions + token).to(tl.int8)
    else:
        at = token
    b_cos = tl.load(cos + at * half + c, mask=m, other=0.0)
    b_sin = tl.load(sin + at * half + c, mask=m, other=0.0)
    start = token * q_token + head * 2 * half
    first = start + c
    if FORM == "halves of the block":
        second = first + HALF
    else:
        second = first + half
    x = tl.load(q + first, mask=m, other=0.0)
    y = tl.load(q + second, mask=m, other=0.0)
    tl.store(out + first, x * b_cos - y * b_sin, mask=m)
    tl.store(out + second, x * b_sin + y * b_cos, mask=m)


@triton.jit
def rotate_pairs(q, cos, sin, out, tokens, half, HALF: tl.constexpr):
    token = tl.program_id(0)
    c = tl.program_id(1) * HALF + tl.arange(0, HALF)
    pair = c % half
    sign = tl.where(c < half, -1.0, 1.0)
    other = tl.where(c < half, c + half, c - half)
    m = c < 2 * half
    x = tl.load(q + token * 2 * half + c, mask=m, other=0.0)
    y = tl.load(q + token * 2 * half + other, mask=m, other=0.0)
    b_cos = tl.load(cos + token * half + pair, mask=m, other=0.0)
    b_sin = tl.load(sin + token * half + pair, mask=m, other=0.0)
    tl.store(out + token * 2 * half + c, x * b_cos + sign * y * b_sin, mask=m)


def turned(q, angle):
    x, y = q.chunk(2, -1)
    c, s = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat([x * c - y * s, x * s + y * c], -1)


def launch(form="plain", in_place=False, limit=6, positions=None, half=12):
    angle, q = torch.randn(limit, half), torch.randn(6, 3, 2 * half)
    order = torch.arange(6) if positions is None else positions
    want = turned(q, angle[order.clamp(0, limit - 1)])
    out = q if in_place else torch.empty_like(q)
    rotate[(6, 3)](q, angle.cos(), angle.sin(), order, out, 3, half, q.stride(0), HALF=16, FORM=form)
    return out, want


def launch_pairs(in_place):
    angle, q = torch.randn(6, 16), torch.randn(6, 1, 32)
    want = turned(q, angle)
    out = q if in_place else torch.empty_like(q)
    rotate_pairs[(6, 2)](q, angle.cos(), angle.sin(), out, 6, 16, HALF=16)
    return out, want


@cases.bug("bounds")
def table_of_angles_shorter_than_the_sequence():
    launch(limit=5)


@cases.bug("alias")
def in_place_while_another_program_reads_the_other_half():
    launch_pairs(in_place=True)


@cases.bug("neighbour's row")
def second_half_begins_after_the_padding():
    launch("halves of the block")


@cases.bug("truncation")
def positions_forced_into_eight_bits():
    launch("from narrow positions", limit=200, positions=torch.tensor([0, 199, 2, 100, 130, 5]))


@cases.clean("in place")
def both_halves_loaded_before_either_is_stored():
    return launch(in_place=True)


@cases.clean("overlapping reads")
def another_program_reads_the_other_half():
    return launch_pairs(in_place=False)


@cases.clean("repeated reads")
def all_tokens_at_few_positions():
    return launch("from positions", limit=3, positions=torch.tensor([0, 2, 2, 1, 0, 2]))


@cases.clean("padding")
def half_is_not_a_power_of_two():
    return launch(half=11)
