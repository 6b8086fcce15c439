import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def momentum(p, g, v, n, lr, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    if FORM == "hinted":
        p = tl.multiple_of(p, 16)
    b_v = 0.9 * tl.load(v + i, mask=m, other=0.0) + tl.load(g + i, mask=m, other=0.0)
    tl.store(v + i, b_v, mask=m)
    tl.store(p + i, tl.load(p + i, mask=m, other=0.0) - lr * b_v, mask=m)


@triton.jit
def momentum_of_rows(p, g, v, rows, dim, lr, BLOCK: tl.constexpr):
    row = tl.load(rows + tl.program_id(0))
    c = tl.arange(0, BLOCK)
    m = c < dim
    b_v = 0.9 * tl.load(v + row * dim + c, mask=m, other=0.0)
    b_v += tl.load(g + tl.program_id(0) * dim + c, mask=m, other=0.0)
    tl.store(v + row * dim + c, b_v, mask=m)
    tl.store(p + row * dim + c, tl.load(p + row * dim + c, mask=m, other=0.0) - lr * b_v, mask=m)


@triton.jit
def clipped(p, g, norm, n, lr, BLOCK: tl.constexpr, FUSED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(g + i, mask=i < n, other=0.0)
    if FUSED:
        tl.atomic_add(norm, tl.sum(b * b, axis=0))
    scale = tl.minimum(1.0, 1 / tl.sqrt(tl.load(norm)))
    tl.store(p + i, tl.load(p + i, mask=i < n, other=0.0) - lr * b * scale, mask=i < n)


@triton.jit
def add_squares(g, norm, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(g + i, mask=i < n, other=0.0)
    tl.atomic_add(norm, tl.sum(b * b, axis=0))


def launch(form="plain", v=None, first=0):
    p, g = torch.randn(400)[first : first + 300], torch.randn(300)
    v = torch.randn(300) if v is None else v
    want = p - 0.1 * (0.9 * v + g)
    momentum[(3,)](p, g, v, 300, 0.1, BLOCK=128, FORM=form)
    return p, want


def launch_rows(rows):
    p, g, v = torch.randn(10, 24), torch.randn(len(rows), 24), torch.zeros(10, 24)
    want = p.index_add(0, rows, -0.1 * g)
    momentum_of_rows[(len(rows),)](p, g, v, rows, 24, 0.1, BLOCK=32)
    return p, want


def launch_clipped(fused):
    p, g, norm = torch.randn(300), torch.randn(300), torch.zeros(1)
    want = p - 0.1 * g / g.norm()
    if not fused:
        add_squares[(3,)](g, norm, 300, BLOCK=128)
    clipped[(3,)](p, g, norm, 300, 0.1, BLOCK=128, FUSED=fused)
    return p, want


@cases.bug("uninitialised")
def velocity_starts_from_fresh_memory():
    launch(v=torch.empty(300))


@cases.bug("alignment")
def parameters_amid_a_flat_buffer_said_to_be_aligned():
    launch("hinted", first=7)


@cases.bug("race of programs")
def one_row_is_updated_twice():
    launch_rows(torch.tensor([3, 9, 3]))


@cases.bug("race of programs")
def norm_used_before_all_programs_added_to_it():
    launch_clipped(fused=True)


@cases.clean("in place")
def parameters_and_velocity_in_place():
    return launch()


@cases.clean("in place")
def velocity_and_gradient_are_one_tensor():
    p, g = torch.randn(300), torch.randn(300)
    want = p - 0.1 * 1.9 * g
    momentum[(3,)](p, g, g, 300, 0.1, BLOCK=128)
    return p, want


@cases.clean("distinct targets")
def rows_are_distinct():
    return launch_rows(torch.tensor([3, 9, 0]))


@cases.clean("atomics")
def norm_of_a_first_launch():
    return launch_clipped(fused=False)
