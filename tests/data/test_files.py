"""The user's files: what is written comes back, and anything else is one clear error."""

import csv
import io
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidl.data import DataError, Tfidf, TfidfOptions, load_text, read_labelled, read_texts
from minidl.data.files import read_records, sort_labels

texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=30)
labels = st.sampled_from(["a", "b", "c d", "\N{GREEK SMALL LETTER ALPHA}"])
keep_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = [(f"text number {i}", "ab"[i % 2]) for i in range(20)]


def complaint(load, path):
    """What the loader says of the file, or its name when nothing is wrong with it."""
    try:
        load(path)
    except DataError as error:
        return str(error)
    return str(path)


def write_csv(path, header, rows, delimiter=",", **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter, **options)
        writer.writerows([header, *rows])
    return path


@keep_files
@given(st.lists(st.tuples(texts, labels), min_size=1, max_size=8), st.sampled_from([".csv", ".tsv"]), st.booleans())
def test_csv_and_tsv_round_trip(tmp_path, rows, suffix, mark):
    path = write_csv(tmp_path / f"data{suffix}", ["text", "label"], rows, "\t" if suffix == ".tsv" else ",")
    if mark:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found, names, source = read_labelled(path)
    assert found.texts == [text for text, _ in rows]
    assert [names[label] for label in found.labels] == [label for _, label in rows]
    assert source["rows"] == len(rows)
    assert read_texts(path) == found.texts


@keep_files
@given(
    st.lists(st.tuples(texts, labels), min_size=1, max_size=8), st.booleans(), st.sampled_from(["\n", "\r\n", "\n\n"])
)
def test_jsonl_round_trip(tmp_path, rows, ascii_only, end):
    path = tmp_path / "data.jsonl"
    lines = [json.dumps({"text": text, "label": label}, ensure_ascii=ascii_only) for text, label in rows]
    path.write_bytes((end.join(lines) + end).encode())
    found, names, _ = read_labelled(path)
    assert found.texts == [text for text, _ in rows]
    assert [names[label] for label in found.labels] == [label for _, label in rows]


@keep_files
@given(st.binary(max_size=200) | texts.map(str.encode), st.sampled_from([".csv", ".tsv", ".jsonl", ".txt"]))
def test_hostile_bytes_raise_only_data_error(tmp_path, junk, suffix):
    path = tmp_path / f"junk{suffix}"
    for head in (b"", b"text,label\n", b'{"text": "a", "label": "b"}\n', b"text\tlabel\nx\ty\n"):
        path.write_bytes(head + junk)
        for load in (load_text, read_texts):
            assert str(path) in complaint(load, path)


hostile_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


@keep_files
@given(st.lists(st.dictionaries(st.sampled_from(["text", "label", "x"]), hostile_values), min_size=1, max_size=5))
def test_hostile_json_raises_only_data_error(tmp_path, objects):
    path = tmp_path / "junk.jsonl"
    path.write_text("\n".join(json.dumps(value) for value in objects))
    assert str(path) in complaint(load_text, path)


def test_nested_json_beyond_the_stack(tmp_path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": ' + "[" * 100_000)
    with pytest.raises(DataError, match="line 1"):
        load_text(path)


def test_a_dataset_is_split_by_class_and_text(tmp_path):
    rows = [(f"text number {i % 80}", "ab"[i % 2]) for i in range(100)]
    data = load_text(write_csv(tmp_path / "mine.csv", ["label", "text"], [(b, a) for a, b in rows]))
    assert data.name == "mine"
    assert data.labels == ["a", "b"]
    parts = [set(part.texts) for part in (data.train, data.validation, data.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 80
    assert sum(len(part) for part in (data.train, data.validation, data.test)) == 100
    assert all(set(part.labels) == {0, 1} for part in (data.train, data.validation, data.test))
    assert data.source["split"] == "by class and hash of the text, seed 0: 10% validation, 20% test"
    other = load_text(tmp_path / "mine.csv", split_seed=1, test=0.5)
    assert set(other.test.texts) != parts[2]


def test_columns_are_guessed_or_named(tmp_path):
    three = write_csv(tmp_path / "three.csv", ["id", "Text", "Class"], [(i, a, b) for i, (a, b) in enumerate(ROWS)])
    assert load_text(three).source["text_column"] == "Text"
    assert load_text(three).source["guessed"] == ["text_column", "label_column"]
    assert load_text(three, text_column="Text").source["guessed"] == ["label_column"]
    assert read_texts(three)[0] == ROWS[0][0]
    assert read_texts(three, usual="id")[0] == "0"
    assert read_texts(three, "Class", usual="id")[0] == ROWS[0][1]
    assert read_texts(three, usual="gone")[0] == ROWS[0][0]
    two = write_csv(tmp_path / "two.csv", ["label", "words"], [(b, a) for a, b in ROWS])
    assert load_text(two).source["text_column"] == "words"
    also = write_csv(tmp_path / "also.csv", ["text", "kind"], ROWS)
    assert load_text(also).source["label_column"] == "kind"
    odd = write_csv(tmp_path / "odd.csv", ["p", "q", "r"], [(a, b, a) for a, b in ROWS])
    with pytest.raises(DataError, match=r"which column is the label\? .*--label-column.*'p', 'q', 'r'"):
        load_text(odd)
    with pytest.raises(DataError, match=r"which column is the text\?"):
        load_text(odd, label_column="q")
    assert load_text(odd, label_column="q", text_column="p").labels == ["a", "b"]
    with pytest.raises(DataError, match="has no text column 'body'; its columns are: 'p', 'q', 'r'"):
        load_text(odd, label_column="q", text_column="body")
    with pytest.raises(DataError, match="named as text and as label"):
        load_text(odd, label_column="q", text_column="q")


def test_semicolons_where_the_comma_is_the_decimal_mark(tmp_path):
    assert load_text(write_csv(tmp_path / "d.csv", ["text", "label"], ROWS, ";")).labels == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv is empty: it needs a line per example, after a header line"),
        ("a.jsonl", b" \n\n", "a.jsonl is empty: it needs a line per example$"),
        ("a.csv", b"text,label\n", "has a header and no rows"),
        ("a.csv", b"text,label\nx,y\nz,\xe9\n", "a.csv, line 3: byte 0xe9 is not UTF-8 text; save the file as UTF-8"),
        ("a.csv", b"text,label\nx,y\nz\0,w\n", "a.csv, line 3: a zero byte, so this is not a text file"),
        ("a.csv", "text,label\nx,y".encode("utf-16"), "UTF-16 text: save it as UTF-8"),
        ("a.csv", b"text,label\nx,y\nz,w,v\n", "line 3: 3 fields where the header has 2; put .* contains a comma"),
        ("a.tsv", b"text\tlabel\nx\n", "line 2: 1 fields where the header has 2; put a field that contains a tab"),
        ("a.csv", b'text,label\n"x\ny",a\n"open,b\n', "line 4: unexpected end of data; close every quoted field"),
        ("a.csv", b'text,label\n"x"y,a\n', "line 2: .*write a double quote inside one twice"),
        ("a.csv", b"text,text\nx,y\n", "line 1: column 'text' occurs twice"),
        ("a.csv", b"text,label\nx,a\ny,a\n", r"has one class only \('a' in column 'label'\)"),
        ("a.csv", b"text,label\nx,a\ny, \n", "line 3: no label in column 'label'; fill it in or delete the row"),
        ("a.csv", b"text,label\nx,a\ny,b\n", "too few rows to split: 2 for training, 0 for validation, 0 for the test"),
        ("a.csv", b"text,label\nx,a\ny,b\n", "each of the 2 classes in column 'label' has at most 1 row; give"),
        ("a.jsonl", b'{"text": "x", "label": "a"}\n{"text": "x"\n', "line 2: not JSON .*write one object per line"),
        ("a.jsonl", b"[1]\n", "line 1: a list where an object is expected"),
        ("a.jsonl", b'{"text": 3, "label": "a"}', "line 1: a number in text column 'text' where a string is expected"),
        ("a.jsonl", b'{"text": "x", "label": "a"}\n{"label": "a"}', "line 2: nothing in text column"),
        ("a.jsonl", b'{"text": "x", "label": ["a"]}', "line 1: a list in label column 'label' where one label"),
        ("a.jsonl", b'{"text": "x", "label": null}', "line 1: no label in column"),
        ("a.jsonl", b'{"text": "x", "label": NaN}', "line 1: no label in column 'label'; fill it in or delete the row"),
        ("a.jsonl", b'{"text": "\\u0000", "label": "a"}', "line 1: a zero character"),
        ("a.jsonl", b'{"text": "\\ud800", "label": "a"}', "line 1: half of a surrogate pair"),
        ("a.jsonl", b'{"text": "b", "c\\ud800": 1}\n' * 2, r"line 1: key 'c\\ud800': half of a surrogate pair"),
        ("a.jsonl", b'{"n": ' + b"9" * 5000 + b"}", "line 1: JSON that cannot be read"),
        ("a.xlsx", b"PK", "give a file ending in .csv, .tsv, .jsonl"),
    ],
)  # fmt: skip
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        load_text(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_paths_that_are_no_files(tmp_path):
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(DataError, match=r"d\.csv is a folder"):
        load_text(tmp_path / "d.csv")
    with pytest.raises(DataError, match="does not exist"):
        read_texts(tmp_path / "none.csv")
    with pytest.raises(DataError, match="cannot be read"):
        read_records(tmp_path / "a\0.csv")
    with pytest.raises(DataError, match="cannot be read: File name too long; give the path"):
        read_texts(tmp_path / ("a" * 5000 + ".csv"))
    with pytest.raises(DataError, match=r"unknown text data 'aaaa.*nor a file that exists") as caught:
        load_text("a" * 5000)
    assert len(str(caught.value)) < 400


def test_bad_shares(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["text", "label"], ROWS)
    for options in ({"validation": 0}, {"test": 1.0}, {"validation": 0.5, "test": 0.5}, {"test": float("nan")}):
        with pytest.raises(DataError, match="must lie between 0 and 1"):
            load_text(path, **options)


def test_an_unknown_label_at_evaluation_lists_the_known(tmp_path):
    path = write_csv(tmp_path / "a.csv", ["text", "label"], [("x", "b"), ("y", "a"), ("z", "new")])
    with pytest.raises(
        DataError, match=r"a\.csv, line 4: label 'new' is unknown to the model; its labels are: 'b', 'a'"
    ):
        read_labelled(path, ["b", "a"])
    assert read_labelled(path, ["new", "b", "a"])[0].labels == [1, 2, 0]


def test_a_text_of_ten_megabytes_and_an_empty_one(tmp_path):
    long = 'long "quoted"\ntext, ' * 500_000
    rows = [*ROWS, (long, "a"), ("", "b")]
    limit = csv.field_size_limit()
    data = load_text(write_csv(tmp_path / "big.csv", ["text", "label"], rows))
    assert csv.field_size_limit() == limit
    everything = data.train.texts + data.validation.texts + data.test.texts
    assert long in everything
    assert "" in everything
    assert Tfidf.fit(everything, TfidfOptions(min_df=1)).transform(["", long]).indptr.tolist()[1] == 0


def test_labels_of_json_types_and_their_order(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"text": f"t{i}", "label": [True, 1.5, "x", 10][i % 4]} for i in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert load_text(path).labels == ["1.5", "10", "true", "x"]
    assert sort_labels({"10", "9", "-1"}) == ["-1", "9", "10"]
    assert sort_labels({"10", "9", "b"}) == ["10", "9", "b"]


def test_texts_to_classify_one_per_line(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("one\r\n\ntwo \N{SNOWMAN}\x0bstill two\n".encode())
    assert read_texts(path) == ["one", "", "two \N{SNOWMAN}\x0bstill two"]
    path.write_bytes(b"")
    assert read_texts(path) == []
    only = write_csv(tmp_path / "only.csv", ["whatever"], [["a"], ["b"]])
    assert read_texts(only) == ["a", "b"]
    many = write_csv(tmp_path / "many.csv", ["u", "v"], [["a", "b"]])
    assert read_texts(many, "v") == ["b"]
    with pytest.raises(DataError, match=r"which column is the text\?"):
        read_texts(many)


def test_what_comes_first_of_a_zero_byte_and_another_bad_byte_is_told(tmp_path):
    for content, message in ((b"a\nb\0\n\xff", "line 2: a zero byte"), (b"a\n\xff\n\0", "line 2: byte 0xff")):
        (tmp_path / "a.txt").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_texts(tmp_path / "a.txt")


def test_blank_lines_are_skipped_and_line_numbers_stay_true(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('\ntext,label\n\n"two\nlines",a\n\nlast,b\n')
    records = read_records(path)
    assert records.rows == [["two\nlines", "a"], ["last", "b"]]
    assert records.lines == [4, 7]


def test_objects_with_ever_new_keys_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("minidl.data.limits.CELLS", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({f"key{i}": 1}) for i in range(50)))
    with pytest.raises(DataError, match="50 different keys in 50 objects"):
        load_text(path)


def test_messages_stay_short_and_printable(tmp_path):
    buffer = io.StringIO()
    csv.writer(buffer).writerows([["text", "label"], ["x", "\x1b[31m" + "y" * 500], ["z", "a"]])
    (tmp_path / "a.csv").write_text(buffer.getvalue())
    with pytest.raises(DataError) as caught:
        read_labelled(tmp_path / "a.csv", ["a", "b"])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_keys_that_every_object_has_its_own_are_refused_in_a_small_file(tmp_path):
    """As a table 120 kB would be ten thousand times ten thousand cells."""
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(f'{{"k{i}": 1}}' for i in range(10_000)))
    with pytest.raises(DataError, match="10000 different keys in 10000 objects"):
        read_records(path)
