"""The command line as its users have it: a subprocess, in a folder of its own. One tiny run is shared by the tests."""

import csv
import json
import os
import random
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from minidl.cli import app
from minidl.training.run_folder import files

ROOT = Path(__file__).parents[2]
WORDS = {
    "crude": "oil barrel crude opec petroleum refinery output tanker drilling well",
    "grain": "wheat corn grain harvest crop bushel soybean farmer acre flour",
    "trade": "tariff export import deficit surplus trade quota customs pact dispute",
}
SHARED = ["the", "of", "and", "a", "in", "to", "was", "said", "for", "on", "that", "it", "by", "with", "from", "year"]
SMALL = ("--epochs", "2", "--batch-size", "32", "--hidden", "8", "--lr", "0.05", "--no-plots")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def environment():
    """This process's environment, with the kernels where this suite has them."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "NO_COLOR": "1"}


def start(*arguments, folder, flags=("-W", "error"), **options):
    return subprocess.Popen(
        [sys.executable, *flags, "-m", "minidl", *map(str, arguments)],
        cwd=folder, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def wait_for(condition, process, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end, "the process did not get there"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def minidl(tmp_path_factory):
    """Runs the command in an empty folder (or `folder`) and returns its exit code and output."""

    def run(*arguments, stdin="", folder=None, **options):
        process = start(*arguments, folder=folder or tmp_path_factory.mktemp("work"), **options)
        out, err = process.communicate(stdin, timeout=200)
        return Result(process.returncode, out, err)

    return run


@pytest.fixture(scope="session")
def command():
    """Runs the command in this process, where importing torch takes no time. An unexpected exception is raised."""

    def run(*arguments, stdin=None):
        threads = torch.get_num_threads()
        try:
            # Two batches show what the eight of a GAN's calibration do, at three quarters of an epoch's time.
            # What a command sets in the environment (--device cpu, sanitize) is its process's own.
            with mock.patch.dict(os.environ), mock.patch("minidl.training.loop.adversaries.CALIBRATION", 2):
                done = CliRunner(env={"COLUMNS": "200", "NO_COLOR": "1"}).invoke(app, list(map(str, arguments)), stdin)
        finally:
            torch.set_num_threads(threads)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return Result(done.exit_code, done.stdout, done.stderr)

    return run


_READ = """
import json, sys
from pathlib import Path
from minidl.training.prediction import predict
from minidl.training.settings.command import Predict
given = {name: value if name == "inputs" else Path(value) for name, value in json.loads(sys.argv[1]).items()}
with predict.reading(Predict(**given)) as begun:
    print(sum(found.features.shape[0] for found in begun.prepared))
assert not sys.modules.keys() & {"torch", "triton"}
"""


def read_without_torch(folder, **given):
    """How many inputs `predict` has prepared before anything has imported torch."""
    done = subprocess.run(
        [sys.executable, "-c", _READ, json.dumps({"run": folder, **given}, default=str)], check=True, env=environment(),
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    return int(done.stdout)


def sentences(count, seed=0):
    """Pairs (text, label): a few words of the label's subject among words that all subjects share."""
    draw = random.Random(seed)
    for i in range(count):
        label = sorted(WORDS)[i % len(WORDS)]
        words = draw.sample(WORDS[label].split(), 3) + draw.choices(SHARED, k=5) + [f"word{i}"]
        draw.shuffle(words)
        yield " ".join(words), label


def write_csv(path, rows, header=("text", "label")):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A CSV file of 240 short texts in three classes."""
    return write_csv(tmp_path_factory.mktemp("data") / "texts.csv", sentences(240))


@pytest.fixture(scope="session")
def text_run(minidl, texts):
    """A finished run on `texts`, and what training it printed. Tests copy it before they change it."""
    folder = texts.parent / "run"
    result = minidl("train", "text", "--data", texts, "--out", folder, *SMALL[:-1])
    assert result.code == 0, result.err
    return folder, result.out


@pytest.fixture(scope="session")
def table(tmp_path_factory):
    """A CSV file of 120 rows: two numbers, a category, and a price that depends on them."""
    draw = random.Random(1)
    rows = []
    for _ in range(120):
        size, age, kind = draw.uniform(20, 200), draw.uniform(0, 80), draw.choice(["house", "flat"])
        rows.append([f"{size:.1f}", f"{age:.1f}", kind, f"{3 * size - age + (50 if kind == 'house' else 0):.1f}"])
    return write_csv(tmp_path_factory.mktemp("data") / "houses.csv", rows, ("size", "age", "kind", "price"))


@pytest.fixture(scope="session")
def table_run(command, table):
    """A finished regression on `table`."""
    folder = table.parent / "run"
    result = command(
        "train", "table", "--data", table, "--target", "price", "--out", folder, "--epochs", "8", "--hidden", "16",
        "--lr", "0.02", "--dropout", "0",
    )  # fmt: skip
    assert result.code == 0, result.err
    return folder, result.out


def unfinished(run, folder):
    """A copy of a run as it is when training is done and the report is not yet written."""
    shutil.copytree(run, folder)
    for name in ("report.json", "report.txt", "manifest.json", "model.safetensors"):
        (folder / name).unlink(missing_ok=True)
    return folder


def older(run, folder):
    """A copy of a run as an earlier version wrote it: no manifest, no identity in its settings and model."""
    shutil.copytree(run, folder)
    files.write_tensors(folder / "model.safetensors", files.read_tensors(folder / "model.safetensors"))
    (folder / "manifest.json").unlink()
    config = files.read_json(folder / "config.json")
    del config["run"]
    files.write_json(folder / "config.json", config, sealed=True)
    return folder


def edited(path, change):
    """Change the JSON in a file: `change` gets its content, and returns another one or alters it.

    It loses its seal, as older versions wrote it.
    """
    content = json.loads(path.read_text())
    content.pop("checksum", None)
    path.write_text(json.dumps(change(content) or content))


def report(folder):
    return json.loads((folder / "report.json").read_text())
