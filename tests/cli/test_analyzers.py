"""`train text --analyzer --ngrams --token-pattern`: a run records what finds its terms, and all commands use it."""

import json

import pytest

from tests.cli.conftest import SMALL, unfinished, write_csv
from tests.cli.test_damage import resumed
from tests.cli.test_predict import lines

SENTENCES = {"food": ["日本料理は美味しい", "寿司を食べたい"], "sport": ["野球の試合を見る", "選手が走っている"]}
ROWS = [
    (f"{text}{'あいうえおかきく'[i % 8]}{i}", label)
    for i in range(20) for label, both in SENTENCES.items() for text in both
]  # fmt: skip
CHARACTERS = ("--analyzer", "char", "--ngrams", "1-2")


@pytest.fixture(scope="module")
def run(command, tmp_path_factory):
    folder = tmp_path_factory.mktemp("characters")
    data = write_csv(folder / "texts.csv", ROWS)
    result = command("train", "text", "--data", data, "--out", folder / "run", *CHARACTERS, *SMALL)
    assert result.code == 0, result.err
    return folder / "run"


def test_characters_of_texts_without_spaces(command, run):
    saved = json.loads((run / "config.json").read_text())["config"]
    assert (saved["analyzer"], saved["ngrams"], saved["token_pattern"], saved["nfc"]) == ("char", 2, None, True)
    terms = json.loads((run / "vocabulary.json").read_text())["terms"]
    assert {"寿", "寿司", "野球"} <= set(terms)
    assert max(map(len, terms)) == 2
    asked = "寿司は美味しい", "野球選手"
    assert [answer["label"] for answer in lines(command("predict", run, *asked))] == ["food", "sport"]
    assert "寿司" in command("explain", run, asked[0], "--json").out
    assert command("evaluate", run).code == 0


def test_a_run_goes_on_with_what_finds_its_terms(command, run, tmp_path):
    folder = unfinished(run, tmp_path / "run")
    for given, was in ((("--analyzer", "word"), "char"), (("--ngrams", "2-3"), "2"), (("--no-nfc",), "True")):
        result = resumed(lambda *words, given=given: command(*words, *given), folder, "text")
        assert (result.code, f"{given[0].replace('no-', '')} is {was} in the run" in result.err) == (2, True), (
            result.err
        )
    assert resumed(command, folder, "text").code == 0
    assert (folder / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--token-pattern", "[\u0900-\u097f]+"), ["मानक", "हिन्दी"]),
        (("--analyzer", "word", "--ngrams", "2-2"), ["standard मानक", "मानक हिन्दी"]),
        (("--ngrams", "02",), ["standard", "standard मानक", "मानक", "मानक हिन्दी", "हिन्दी"]),
        (("--no-nfc",), ["standard", "नक"]),
    ],
)  # fmt: skip
def test_what_the_terms_are(command, tmp_path, given, expected):
    data = write_csv(tmp_path / "texts.csv", [("standard मानक हिन्दी" + " " * i, "ab"[i % 2]) for i in range(24)])
    result = command("train", "text", "--data", data, "--out", tmp_path / "run", *given, *SMALL)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "run" / "vocabulary.json").read_text())["terms"] == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--ngrams", "0"), "--ngrams is 0, expected a length from 1 to 10, or two such as 2-3"),
        (("--ngrams", "3-2"), "--ngrams is 3-2, expected"),
        (("--ngrams", "1-11"), "--ngrams is 1-11, expected"),
        (("--ngrams", "1,2"), "--ngrams is 1,2, expected"),
        (("--ngrams", "-1"), "--ngrams is -1, expected"),
        (("--analyzer", "words"), "--analyzer is words, expected one of word, char, char_wb"),
        (("--token-pattern", "("), "--token-pattern is '(': not a regular expression: "),
        (("--token-pattern", "(a)(b)"), "--token-pattern is '(a)(b)': 2 groups, expected at most one"),
        (
            ("--token-pattern", "(a+)+$"),
            "--token-pattern is '(a+)+$': a pattern that some texts may keep busy for",
        ),
        (("--token-pattern", "a", "--analyzer", "char"), "--token-pattern finds words, and --analyzer char takes char"),
    ],
)
def test_bad_settings(command, texts, tmp_path, given, message):
    result = command("train", "text", "--data", texts, "--out", tmp_path / "run", *given)
    assert result.code == 2
    assert result.err.startswith(f"error: {message}")
    assert not (tmp_path / "run").exists()
