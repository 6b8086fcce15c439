"""`minidl.testing.compiled`: kernels of others, compiled for the CPU."""

import signal
import subprocess
import sys

import pytest

from minidl.cpu import build
from minidl.testing import compiled

SCRIPT = """
import torch, triton, triton.language as tl
from minidl.testing import compiled

@triton.jit
def add_kernel(p_x, p_y, p_out, n, BLOCK: tl.constexpr, alpha=1.0):
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    tl.store(p_out + o, tl.load(p_x + o, mask=m) + alpha * tl.load(p_y + o, mask=m), mask=m)

@triton.jit
def count_kernel(p_x, p_out):
    tl.atomic_add(p_out, tl.load(p_x))

x, y, out = torch.randn(1000), torch.randn(1000), torch.full((1001,), 7.0)
compiled(add_kernel)[lambda meta: (triton.cdiv(meta["n"], meta["BLOCK"]),)](x, y, out, 1000, BLOCK=128, num_warps=8)
assert torch.equal(out[:1000], x + y) and out[1000] == 7
compiled(add_kernel)[(8,)](x, p_y=y, p_out=out, n=1000, BLOCK=128, alpha=-1.0)
assert torch.equal(out[:1000], x - y)
# In place, and without programs.
compiled(add_kernel)[(8, 1, 1)](x, y, x, 1000, BLOCK=128, alpha=2.0)
for launch in (
    lambda: compiled(count_kernel)[(1,)](x, out),
    lambda: compiled(print),
    lambda: compiled(add_kernel)[(1,)](x, y),
    lambda: compiled(add_kernel)[(1,)](x, y, out.to("meta"), 3, BLOCK=4),
):
    try:
        launch()
        print("nothing raised")
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in a process that compiles for the CPU."""
    if build.compiler() is None:
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("MINIDL_CPU", "compiled")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    script = tmp_path / "script.py"

    def run(text):
        script.write_text(text)
        return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)

    return run


def test_a_kernel_of_its_own(run):
    done = run(SCRIPT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("NotImplementedError ")
    assert lines[0].endswith("script.py:13: tt.atomic_rmw is not supported on the CPU")
    assert lines[1].startswith("TypeError testing.compiled: got a builtin_function_or_method, expected a function")
    assert lines[2] == "TypeError missing a required argument: 'p_out'"
    assert lines[3] == "ValueError testing.compiled: p_out is on meta, expected a tensor on the CPU"


def test_an_interpreting_process_says_what_to_set():
    with pytest.raises(RuntimeError, match="this process interprets kernels: set MINIDL_CPU=compiled"):
        compiled(print)


IN_PLACE = """
import torch, triton, triton.language as tl
from minidl.testing import compiled

@triton.jit
def shift_kernel(p_from, p_to, n, LOOP: tl.constexpr):
    o = tl.arange(0, 8)
    p_source, p_target = p_from + o, p_to + o
    if LOOP:
        for _ in range(0, n):
            tl.store(p_target, tl.load(p_source) * 2)
    else:
        tl.store(p_target, tl.load(p_source) * 2)

@triton.jit
def repeat_kernel(p_x, DIVISOR: tl.constexpr):
    p = p_x + tl.arange(0, 8) // DIVISOR
    tl.store(p, tl.load(p) + 1)

x = torch.arange(16.0)
expected = x.clone()
expected[1:9] = 2 * x[:8]
for loop in (False, True):
    y = x.clone()
    compiled(shift_kernel)[(1,)](y, y[1:], 1, LOOP=loop)
    assert torch.equal(y, expected), (loop, y)
for divisor in (1, 2, 8):
    y = torch.arange(16.0)
    compiled(repeat_kernel)[(1,)](y, DIVISOR=divisor)
    assert torch.equal(y[: 8 // divisor], x[: 8 // divisor] + 1), (divisor, y)
y = x.clone()
compiled(shift_kernel)[(0,)](y, y[1:], 1, LOOP=False)
assert torch.equal(y, x)
"""

SENT = """
import os, signal
import torch, triton, triton.language as tl
from minidl.testing import compiled

@triton.jit
def fill_kernel(p_x):
    tl.store(p_x + tl.arange(0, 4), 1.0)

compiled(fill_kernel)[(1,)](torch.zeros(4))
os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(("text", "code"), [(IN_PLACE, 0), (SENT, -signal.SIGSEGV)], ids=["in place", "signal"])
def test_overlaps_empty_grids_and_signals_of_others(text, code, run):
    done = run(text)
    assert done.returncode == code, done.stderr
    assert "minidl:" not in done.stderr


CRASH = """
import torch, triton, triton.language as tl
from minidl.testing import compiled

@triton.jit
def wild_kernel(p_x, n):
    tl.store(p_x + n * tl.program_id(0), 1.0)

compiled(wild_kernel)[(4,)](torch.zeros(4), 2**40)
"""


def test_a_crash_names_the_kernel(run, tmp_path):
    done = run(CRASH)
    assert done.returncode == -signal.SIGSEGV
    assert (
        f"minidl: wild_kernel ({tmp_path / 'script.py'}:5) read or wrote outside of its tensors (signal 11)"
        in done.stderr
    )
