"""`minidl doctor --compile FILE.py`: a script's launches are compiled as Triton specialises them, its mistakes told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from minidl.runtime import launch
from minidl.tools.doctor import doctor_files

ROOT = Path(__file__).parents[3]
PLANTED = Path(__file__).parent / "scripts_planted.py"
KERNEL = """
import torch, triton, triton.language as tl

@triton.jit
def copies(x, out, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + i, mask=i < n, other=0.0), mask=i < n)

def launch(n, **options):
    copies[(1,)](torch.ones(64), torch.empty(64), n, BLOCK=64, **options)
"""


def doctor(folder, *arguments):
    """The command on scripts, in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    environment |= {"TRITON_DEFAULT_FP_FUSION": "1"}  # Triton 3.9 warns where nothing says so
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "minidl", "doctor", "--compile", *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The report of the planted kernels: rows by kernel, GPU and tile, and what was printed."""
    path = tmp_path_factory.mktemp("planted") / "report.json"
    done = doctor(path.parent, PLANTED, "--arch", "sm_80,86,gfx942", "--json", path)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    report = json.loads(path.read_text())
    assert not report["fine"]
    assert report["failures"] == {}
    return report["rows"], done.stdout


def rows_of(planted, kernel, arch=80):
    return [row for row in planted[0] if (row["kernel"], row["arch"]) == (kernel, arch)]


def test_a_plain_kernel_is_specialised_for_sizes_of_16_and_others(planted):
    for arch in (80, 86, "gfx942"):
        (row,) = rows_of(planted, "add", arch)
        assert (row["launches"], row["problems"], row["dtype"]) == (2, [], "float32")
        assert row["registers"] > 0 == row["spill"] == row["shared"]
        assert row["loads"] > 0


def test_a_product_has_matrix_instructions_wide_loads_and_the_memory_that_a_gpu_may_lack(planted):
    (ampere,), (small,), (amd,) = (rows_of(planted, "product", arch) for arch in (80, 86, "gfx942"))
    assert ampere["problems"] == []
    assert small["problems"] == ["needs 131072 bytes of shared memory, the limit is 101376"]
    assert amd["problems"] == ["needs 131072 bytes of shared memory, the limit is 65536"]
    assert ampere["mma"] > 0 == ampere["mfma"]
    assert amd["mfma"] > 0 == amd["mma"]
    assert all(row["wide"] == row["loads"] > 0 for row in (ampere, small, amd))
    assert "131072/166912" in planted[1]


def test_every_configuration_of_an_autotuned_kernel_is_compiled_with_its_heuristics(planted):
    tiles = [row["tile"] for row in rows_of(planted, "doubled", "gfx942")]
    assert tiles == [
        f"EVEN=False 64 warps={w} stages=3".replace("64", f"BLOCK={b}") for b, w in ((128, 2), (256, 4), (64, 1))
    ]


def test_what_does_not_compile_is_told_in_one_line(planted):
    (row,) = rows_of(planted, "narrow")
    (told,) = row["problems"]
    assert told.startswith("CompilationError: Input shapes should have M >= 1, N >= 1 and K >= 16 at `tl.store(c +")
    assert f"wrong narrow [warps=4 stages=3] float16 - sm_80: {told}\n" in planted[1]
    (amd,) = rows_of(planted, "narrow", "gfx942")
    assert amd["problems"] == ["no matrix instructions"]


def test_functions_of_functions_and_methods_of_tensors_are_compiled(planted):
    for kernel in ("total", "called", "apply", "apply 2 (scripts_planted.py:57)"):
        (row,) = rows_of(planted, kernel)
        assert (row["launches"], row["problems"]) == (1, []), row


def test_files_that_fail_or_launch_nothing_are_told_and_what_was_launched_counts(tmp_path):
    (tmp_path / "empty.py").write_text("print('hello')")
    (tmp_path / "own.py").write_text(KERNEL)
    (tmp_path / "fails.py").write_text("from own import launch\nlaunch(16)\nlaunch(7, waves_per_eu=2)\n1 / 0\n")
    done = doctor(tmp_path, "empty.py", "fails.py", "--arch", "90,gfx1201")
    assert done.returncode == 1
    assert 'fails.py", line 4, in <module>' in done.stderr
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    assert done.stdout.startswith("hello\n")
    assert "failed empty.py: launched no Triton kernel of its own\n" in done.stdout
    assert "failed fails.py: ended with exit code 1, after 2 launches\n" in done.stdout
    assert "failed copies for sm_90: KeyError: 'Keyword argument waves_per_eu was specified but unr" in done.stdout
    assert "3 launches of 1 kernel compiled" in done.stdout
    assert done.stdout.endswith(" s: 1 wrong, 2 scripts failed\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda is a GPU")
def test_scripts_for_a_gpu_run_without_one(tmp_path):
    scripts = (ROOT / "tests/testing/for_a_gpu" / name for name in ("vector_add.py", "in_place.py"))
    done = doctor(tmp_path, *scripts, "--arch", "90")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("added cuda:0\ndone\n")
    assert " of 2 kernels compiled with Triton" in done.stdout
    assert done.stdout.endswith(" s: no problem\n")


@pytest.mark.skipif(not launch.INTERPRETED, reason="scripts run in this process, with their kernels interpreted")
def test_scripts_with_nothing_to_compile(tmp_path, capsys):
    (tmp_path / "test_none.py").write_text("")
    assert doctor_files([str(tmp_path / "test_none.py")]) == 1
    told = "test_none.py launched no Triton kernel of its own; tests run by: minidl doctor --compile -m pytest "
    assert told in capsys.readouterr().out
    (tmp_path / "own.py").write_text(KERNEL + "launch(16)")
    with pytest.raises(ValueError, match="no kernel has 'zzz' in its name; launched were: copies"):
        doctor_files([str(tmp_path / "own.py")], only="zzz")
    (tmp_path / "minidls.py").write_text("import minidl\nminidl.randn(3)")
    assert doctor_files([str(tmp_path / "minidls.py")]) == 1
    assert "minidls.py launched no Triton kernel of its own\n" in capsys.readouterr().out


def test_tests_run_by_pytest(tmp_path):
    (tmp_path / "test_own.py").write_text(KERNEL + "def test_it():\n    launch(16)\n")
    done = doctor(tmp_path, "--arch", "90", "-m", "pytest", "test_own.py")
    assert (done.returncode, done.stderr) == (0, "")
    assert "1 launch of 1 kernel compiled with Triton" in done.stdout
    assert done.stdout.endswith(": no problem\n")
