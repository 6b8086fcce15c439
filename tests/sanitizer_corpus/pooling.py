import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def max_pool(x, out, places, H, W, OH, OW, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    image = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < OH * OW
    row = o // OW * 2
    col = o % OW * 2
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    place = tl.zeros((BLOCK,), tl.int32)
    for t in tl.static_range(4):
        r = row + t // 2
        c = col + t % 2
        if FORM == "open":
            inside = m
        else:
            inside = m & (r < H) & (c < W)
        if FORM == "no other":
            b = tl.load(x + image * H * W + r * W + c, mask=inside)
        else:
            b = tl.load(x + image * H * W + r * W + c, mask=inside, other=float("-inf"))
        place = tl.where(b > top, r * W + c, place)
        top = tl.maximum(top, b)
    tl.store(out + image * OH * OW + o, top, mask=m)
    tl.store(places + image * OH * OW + o, place, mask=m)


@triton.jit
def unpool(dy, places, dx, size, n, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    image = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    to = dx + image * size + tl.load(places + image * n + o, mask=m, other=0)
    b = tl.load(dy + image * n + o, mask=m, other=0.0)
    if ATOMIC:
        tl.atomic_add(to, b, mask=m)
    else:
        tl.store(to, b, mask=m)


def launch(H, W, form="plain"):
    x = torch.randn(2, H, W)
    want = functional.max_pool2d(x, 2, ceil_mode=True)
    out, places = torch.empty(want.shape), torch.empty(want.shape, dtype=torch.int32)
    OH, OW = want.shape[1:]
    max_pool[(2, triton.cdiv(OH * OW, 32))](x, out, places, H, W, OH, OW, BLOCK=32, FORM=form)
    return out, want


def launch_unpool(places, dx, atomic):
    n = places.shape[1]
    dy = torch.randn(2, n)
    unpool[(2, 1)](dy, places, dx, dx.shape[1], n, BLOCK=32, ATOMIC=atomic)
    return dx, torch.zeros(dx.shape).scatter_add(1, places, dy)


@cases.bug("neighbour's row")
def windows_hang_over_the_edge_unmasked():
    launch(9, 11, "open")


@cases.bug("undefined lanes")
def window_over_the_edge_takes_undefined_values():
    launch(9, 11, "no other")


@cases.bug("race of lanes")
def overlapping_windows_store_to_one_place():
    launch_unpool(torch.arange(20).repeat(2, 1) // 2, torch.zeros(2, 40), atomic=False)


@cases.bug("uninitialised")
def gradients_added_to_fresh_memory():
    launch_unpool(torch.arange(20).repeat(2, 1) // 2, torch.empty(2, 40), atomic=True)


@cases.clean("padding")
def windows_hang_over_the_edge_masked():
    return launch(9, 11)


@cases.clean("padding")
def even_sizes_need_no_mask():
    return launch(8, 12, "open")


@cases.clean("distinct targets")
def disjoint_windows_store_to_their_own_places():
    return launch_unpool(torch.arange(20).repeat(2, 1) * 2 + 1, torch.zeros(2, 40), atomic=False)


@cases.clean("atomics")
def overlapping_windows_add_atomically():
    return launch_unpool(torch.arange(20).repeat(2, 1) // 2, torch.zeros(2, 40), atomic=True)
