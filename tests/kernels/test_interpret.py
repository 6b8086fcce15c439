"""The interpreter's short ways give what its own give."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton.language as tl

from minidl.kernels import interpret_operators, launch
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


def test_numbers_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(interpret_operators, "MOST", 8)
    interpret_operators._constants.clear()
    block = tl.arange(0, 4)
    for number in range(20):
        assert (block + number).handle.data.tolist() == [number, number + 1, number + 2, number + 3]
    assert len(interpret_operators._constants) <= 8
