"""The files of what commands usually launch have it, with each version of Triton."""

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
from minidl.tools.doctor import usual as made
lacking = {}
for command in made.warm.NAMES:
    found, known = [*made.found(90, command)], [*command_kernels.jobs(command, 90)]
    # Triton 3.10 changes its default.
    assert all("enable_fp_fusion" in job.options for job in (*found, *known)), command
    found, known = ({job.key for job in jobs} for jobs in (found, known))
    lacking[command] = [len(found - known), len(found)]
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
