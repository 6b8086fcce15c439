"""`predict` and `evaluate` on finished runs."""

import json
import subprocess
import sys

import pytest

from tests.cli.conftest import environment, report, sentences, start, write_csv


def lines(result):
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


def test_a_line_of_standard_input_is_one_line_of_json(minidl, text_run):
    (answer,) = lines(minidl("predict", text_run[0], stdin="crude oil output rose to 2 mln barrels a day\n"))
    assert answer["label"] == "crude"
    assert answer["probability"] > 0.5
    assert answer["top"][0] == {"label": "crude", "probability": answer["probability"]}
    assert [entry["probability"] for entry in answer["top"]] == sorted(
        (entry["probability"] for entry in answer["top"]), reverse=True
    )
    assert sum(entry["probability"] for entry in answer["top"]) == pytest.approx(1, abs=1e-4)


def test_arguments_files_and_standard_input_agree(minidl, text_run, tmp_path):
    texts = ["wheat and corn harvest", "tariff on imports", "", "words that were never seen", "ö ß ☃"]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    write_csv(tmp_path / "texts.csv", [[text] for text in texts if text], ("text",))
    by_argument = lines(minidl("predict", text_run[0], *texts, "--top", "1"))
    assert [answer["label"] for answer in by_argument[:2]] == ["grain", "trade"]
    assert all(len(answer["top"]) == 1 for answer in by_argument)
    assert lines(minidl("predict", text_run[0], "--file", tmp_path / "lines.txt", "--top", "1")) == by_argument
    assert lines(minidl("predict", text_run[0], "--top", "1", stdin="\r\n".join(texts))) == by_argument
    by_column = lines(minidl("predict", text_run[0], "--file", tmp_path / "texts.csv", "--top", "1"))
    assert by_column == [answer for answer, text in zip(by_argument, texts, strict=True) if text]


def test_standard_input_is_answered_as_it_comes(text_run, tmp_path):
    process = start("predict", text_run[0], folder=tmp_path)
    for text, label in (("oil barrel tanker", "crude"), ("wheat flour acre", "grain")):
        process.stdin.write(text + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["label"] == label
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", 0)


def test_nothing_in_is_nothing_out(minidl, text_run):
    result = minidl("predict", text_run[0], stdin="")
    assert (result.code, result.out, result.err) == (0, "", "")


def test_a_reader_that_leaves_is_no_error(text_run, tmp_path):
    command = f"{sys.executable} -m minidl predict {text_run[0]} | head -n 1"
    many = "oil and more oil\n" * 5000
    done = subprocess.run(
        ["bash", "-c", command],
        check=False,
        cwd=tmp_path,
        env=environment(),
        input=many,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert json.loads(done.stdout)["label"] == "crude"
    assert done.stderr == ""


def test_evaluate_repeats_the_scores_of_the_report(minidl, text_run, tmp_path):
    result = minidl("evaluate", text_run[0], "--json", tmp_path / "scores.json")
    assert result.code == 0, result.err
    scores, trained = json.loads((tmp_path / "scores.json").read_text()), report(text_run[0])
    for name in ("accuracy", "macro_f1", "per_class", "confusion"):
        assert scores[name] == trained[name]
    assert "macro-F1" in result.out


def test_evaluate_takes_other_data(minidl, text_run, tmp_path):
    write_csv(tmp_path / "new.csv", [(label, text) for text, label in sentences(30, seed=9)], ("topic", "body"))
    result = minidl(
        "evaluate", text_run[0], "--data", tmp_path / "new.csv", "--text-column", "body", "--label-column", "topic",
        "--json", tmp_path / "scores.json",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert sum(map(sum, json.loads((tmp_path / "scores.json").read_text())["confusion"])) == 30


def test_table_rows_come_as_json_or_csv(minidl, table_run, tmp_path):
    rows = [{"size": 100, "age": 10, "kind": "house"}, {"size": 50.5, "age": 30, "kind": "flat"}]
    as_json = "".join(json.dumps(row) + "\n" for row in rows)
    as_csv = "kind,age,size\nhouse,10,100\nflat,30,50.5\n"
    (tmp_path / "rows.csv").write_text(as_csv)
    by_argument = lines(minidl("predict", table_run[0], *as_json.splitlines()))
    assert by_argument[0].keys() == {"prediction"}
    assert by_argument[0]["prediction"] > by_argument[1]["prediction"]
    assert lines(minidl("predict", table_run[0], stdin=as_json)) == by_argument
    assert lines(minidl("predict", table_run[0], stdin=as_csv)) == by_argument
    assert lines(minidl("predict", table_run[0], "--file", tmp_path / "rows.csv")) == by_argument


def test_evaluate_of_a_table_repeats_the_report(minidl, table_run, table, tmp_path):
    for arguments in ([], ["--data", table]):
        result = minidl("evaluate", table_run[0], "--json", tmp_path / "scores.json", *arguments)
        assert result.code == 0, result.err
        scores = json.loads((tmp_path / "scores.json").read_text())
        if not arguments:
            assert scores["r2"] == report(table_run[0])["r2"]
        assert scores["r2"] > 0.8
