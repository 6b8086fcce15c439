"""Two processes that write to one folder: one of them does, the other is told who."""

import shutil
import time

import pytest

from minidl.errors import ConfigError
from minidl.training.run_folder import folder_lock
from tests.cli.conftest import SMALL, report, start


def held(folder):
    """Wait until a process writes to a folder."""
    for _ in range(600):
        try:
            folder_lock.check_free(folder)
        except ConfigError:
            return
        time.sleep(0.1)
    pytest.fail("no process has the lock")


@pytest.mark.parametrize("how", [[], ["--overwrite"]])
def test_two_trainings(command, texts, text_run, tmp_path, how):
    folder = tmp_path / "run"
    if how:
        shutil.copytree(text_run[0], folder)
    first = start("train", "text", "--data", texts, "--out", "run", *SMALL, *how, "--epochs", "300", folder=tmp_path)
    try:
        held(folder)
        for more in (["--resume"], ["--overwrite"], []):
            second = command("train", "text", "--data", texts, "--out", folder, *SMALL, *more)
            assert second.code == 2
            assert f"error: {folder} is being written by process {first.pid} on " in second.err
            assert "(minidl train text --data" in second.err
        first.terminate()
        assert "interrupted" in first.communicate(timeout=100)[1]
    finally:
        first.kill()
        first.communicate()
    done = command("train", "text", "--data", texts, "--out", folder, *SMALL, "--overwrite")
    assert done.code == 0, done.err
    assert report(folder)["epochs"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
