"""What tests of launches share."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def seen():
    """What the pretended device saw, in a process that does not interpret."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.pretended"], capture_output=True, text=True,
        cwd=Path(__file__).parents[2], env={**os.environ, "TRITON_INTERPRET": "0"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
