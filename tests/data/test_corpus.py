"""Files read in parts give the same texts and errors as files parsed at once."""

import json
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minidl.data import DataError, TfidfOptions, load_text, parts, read_labelled, read_texts, terms
from minidl.data.corpus import count_dataset, load_corpus, read_corpus, read_counted
from minidl.data.split import digests
from minidl.data.workers import Workers
from tests.data.test_files import labels, texts, write_csv

ANALYZER = TfidfOptions().analyzer
keep_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
rows = st.lists(st.tuples(texts | st.just('"'), labels), min_size=1, max_size=8)


def read_at_once(path, model_labels=None):
    """Return the texts, classes, label names and source of a file, or the error message."""
    try:
        texts, names, source = read_labelled(path, model_labels)
    except DataError as error:
        return str(error)
    return texts.texts, texts.labels, names, source


def read_in_parts(path, model_labels=None, workers=None):
    """Return the corpus of a file, or the error message."""
    try:
        return read_corpus(path, ANALYZER, model_labels, workers=workers)
    except DataError as error:
        return str(error)


class InProcess:
    """Workers that run in this process."""

    count = 2
    map = staticmethod(map)


def check_counts(path):
    """Check and return the counts of texts to classify; None if `read_counted` leaves them to `read_texts`."""
    counts = read_counted(path, ANALYZER, None, None, InProcess)
    try:
        expected = read_texts(path)
    except DataError:
        assert counts is None
        return None
    if counts is not None:
        assert entries(counts) == entries(terms.count_texts(expected, ANALYZER))
    return counts


def check(path, model_labels=None):
    check_counts(path)
    expected, corpus = read_at_once(path, model_labels), read_in_parts(path, model_labels)
    if isinstance(expected, str):
        assert corpus == expected
        return
    texts, classes, names, source = expected
    assert (corpus.labels, corpus.classes.tolist(), corpus.source) == (names, classes, source)
    assert (corpus.digests == digests(texts)).all()
    assert entries(corpus.content) == entries(terms.count_texts(texts, ANALYZER))


def entries(counts):
    """The counts of each text by term."""
    ends = np.cumsum(counts.sizes)
    return [
        {counts.terms[counts.ids[i]]: int(counts.counts[i]) for i in range(end - size, end)}
        for end, size in zip(ends, counts.sizes, strict=True)
    ]


@pytest.fixture
def small(monkeypatch):
    """Parts of a few bytes."""
    monkeypatch.setattr(parts, "PART", 16)
    monkeypatch.setattr("minidl.data.corpus.PART", 8)


@pytest.mark.usefixtures("small")
@keep_files
@given(rows, st.sampled_from([".csv", ".tsv"]), st.booleans(), st.booleans())
def test_csv_in_small_parts(tmp_path, rows, suffix, mark, quoted):
    path = write_csv(
        tmp_path / f"data{suffix}", ["text", "label"], rows, "\t" if suffix == ".tsv" else ",", quoting=int(quoted)
    )
    if mark:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    check(path)


@pytest.mark.usefixtures("small")
@keep_files
@given(
    st.lists(
        st.sampled_from([b'"', b",", b"\n", b"\r", b"a", b'""', b"x,y\n", b'"q\n"', b"\xff", b"\0", b";"]), max_size=24
    )
)
def test_any_bytes(tmp_path, fragments):
    path = tmp_path / "data.csv"
    path.write_bytes(b"text,label\n" + b"".join(fragments))
    check(path)
    path.write_bytes(b"text;label\n" + b"".join(fragments).replace(b",", b";"))
    check(path)


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just([1]) | st.just({"a": 1})
)


@pytest.mark.usefixtures("small")
@keep_files
@given(
    st.lists(
        st.fixed_dictionaries({"text": texts | values, "label": labels | values}, optional={"x": values}),
        min_size=1,
        max_size=6,
    )
)
def test_any_objects(tmp_path, objects):
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, objects)) + "\n")
    check(path)


@pytest.mark.parametrize("key", ["a\0", "\ud800"])
def test_a_key_that_is_no_text_is_refused(tmp_path, key):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"text": "a word", "label": label, key: 1}) + "\n" for label in "ab"))
    check(path)
    assert "key" in read_in_parts(path)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("name", "content", "is_counted"),
    [
        ("a.csv", "text,other\n" + '"one, two",1\nthree,2\n' * 9, True),
        ("a.csv", "x\n" + "one two\n" * 9, True),
        ("a.csv", "x,y\n" + "one,two\n" * 9, False),  # which column?
        ("a.jsonl", '{"text": "one two"}\n' * 9, True),
        ("a.jsonl", '{"text": "one \\ud800"}\n' * 9, False),
        ("a.jsonl", '{"text": "one"}\n' * 9 + '{"text": 1}\n', False),
        ("a.txt", "one two\n" * 9, False),
        ("a.csv", "x\n1", False),
    ],
)
def test_valid_texts_to_classify_are_counted(tmp_path, name, content, is_counted):
    path = tmp_path / name
    path.write_text(content)
    assert (check_counts(path) is not None) == is_counted


@pytest.mark.usefixtures("small")
def test_a_pipe_is_not_read_twice(tmp_path):
    path = tmp_path / "a.csv"
    os.mkfifo(path)
    assert read_counted(path, ANALYZER, None, None, InProcess) is None


def test_labels_of_a_model(tmp_path):
    path = write_csv(tmp_path / "d.csv", ["text", "label"], [("one two", "a"), ("three", "b")])
    check(path, ["b", "a", "c"])
    check(path, ["a"])


@pytest.mark.parametrize("name", ["missing.csv", "folder.csv", "data.txt"])
def test_files_that_cannot_be_read(tmp_path, name):
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "data.txt").write_text("text,label\na,b\n")
    check(tmp_path / name)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A file of 6 MB with quoted line ends."""
    draw = np.random.default_rng(0)
    rows = [
        (" ".join(f"w{n}" for n in draw.zipf(1.3, 30).clip(max=3000)) + ('\n"so"' if i % 3 == 0 else ""), f"c{i % 5}")
        for i in range(40_000)
    ]
    return write_csv(tmp_path_factory.mktemp("large") / "data.csv", ["text", "label"], rows)


@pytest.mark.slow
def test_processes_read_a_large_file_as_one_does(large):
    with Workers(3) as pool:
        by_workers = read_corpus(large, ANALYZER, workers=pool)
    in_process = read_corpus(large, ANALYZER)
    texts, names, source = read_labelled(large)
    assert by_workers.source == in_process.source == source
    assert by_workers.labels == in_process.labels == names
    for corpus in (by_workers, in_process):
        assert corpus.classes.tolist() == texts.labels
        assert (corpus.digests == digests(texts.texts)).all()
    assert by_workers.content.terms == in_process.content.terms
    for name in ("sizes", "ids", "counts"):
        assert (getattr(by_workers.content, name) == getattr(in_process.content, name)).all()


@pytest.mark.slow
def test_an_error_late_in_a_large_file_names_the_line(large, tmp_path):
    raw = large.read_bytes()
    path = tmp_path / "bad.csv"
    path.write_bytes(raw + b"one field\n")
    with Workers(2) as pool:
        message = read_in_parts(path, workers=pool)
    assert message == read_at_once(path)
    assert f"line {raw.count(bytes([10])) + 1}: 1 fields where the header has 2" in message


def test_the_splits_are_those_of_the_texts(tmp_path):
    rows = [(f"text number {i % 50} of {i % 7}", "abc"[i % 3]) for i in range(200)]
    path = write_csv(tmp_path / "d.csv", ["text", "label"], rows)
    other = write_csv(tmp_path / "o.csv", ["text", "label"], rows[:9])
    for shares in ({}, {"validation": 0.2, "test": 0.3, "split_seed": 3}, {"test": other}):
        expected = load_text(path, **shares)
        with Workers(1) as pool:
            dataset = load_corpus(path, ANALYZER, pool, **shares)
            in_memory = count_dataset(expected, ANALYZER, pool)
        assert (dataset.labels, dataset.name, dataset.source) == (expected.labels, expected.name, expected.source)
        for name in ("train", "validation", "test"):
            part, texts = getattr(dataset, name), getattr(expected, name)
            assert part.classes.tolist() == texts.labels
            assert (part.digests == digests(texts.texts, shares.get("split_seed", 0))).all()
            assert entries(part.content) == entries(getattr(in_memory, name).content)
        assert dataset.texts() == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("text,label\n" + "a b,x\n" * 9, "has one class only"),
        ("text,label\n" + "".join(f"t{i} u,c{i}\n" for i in range(9)), "has too few rows to split"),
    ],
)
def test_a_file_without_a_task(tmp_path, content, message):
    path = tmp_path / "d.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as expected:
        load_text(path)
    with pytest.raises(DataError) as error:
        load_corpus(path, ANALYZER)
    assert str(error.value) == str(expected.value)
