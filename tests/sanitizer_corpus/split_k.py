import torch
import triton
import triton.language as tl

from tests.sanitizer_corpus.case import Cases

cases = Cases()


@triton.jit
def split_k(a, b, c, lock, M, N, K, SPLITS: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr):
    m = tl.program_id(0) * B + tl.arange(0, B)
    n = tl.program_id(1) * B + tl.arange(0, B)
    split = tl.program_id(2)
    acc = tl.zeros((B, B), tl.float32)
    for start in range(split * B, K, SPLITS * B):
        k = start + tl.arange(0, B)
        b_a = tl.load(a + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b_b = tl.load(b + k[:, None] * N + n[None, :], mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
    p_c = c + m[:, None] * N + n[None, :]
    inside = (m[:, None] < M) & (n[None, :] < N)
    if FORM == "atomic":
        tl.atomic_add(p_c, acc, mask=inside)
    elif FORM == "block scope":
        tl.atomic_add(p_c, acc, mask=inside, scope="cta")
    elif FORM == "partials":
        tl.store(p_c + split * M * N, acc, mask=inside)
    elif FORM == "first stores":
        if split == 0:
            tl.store(p_c, acc, mask=inside)
        else:
            tl.atomic_add(p_c, acc, mask=inside)
    elif FORM == "turns" or FORM == "stored turns":
        p_lock = lock + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
        while tl.atomic_add(p_lock, 0) != split:
            pass
        if split > 0:
            acc += tl.load(p_c, mask=inside, other=0.0)
        tl.store(p_c, acc, mask=inside)
        tl.debug_barrier()
        if FORM == "turns":
            tl.atomic_add(p_lock, 1)
        else:
            tl.store(p_lock, split + 1)


@triton.jit
def add_splits(parts, c, n, SPLITS: tl.constexpr, B: tl.constexpr):
    i = tl.program_id(0) * B + tl.arange(0, B)
    total = tl.zeros((B,), tl.float32)
    for s in range(SPLITS):
        total += tl.load(parts + s * n + i, mask=i < n, other=0.0)
    tl.store(c + i, total, mask=i < n)


def launch(c, form, splits=3, told=3):
    a, b, lock = torch.randn(20, 90), torch.randn(90, 20), torch.zeros(4, dtype=torch.int32)
    split_k[(2, 2, splits)](a, b, c, lock, 20, 20, 90, SPLITS=told, B=16, FORM=form)
    return a @ b


@cases.bug("atomics")
def turn_is_passed_on_by_a_plain_store():
    launch(torch.empty(20, 20), "stored turns")


@cases.bug("atomics")
def sum_across_programs_with_the_scope_of_one_block():
    launch(torch.zeros(20, 20), "block scope")


@cases.bug("race of programs")
def first_split_stores_while_others_add():
    launch(torch.zeros(20, 20), "first stores")


@cases.bug("grid")
def fewer_splits_launched_than_are_added():
    parts, c = torch.empty(4, 20, 20), torch.empty(20, 20)
    launch(parts, "partials", splits=3, told=4)
    add_splits[(4,)](parts, c, 400, SPLITS=4, B=128)


@cases.clean("atomics")
def atomic_sum_of_all_splits():
    c = torch.zeros(20, 20)
    want = launch(c, "atomic")
    return c, want


@cases.clean("fresh memory")
def every_split_has_its_own_partial():
    parts, c = torch.empty(3, 20, 20), torch.empty(20, 20)
    want = launch(parts, "partials")
    add_splits[(4,)](parts, c, 400, SPLITS=3, B=128)
    return c, want


@cases.clean("lock")
def splits_add_in_turn():
    c = torch.empty(20, 20)
    want = launch(c, "turns")
    return c, want


@cases.clean("one split")
def first_split_stores_and_there_is_no_other():
    c = torch.empty(20, 20)
    want = launch(c, "first stores", splits=1, told=1)
    return c, want
