"""`minidl sanitize`: a script runs as Python runs it, and what its kernels do wrong is told."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from minidl.testing.fake_gpu import pretended_gpu

FOR_A_GPU = Path(__file__).parents[1] / "testing/for_a_gpu"
KERNEL = """
import sys
import torch, triton, triton.language as tl

@triton.jit
def copies(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)

if __name__ == "__main__":
    n = int(sys.argv[1])
    copies[(2,)](torch.ones(10), torch.empty(10), n, BLOCK=8)
    print("copied", n, *sys.argv[2:])
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "own.py").write_text("WORD = 'own'")
    (tmp_path / "my_kernel.py").write_text(KERNEL)
    return tmp_path / "my_kernel.py"


def test_a_right_script_is_left_alone(minidl, script):
    done = minidl("sanitize", script, 10, "--first", "-m")
    assert (done.code, done.out) == (0, "copied 10 --first -m\n")
    assert done.err == "no bugs in 1 launch of 1 kernel\n"


def test_bugs_are_told_with_their_line(minidl, script, tmp_path):
    done = minidl("sanitize", "--json", tmp_path / "found.json", script, 12)
    assert (done.code, done.out) == (1, "copied 12\n")
    assert done.err.count("(2 accesses in 1 program)") == 2
    assert f"1. out-of-bounds read in copies, program (1, 0, 0), {script}:8\n" in done.err
    assert done.err.endswith("2 bugs in 1 launch of 1 kernel\n")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["launches"] == {"copies": 1}
    assert [(f["kind"], f["line"], f["tensor"], f["accesses"]) for f in found["findings"]] == [
        ("out-of-bounds read", 8, "x", 2),
        ("out-of-bounds write", 8, "out", 2),
    ]


def test_the_first_bug_ends_the_script_and_modules_run_too(minidl, script):
    done = minidl("sanitize", "--first", "-m", "my_kernel", 12, folder=script.parent)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("1 bug in 1 launch of 1 kernel\n")


def test_a_script_that_changes_folder(minidl, script):
    (script.parent / "other").mkdir()
    script.write_text("import os; os.chdir('other')\n" + KERNEL)
    done = minidl("sanitize", "--json", "found.json", script.name, 12, folder=script.parent)
    assert (done.code, done.out) == (1, "copied 12\n")
    assert "tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)" in done.err
    assert len(json.loads((script.parent / "found.json").read_text())["findings"]) == 2


def test_threads_are_waited_for(minidl, script):
    (script.parent / "threads.py").write_text(
        "import threading, time, torch\nfrom my_kernel import copies\n"
        "def late():\n    time.sleep(0.5)\n    copies[(2,)](torch.ones(10), torch.empty(10), 10, BLOCK=8)\n"
        "threading.Thread(target=late).start()\n"
    )
    done = minidl("sanitize", script.parent / "threads.py")
    assert (done.code, done.err) == (0, "no bugs in 1 launch of 1 kernel\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a GPU")
@pytest.mark.parametrize(
    ("name", "out", "launches"), [("vector_add.py", "added cuda:0\n", 2), ("in_place.py", "done\n", 14)]
)
def test_scripts_for_a_gpu_run_without_one(minidl, name, out, launches):
    done = minidl("sanitize", FOR_A_GPU / name)
    assert (done.code, done.out, done.err) == (0, out, f"no bugs in {launches} launches of 1 kernel\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a GPU")
def test_bugs_in_tensors_of_a_gpu_are_told(minidl, script):
    script.write_text(KERNEL.replace("torch.empty(10)", 'torch.empty(10, device="cuda")'))
    done = minidl("sanitize", script, 12)
    assert (done.code, done.out) == (1, "copied 12\n")
    assert "1 past the end of out (float32 tensor of shape [10])" in done.err
    script.write_text(KERNEL.replace("torch.ones(10)", 'torch.empty(10, device=torch.device("cuda"))'))
    done = minidl("sanitize", script, 10)
    assert "1. read of unwritten memory in copies, program (0, 0, 0)" in done.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a GPU")
def test_what_stands_for_a_gpu_ends_with_the_script():
    answers, apply = dict(vars(torch.cuda)), BackwardCFunction.apply
    with pretended_gpu():
        torch.set_default_device("cuda")
        assert torch.cuda.is_available()
        assert torch.zeros(1).is_cuda
    assert vars(torch.cuda) == answers
    assert BackwardCFunction.apply is apply
    assert not torch.zeros(1).is_cuda
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")


def test_what_was_found_before_an_interrupt_is_told(minidl, script):
    script.write_text(KERNEL + "    raise KeyboardInterrupt\n")
    done = minidl("sanitize", script, 12)
    assert (done.code, done.out) == (130, "copied 12\n")
    assert done.err.startswith("interrupted\n1. out-of-bounds read in copies")
    assert done.err.endswith("\n2 bugs in 1 launch of 1 kernel before the script was interrupted\n")


def test_a_script_that_fails_is_not_called_free_of_bugs(minidl, script):
    script.write_text(KERNEL.replace("    tl.store(", "    tl.foo(i)\n    tl.store("))
    done = minidl("sanitize", script, 10)
    assert (done.code, done.out) == (1, "")
    assert done.err.endswith("\nno bugs in 1 launch of 1 kernel before the script failed (exit code 1)\n")


def test_a_module_whose_package_has_kernels_is_found_and_interpreted(script):
    package = script.parent / "package"
    package.mkdir()
    (package / "__init__.py").write_text(KERNEL)
    (package / "work.py").write_text(
        "import torch\nfrom . import copies\ncopies[(2,)](torch.ones(10), torch.empty(10), 10, BLOCK=8)\n"
    )
    # As the installed command does, which has not the current folder on its path.
    start = "import sys; sys.path.remove(''); from minidl.cli import main; main()"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", start, "sanitize", "-m", "package.work"],
        cwd=script.parent, env=env | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "no bugs in 1 launch of 1 kernel\n")


@pytest.mark.parametrize(
    ("source", "code", "out", "err"),
    [
        ("print('done')", 1, "done\n", "nothing was checked: no Triton kernel was launched\n"),
        ("from own import WORD\nimport sys\nprint(WORD)\nsys.exit(7)", 7, "own\n", "script failed (exit code 7)"),
        ("raise SystemExit('no luck')", 1, "", "no luck\n"),
        ("def f():\n    raise ValueError('mine')\nf()", 1, "", "ValueError: mine\n"),
        ("1 +", 1, "", "SyntaxError: invalid syntax\n"),
    ],
    ids=["no kernel", "exit", "exit with a text", "exception", "syntax"],
)
def test_the_script_ends_as_it_would(minidl, script, source, code, out, err):
    script.write_text(textwrap.dedent(source))
    done = minidl("sanitize", script)
    assert (done.code, done.out) == (code, out)
    assert err in done.err
    assert "runpy" not in done.err
    assert "sanitizer" not in done.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.py",), "missing.py is not a file; expected a Python script, or -m and the name of a module"),
        (("-m", "no.such.module"), "there is no module 'no.such.module'; -m takes the name of a module"),
        (("--json", "/no/folder/found.json", __file__), "--json"),
    ],
)
def test_bad_usage(command, arguments, message):
    done = command("sanitize", *arguments)
    assert (done.code, done.out) == (2, "")
    assert message in done.err
