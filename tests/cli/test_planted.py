"""Files of the current folder that have the names of modules: no process that a command starts imports them."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from minidl.runtime import launch
from tests.cli.conftest import ROOT, environment
from tests.cli.test_generate import model  # noqa: F401 (a fixture)

NAMES = "json", "numpy", "minidl", "torch", "typing", "runpy", "subprocess", "PIL", "matplotlib"


@pytest.fixture
def planted(tmp_path):
    """A folder whose files say that they were imported."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write('{name}\\n')\n")
    for kind in ("a", "b"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        for i in range(20):
            pixels = np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pictures" / kind / f"{i}.png")
    return tmp_path


def ran(folder, *arguments):
    """As the console script runs the command: nothing of the current folder is imported by itself."""
    line = [sys.executable, "-P", "-m", "minidl", *map(str, arguments)]
    done = subprocess.run(line, cwd=folder, env=environment(), capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not (folder / "imported").exists(), (folder / "imported").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo")
def test_several_processes_train(planted):
    flags = "--epochs", 1, "--batch-size", 64, "--no-plots", "--quiet"
    ran(planted, "train", "table", "--data", "diabetes", "--devices", 2, "--out", "run", *flags)


@pytest.mark.slow
def test_several_processes_make_pictures(planted, model):  # noqa: F811
    flags = "--count", 4, "--quiet", "--out", "out", "--device", "cpu"
    ran(planted, "generate", "--model", model, "--devices", 2, *flags)


@pytest.mark.slow
def test_workers_read_pictures_and_draw(planted):
    flags = "--epochs", 1, "--workers", 4, "--quiet", "--device", "cpu"
    ran(planted, "train", "images", "--data", "pictures", "--out", "run", *flags)


@pytest.mark.parametrize("command", ["predict", "evaluate"])
def test_several_processes_answer(planted, text_run, texts, command):
    what = "--file" if command == "predict" else "--data"
    ran(planted, command, text_run[0], what, texts, "--devices", 2, "--device", "cpu")


@pytest.mark.slow
def test_kernels_are_compiled(planted):
    ran(planted, "doctor", "--compile", "--only", "digit_places", "--arch", "90")


def test_no_other_place_starts_python():
    """All others that start Python isolate it, or name the folder that it imports from; `sanitize` starts the user's
    script as Python does."""
    lines = [line for path in (ROOT / "minidl").rglob("*.py") for line in path.read_text().splitlines()]
    starts = [line for line in lines if re.search(r"sys\.executable|\[self\.python|import multiprocessing", line)]
    assert len(starts) == 8
    assert all(re.search(r'"-[IP]"|python: str = |\*flags, ', line) for line in starts), starts
