"""`train --test` and `--validation`: data that comes split, its leakage, and files that do not fit together."""

import json
import shutil

import numpy as np
import pytest

from minidl import data
from minidl.training.loop import trainer
from tests.cli.conftest import SMALL, report, sentences, write_csv
from tests.cli.test_images import SMALL as SMALL_IMAGES
from tests.cli.test_images import StopAfter, photos, refused, write_folder

__all__ = ["photos"]

ROWS = list(sentences(120, seed=1))
# Copies of training texts, one of them under another label, and one validation text twice.
VALIDATION = [*sentences(30, seed=2), ROWS[0], (ROWS[1][0], "crude")]
TEST = [*sentences(45, seed=3), ROWS[5], VALIDATION[0], VALIDATION[0]]
HOUSES = ("size", "kind", "price")


def house(i):
    return [str(20 + 7 * i % 97), ("house", "flat")[i % 2], str(3 * (20 + 7 * i % 97))]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """train.csv, validation.csv and test.csv of texts in an empty folder, where the commands run."""
    monkeypatch.chdir(tmp_path)
    for name, rows in (("train", ROWS), ("validation", VALIDATION), ("test", TEST)):
        write_csv(tmp_path / f"{name}.csv", rows)
    return tmp_path


@pytest.fixture
def houses(tmp_path, monkeypatch):
    """train.csv and test.csv of houses; the columns of the latter have another order, and one more."""
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "train.csv", [house(i) for i in range(60)], HOUSES)
    rows = [["x", *house(i)[::-1]] for i in range(57, 80)]
    write_csv(tmp_path / "test.csv", rows, ("note", *HOUSES[::-1]))
    return tmp_path


@pytest.fixture
def train(command):
    """Trains on train.csv or the folder train, into the folder run."""

    def run(kind, *flags):
        source = "train" if kind == "images" else "train.csv"
        target = ("--target", "price", "--task", "regression") if kind == "table" else ()
        settings = SMALL_IMAGES if kind == "images" else SMALL
        return command("train", kind, "--data", source, *target, "--out", "run", *settings, *flags)

    return run


def leaked(file, also_in, examples, of):
    return {"file": file, "also_in": also_in, "examples": examples, "of": of}


def test_texts_with_both_files_are_not_split(command, train, files):
    done = train("text", "--validation", "validation.csv", "--test", "test.csv")
    assert done.code == 0, done.err
    content = report(files / "run")
    assert content["source"]["sizes"] == {"train": 120, "validation": 32, "test": 48}
    assert content["source"]["split"] == "validation from validation.csv; test from test.csv"
    assert content["leakage"] == [
        leaked("validation.csv", "train.csv", 2, 32),
        leaked("test.csv", "train.csv", 1, 48),
        leaked("test.csv", "validation.csv", 2, 48),
    ]
    assert np.sum(content["confusion"]) == 48
    line = (
        "2 of 32 examples of validation.csv also in train.csv; 1 of 48 examples of test.csv also in train.csv; "
        "2 of 48 examples of test.csv also in validation.csv\n"
    )
    assert f"\nleakage: {line}" in done.out
    assert f"\nleakage        {line}" in (files / "run" / "report.txt").read_text()
    saved = json.loads((files / "run" / "config.json").read_text())["config"]
    assert (saved["validation"], saved["test"]) == ("validation.csv", "test.csv")

    scores = command("evaluate", "run", "--json", "own.json")
    assert scores.code == 0, scores.err
    assert command("evaluate", "run", "--data", "test.csv", "--json", "given.json").code == 0
    own, given = (json.loads((files / name).read_text()) for name in ("own.json", "given.json"))
    assert own["confusion"] == given["confusion"] == content["confusion"]


def test_with_one_file_the_data_makes_the_other_split(train, files):
    assert train("text", "--test", "test.csv", "--val-split", "0.2").code == 0
    source = report(files / "run")["source"]
    assert source["sizes"] == {"train": 96, "validation": 24, "test": 48}
    assert source["split"] == "test from test.csv; by class and hash of the text, seed 0: 20% validation"

    assert train("text", "--validation", "validation.csv", "--overwrite").code == 0
    content = report(files / "run")
    assert content["source"]["sizes"] == {"train": 96, "validation": 32, "test": 24}
    assert content["leakage"] == [leaked("validation.csv", "train.csv", 2, 32)]


def test_data_in_one_file_has_no_leakage_to_report(text_run):
    folder, out = text_run
    assert "leakage" not in report(folder)
    assert "leakage" not in out


def test_a_run_goes_on_with_the_same_files_only(command, train, files, monkeypatch):
    whole = train("text", "--test", "test.csv", "--epochs", "3")
    assert whole.code == 0, whole.err
    shutil.move("run", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "Interrupts", StopAfter)
        StopAfter.left = 5
        assert train("text", "--test", "test.csv", "--epochs", "3").code == 130
    kept = (files / "test.csv").read_bytes()
    (files / "test.csv").write_bytes(kept + b"one more,trade\n")
    done = command("train", "text", "--out", "run", "--resume")
    refused(done, "the data of run (train.csv, test.csv) is not what the run was started on; restore the data")
    (files / "test.csv").write_bytes(kept)
    done = command("train", "text", "--out", "run", "--resume", "--test", "validation.csv")
    refused(done, "--test is test.csv in the run, validation.csv was given")
    done = command("train", "text", "--out", "run", "--resume", "--test", "test.csv")
    assert done.code == 0, done.err
    assert (files / "run/model.safetensors").read_bytes() == (files / "whole/model.safetensors").read_bytes()
    assert report(files / "run")["leakage"] == report(files / "whole")["leakage"]


def test_a_run_evaluates_the_test_file_that_it_had(command, train, files):
    assert train("text", "--test", "test.csv").code == 0
    (files / "test.csv").unlink()
    refused(command("evaluate", "run"), "test.csv does not exist")
    write_csv(files / "test.csv", TEST[1:])
    refused(command("evaluate", "run"), "the data of run (train.csv, test.csv) is not what the run was started on")


def test_a_table_finds_its_columns_by_name(command, train, houses):
    done = train("table", "--test", "test.csv")
    assert done.code == 0, done.err
    content = report(houses / "run")
    assert content["source"]["sizes"]["test"] == 23
    assert content["leakage"] == [leaked("test.csv", "train.csv", 3, 23)]
    done = command("evaluate", "run", "--data", "test.csv", "--json", "scores.json")
    assert json.loads((houses / "scores.json").read_text())["rmse"] == content["rmse"]


def test_a_target_of_numbers_may_have_values_that_training_lacks(train, houses):
    write_csv(houses / "test.csv", [["1", "house", "5000"], ["2", "boat", "6000"]], HOUSES)
    assert train("table", "--validation", "test.csv").code == 0


def test_pictures_in_folders_of_their_own(command, train, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, "train")
    write_folder(tmp_path / "test", 6, first=20)
    write_folder(tmp_path / "validation", 4, first=40)
    done = train("images", "--test", "test", "--validation", "validation", "--epochs", "1")
    assert done.code == 0, done.err
    content = report(tmp_path / "run")
    assert content["source"]["sizes"] == {"train": 72, "validation": 12, "test": 18}
    assert content["leakage"] == [
        leaked("validation", "train", 0, 12),
        leaked("test", "train", 12, 18),
        leaked("test", "validation", 0, 18),
    ]
    assert "12 of 18 examples of test also in train" in done.out
    assert command("evaluate", "run").code == 0


def test_a_class_needs_a_picture_for_each_split_made_of_it(tmp_path):
    write_folder(tmp_path / "train", 2)
    write_folder(tmp_path / "test", 1, first=5)
    dataset = data.load_images(tmp_path / "train", test=tmp_path / "test")
    assert [len(part) for part in (dataset.train, dataset.validation, dataset.test)] == [3, 3, 3]
    write_folder(tmp_path / "few", 1)
    message = "few/across has 1 picture, expected at least 2: one to learn from and one to validate; add some"
    with pytest.raises(data.DataError, match=message):
        data.load_images(tmp_path / "few", test=tmp_path / "test")


def test_labels_that_training_lacks_are_refused(train, files, houses, photos):
    unknown = " has labels that train.csv lacks, so that no model can learn them: "
    write_csv(files / "train.csv", ROWS)
    write_csv(files / "new.csv", [*TEST, ("a text", "zebra"), ("another", "gnu")])
    message = f"new.csv{unknown}'gnu', 'zebra'; add examples of them to train.csv, or remove them from new.csv"
    refused(train("text", "--validation", "new.csv"), message)

    write_csv(houses / "train.csv", [house(i) for i in range(60)], HOUSES)
    write_csv(houses / "new.csv", [["1", "boat", "5"], ["2", "flat", "6"]], HOUSES)
    flags = ("--target", "kind", "--task", "classification")
    refused(train("table", "--test", "new.csv", *flags), f"new.csv{unknown}'boat'; add examples")

    shutil.copytree(photos, "train")
    write_folder(files / "new", 1, first=50)
    (files / "new" / "plain").rename(files / "new" / "dotted")
    message = "new has labels that train lacks, so that no model can learn them: 'dotted'; add examples"
    refused(train("images", "--test", "new"), message)


def test_a_missing_column_is_named(train, files, houses):
    write_csv(houses / "narrow.csv", [["1", "5"]], ("size", "price"))
    write_csv(houses / "blind.csv", [["1", "flat"]], ("size", "kind"))
    write_csv(files / "train.csv", [house(i) for i in range(60)], HOUSES)
    refused(train("table", "--test", "narrow.csv"), "narrow.csv has no input column 'kind'; its columns are: 'size'")
    refused(train("table", "--test", "blind.csv"), "blind.csv has no target column 'price'; its columns are")
    write_csv(files / "train.csv", ROWS)
    write_csv(files / "other.csv", TEST, ("review", "label"))
    refused(train("text", "--test", "other.csv"), "other.csv has no text column 'text'; its columns are: 'review'")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--test", "./train.csv"), "--data and --test name the same file, ./train.csv: give two names"),
        (
            ("--test", "a.csv", "--validation", "a.csv"),
            "--validation and --test name the same file, a.csv",
        ),
        (("--test", "gone.csv"), "gone.csv does not exist"),
        (("--test", "/proc"), "/proc is a folder: give a file ending in .csv"),
        (("--test", "test.csv", "--test-split", "0.3"), "--test names the test split: remove --test-split"),
        (("--validation", "a.csv", "--val-split", "0.3"), "--validation names the validation split: remove"),
        (
            ("--validation", "validation.csv", "--trace", "validation.csv"),
            "--trace validation.csv exists and was not written by --trace",
        ),
    ],
)
def test_files_that_cannot_be_are_refused(train, files, flags, message):
    refused(train("text", *flags), message)
    assert not (files / "run").exists()


def test_a_file_in_place_of_a_folder_is_refused(train, files, photos):
    shutil.copytree(photos, "train")
    refused(
        train("images", "--test", "test.csv"), "test.csv is not a folder; expected one with a folder of pictures per"
    )


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("text", "docstrings", "--test is for your own file; docstrings takes none: its columns and splits are fixed"),
        (
            "table",
            "diabetes",
            "--test is for your own file; diabetes takes none: --val-split and --test-split split it",
        ),
        ("images", "digits", "--test is for your own folder: the size and splits of digits are fixed"),
    ],
)
def test_data_that_comes_with_minidl_has_its_own_splits(command, files, kind, name, message):
    refused(command("train", kind, "--data", name, "--test", "test.csv", "--out", "run"), message)
