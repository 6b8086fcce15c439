"""The files of command kernels have the kernels that commands launch, with each version of Triton."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
LACKING = """
import json
from minidl.compilation import command_kernels
from minidl.tools.doctor import usual
lacking = {}
for command in usual.warm.NAMES:
    launched, stored = [*usual.jobs_of(90, command)], [*command_kernels.jobs(command, 90)]
    # Triton 3.10 changes its default.
    assert all("enable_fp_fusion" in job.options for job in (*launched, *stored)), command
    launched, stored = ({job.key for job in jobs} for jobs in (launched, stored))
    lacking[command] = [len(launched - stored), len(launched)]
print(json.dumps(lacking))
"""


@pytest.mark.slow
@pytest.mark.parametrize("version", ["", "3.6.0", "3.9.0"])
def test_the_files_have_what_commands_usually_launch(version):
    python = ROOT / f".venv-triton{version}" / "bin" / "python"
    if version and not python.exists():
        pytest.skip(f"no {python.parents[1].name}; make compile-versions makes it")
    done = subprocess.run(
        [python if version else sys.executable, "-c", LACKING], capture_output=True, text=True, cwd=ROOT, check=True,
        env={**os.environ, "TRITON_INTERPRET": "0"},
    )  # fmt: skip
    lacking = json.loads(done.stdout.splitlines()[-1])
    assert lacking.keys() == {"text", "table", "images", "gan", "generate"}
    # Sizes of docstrings depend on the version of Python.
    assert {name: counts for name, counts in lacking.items() if counts[0] > 0.2 * counts[1]} == {}, (
        "run TRITON_INTERPRET=0 python -m minidl.tools.doctor.usual"
    )
