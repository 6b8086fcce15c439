"""`predict` and `evaluate` on finished runs."""

import contextlib
import io
import json
import shutil
import subprocess
import sys

import pytest

from minidl.data import DataError
from minidl.data.parts import PART
from minidl.errors import ConfigError, DamagedError
from minidl.training.prediction import predict
from minidl.training.settings.command import Evaluate, Predict
from tests.cli.conftest import environment, read_without_torch, report, sentences, start, write_csv


def lines(result):
    assert result.code == 0, result.err
    return [json.loads(line) for line in result.out.splitlines()]


@pytest.fixture
def answers(monkeypatch):
    """What `predict` answers, without a process of its own: importing torch takes longer than the answer."""

    def ask(folder, *inputs, stdin=None, **options):
        out = io.StringIO()
        if stdin is not None:
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        predict.predict(Predict(run=folder, inputs=inputs, **options), out)
        return [json.loads(line) for line in out.getvalue().splitlines()]

    return ask


def test_a_line_of_standard_input_is_one_line_of_json(minidl, text_run):
    (answer,) = lines(minidl("predict", text_run[0], stdin="crude oil output rose to 2 mln barrels a day\n"))
    assert answer["label"] == "crude"
    assert answer["top"][0] == {"label": "crude", "probability": answer["probability"]}
    probabilities = [entry["probability"] for entry in answer["top"]]
    assert probabilities == sorted(probabilities, reverse=True)
    assert sum(probabilities) == pytest.approx(1, abs=1e-4)
    assert answer["known_terms"] > 1


def test_arguments_files_and_standard_input_agree(answers, text_run, tmp_path):
    folder, _ = text_run
    texts = ["wheat and corn harvest", "tariff on imports", "", "words that were never seen", "ö ß ☃"]
    (tmp_path / "lines.txt").write_text("\n".join(texts) + "\n")
    write_csv(tmp_path / "texts.csv", [[text] for text in texts if text], ("text",))
    by_argument = answers(folder, *texts, top=1)
    assert [answer["label"] for answer in by_argument[:2]] == ["grain", "trade"]
    assert all(len(answer["top"]) == 1 for answer in by_argument)
    assert answers(folder, file=tmp_path / "lines.txt", top=1) == by_argument
    assert answers(folder, stdin="\r\n".join(texts), top=1) == by_argument
    by_column = answers(folder, file=tmp_path / "texts.csv", top=1)
    assert by_column == [answer for answer, text in zip(by_argument, texts, strict=True) if text]


@pytest.mark.parametrize("kind", ["text", "table"])
def test_inputs_are_read_before_torch_is_there(kind, request, texts, table):
    folder, file = request.getfixturevalue(f"{kind}_run")[0], {"text": texts, "table": table}[kind]
    assert read_without_torch(folder, file=file) == len(file.read_text().splitlines()) - 1


def test_processes_answer_a_large_file_as_one_does(text_run, tmp_path, monkeypatch):
    """Three chunks of it, and lines in more than one part."""
    monkeypatch.setattr("minidl.training.prediction.inputs.FILE_CHUNK", 5000)
    rows = [[f"{text} {'crude wheat ' * (i % 3)} {'x' * 400}"] for i, (text, _) in enumerate(sentences(11_000))]
    file = write_csv(tmp_path / "large.csv", rows, ("text",))
    assert file.stat().st_size > 2 * PART
    found = []
    for workers in (1, 2):
        out = io.StringIO()
        predict.predict(Predict(run=text_run[0], file=file, workers=workers), out)
        found.append(out.getvalue())
    assert found[0] == found[1]
    assert found[0].count("\n") == len(rows)


def test_of_two_faults_the_one_of_the_run_is_told(text_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(text_run[0], folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"model\.safetensors is missing"):
        predict.predict(Predict(run=folder, file=tmp_path / "none.csv"), io.StringIO())


def test_what_the_model_does_not_know_is_told(answers, text_run, table_run, capsys):
    found = answers(text_run[0], "", "qwertz", "oil oil qwertz", "oil barrel")
    assert [answer["known_terms"] for answer in found] == [0, 0, 1, 2]
    note = "note: 2 of 4 texts contain no term that the model knows: their answers do not depend on the text\n"
    assert capsys.readouterr().err == note
    answers(text_run[0], "qwertz")
    assert capsys.readouterr().err.startswith("note: the text contains no term that the model knows")
    row = {"size": 100, "age": 10, "kind": "castle"}
    strange, usual = answers(table_run[0], json.dumps(row), json.dumps(row | {"kind": "flat"}))
    assert strange["unknown"] == ["kind"]
    assert usual.keys() == {"prediction"}


def test_numbers_have_the_digits_of_float32(answers, table_run):
    (answer,) = answers(table_run[0], json.dumps({"size": 101, "age": 11, "kind": "flat"}))
    assert float(f"{answer['prediction']:.9g}") == answer["prediction"]


def test_many_lines_are_answered_in_order(answers, text_run):
    kinds = {"crude": "oil barrel", "grain": "wheat corn", "trade": "tariff quota"}
    wanted = [label for label in kinds for _ in range(300)] * 2
    found = answers(text_run[0], stdin="".join(kinds[label] + "\n" for label in wanted))
    assert [answer["label"] for answer in found] == wanted


def test_standard_input_is_answered_as_it_comes(text_run, tmp_path):
    process = start("predict", text_run[0], folder=tmp_path)
    for text, label in (("oil barrel tanker", "crude"), ("wheat flour acre", "grain")):
        process.stdin.write(text + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline())["label"] == label
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("", "", 0)


def test_an_error_while_standard_input_is_open_ends_the_process_whole(table_run, tmp_path):
    for rest, times in ((b"", 1), (b"50,3\n" * 20_000, 2)):
        for _ in range(times):
            process = start("predict", table_run[0], folder=tmp_path)
            process.stdin.buffer.write(b"size,age\n100,3\n")
            process.stdin.flush()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.buffer.write(rest)
                process.stdin.flush()
            assert process.wait(60) == 2
            error = process.stderr.read()
            assert error.startswith("error: standard input has no input column 'kind'")
            assert error.count("\n") == 1
            for pipe in (process.stdout, process.stderr):
                pipe.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()


def test_nothing_in_is_nothing_out(answers, text_run, table_run):
    assert answers(text_run[0], stdin="") == []
    assert answers(table_run[0], stdin="\n\n") == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1,2]", ", line 1: a list where an object is expected"),
        ("[1,2", " has a header and no rows: add a line per example"),
        ("3", " has a header and no rows"),
        ("null", " has a header and no rows"),
        ("3\n4", " has no input columns 'size', 'age', 'kind'; its columns are: '3'"),
    ],
)
def test_what_is_no_row_is_told(command, table_run, given, message):
    result = command("predict", table_run[0], stdin=f"{given}\n")
    assert (result.code, result.out) == (2, "")
    assert f"error: standard input{message}" in result.err
    result = command("predict", table_run[0], given)
    assert (result.code, result.out) == (2, "")
    assert "error: argument 1: " in result.err


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


def test_evaluate_repeats_the_scores_of_the_report(command, text_run, tmp_path):
    result = command("evaluate", text_run[0], "--json", tmp_path / "scores.json")
    assert result.code == 0, result.err
    scores, trained = json.loads((tmp_path / "scores.json").read_text()), report(text_run[0])
    for name in ("accuracy", "macro_f1", "per_class", "confusion"):
        assert scores[name] == trained[name]
    assert "macro-F1" in result.out
    assert "examples  48, the test split\n" in result.out
    assert scores["baseline"]["majority"]["accuracy"] == trained["baseline"]["majority"]["accuracy"]
    assert "\nmajority " in result.out


def test_evaluate_takes_other_data(text_run, tmp_path):
    data = write_csv(tmp_path / "new.csv", [(label, text) for text, label in sentences(30, seed=9)], ("topic", "body"))
    scores = predict.evaluate(
        Evaluate(
            run=text_run[0], data=str(data), text_column="body", label_column="topic", json=tmp_path / "scores.json"
        )
    )
    assert sum(map(sum, scores["confusion"])) == 30
    assert json.loads((tmp_path / "scores.json").read_text()) == scores


def test_table_rows_come_as_json_or_csv(answers, table_run, tmp_path):
    folder, _ = table_run
    rows = [{"size": 100, "age": 10, "kind": "house"}, {"size": 50.5, "age": 30, "kind": "flat"}]
    as_json = "".join(json.dumps(row) + "\n" for row in rows)
    as_csv = "kind,age,size\nhouse,10,100\nflat,30,50.5\n"
    (tmp_path / "rows.csv").write_text(as_csv)
    by_argument = answers(folder, *as_json.splitlines())
    assert by_argument[0].keys() == {"prediction"}
    assert by_argument[0]["prediction"] > by_argument[1]["prediction"]
    assert answers(folder, stdin=as_json) == by_argument
    assert answers(folder, stdin=as_csv) == by_argument
    assert answers(folder, file=tmp_path / "rows.csv") == by_argument


def test_an_argument_that_cannot_be_read_is_told_by_its_number(command, table_run):
    whole = '{"size": 1, "age": 2, "kind": "flat"}'
    for arguments, message in (
        (('{"size": 1}',), "argument 1 has no input columns 'age', 'kind'; its columns are: 'size'"),
        ((whole, '{"size": '), "argument 2: not JSON"),
        ((whole, whole.replace("2", '"old"')), "argument 2, column 'age': 'old' where a finite number is expected"),
    ):
        result = command("predict", table_run[0], *arguments)
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert result.err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        ('{"size": 1}\n', "standard input has no input columns 'age', 'kind'; its columns are: 'size'"),
        ('{"size": 1, "kind": "flat"}\n', "standard input has no input column 'age'"),
        (
            '{"size": 1, "age": "old", "kind": "flat"}\n',
            "line 1, column 'age': 'old' where a finite number is expected",
        ),
        ('{"size": 1, "age": 2, "kind": "flat"}\n[]\n', "line 2: a list where an object is expected"),
        ('{"size": \n', "line 1: not JSON"),
        ("size,age,kind\n1,2\n", "line 2: 2 fields where the header has 3"),
        ('size,age,kind\n1,2,"flat\n', "line 2: unexpected end of data; each row must be on one line"),
    ],
)
def test_a_row_that_cannot_be_read_is_told_by_its_line(answers, table_run, stdin, message):
    with pytest.raises(DataError) as caught:
        answers(table_run[0], stdin=stdin)
    assert message in str(caught.value)


GOOD = {"size": 100, "age": 10, "kind": "house"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("not json", "3: not JSON"),
        ('{"size": "big", "age": 10, "kind": "flat"}', "3, column 'size': 'big' where a finite number"),
        ('{"size": 5, "kind": "flat"}', "column 'age'"),
    ],
)
def test_good_rows_are_answered_before_a_bad_one(command, table_run, bad, message):
    good = json.dumps(GOOD)
    wanted = command("predict", table_run[0], good).out * 2
    for given in ({"stdin": f"{good}\n{good}\n{bad}\n{good}\n"}, {"arguments": (good, good, bad, good)}):
        result = command("predict", table_run[0], *given.get("arguments", ()), stdin=given.get("stdin"))
        assert result.code == 2
        assert message in result.err
        assert result.out == wanted


def test_good_rows_of_csv_are_answered_before_a_bad_one(command, table_run, tmp_path):
    content = "size,age,kind\n100,10,house\n100,10,house\nbig,10,house\n"
    (tmp_path / "rows.csv").write_text(content)
    wanted = command("predict", table_run[0], json.dumps(GOOD)).out * 2
    for result in (
        command("predict", table_run[0], stdin=content),
        command("predict", table_run[0], "--file", tmp_path / "rows.csv"),
        command("predict", table_run[0], stdin=content.replace("big,10,house", "1,2")),
    ):
        assert result.code == 2
        assert "line 4" in result.err
        assert result.out == wanted


def test_an_argument_that_is_no_row_is_told(command, table_run):
    assert "argument 1: not JSON" in command("predict", table_run[0], "").err


def test_a_file_without_its_flag_is_told(command, text_run, table_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_csv(tmp_path / "a few.csv", [("oil",)], ("text",))
    done = command("predict", text_run[0], "a few.csv", "oil.csv", "oil\0.csv", "oil")
    assert done.code == 0
    assert len(done.out.splitlines()) == 4
    assert done.err.startswith(
        "note: a few.csv is read as a text; to predict the file's contents: --file 'a few.csv'\n"
    )
    assert done.err.count("note: ") == 2, "and one on the text without known terms"
    done = command("predict", table_run[0], "a few.csv")
    assert done.code == 2
    assert done.err.startswith("note: a few.csv is read as a row; to predict the file's contents: --file 'a few.csv'\n")


def test_scores_that_cannot_be_written_are_told_before_the_work(command, text_run, tmp_path, monkeypatch):
    monkeypatch.setattr(predict, "evaluate", None)
    for path, message in (
        (tmp_path / "none" / "x.json", "is not a folder; create it"),
        (tmp_path, "is a folder: give"),
    ):
        result = command("evaluate", text_run[0], "--json", path)
        assert result.code == 2
        assert f"--json {path}" in result.err
        assert message in result.err


def test_evaluate_of_a_table_repeats_the_report(table_run, table):
    assert predict.evaluate(Evaluate(run=table_run[0]))["r2"] == report(table_run[0])["r2"]
    scores = predict.evaluate(Evaluate(run=table_run[0], data=str(table)))
    assert scores["r2"] > 0.8
    assert scores["source"]["examples"] == 120
    assert scores["baseline"]["mean"]["r2"] == pytest.approx(0, abs=0.01)


def test_evaluate_on_data_with_other_labels_is_refused(text_run):
    with pytest.raises(DataError, match="docstrings has labels that the model does not know: 'binary data'"):
        predict.evaluate(Evaluate(run=text_run[0], data="docstrings"))


def test_evaluate_refuses_columns_that_mean_nothing(text_run, table_run):
    with pytest.raises(ConfigError, match="are for a file given by --data"):
        predict.evaluate(Evaluate(run=text_run[0], text_column="text"))
    with pytest.raises(ConfigError, match="are for text runs"):
        predict.evaluate(Evaluate(run=table_run[0], label_column="kind"))
