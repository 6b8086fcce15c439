"""`train text --features hash`: a run without a vocabulary, from its flags to its damage."""

import json
import shutil

import pytest
from safetensors.numpy import load_file

from minidl.data import corpus, parts, terms
from tests.cli.conftest import SMALL, report, sentences, unfinished, write_csv
from tests.cli.test_damage import refused, resumed
from tests.cli.test_predict import lines

HASH = ("--features", "hash", "--max-features", "4096", "--ngrams", "2")


@pytest.fixture(scope="module")
def hash_run(command, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hash") / "run"
    result = command("train", "text", "--data", texts, "--out", folder, *HASH, *SMALL)
    assert result.code == 0, result.err
    assert "training, 24 validation and 48 test examples, 4,096 hashed features, 3 classes\n" in result.out
    return folder


def test_a_run_has_no_word_of_the_texts(hash_run):
    assert not (hash_run / "vocabulary.json").exists()
    raw = (hash_run / "hashing.json").read_text()
    assert len(raw) < 20_000
    assert "crude" not in raw.replace('"crude"', "")
    assert load_file(hash_run / "model.safetensors")["0.weight"].shape == (4096, 8)
    assert report(hash_run)["accuracy"] > 0.8
    assert report(hash_run)["source"]["features"] == 4096


def test_it_answers_and_is_scored(command, hash_run, tmp_path):
    asked = ("crude oil barrel of the opec", "wheat corn harvest", "", "qwertz")
    found = lines(command("predict", hash_run, *asked))
    assert [answer["label"] for answer in found[:2]] == ["crude", "grain"]
    assert found[0]["known_terms"] > 3
    assert [answer["known_terms"] for answer in found[2:]] == [0, 0]
    scored = command("evaluate", hash_run, "--json", tmp_path / "own.json")
    assert scored.code == 0, scored.err
    assert json.loads((tmp_path / "own.json").read_text())["accuracy"] == report(hash_run)["accuracy"]
    other = write_csv(tmp_path / "other.csv", sentences(30, seed=9))
    scored = command("evaluate", hash_run, "--data", other, "--json", tmp_path / "other.json")
    assert scored.code == 0, scored.err
    assert json.loads((tmp_path / "other.json").read_text())["accuracy"] > 0.8


def test_it_is_resumed_with_its_settings(command, hash_run, tmp_path):
    folder = unfinished(hash_run, tmp_path / "run")
    for given in (("--features", "tfidf"), ("--max-features", "20000"), ("--min-df", "2")):
        refused(resumed(lambda *words, given=given: command(*words, *given), folder, "text"), f"{given[0]} is ")
    (folder / "hashing.json").unlink()
    result = resumed(command, folder, "text")
    assert result.code == 0, result.err
    assert "hashing.json was missing or changed" in result.out
    for name in ("hashing.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (hash_run / name).read_bytes()


@pytest.mark.parametrize("harm", ["gone", "cut", "empty", "changed", "vocabulary"])
def test_a_damaged_file_is_told(command, hash_run, text_run, tmp_path, harm):
    folder = tmp_path / "run"
    shutil.copytree(hash_run, folder)
    path = folder / "hashing.json"
    text = path.read_text()
    if harm == "gone":
        path.unlink()
    elif harm == "vocabulary":
        shutil.copy(text_run[0] / "vocabulary.json", path)
    else:
        path.write_text(
            {"cut": text[: len(text) // 2], "empty": "", "changed": text.replace("0, 1,", "1, 0,", 1)}[harm]
        )
    result = command("predict", folder, "oil")
    refused(result, f"hashing.json is {'missing' if harm == 'gone' else 'damaged'}", "restore it or train again")
    assert result.out == ""


def test_any_number_of_workers_makes_the_same_run(command, hash_run, texts, tmp_path, monkeypatch):
    for module in (corpus, parts):
        monkeypatch.setattr(module, "PART", 1024)
    monkeypatch.setattr(terms, "_CHUNK", 1024)
    folder = tmp_path / "run"
    result = command("train", "text", "--data", texts, "--out", folder, *HASH, *SMALL, "--workers", 2)
    assert result.code == 0, result.err
    for name in ("hashing.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (hash_run / name).read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--features", "hash", "--max-features", 2**24 + 1), "is 16777217, expected at most 16777216 columns with"),
        (("--features", "words"), "--features is words, expected one of tfidf, hash"),
        (("--features", "hash", "--min-df", 0), "--min-df is 0, expected a whole number from 1"),
        (("--features", "hash", "--min-df", 10**6), "contain no term that occurs in 1000000 of them"),
    ],
)
def test_flags_that_cannot_be(command, texts, tmp_path, flags, message):
    if message.startswith("contain"):
        # At least every text has to have it; here no word is in all of them.
        write_csv(tmp_path / "t.csv", [(f"a{i} b{i}", "xyz"[i % 3]) for i in range(60)])
        texts = tmp_path / "t.csv"
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *flags)
    refused(result, message)
    assert result.err.count("\n") == 1
    assert not (tmp_path / "run").exists()
