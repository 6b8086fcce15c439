"""Kernels with one bug each, and right ones that look like them."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + i, mask=i < n, other=0.0) + tl.load(y + i, mask=i < n, other=0.0)
    tl.store(out + i, total, mask=i < n)


@triton.jit
def reads_one_too_many(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i <= n, other=0.0)  # BUG
    tl.store(out + i, value, mask=i < n)


@triton.jit
def reads_before(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = tl.load(x + i - 1, mask=i < n, other=0.0)  # BUG
    tl.store(out + i, before, mask=i < n)


@triton.jit
def writes_one_too_many(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n, other=0.0)
    tl.store(out + i, value, mask=i <= n)  # BUG


@triton.jit
def sums_without_other(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(x + i, mask=i < n))
    tl.store(out, total)  # BUG


@triton.jit
def keeps_masked_lanes(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, value * 2, mask=i < n)
    tl.store(out + n, tl.sum(tl.where(i < n, value, 0)))


@triton.jit
def all_write_the_first(x, out, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out, tl.sum(tl.load(x + i)))  # BUG


@triton.jit
def second_writes_a_byte_of_a_word(out):
    if tl.program_id(0) == 0:
        tl.store(out + 1, 7)
    else:
        tl.store(out.to(tl.pointer_type(tl.int8)) + 6, 1)  # BUG


@triton.jit
def others_read_what_the_first_wrote(x, out):
    me = tl.program_id(0)
    if me == 0:
        tl.store(out, tl.load(x))
    else:
        tl.store(out + me, tl.load(out))  # BUG


@triton.jit
def first_reads_what_others_write(x, out):
    me = tl.program_id(0)
    if me == 0:
        tl.store(x, tl.load(out + 1))
    else:
        tl.store(out + me, 1.0)  # BUG


@triton.jit
def lanes_meet(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i // 2, i)  # BUG


@triton.jit
def lanes_agree(out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i // 2, i // 2)


@triton.jit
def doubles_in_place_as_a_matrix(x, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    row = tl.load(x + tl.arange(0, SIZE * SIZE))
    tl.store(x + i[:, None] * SIZE + i[None, :], tl.reshape(row, [SIZE, SIZE]) * 2)


@triton.jit
def reads_back_as_a_row(x, out, SIZE: tl.constexpr):
    i, row = tl.arange(0, SIZE), tl.arange(0, SIZE * SIZE)
    tl.store(x + i[:, None] * SIZE + i[None, :], 1.0)
    tl.store(out + row, tl.load(x + row))  # BUG


@triton.jit
def counts_then_reads(bins, counts, out, SIZE: tl.constexpr, BINS: tl.constexpr, BARRIER: tl.constexpr):
    j = tl.arange(0, BINS)
    tl.atomic_add(counts + tl.load(bins + tl.arange(0, SIZE)), 1)
    if BARRIER:
        tl.debug_barrier()
    tl.store(out + j, tl.load(counts + j))  # BUG


@triton.jit
def clears_then_counts(bins, counts, SIZE: tl.constexpr, BINS: tl.constexpr):
    tl.store(counts + tl.arange(0, BINS), 0)
    tl.atomic_add(counts + tl.load(bins + tl.arange(0, SIZE)), 1)  # BUG


@triton.jit
def copies(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0), mask=i < n)


@triton.jit
def copies_rows(x, out, rows, columns, stride, BLOCK: tl.constexpr):
    r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    value = tl.load(x + r[:, None] * stride + c[None, :], mask=inside, other=0.0)
    tl.store(out + r[:, None] * columns + c[None, :], value, mask=inside)


@triton.jit
def reads_by_halves(x, out):
    words = x.to(tl.pointer_type(tl.int8)) + 1
    tl.store(out, tl.load(words.to(tl.pointer_type(tl.int32))))  # BUG


@triton.jit
def follows(table, out, at):
    there = tl.load(table).to(tl.pointer_type(tl.float32))
    tl.store(out, tl.load(there + at))  # BUG


@triton.jit
def last_adds_all(x, parts, count, out, SIZE: tl.constexpr):
    me = tl.program_id(0)
    tl.store(parts + me, tl.load(x + me))
    if tl.atomic_add(count, 1) == SIZE - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, SIZE))))


@triton.jit
def last_adds_all_relaxed(x, parts, count, out, SIZE: tl.constexpr):
    me = tl.program_id(0)
    tl.store(parts + me, tl.load(x + me))
    if tl.atomic_add(count, 1, sem="relaxed") == SIZE - 1:
        tl.store(out, tl.sum(tl.load(parts + tl.arange(0, SIZE))))  # BUG


@triton.jit
def counts_beyond(count, n):
    tl.atomic_add(count + n, 1)  # BUG


@triton.jit
def doubled(x):
    return tl.load(x) * 2  # BUG


@triton.jit
def calls(x, out):
    tl.store(out, doubled(x + 5))


@triton.jit
def reads_boxes(x, out, rows, columns, BLOCK: tl.constexpr):
    box = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    value = box.load([0, 0])  # BUG
    r, c = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    inside = (r[:, None] < rows) & (c[None, :] < columns)
    tl.store(out + r[:, None] * columns + c[None, :], value, mask=inside)


@triton.jit
def writes_boxes(x, out, rows, columns, BLOCK: tl.constexpr):
    box = tl.make_tensor_descriptor(out, [rows, columns], [columns, 1], [BLOCK, BLOCK])
    box.store([0, 0], tl.full((BLOCK, BLOCK), 1.0, tl.float32) + tl.load(x))  # BUG


@triton.jit
def converts_without_other(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    tl.store(out + i, (-value.to(tl.float32) * 3 + 1).to(out.dtype.element_ty))  # BUG


@triton.jit
def copies_without_other(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n))  # BUG


@triton.jit
def copies_one(x, out, n):
    one = tl.arange(0, 1)
    tl.store(out + one, tl.load(x + one, mask=one < n, other=0))


@triton.jit
def reduces_without_other(x, out, n, how: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if how == "argmax":
        result = tl.argmax(value, 0)
    elif how == "max":
        result = tl.max(value)
    elif how == "min":
        result = tl.min(value)
    else:
        result = tl.sum(value)
    tl.store(out, result)  # BUG


@triton.jit
def adds_without_other(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + i, mask=i < n)))  # BUG


@triton.jit
def computes_without_other(x, out, n, how: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if how == "exp":
        value = tl.exp(value)
    elif how == "log":
        value = tl.log(value)
    elif how == "sin":
        value = tl.sin(value)
    elif how == "sigmoid":
        value = tl.sigmoid(value)
    elif how == "maximum":
        value = tl.maximum(value, 0.0)
    elif how == "clamp":
        value = tl.clamp(value, -1.0, 1.0)
    tl.store(out + i, value)  # BUG


@triton.jit
def multiplies_without_other(x, y, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    whole = i[:, None] * BLOCK + i[None, :]
    left = tl.load(x + whole, mask=i[None, :] < n)
    right = tl.load(y + whole, mask=i[:, None] < n, other=0.0)
    tl.store(out + whole, tl.dot(left, right))  # BUG


@triton.jit
def reads_a_block_without_padding(x, out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    before = tl.load(x + i, mask=i < n, other=0.0)
    block = tl.load(tl.make_block_ptr(x, (n,), (1,), (0,), (BLOCK,), (0,)), boundary_check=(0,))
    tl.store(out + i, block + before)  # BUG


@triton.jit
def first_writes_what_all_add_to(out):
    if tl.program_id(0) == 0:
        tl.store(out, 0.0)
    tl.atomic_add(out, 1.0, sem="relaxed")  # BUG


@triton.jit
def others_read_what_the_first_added(out, into):
    me = tl.program_id(0)
    if me == 0:
        tl.atomic_add(out, 1.0)
    else:
        tl.store(into + me, tl.load(out))  # BUG


@triton.jit
def second_reads_what_all_added(out, into):
    tl.atomic_add(out, 1.0, sem="relaxed")
    if tl.program_id(0) == 1:
        tl.store(into, tl.load(out))  # BUG


@triton.jit
def last_of_a_group_reads_what_the_group_added(x, sums, counts, out, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    me = tl.program_id(0)
    group = me % GROUPS
    tl.atomic_add(sums + group, tl.load(x + me), sem="relaxed")
    if tl.atomic_add(counts + group, 1) == SIZE - 1:
        tl.store(out + group, tl.load(sums + group))


@triton.jit
def all_store_the_same_and_read_their_own(table, out, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(table + i, i)
    tl.store(out + tl.program_id(0) * BLOCK + i, tl.load(table + i))


@triton.jit
def second_meets_only_the_first(x, count, out):
    row, column = tl.program_id(0), tl.program_id(1)
    if row == 0:
        tl.store(out + column, tl.load(x))
    if column == 0:
        tl.atomic_add(count, 1)
        if row == 1:
            tl.store(x, 1.0)  # BUG


@triton.jit
def adds_rows_in_groups(x, sums, locks, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    group = row % GROUPS
    value = tl.load(x + row * BLOCK + i)
    while tl.atomic_cas(locks + group, 0, 1) == 1:
        pass
    if tl.load(locks + GROUPS + group) == 0:
        tl.atomic_xchg(locks + GROUPS + group, 1)
    else:
        value += tl.load(sums + group * BLOCK + i)
    tl.store(sums + group * BLOCK + i, value)
    tl.debug_barrier()
    tl.atomic_xchg(locks + group, 0)


@triton.jit
def writes_addresses(x, y, table):
    tl.store(table, x.to(tl.int64))
    tl.store(table + 1, x.to(tl.int64) - y.to(tl.int64))


@triton.jit
def reads_two_halves(x, out):
    tl.store(out, tl.load(x.to(tl.pointer_type(tl.int16))))  # BUG
