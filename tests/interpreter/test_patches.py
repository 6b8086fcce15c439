"""The interpreter's short ways give what its own give."""

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from minidl.interpreter import memory, operators, patches
from minidl.runtime import launch
from tests.kernels import operands

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled here, nothing is interpreted")


def test_operators_give_the_same_bits_types_and_errors_as_the_interpreters_own():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "tests.kernels.operands"]
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    expected, found = json.loads(done.stdout), dict(operands.outcomes())
    assert len(found) == len(expected) > 10_000
    assert {label: (outcome, expected[label]) for label, outcome in found.items() if outcome != expected[label]} == {}
    errors = sum(isinstance(outcome, str) for outcome in found.values())
    assert 0 < errors < len(found) / 2


def test_the_language_is_saved_while_another_thread_imports(monkeypatch):
    monkeypatch.setattr(patches, "_language", [])
    monkeypatch.setattr(tl.block_type, "__new__", tl.block_type.__new__)  # `_save_language` replaces it
    stopped = threading.Event()

    def import_modules():
        while not stopped.is_set():
            for number in range(100):
                sys.modules[f"imported_{number}"] = types.ModuleType("imported")
            for number in range(100):
                del sys.modules[f"imported_{number}"]

    importing = threading.Thread(target=import_modules)
    importing.start()
    try:
        for _ in range(300):
            patches._save_language()
    finally:
        stopped.set()
        importing.join()


def test_types_of_blocks_are_one_object_for_each_shape_and_element():
    one = tl.block_type(tl.float32, [4, 2])
    assert tl.block_type(tl.float32, tl.tuple([tl.constexpr(4), 2])) is one
    assert tl.block_type(tl.float32, [2, 4]) is not one
    assert tl.block_type(tl.float64, [4, 2]) is not one
    pointers = tl.block_type(tl.pointer_type(tl.float32), [4, 2])
    assert tl.block_type(tl.pointer_type(tl.float32), [4, 2]) is pointers
    assert tl.block_type(tl.pointer_type(tl.float32, const=True), [4, 2]) is not pointers
    with pytest.raises(ValueError, match="power of 2"):
        tl.block_type(tl.float32, [3])


def test_the_cache_of_numbers_is_limited(monkeypatch):
    monkeypatch.setattr(operators, "MAX_CONSTANTS", 8)
    operators._constants.clear()
    block = tl.arange(0, 4)
    for number in range(20):
        assert (block + number).handle.data.tolist() == [number, number + 1, number + 2, number + 3]
    assert len(operators._constants) <= 8


@triton.jit
def moving_kernel(
    p_x, p_offset, p_mask, p_other, p_y, p_first, p_z,
    A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """y = x at the offsets, `other` where masked out (in `first` the first of each B); z at the offsets = other."""
    o_first = tl.arange(0, A)[:, None, None] * (B * C) + tl.arange(0, C)[None, None, :]
    o_lane = o_first + tl.arange(0, B)[None, :, None] * C
    b_offset = tl.load(p_offset + o_lane)
    b_other = tl.load(p_other + o_lane)
    if MASKED:
        m = tl.load(p_mask + o_lane) != 0
        b_x = tl.load(p_x + b_offset, mask=m, other=b_other)
        tl.store(p_first + o_lane, tl.load(p_x + b_offset, mask=m, other=tl.load(p_other + o_first)))
        tl.store(p_z + b_offset, b_other, mask=m)
    else:
        b_x = tl.load(p_x + b_offset)
        tl.store(p_z + b_offset, b_other)
    tl.store(p_y + o_lane, b_x)


def offsets_of(kind, shape, random):
    """Offsets [A, B, C] that are sums of rows and columns, or nearly, or not at all."""
    rows, columns = shape[0] * shape[1], shape[2]
    step = {"apart": 3, "back": -1, "one place": 0}.get(kind, 1)
    along = 400 + step * np.arange(columns)
    found = random.permutation(rows)[:, None] * columns * 3 + along[None, :]
    if kind == "scattered":
        found = random.integers(0, found.max() + 1, found.shape)
    elif kind.startswith("but for"):
        place = {"first": (0, 0), "last": (-1, -1), "middle": (rows // 2, columns // 2)}[kind.split()[-1]]
        found[place] += 1
    elif kind == "rows twice":
        found[rows // 2 :] = found[: rows - rows // 2]
    return found.reshape(shape)


MASKS = {
    "all": lambda shape, random: np.ones(shape, bool),
    "none": lambda shape, random: np.zeros(shape, bool),
    "rows": lambda shape, random: np.broadcast_to(random.random(shape[:2])[..., None] < 0.5, shape),
    "columns": lambda shape, random: np.broadcast_to(np.arange(shape[2]) % shape[2] > shape[2] // 3, shape),
    "columns apart": lambda shape, random: np.broadcast_to(np.arange(shape[2]) % 2 == 0, shape),
    "any": lambda shape, random: random.random(shape) < 0.7,
    "one": lambda shape, random: np.arange(np.prod(shape)).reshape(shape) == 77,
}


@pytest.mark.unsanitized
@pytest.mark.parametrize("masked", [*MASKS, None])
@pytest.mark.parametrize(
    "kind",
    [
        "side by side", "apart", "back", "one place", "rows twice", "scattered", "but for first", "but for middle",
        "but for last",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 8, 16), (1, 64, 4), (2, 1, 128), (128, 2, 1)], ids=str)
def test_blocks_of_any_addresses(shape, kind, masked):
    random = np.random.default_rng(0)
    offset = offsets_of(kind, shape, random)
    mask = np.ascontiguousarray(MASKS[masked or "all"](shape, random))
    for dtype, integers in ((np.float32, np.int32), (np.float16, np.int64), (np.float64, np.int32)):
        x = random.integers(-99, 99, offset.max() + 1).astype(dtype)
        other = random.integers(100, 200, shape).astype(dtype)
        y, first, z = np.full(shape, 7, dtype), np.full(shape, 7, dtype), np.zeros_like(x)
        tensors = [torch.from_numpy(a) for a in (x, offset.astype(integers), mask.astype(np.int8), other, y, first, z)]
        sizes = dict(zip("ABC", shape, strict=True))
        launch.run(moving_kernel, (1,), *tensors, **sizes, MASKED=masked is not None)
        assert np.array_equal(y, np.where(mask, x[offset], other))
        assert masked is None or np.array_equal(first, np.where(mask, x[offset], other[:, :1]))
        expected = np.zeros_like(x)
        for at, value, active in zip(offset.flat, other.flat, mask.flat, strict=True):
            if active:
                expected[at] = value
        assert np.array_equal(z, expected)


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (np.arange(40, dtype=np.int32)[:, None] * 7, np.arange(5, dtype=np.int32)[None, :] + 3),
        (np.broadcast_to(np.arange(9, dtype=np.int64)[:, None], (9, 16)), np.arange(16, dtype=np.int64)[None, :]),
        (np.array([[2**31 - 9], [5]], dtype=np.int32), np.arange(64, dtype=np.int32)[None, :]),
        (np.array([[-(2**31)], [5]], dtype=np.int32), np.arange(64, dtype=np.int32)[None, :] - 1),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_the_parts_of_a_sum_are_those_of_its_values(rows, columns, turned):
    with np.errstate(over="ignore"):
        data = columns + rows if turned else rows + columns
    before = memory._sum_of_parts(data.copy())
    memory.note_sum(data, *((columns, rows) if turned else (rows, columns)))
    found = memory._sum_of_parts(data)
    assert (found is None) == (before is None)
    if found is not None:
        for part, expected in zip(found, before, strict=True):
            assert part.dtype == expected.dtype
            assert part.tolist() == expected.tolist()


@triton.jit
def choose_kernel(p_x, p_y, p_out, limit, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_out + o, tl.where(limit > 0.5, tl.load(p_x + o), tl.load(p_y + o)))


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_one_condition_for_a_block_takes_one_side(limit):
    x, y = torch.randn(128), torch.randn(128)
    out = torch.empty(128)
    choose_kernel[(1,)](x, y, out, limit, N=128)
    assert torch.equal(out, x if limit else y)


@triton.jit
def count_kernel(p_place, p_out, p_lock, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.atomic_add(p_out + tl.load(p_place + o), 3, mask=o < N - 1)
    tl.atomic_cas(p_lock + o, tl.zeros((N,), tl.int32), tl.full((N,), 5, tl.int32))


def test_atomic_operations_take_one_number_for_a_block():
    place, out, lock = torch.arange(64) // 8, torch.zeros(8, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    count_kernel[(1,)](place, out, lock, N=64)
    assert out.tolist() == [24] * 7 + [21]
    assert lock.tolist() == [5] * 64
