import torch
import triton
import triton.language as tl
from torch.nn import functional

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def layer_norm(x, w, out, rstd, n, BLOCK: tl.constexpr, WHERE: tl.constexpr = True, MASK_WEIGHT: tl.constexpr = True):
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    m = c < n
    b = tl.load(x + row * n + c, mask=m)
    if WHERE:
        b = tl.where(m, b, 0.0)
    mean = tl.sum(b, axis=0) / n
    d = tl.where(m, b - mean, 0.0)
    r = 1 / tl.sqrt(tl.sum(d * d, axis=0) / n + 1e-5)
    tl.store(rstd + row, r)
    if MASK_WEIGHT:
        b_w = tl.load(w + c, mask=m)
    else:
        b_w = tl.load(w + c)
    tl.store(out + row * n + c, d * r * b_w, mask=m)


@triton.jit
def weight_grad(dy, x_hat, dw, lock, rows, n, GUARD: tl.constexpr, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    m = c < n
    part = tl.zeros((BLOCK,), tl.float32)
    for row in range(tl.program_id(0), rows, tl.num_programs(0)):
        b_dy = tl.load(dy + row * n + c, mask=m, other=0.0)
        part += b_dy * tl.load(x_hat + row * n + c, mask=m, other=0.0)
    if GUARD == "atomic":
        tl.atomic_add(dw + c, part, mask=m)
    elif GUARD == "partials":
        tl.store(dw + tl.program_id(0) * n + c, part, mask=m)
    else:
        if GUARD == "late lock":
            part += tl.load(dw + c, mask=m, other=0.0)
        while tl.atomic_cas(lock, 0, 1) == 1:
            pass
        if GUARD == "lock":
            part += tl.load(dw + c, mask=m, other=0.0)
        tl.store(dw + c, part, mask=m)
        tl.debug_barrier()
        tl.atomic_xchg(lock, 0)


@triton.jit
def add_partials(parts, dw, n_parts, n, BLOCK: tl.constexpr):
    c = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in range(n_parts):
        total += tl.load(parts + i * n + c, mask=c < n, other=0.0)
    tl.store(dw + c, total, mask=c < n)


def launch(x, w, out, **flags):
    rows, n = x.shape
    layer_norm[(rows,)](x, w, out, torch.empty(rows), n, BLOCK=triton.next_power_of_2(n), **flags)


def launch_grad(dw, guard):
    dy, x_hat, lock = torch.randn(10, 50), torch.randn(10, 50), torch.zeros(1, dtype=torch.int32)
    weight_grad[(4,)](dy, x_hat, dw, lock, 10, 50, GUARD=guard, BLOCK=64)
    return (dy * x_hat).sum(0)


@cases.bug("undefined lanes")
def mean_over_lanes_nobody_loaded():
    x, w = torch.randn(5, 50), torch.randn(50)
    launch(x, w, torch.empty_like(x), WHERE=False)


@cases.bug("bounds")
def weight_read_past_its_end():
    x, w = torch.randn(5, 50), torch.randn(50)
    launch(x, w, torch.empty_like(x), MASK_WEIGHT=False)


@cases.bug("race of programs")
def gradient_is_read_before_the_lock_is_taken():
    launch_grad(torch.zeros(50), "late lock")


@cases.bug("uninitialised")
def atomic_sum_starts_from_fresh_memory():
    launch_grad(torch.empty(50), "atomic")


@cases.clean("undefined lanes unused")
def undefined_weights_are_never_stored():
    x, w, out = torch.randn(5, 50), torch.randn(50), torch.empty(5, 50)
    launch(x, w, out)
    return out, functional.layer_norm(x, (50,), w)


@cases.clean("lock")
def programs_add_to_the_gradient_under_a_lock():
    dw = torch.zeros(50)
    want = launch_grad(dw, "lock")
    return dw, want


@cases.clean("atomics")
def atomic_sum_from_zeros():
    dw = torch.zeros(50)
    want = launch_grad(dw, "atomic")
    return dw, want


@cases.clean("fresh memory")
def partials_are_written_before_they_are_added():
    parts, dw = torch.empty(4, 50), torch.empty(50)
    want = launch_grad(parts, "partials")
    add_partials[(1,)](parts, dw, 4, 50, BLOCK=64)
    return dw, want
