"""Triton's cache filled ahead: the kernels of whole commands are among those listed, and are compiled once."""

import os
import re
import subprocess
import sys

import pytest

from minidl.errors import ConfigError
from minidl.runtime import launch
from minidl.tools.doctor import warm
from minidl.training import train
from minidl.training.prediction import predict
from minidl.training.run_folder.train_settings import train_settings
from minidl.training.settings.command import Evaluate
from minidl.training.tasks import TASKS
from tests.compilation.test_rehearsal import launched, rehearsed
from tests.runtime.test_fast_launch import ROOT


def forms(found):
    """Without sizes: the weights of the best epoch are those of training, and batches of other rows have others."""
    return {(name, meta) for name, _, _, meta in found}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return tmp_path_factory.mktemp("warm") / "run"


def test_a_whole_training_and_its_evaluation_launch_nothing_else(run):
    def commands():
        config = train_settings("table", {"data": "diabetes", "out": run, "epochs": 1, "quiet": True, "plots": False})
        train.train("table", config, TASKS["table"].load(config))
        predict.evaluate(Evaluate(run=run))

    (work,) = warm.works("table")
    some = forms(rehearsed(work))
    whole = forms(launched(commands))
    assert len(whole) > 5
    assert whole <= some
    # And a finished run is a name.
    (answers,) = warm.works(str(run))
    found = forms(rehearsed(answers))
    assert found <= some
    assert forms(launched(lambda: predict.evaluate(Evaluate(run=run)))) <= found


@pytest.mark.skipif(not launch.INTERPRETED, reason="kernels are compiled")
def test_what_has_no_kernels_is_refused(tmp_path):
    for name in ("texts", str(tmp_path)):
        with pytest.raises(ConfigError, match="is neither one of text, table, images, gan, generate nor the folder of"):
            next(warm.jobs([name], 90))


@pytest.mark.slow
def test_kernels_are_compiled_once_and_found_by_another_process(tmp_path):
    def command():
        done = subprocess.run(
            [sys.executable, "-m", "minidl", "doctor", "--warm", "generate", "--arch", "90"],
            capture_output=True, text=True, cwd=ROOT, check=False,
            env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "COLUMNS": "400"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        last = done.stdout.splitlines()[-1]
        made, there = map(int, re.match(r"(\d+) kernels compiled, (\d+) were cached", last).groups())
        assert str(tmp_path) in last
        return made, there

    made, there = command()
    assert made > 15
    assert there == 0
    assert command() == (0, made)
