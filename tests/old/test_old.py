"""Runs, models and checkpoints of every version of the formats: read as when they were written, and continued.

A format's version is changed together with a new folder made by `python -m tests.old.make`; the folders that are there
stay as they are.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from minidl.data import schema, vectorizer
from minidl.generation import evaluator
from minidl.generation import folder as generation
from minidl.models import dcgan
from minidl.training.run_folder import checkpoints, folder
from minidl.training.tasks.images import PictureFormat
from tests.old.make import ASKED, KINDS, answers, command, features, minidl
from tests.old.make import pictures as generated

HERE = Path(__file__).parent
FOLDERS = sorted(path.name for path in HERE.glob("formats-*"))
# float32 results of other versions of torch, of BLAS, or of a GPU differ by their roundings.
NEAR = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture
def old(request, tmp_path, monkeypatch):
    """A copy of a folder of old runs, which is the current folder."""
    shutil.copytree(HERE / request.param, tmp_path / "old")
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


every = pytest.mark.parametrize("old", FOLDERS, indirect=True)


def agree(found, expected):
    """Whether two JSON values are equal, numbers nearly so."""
    if isinstance(expected, float):
        return bool(np.isclose(found, expected, **NEAR))
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(agree, found, expected))
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(agree(found[name], value) for name, value in expected.items())
    return found == expected


def test_every_version_of_a_format_has_its_folder():
    """The versions that this minidl writes are those of the newest folder: else make one, and keep the old ones."""
    written = {
        "run": (folder.FORMAT, folder.VERSION),
        "checkpoint": (checkpoints.FORMAT, checkpoints.VERSION),
        "images": (generation.FORMAT, generation.VERSION),
    }
    newest = HERE / FOLDERS[-1]
    files = {
        "run": newest / "text" / "config.json",
        "checkpoint": newest / "text-stopped" / "checkpoints" / "last.json",
        "vocabulary": newest / "text" / "vocabulary.json",
        "schema": newest / "table" / "schema.json",
        "pictures": newest / "images" / "pictures.json",
        "images": newest / "made" / "images.json",
    }
    found = {
        name: (content["format"], content["version"])
        for name, path in files.items()
        for content in [json.loads(path.read_text())]
    }
    texts = {
        "vocabulary": vectorizer.Tfidf(vectorizer.TfidfOptions(), ["a"], [1.0]).to_json(),
        "schema": schema.TableSchema([schema.Column("a")], "b", "regression").to_json(),
        "pictures": PictureFormat(1, 1, 1, (0.0,), (1.0,)).to_json(),
    }
    written |= {name: (json.loads(text)["format"], json.loads(text)["version"]) for name, text in texts.items()}
    assert found == written
    # These have no number; what is read is what their settings say.
    assert (dcgan.FORMAT, evaluator.FORMAT) == ("minidl generator", "minidl evaluator")


@every
@pytest.mark.parametrize("kind", ASKED)
def test_a_finished_run_answers_as_it_did(old, kind):
    expected = json.loads(Path("expected.json").read_text())["answers"][kind]
    assert agree(answers(kind), expected)


@every
@pytest.mark.parametrize("model", ["gan", "generator.safetensors"])
def test_a_generator_makes_the_same_pictures(old, model):
    expected = np.array(json.loads(Path("expected.json").read_text())["pictures"], dtype=np.float32)
    assert np.abs(expected).max() > 0.01
    np.testing.assert_allclose(generated(Path("array"), model), expected, **NEAR)


@every
def test_an_evaluator_reads_the_same_features(old):
    expected = np.array(json.loads(Path("expected.json").read_text())["features"], dtype=np.float32)
    assert expected.max() > 0.01
    np.testing.assert_allclose(features(), expected, **NEAR)


@every
@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_is_continued_to_what_the_other_became(old, kind):
    steps = json.loads((old / f"{kind}-stopped/checkpoints/last.json").read_text())["progress"]["steps"]
    assert steps > 0
    minidl("train", command(kind), "--out", f"{kind}-stopped", "--resume", "--no-plots", "--quiet")
    found, expected = (load_file(old / name / "model.safetensors") for name in (f"{kind}-stopped", kind))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name].numpy(), tensor.numpy(), **NEAR, err_msg=name)
    last = [
        json.loads((old / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in (f"{kind}-stopped", kind)
    ]
    for record in last:
        record.pop("seconds")
    assert agree(*last)
    assert last[0]["steps"] > steps


@every
def test_pictures_that_were_generated_are_replaced(old):
    """A folder that has an images.json of any version may be overwritten: what it names, and nothing else."""
    Path("made/mine.txt").write_text("mine")
    minidl("generate", "--model", "gan", "--out", "made", "--quiet", "--seeds", "1", "--overwrite")
    assert sorted(path.name for path in Path("made").iterdir()) == ["images.json", "mine.txt", "seed-000001.png"]
