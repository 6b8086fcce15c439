"""Tables: encoding against plain arithmetic, the training split's statistics only, and errors that name the cell."""

import csv
import datetime as dt
import json
import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from minidl.data import Batches, DataError, TableSchema, load_table, read_features, read_rows
from minidl.data.files import read_records
from minidl.data.tables import load_table_file

keep_files = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(path, header, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def rows(count=60):
    return [[i, f"{i / 7:.4f}", "red" if i % 3 else "blue", 2.5 * i + 1] for i in range(count)]


HEADER = ["n", "ratio", "colour", "target"]


def test_diabetes():
    data = load_table("diabetes")
    assert [len(part) for part in (data.train, data.validation, data.test)] == [310, 44, 88]
    assert data.schema.task == "regression"
    assert data.schema.feature_names == ["age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert data.train.x.dtype == data.train.y.dtype == np.float32
    np.testing.assert_allclose(data.train.x.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(data.train.x.std(0), 1, atol=1e-5)
    np.testing.assert_allclose([data.train.y.mean(), data.train.y.std()], [0, 1], atol=1e-5)
    raw = data.test.y.astype(float) * data.schema.target_scale + data.schema.target_mean
    assert np.abs(raw - raw.round()).max() < 1e-4
    assert 25 <= raw.min() < raw.max() <= 346


def test_encoding_follows_the_training_split(tmp_path):
    data = load_table(write(tmp_path / "t.csv", HEADER, rows()))
    schema = data.schema
    assert schema.task == "regression"
    assert schema.feature_names == ["n", "ratio", "colour=blue", "colour=red"]
    n = [(y * schema.target_scale + schema.target_mean - 1) / 2.5 for y in data.train.y.astype(float)]
    np.testing.assert_allclose(schema.columns[0].mean, np.mean(n), rtol=1e-6)
    np.testing.assert_allclose(schema.columns[0].scale, np.std(n), rtol=1e-6)
    for part in (data.train, data.validation, data.test):
        i = np.round((part.y.astype(float) * schema.target_scale + schema.target_mean - 1) / 2.5)
        np.testing.assert_allclose(part.x[:, 0], (i - schema.columns[0].mean) / schema.columns[0].scale, atol=1e-5)
        np.testing.assert_array_equal(part.x[:, 2], i % 3 == 0)
        np.testing.assert_array_equal(part.x[:, 2] + part.x[:, 3], 1)
    ((x, y), *_) = Batches(data.train.x, data.train.y, 8).epoch(0)
    assert (list(x.shape), list(y.shape)) == ([8, 4], [8])


def test_a_schema_reads_new_rows_as_the_old(tmp_path):
    path = write(tmp_path / "t.csv", HEADER, rows())
    data = load_table(path)
    schema = TableSchema.from_json(data.schema.to_json())
    assert schema == data.schema
    whole = read_rows(path, schema)
    assert len(whole) == 60
    parts = np.concatenate([part.x for part in (data.train, data.validation, data.test)])
    assert sorted(map(bytes, parts)) == sorted(map(bytes, whole.x))
    unlabelled = write(tmp_path / "new.csv", ["colour", "n", "ratio"], [["green", 1, 2], ["red", 3, 4]])
    x = read_features(unlabelled, schema)
    assert x[:, 2:].tolist() == [[0, 0], [0, 1]], "a colour never seen in training is all zeros"
    with pytest.raises(DataError, match=r"new.csv has no target column 'target'; its columns are: 'colour'"):
        read_rows(unlabelled, schema)
    with pytest.raises(DataError, match="has no input columns 'n', 'colour'; its columns are: 'ratio'"):
        read_features(write(tmp_path / "less.csv", ["ratio"], [[1]]), schema)
    with pytest.raises(DataError, match=r"bad.csv, line 2, column 'n': 'many' where a finite number is expected"):
        read_features(write(tmp_path / "bad.csv", ["colour", "n", "ratio"], [["red", "many", 1]]), schema)
    with pytest.raises(DataError, match="is too large"):
        read_features(write(tmp_path / "huge.csv", ["colour", "n", "ratio"], [["red", "1e300", 1]]), schema)


def test_classification(tmp_path):
    path = write(tmp_path / "t.csv", ["x", "kind"], [[i, ["no", "yes", "maybe"][i % 3]] for i in range(60)])
    data = load_table(path, target="kind")
    assert (data.schema.task, data.schema.labels) == ("classification", ["maybe", "no", "yes"])
    assert data.train.y.dtype == np.int64
    assert all(set(part.y) == {0, 1, 2} for part in (data.train, data.validation, data.test))
    other = write(tmp_path / "o.csv", ["x", "kind"], [[1, "yes"], [2, "never"]])
    with pytest.raises(DataError, match=r"line 3, column 'kind': label 'never' is unknown .*'maybe', 'no', 'yes'"):
        read_rows(other, data.schema)
    with pytest.raises(DataError, match="target of a regression must be a finite number"):
        load_table(path, target="kind", task="regression")


@pytest.mark.parametrize(
    ("values", "task"),
    [
        (range(60), "regression"),
        ([i % 5 for i in range(60)], "classification"),
        ([i % 5 + 0.5 for i in range(60)], "regression"),
        (["a", "b"] * 30, "classification"),
        (["true", "false"] * 30, "classification"),
    ],
)
def test_the_task_is_guessed(tmp_path, values, task):
    path = write(tmp_path / "t.csv", ["x", "target"], list(enumerate(values)))
    assert load_table(path).schema.task == task


@pytest.mark.parametrize(
    ("values", "bad"),
    [
        ([i / 7 for i in range(120)], "inf"),
        ([i / 7 for i in range(120)], "abc"),
        (range(120), "12,5"),
        ([i % 12 for i in range(120)], "seven"),
        ([i % 2 for i in range(10)], "one"),
    ],
)
def test_one_bad_target_is_a_mistake_and_no_class(tmp_path, values, bad):
    values = list(values)
    values[7] = bad
    path = write(tmp_path / "t.csv", ["x", "target"], list(enumerate(values)))
    with pytest.raises(DataError, match=f"line 9, column 'target': '{bad}' is not a finite number, unlike most"):
        load_table(path)


def test_texts_among_numbers_are_classes_when_they_are_many_or_the_task_says_so(tmp_path):
    grades = [["1", "2", "3", "fail"][i % 4] for i in range(120)]
    few = [i % 12 if i % 40 else "seven" for i in range(120)]
    path = write(tmp_path / "t.csv", ["x", "target"], list(enumerate(grades)))
    assert load_table(path).schema.labels == ["1", "2", "3", "fail"]
    path = write(tmp_path / "few.csv", ["x", "target"], list(enumerate(few)))
    assert len(load_table(path, task="classification").schema.labels) == 13


def test_a_missing_category_may_be_nan(tmp_path):
    path = tmp_path / "t.jsonl"
    cells = ["red", "blue", math.nan]
    path.write_text("\n".join(json.dumps({"colour": cells[i % 3], "x": i, "target": i / 3}) for i in range(60)))
    with pytest.raises(DataError, match="line 3, column 'colour': the value is missing"):
        load_table(path)
    assert load_table(path, missing="fill").schema.feature_names == ["colour=blue", "colour=red", "x"]


def test_missing_values(tmp_path):
    cells = rows()
    cells[4][1] = "NA"
    path = write(tmp_path / "t.csv", HEADER, cells)
    with pytest.raises(DataError, match=r"t\.csv, line 6, column 'ratio': the value is missing; .*--missing fill"):
        load_table(path)
    data = load_table(path, missing="fill")
    assert sum(int((part.x[:, 1] == 0).sum()) for part in (data.train, data.validation, data.test)) == 1
    assert load_table(path, ignore=["ratio"]).schema.feature_names == ["n", "colour=blue", "colour=red"]
    cells[5][2] = " "
    path = write(tmp_path / "t.csv", HEADER, cells)
    with pytest.raises(DataError, match=r"line 7, column 'colour': the value is missing"):
        load_table(path, ignore=["ratio"])
    data = load_table(path, missing="fill")
    assert sum(int((part.x[:, 2:].sum(1) == 0).sum()) for part in (data.train, data.validation, data.test)) == 1
    cells[7][3] = ""
    with pytest.raises(DataError, match=r"line 9, column 'target'"):
        load_table(write(tmp_path / "t.csv", HEADER, cells), missing="fill", task="regression")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "price"}, "has no target column 'price'; its columns are: 'n', 'ratio', 'colour', 'goal'"),
        ({}, r"which column is to be predicted\? Name it with --target \(target in Python\)"),
        (
            {"target": "goal", "ignore": ["n", "goal"]},
            r"column 'goal' is the target \(--target\) and cannot be ignored",
        ),
        ({"target": "goal", "ignore": ["size"]}, "has no ignored column 'size'"),
        ({"target": "goal", "ignore": ["n", "ratio", "colour"]}, "no input column besides the target 'goal'"),
        ({"target": "goal", "task": "clustering"}, "unknown task 'clustering'"),
        ({"target": "goal", "missing": "guess"}, "unknown treatment of missing values 'guess'"),
        ({"target": "goal", "test": 2}, "must lie between 0 and 1"),
        ({"target": "goal", "text_column": "n"}, "has no option 'text_column'; its options are: target, task"),
    ],
)
def test_bad_options(tmp_path, change, message):
    path = write(tmp_path / "t.csv", ["n", "ratio", "colour", "goal"], rows())
    with pytest.raises(DataError, match=message):
        load_table(path, **change)


@pytest.mark.parametrize(
    ("header", "cells", "message"),
    [
        (["x", "target"], [[i, "one"] for i in range(9)], "has one class only"),
        (["x", "target"], [[i, 1.5] for i in range(9)], "has the one value 1.5"),
        (["x", "target"], [[1, "a"], [2, "b"]], "each of the 2 classes in column 'target' has at most 1 row; give"),
        (["x", "target"], [[1, 0.5], [2, 0.7]], "0 for validation, 1 for the test; it has 2 different rows; give at"),
        (["x", "target"], [[f"id {i}", i] for i in range(300)], "different texts, at most 100 categories"),
        (
            ["x", "target"],
            [["12,5" if i == 3 else i, i] for i in range(40)],
            r"line 5, column 'x': '12,5' is not a finite",
        ),
        (["x", "target"], [["inf" if i == 3 else i, i] for i in range(40)], r"column 'x': 'inf' is not a finite"),
        (["x", "target"], [[i * 4e306 * (-1) ** i, i] for i in range(40)], "numbers too large to standardise"),
        (["x", "z", "target"], [["", i, i] for i in range(40)], "the value is missing"),
        (["x", "target"], [[i, i * 1e120] for i in range(40)], "numbers too large to standardise"),
    ],
)
def test_bad_tables(tmp_path, header, cells, message):
    with pytest.raises(DataError, match=message):
        load_table(write(tmp_path / "t.csv", header, cells))


def test_a_number_taken_for_classes_is_told(tmp_path):
    path = write(tmp_path / "t.csv", ["x", "price"], [[i, 1000 + i // 2] for i in range(200)])
    with pytest.raises(DataError) as caught:
        load_table(path, target="price", task="classification")
    assert "each of the 100 classes in column 'price' has at most 2 different rows" in str(caught.value)
    assert "or predict the numbers as such (--task regression)" in str(caught.value)


def test_what_was_guessed_is_in_the_source(tmp_path):
    path = write(tmp_path / "t.csv", HEADER, rows())
    assert load_table(path).source["guessed"] == ["target", "task"]
    assert load_table(path, target="target").source["guessed"] == ["task"]
    assert load_table(path, target="n", task="regression").source["guessed"] == []


def test_unknown_categories_are_named(tmp_path):
    schema = load_table(write(tmp_path / "t.csv", HEADER, rows()), missing="fill").schema
    new = write(tmp_path / "n.csv", ["colour", "n", "ratio"], [["green", 1, 2], ["red", 3, 4], ["", 3, 4]])
    assert schema.unknown(read_records(new)) == [["colour"], [], []]


def test_an_empty_column_can_only_be_ignored(tmp_path):
    path = write(tmp_path / "t.csv", ["x", "y", "target"], [["", i, i] for i in range(40)])
    with pytest.raises(DataError, match="column 'x' is empty; ignore the column"):
        load_table(path, missing="fill")


def test_a_constant_column_becomes_zeros(tmp_path):
    data = load_table(write(tmp_path / "t.csv", ["c", "x", "target"], [[0.1, i, i] for i in range(40)]))
    assert (data.train.x[:, 0] == 0).all()


def test_rows_with_equal_inputs_stay_together(tmp_path):
    data = load_table(write(tmp_path / "t.csv", ["x", "target"], [[i % 40, i] for i in range(120)]))
    parts = [set(part.x[:, 0]) for part in (data.train, data.validation, data.test)]
    assert len(set.union(*parts)) == sum(map(len, parts)) == 40


def test_json_rows_keep_their_types(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps({"flag": i % 2 == 0, "x": i, "target": i / 3}) for i in range(40)))
    assert load_table(path).schema.feature_names == ["flag=false", "flag=true", "x"]


@keep_files
@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6) | st.floats().map(str)), min_size=1, max_size=12))
def test_hostile_cells_raise_only_data_error(tmp_path, cells):
    path = tmp_path / "t.csv"
    with path.open("w", newline="", encoding="utf-8", errors="replace") as file:
        csv.writer(file).writerows([["x", "target"], *cells, ["1", "2"], ["3", "4"], ["5", "6"]])
    for options in ({}, {"missing": "fill"}, {"task": "regression", "missing": "fill"}):
        parts, complaint = [], str(path)
        try:
            data = load_table(path, **options)
            parts = [data.train, data.validation, data.test]
        except DataError as error:
            complaint = str(error)
        assert str(path) in complaint
        assert all(np.isfinite(part.x).all() for part in parts)


def damage(change):
    data = json.loads(load_table("diabetes").schema.to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(version=2),
        lambda data: data.pop("columns"),
        lambda data: data.update(columns=[]),
        lambda data: data.pop("target_mean"),
        lambda data: data.pop("missing"),
        lambda data: data["columns"][0].pop("scale"),
        lambda data: data["columns"][0].update(mean=10**400),
        lambda data: data["columns"][0].update(categories=[]),
        lambda data: data.update(columns=[{"name": 3}]),
        lambda data: data.update(columns=3),
        lambda data: data["columns"][0].update(scale=0),
        lambda data: data["columns"][0].update(mean=math.nan),
        lambda data: data["columns"][0].update(categories="ab"),
        lambda data: data.update(task="classification"),
        lambda data: data.update(surprise=1),
        lambda data: data.update(target_scale=None),
        lambda data: data.update(missing=None),
    ],
)
def test_a_damaged_schema_is_refused(change):
    with pytest.raises(DataError, match=r"^run/table.json is damaged: .*; restore it or train again$"):
        TableSchema.from_json(damage(change), "run/table.json")


def test_a_truncated_schema_is_refused():
    text = load_table("diabetes").schema.to_json()
    for length in (0, 1, 50, len(text) - 1):
        with pytest.raises(DataError, match=r"minidl-table-schema is damaged: .*; restore it or train again"):
            TableSchema.from_json(text[:length])


class Counting(list):
    """Column names that count how often all of them are looked through."""

    searched = 0

    def __contains__(self, name):
        self.searched += 1
        return super().__contains__(name)

    def index(self, *names):
        self.searched += 1
        return super().index(*names)


def test_no_column_is_looked_for_among_all_others(tmp_path):
    """With 100,000 columns that took six minutes."""
    count = 300
    names = [f"c{i}" for i in range(count)]
    lines = [",".join([*(str(i * row % 97) for i in range(count)), "ab"[row % 2]]) for row in range(1, 40)]
    (tmp_path / "wide.csv").write_text("\n".join([",".join([*names, "target"]), *lines]))
    read = read_records(tmp_path / "wide.csv")
    records = replace(read, columns=Counting(read.columns))
    schema = load_table_file(records, task="classification").schema
    schema.features(records)
    schema.unknown(records)
    assert records.columns.searched < 10


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ([dt.date(2020, 1, day) for day in range(1, 31)], "a date"),
        ([dt.datetime(2020, 1, day, 12) for day in range(1, 31)], "a datetime"),
        ([b"bytes"] * 30, "a bytes"),
        ([{"a": b"bytes"}] * 30, "an object"),
    ],
)
def test_values_that_json_lacks_are_refused_where_they_are_used(tmp_path, values, what):
    """Parquet has them; a column that is ignored may."""
    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"x": np.arange(30) / 7, "when": values, "target": np.arange(30) / 3}), path)
    with pytest.raises(DataError, match=rf"t\.parquet, line \d+: {what} in label column 'when' where one label is"):
        load_table(path)
    assert len(load_table(path, ignore=["when"]).train.x) > 0
