"""A fifth task: what a contributor writes is one file, here `MajorityTask`, and one line in the registry."""

import hashlib
import itertools
import json
import re
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from pydantic import Field

from minidl import nn
from minidl.data import DataError
from minidl.errors import ConfigError
from minidl.training.loop import trainer
from minidl.training.loop.supervised import Supervised, sizes
from minidl.training.loop.targets import Classification
from minidl.training.prediction import inputs
from minidl.training.settings import fields
from minidl.training.settings.command import Session, Training
from minidl.training.task import Predictor, Task
from minidl.training.tasks import TASKS
from tests.cli.conftest import command, report
from tests.cli.test_images import StopAfter

__all__ = ["command"]

BITS = 5


class TrainMajority(Training, Session):
    """Train a network that tells whether most bits of a string are ones."""

    data: Annotated[fields.Data, Field(description="all, or a file.")]
    dropout: fields.Dropout = 0.0
    lr: fields.LearningRate = 0.05
    weight_decay: fields.WeightDecay = 0.0
    epochs: fields.Epochs = 15
    batch_size: fields.BatchSize = 8
    patience: fields.Patience = 0
    schedule: fields.Schedule = "constant"
    precision: fields.Precision = "float32"
    copies: Annotated[int, Field(ge=1, le=9, description="How often a step sees each string.")] = 1


@dataclass(frozen=True)
class Strings:
    """Bit strings, one a line of a file, in splits."""

    train: list[str]
    validation: list[str]
    test: list[str]


class MajorityTask(Task):
    """Whether most bits of a string are ones."""

    name = "majority"
    run = "a majority run"
    settings = TrainMajority
    data_sets = {"all": "all strings of five bits"}  # noqa: RUF012
    files = ("labels.json", "confusion.png")

    def read(self, name, **options):
        lines = [format(i, f"0{BITS}b") for i in range(2**BITS)] if name == "all" else Path(name).read_text().split()
        return Strings(lines, lines[1::2], lines[::2])

    def options(self, config):
        return {}

    def fingerprints(self, dataset):
        yield hashlib.sha256(" ".join(dataset.train).encode()).hexdigest()

    def prepare(self, config, dataset):
        targets = Classification(["zeros", "ones"])
        return Supervised(
            name=self.name,
            config=config,
            source={"name": config.data, "sizes": sizes(dataset), "features": BITS},
            features=f"{BITS} bits",
            targets=targets,
            train=examples(dataset.train * config.copies),
            validation=examples(dataset.validation),
            test=lambda: examples(dataset.test),
            make_model=lambda config, device: nn.Linear(BITS, 2, device=device),
            documents=targets.documents,
        )

    def predictor(self, config, run):
        return Majority(config, run)


@dataclass(frozen=True)
class Majority(Predictor):
    @cached_property
    def targets(self):
        return Classification.of_run(self.run)

    @cached_property
    def model(self):
        from minidl.training.run_folder import weights

        return weights.materialize(nn.Linear(BITS, 2, device="meta"), self.run.weights(), self.run.model)

    def chunks(self, config):
        return inputs.chunks(list(config.inputs))

    def features(self, chunk):
        return examples(chunk)[0]

    def answers(self, chunk, features, top):
        from minidl.training.loop.forward import saved_outputs

        return self.targets.answers(saved_outputs(self.model, features, self.targets.outputs), top)

    def before_fault(self, chunk):
        return ([one] for one in chunk)

    def check_columns(self, config):
        if config.text_column or config.label_column:
            raise ConfigError("a majority run has no columns")

    def labelled(self, config):
        return *examples(Path(config.data).read_text().split()), {"name": config.data}

    def test(self, dataset, config):
        return examples(dataset.test)


def examples(strings):
    """(bits float32 [N, BITS], 1 where most are ones)."""
    for one in strings:
        if len(one) != BITS or set(one) - {"0", "1"}:
            raise DataError(f"{one} is no string of {BITS} bits")
    bits = np.array([[int(bit) for bit in one] for one in strings], dtype=np.float32).reshape(-1, BITS)
    return bits, (2 * bits.sum(1) > BITS).astype(np.int64)


@pytest.fixture(scope="module", autouse=True)
def _registered():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "majority", MajorityTask())
        yield


@pytest.fixture(scope="module")
def majority_run(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("majority") / "run"
    done = command("train", "majority", "--data", "all", "--out", folder, "--quiet")
    assert done.code == 0, done.err
    return folder


def test_a_fifth_task_trains_and_reports(majority_run):
    content = report(majority_run)
    assert (content["kind"], content["task"], content["data"]) == ("majority", "classification", "all")
    assert content["accuracy"] > 0.9 > content["baseline"]["majority"]["accuracy"]
    names = {path.name for path in majority_run.iterdir()}
    assert {"labels.json", "model.safetensors", "report.txt", "metrics.jsonl", "loss.png", "confusion.png"} <= names
    config = json.loads((majority_run / "config.json").read_text())
    assert (config["kind"], config["config"]["epochs"], list(config["documents"])) == ("majority", 15, ["labels.json"])


def test_a_fifth_task_goes_on_bit_for_bit(command, majority_run, tmp_path, monkeypatch):
    again = tmp_path / "again"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Interrupts", StopAfter)
        StopAfter.left = 5
        done = command("train", "majority", "--data", "all", "--out", again)
    assert (done.code, "minidl train majority --out" in done.err) == (130, True)
    done = command("train", "majority", "--out", again, "--resume")
    assert "continuing after epoch 1 and 1 step" in done.out
    for name in ("model.safetensors", "labels.json"):
        assert (majority_run / name).read_bytes() == (again / name).read_bytes()


def test_a_fifth_task_is_replaced_with_its_files(command, majority_run, tmp_path):
    folder = shutil.copytree(majority_run, tmp_path / "run")
    flags = ("--epochs", "1", "--no-plots", "--overwrite")
    assert command("train", "majority", "--data", "all", "--out", folder, *flags).code == 0
    assert not (folder / "confusion.png").exists()
    assert not folder.with_name("run.previous").exists()


def test_a_fifth_task_answers(command, majority_run):
    done = command("predict", majority_run, "11111", "00000", "--top", "1")
    assert [json.loads(line)["label"] for line in done.out.splitlines()] == ["ones", "zeros"]
    done = command("predict", majority_run, "11110", "ones", "00000")
    assert (done.code, done.err) == (2, "error: ones is no string of 5 bits\n")
    assert json.loads(done.out)["label"] == "ones"


def test_a_fifth_task_is_evaluated(command, majority_run, tmp_path):
    done = command("evaluate", majority_run, "--json", tmp_path / "scores.json")
    assert done.code == 0, done.err
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["accuracy"] == report(majority_run)["accuracy"]
    assert scores["source"] == {"name": "all", "part": "test split", "examples": 16}
    own = tmp_path / "own.txt"
    own.write_text("11111\n11110\n00001\n")
    assert "examples  3" in command("evaluate", majority_run, "--data", own).out
    assert "a majority run has no columns" in command("evaluate", majority_run, "--text-column", "x").err


def test_the_settings_of_a_fifth_task_are_options(command, tmp_path):
    shown = command("train", "majority", "--help").out
    assert "Train a network that tells whether most bits" in shown
    assert "majority  Train a network that" in command("train", "--help").out
    assert "How often a step sees each string. Default: 1." in " ".join(shown.split())
    done = command("train", "majority", "--data", "all", "--out", tmp_path / "run", "--copies", "10")
    assert (done.code, done.err) == (2, "error: --copies is 10, expected a whole number from 1 to 9\n")


def test_other_commands_know_what_a_fifth_task_is(command, majority_run, tmp_path):
    done = command("generate", "--model", majority_run, "--out", tmp_path / "pictures")
    assert "is a majority run, which cannot generate pictures" in done.err
    done = command("train", "text", "--out", majority_run, "--resume")
    assert "is a majority run; continue it with: minidl train majority" in done.err


def test_a_task_is_known_in_its_own_file_alone():
    """Outside of it, no module of training and of the commands names a task's settings or compares kinds."""
    root = Path(trainer.__file__).parents[1]
    for path in itertools.chain(*((root / part).rglob("*.py") for part in ("training", "generation", "cli"))):
        if "tasks" not in path.parts:
            found = re.search(
                r"\bTrain(Text|Table|Images|Gan)\b|(==|!=|in) *\(?['\"](text|table|images|gan)['\"]", path.read_text()
            )
            assert found is None, f"{path} has {found[0]}"
