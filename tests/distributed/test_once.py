"""Pictures are decoded once on each host."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from minidl.runtime import launch
from minidl.training.tasks import TASKS
from tests.distributed.test_elastic import children

pytestmark = pytest.mark.skipif(not launch.INTERPRETED, reason="processes on one GPU are for gloo")

# The first process decodes for longer than processes wait for each other; the second may not.
LOADS = """
from pathlib import Path
from minidl.data import pictures
from minidl.training.tasks import TASKS
read = pictures._read
def decode(*given, **more):
    assert here.rank == 0
    time.sleep(3)
    return read(*given, **more)
pictures._read = decode
task = TASKS["images"]
dataset = task.load(task.settings(data={folder!r}, out=Path("unused")))
print(next(task.fingerprints(dataset)), file=sys.stderr)
"""


@pytest.fixture
def folder(tmp_path):
    draw = np.random.default_rng(0)
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(12):
            pixels = draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / label / f"{i}.png")
    return tmp_path


def test_one_process_of_a_host_decodes(folder):
    task = TASKS["images"]
    expected = next(task.fingerprints(task.load(task.settings(data=str(folder), out=Path("unused")))))
    codes, said = children(LOADS.format(folder=str(folder)), 2)
    assert codes == [0, 0], said
    assert said.split() == [expected] * 2


def test_a_picture_that_cannot_be_read_is_one_error(folder):
    (folder / "b" / "3.png").write_bytes(b"no picture")
    codes, said = children(LOADS.format(folder=str(folder)), 30)
    assert codes == [2, 2], said
    assert said.startswith("error: ")
    assert "b/3.png" in said
    assert said.count("\n") == 1, said
