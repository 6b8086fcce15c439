"""docs/errors.md: the messages that it quotes are what the commands print, details aside."""

import gzip
import os
import re
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from PIL import Image

from minidl.data import limits
from minidl.training.prediction import inputs
from minidl.training.run_folder import folder_lock
from tests.cli.conftest import SMALL, write_csv
from tests.pages import ROOT

# Rows whose message a test of its own causes, since it takes long or another process.
ELSEWHERE = {
    "a pipe instead of a file of a run": "test_strange_files.py::test_files_of_a_finished_run",
    "training that diverges": "test_errors.py::test_a_loss_that_explodes_stops_with_advice",
    "settings larger than the weights": "test_damage.py::test_settings_far_larger_than_their_weights_take_no_memory",
    "a model that cannot fit": "test_memory.py::test_a_model_that_cannot_fit_is_refused_with_one_that_does",
    "an output that would replace a file of yours": "test_own_files.py::test_commands_refuse_before_their_work",
    "a folder that is replaced while it is written": (
        "test_own_files.py::test_a_folder_that_takes_the_place_of_a_run_stays_as_it_is"
    ),
    "no GPU with `--device cuda`": "test_errors.py::test_cuda_without_a_gpu",
    "a damaged tile table": "test_errors.py::test_a_damaged_tile_table_is_told_before_the_work",
}


def quoted():
    """The message of each row of the page that quotes one, by what the row is about."""
    found = {}
    for line in (ROOT / "docs" / "errors.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        messages = [text for text in re.findall(r"`([^`]+)`", cells[-1]) if " " in text]
        if line.startswith("| ") and messages:
            found[cells[0]] = messages[-1]
    return found


def texts(command, content, *more):
    Path("train.csv").write_bytes(content)
    return command("train", "text", "--data", "train.csv", "--out", "run", *more)


def pictures(command, tmp_path, **counts):
    for name, count in counts.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (8, 8), 10 * i + ord(name)).save(tmp_path / "photos" / name / f"{i + 1}.png")
    return command("train", "images", "--data", "photos", "--out", "run")


def cut_off(command, tmp_path):
    pictures(lambda *_: None, tmp_path, a=5, b=5)
    path = tmp_path / "photos" / "a" / "1.png"
    path.write_bytes(path.read_bytes()[:-24])
    return command("train", "images", "--data", "photos", "--out", "run")


def prices(command, tmp_path):
    rows = [(f"{i % 7}", f"{1000 + i}") for i in range(260)]
    write_csv(tmp_path / "train.csv", rows, ("size", "price"))
    return command(
        "train", "table", "--data", "train.csv", "--target", "price", "--task", "classification", "--out", "run"
    )


def junk(command, tmp_path):
    (tmp_path / "junk.csv").write_bytes(bytes(range(256)))
    return command("train", "text", "--data", "junk.csv", "--out", "run")


def two_labels(command, tmp_path):
    write_csv(tmp_path / "train.csv", [(f"word{i % 9} {'oil' if i % 2 else 'corn'}", "ab"[i % 2]) for i in range(80)])
    return command("train", "text", "--data", "train.csv", "--out", "RUN", *SMALL, "--quiet")


def zebra(command, tmp_path):
    two_labels(command, tmp_path)
    write_csv(tmp_path / "other.csv", [("oil", "zebra")])
    return command("evaluate", "RUN", "--data", "other.csv")


def labels_of_its_own(command, tmp_path):
    write_csv(tmp_path / "test.csv", [("oil", "zebra")])
    return texts(command, b"text,label\nb c,a\nd e,f\n", "--test", "test.csv")


def truncated(command, tmp_path):
    two_labels(command, tmp_path)
    model = tmp_path / "RUN" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:100])
    return command("predict", "RUN", "oil")


def no_age(command, tmp_path):
    rows = [(f"{i}", f"{i % 5}", "ab"[i % 2], f"{3 * i}") for i in range(60)]
    write_csv(tmp_path / "train.csv", rows, ("area", "age", "city", "price"))
    command("train", "table", "--data", "train.csv", "--target", "price", "--out", "RUN", "--epochs", "1", "--no-plots")
    return command("predict", "RUN", stdin='{"area": 1, "rooms": 2, "city": "a"}\n')


def many_threads(command):
    with mock.patch.dict(os.environ, OMP_NUM_THREADS="65536"):
        return command("train", "text", "--data", "docstrings", "--out", "run")


def endless(command, tmp_path):
    two_labels(command, tmp_path)
    return command("predict", "RUN", stdin="a" * (inputs.LONGEST + 1))


def other_form(command, tmp_path):
    (tmp_path / "mails.txt").write_bytes(b"text,label\nb c,a\n")
    return command("train", "text", "--data", "mails.txt", "--out", "run")


def folder(command, tmp_path):
    (tmp_path / "photos").mkdir()
    return command("train", "text", "--data", "photos", "--out", "run")


def packed(command, tmp_path, content, ending=".csv.gz"):
    (tmp_path / f"train{ending}").write_bytes(content)
    return command("train", "text", "--data", f"train{ending}", "--out", "run")


def device(command, tmp_path):
    (tmp_path / "train.csv").symlink_to("/dev/zero")
    return command("train", "text", "--data", "train.csv", "--out", "run")


def without_pyarrow(command, tmp_path):
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with mock.patch.dict(sys.modules, pyarrow=None):
        return command("train", "text", "--data", "train.parquet", "--out", "run")


def two_writers(command, tmp_path):
    with folder_lock.lock(tmp_path / "run"):
        return command("train", "text", "--data", "docstrings", "--out", "run")


CASES = {
    "empty file": lambda command, _: texts(command, b""),
    "an unknown file extension": other_form,
    "a folder instead of a file": folder,
    "a truncated compressed file": lambda command, folder: packed(command, folder, gzip.compress(b"a,b")[:15]),
    "a small file that unpacks to a large one": lambda command, folder: packed(
        command, folder, gzip.compress(bytes(limits.LEAST + 1))
    ),
    "a small file of many empty rows": lambda command, folder: packed(
        command, folder, gzip.compress(b"{}\n" * 1_500_000), ".jsonl.gz"
    ),
    "a device instead of a file": device,
    "Parquet, Arrow or `.zst` without pyarrow": without_pyarrow,
    "a folder that another command writes to": two_writers,
    "one class only": lambda command, _: texts(command, b"text,label\n" + b"b c,a\n" * 20),
    "missing column": lambda command, _: texts(command, b"text,topic\nb c,a\n", "--label-column", "label"),
    "numbers used as classes": prices,
    "unknown label at evaluation": zebra,
    "a test file with unknown labels": labels_of_its_own,
    "binary data": junk,
    "an endless line on standard input": endless,
    "a row that lacks a column of the model": no_age,
    "validation and test shares that leave no training data": lambda command, _: texts(
        command, b"text,label\nb c,a\nd e,f\n", "--val-split", "0.6", "--test-split", "0.6"
    ),
    "a folder with only one class folder": lambda command, folder: pictures(command, folder, a=5),
    "a class with one picture": lambda command, folder: pictures(command, folder, a=5, b=1),
    "a truncated picture": cut_off,
    "a truncated model file": truncated,
    "a folder that cannot be written": lambda command, _: command(
        "train", "text", "--data", "docstrings", "--out", "/proc/x"
    ),
    "an invalid number of threads": lambda command, _: many_threads(command),
    "an unknown kernel name": lambda command, _: command("doctor", "--compile", "--only", "zzz"),
    "bfloat16 without a GPU": lambda command, _: command(
        "train", "images", "--data", "digits", "--precision", "bfloat16", "--device", "cpu", "--out", "run"
    ),
}


def test_every_message_is_caused():
    assert CASES.keys() | ELSEWHERE.keys() == quoted().keys()
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / "cli" / file).read_text()


@pytest.mark.parametrize("given", CASES)
def test_the_page_quotes_what_is_printed(given, command, tmp_path, monkeypatch):
    if given == "bfloat16 without a GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    done = CASES[given](command, tmp_path)
    assert done.code in (1, 2)
    assert "Traceback" not in done.err
    pattern = ".*".join(re.escape(part.strip()).replace(r"\ ", r"\s+") for part in quoted()[given].split("..."))
    assert re.search(pattern, done.err, re.DOTALL), f"the page says\n{quoted()[given]}\nand this is printed\n{done.err}"
