"""What separates the cells of a CSV file: declared as Excel does, or as its header line shows; one reader for all."""

import io

import pytest

from minidl.data import DataError, TfidfOptions, load_table, load_text, parts, read_features, read_texts
from minidl.data.corpus import read_corpus
from minidl.data.files import read_records
from minidl.training.prediction.inputs import rows_as_they_come

ROWS = [(f"text {i}", "ab"[i % 2]) for i in range(24)]


def content(delimiter, head="", header=("text", "label"), end="\r\n"):
    return head + "".join(delimiter.join(row) + end for row in [header, *ROWS])


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("head", ["sep={}\r\n", '"sep={}"\r\n', "SEP={}\n", "\r\nsep={}\r\n"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|", "^"])
def test_a_first_line_declares_the_delimiter(tmp_path, delimiter, head, mark):
    path = tmp_path / "a.csv"
    path.write_text(mark + content(delimiter, head.format(delimiter)), encoding="utf-8", newline="")
    records = read_records(path)
    assert (records.columns, records.rows[0]) == (["text", "label"], ["text 0", "a"])
    assert records.lines[0] == 3 + head.startswith("\r\n")
    assert load_text(path).labels == ["a", "b"]
    assert read_texts(path) == [text for text, _ in ROWS]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("head", ["", "sep={}\n"])
def test_all_readers_see_the_same_cells(tmp_path, monkeypatch, delimiter, head):
    """Files read whole, files read in parts, and standard input have the same cells."""
    path = tmp_path / "a.csv"
    raw = content(delimiter, head.format(delimiter))
    path.write_text(raw, newline="")
    expected = read_records(path)
    assert expected.columns == ["text", "label"]
    monkeypatch.setattr(parts, "PART", 64)
    monkeypatch.setattr("minidl.data.corpus.PART", 64)
    monkeypatch.setattr("minidl.data.files.parse_records", None)  # the file is read in parts
    corpus = read_corpus(path, TfidfOptions(min_df=1, token_pattern=r"\S+").analyzer)
    assert (len(corpus), corpus.labels) == (24, ["a", "b"])
    assert corpus.content.terms[:2] == ["text", "0"]
    found = list(rows_as_they_come(io.BufferedReader(io.BytesIO(raw.encode())), []))
    assert found[0].columns == expected.columns
    assert [row for records in found for row in records.rows] == expected.rows
    assert {records.decimal_comma for records in found} == {expected.decimal_comma} == {delimiter == ";"}


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_a_delimiter_in_quotes_is_none(tmp_path, delimiter):
    path = tmp_path / "a.csv"
    path.write_text(content(delimiter, header=('"text, or so; a\tb"', "label")), newline="")
    assert read_records(path).columns == ["text, or so; a\tb", "label"]


def test_tables_are_read_with_any_delimiter_whatever_the_one_in_training(tmp_path):
    rows = [[str(i), f"{i}.5", str(3 * i)] for i in range(60)]

    def write(name, delimiter, head=""):
        path = tmp_path / name
        path.write_text(head + "\n".join(delimiter.join(row) for row in [["a", "b", "target"], *rows]))
        return path

    data = load_table(write("t.csv", ","))
    expected = read_features(tmp_path / "t.csv", data.schema)
    for path in (write("a.csv", "\t"), write("b.csv", ";", "sep=;\n"), write("c.tsv", "\t"), write("d.csv", "|")):
        assert (read_features(path, data.schema) == expected).all()


def test_an_error_names_the_line_and_the_delimiter(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("sep=^\ntext^label\na^b\nc\n")
    with pytest.raises(DataError, match=r"line 4: 1 fields where the header has 2; put a field that contains '\^' or"):
        read_records(path)
    path.write_text("sep=;\n")
    with pytest.raises(DataError, match="has a header and no rows"):
        read_records(path)
