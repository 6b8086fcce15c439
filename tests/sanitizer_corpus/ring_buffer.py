import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def push(x, ring, head, n, capacity, BLOCK: tl.constexpr, FORM: tl.constexpr = "plain"):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = i < n
    at = tl.load(head)
    if FORM == "wide":
        slot = (at.to(tl.int64) * n + i) % capacity
    elif FORM == "steps":
        slot = (at * n + i) % capacity
    elif FORM == "unwrapped":
        slot = at + i
    else:
        slot = (at + i) % capacity
    tl.store(ring + slot, tl.load(x + i, mask=m, other=0.0), mask=m)
    if FORM == "moves head":
        tl.store(head, at + n)


@triton.jit
def take_slots(x, queue, tail, n, capacity, BLOCK: tl.constexpr, ATOMIC: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b = tl.load(x + i, mask=i < n, other=-1.0)
    wanted = b > 0
    count = tl.sum(wanted.to(tl.int32), axis=0)
    if ATOMIC:
        first = tl.atomic_add(tail, count)
    else:
        first = tl.load(tail)
        tl.store(tail, first + count)
    slot = first + tl.cumsum(wanted.to(tl.int32), axis=0) - 1
    tl.store(queue + slot, b, mask=wanted & (slot < capacity))


@triton.jit
def last_values(ring, head, out, n, capacity, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    slot = (tl.load(head) - n + i + capacity) % capacity
    tl.store(out + i, tl.load(ring + slot, mask=i < n, other=0.0), mask=i < n)


def launch(start, form="plain", n=50, capacity=64):
    x, ring, head = torch.randn(n), torch.zeros(capacity), torch.tensor([start], dtype=torch.int32)
    want = torch.zeros(capacity)
    want[(start * (n if form in ("steps", "wide") else 1) + torch.arange(n)) % capacity] = x
    push[(triton.cdiv(n, 32),)](x, ring, head, n, capacity, BLOCK=32, FORM=form)
    return ring, want


def launch_queue(atomic):
    x, queue, tail = torch.randn(100), torch.zeros(100), torch.zeros(1, dtype=torch.int32)
    take_slots[(4,)](x, queue, tail, 100, 100, BLOCK=32, ATOMIC=atomic)
    return queue.sort().values, torch.nn.functional.pad(x[x > 0], (0, 100 - int((x > 0).sum()))).sort().values


@cases.bug("overflow")
def position_of_a_late_step_exceeds_31_bits():
    launch(50_000_000, "steps", n=50, capacity=100)


@cases.bug("bounds")
def position_does_not_wrap():
    launch(20, "unwrapped")


@cases.bug("race of programs")
def head_moves_while_other_programs_read_it():
    launch(0, "moves head")


@cases.bug("race of programs")
def tail_is_loaded_and_stored_by_all_programs():
    launch_queue(atomic=False)


@cases.clean("just below overflow")
def position_of_a_late_step_just_fits():
    return launch(42_949_671, "steps", n=50, capacity=100)


@cases.clean("wide index")
def position_of_a_late_step_in_64_bits():
    return launch(50_000_000, "wide", n=50, capacity=100)


@cases.clean("atomics")
def programs_take_their_slots_atomically():
    return launch_queue(atomic=True)


@cases.clean("wrapped indices")
def last_values_lie_on_both_sides_of_the_end():
    ring, head, out = torch.randn(64), torch.tensor([20], dtype=torch.int32), torch.empty(50)
    last_values[(1,)](ring, head, out, 50, 64, BLOCK=64)
    return out, torch.cat([ring, ring])[20 + 64 - 50 : 20 + 64]
