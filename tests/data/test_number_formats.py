"""Numbers as people write them: one format for a column, the same at prediction, and never another number silently."""

import csv

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import DataError, TableSchema, load_table, read_features, read_rows
from minidl.data.number_formats import NumberFormat, of_column, to_number


def write(path, header, rows, delimiter=",", head=""):
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write(head)
        csv.writer(file, delimiter=delimiter).writerows([header, *rows])
    return path


FORMATS = [
    (["$1,234", "$56", "$1,234,567"], (".", ",", "$"), [1234, 56, 1234567]),
    (["$1,234.50", "-$5", "($7.25)", "8"], (".", ",", "$"), [1234.5, -5, -7.25, 8]),
    (["1.234,50 €", "0,99 €", "12 €"], (",", ".", "€"), [1234.5, 0.99, 12]),
    (["12%", "7.5 %", "-3%"], (".", "", "%"), [12, 7.5, -3]),
    (["12,5", "0,125", "1234,5"], (",", "", ""), [12.5, 0.125, 1234.5]),
    (["1 234", "12 345,6", "7"], (",", " ", ""), [1234, 12345.6, 7]),
    (["1\u202f234", "12\u00a0345", "7"], (".", " ", ""), [1234, 12345, 7]),
    (["1'234.5", "7’000", "2"], (".", "'", ""), [1234.5, 7000, 2]),
    (["₹12,34,567", "₹1,00,000.5", "₹99"], (".", ",", "₹"), [1234567, 100000.5, 99]),
    (["£\u22125", "\u2212£6", "£ 7"], (".", "", "£"), [-5, -6, 7]),
    (["1,5e3", "2,25e-1", "3"], (",", "", ""), [1500, 0.225, 3]),
]


@pytest.mark.parametrize(("texts", "expected", "numbers"), FORMATS)
@pytest.mark.parametrize("decimal_comma", [False, True])
def test_a_column_is_read_as_all_its_values_show(texts, expected, numbers, decimal_comma):
    """Also where the file is of the other decimal mark: these values leave no choice."""
    decimal, group, unit = expected
    if decimal_comma and (texts[0] == "12,5" or group == " " or "," not in "".join(texts)):
        return  # plain numbers there, or either mark will do
    form, note = of_column(texts, "auto", decimal_comma)
    assert form == NumberFormat(decimal, group, unit)
    assert [form.number(text) for text in texts] == numbers
    assert "--numbers" not in note


@pytest.mark.parametrize(
    ("texts", "decimal_comma", "reads", "note"),
    [
        (["$1,234", "$2,345"], False, 1234, "'$1,234' is read as 1234; --numbers comma reads it as 1.234"),
        (["1,234", "999"], False, 1234, "'1,234' is read as 1234; --numbers comma reads it as 1.234"),
        (["1.234 €", "999 €"], False, 1.234, "'1.234 €' is read as 1.234; --numbers comma reads it as 1234"),
        (["1.234 €", "999 €"], True, 1234, "'1.234 €' is read as 1234; --numbers point reads it as 1.234"),
        (["1,234", "2,345"], True, None, "'1,234' is read as 1.234; --numbers point reads it as 1234"),
        (["1.234", "2.345"], True, None, "'1.234' is read as 1.234; --numbers comma reads it as 1234"),
    ],
)
def test_what_may_mean_two_numbers_is_noted_with_both(texts, decimal_comma, reads, note):
    texts = [*texts, *texts]
    form, told = of_column(texts, "auto", decimal_comma)
    assert told == note
    assert (None if form is None else form.number(texts[0])) == reads
    for numbers, decimal in (("point", "."), ("comma", ",")):
        chosen, told = of_column(texts, numbers, decimal_comma)
        assert ((chosen or NumberFormat()).decimal, "--numbers" in (told or "")) == (decimal, False)


@pytest.mark.parametrize(
    "texts",
    [
        ["1.5", "2", "1e3"], ["red", "blue", "$5"], ["1/2", "3-4", "2021-01-01"], ["$5", "€6"] * 2, ["12%", "0.12"] * 2,
        ["5 kg", "6 kg"], ["1,23,45", "1,2,3"], ["5²", "6²"], ["$$5", "--5"], ["(5", "5)"], ["9" * 65 + ",5"] * 2,
        ["$" + " " * 10**6 + "x"] * 2,
    ],
)  # fmt: skip
def test_plain_numbers_and_other_texts_have_no_format(texts):
    assert of_column(texts, "auto", False) == (None, None)
    assert of_column(["$1,234", "$2,000"], "plain", False) == (None, None)


@given(st.lists(st.text("1203.,' $%€-()e", max_size=7) | st.floats() | st.booleans(), max_size=6), st.booleans())
def test_any_column_is_read_or_left(values, decimal_comma):
    for numbers in ("auto", "point", "comma"):
        form, note = of_column(values, numbers, decimal_comma)
        assert form is None or 2 * sum(form.number(value) is not None for value in values) > len(values)
        assert (note or "").count("None") == 0


def test_a_minus_sign_of_any_width():
    for minus in "-\u2212\u2013\ufe63\uff0d":
        assert to_number(f"{minus}1.5") == -1.5
    assert to_number("1\u22125") is None


@given(st.lists(st.integers(-(10**9), 10**9), min_size=3), st.sampled_from([",", ".", " ", "'"]), st.booleans())
def test_written_numbers_come_back(values, group, percent):
    decimal = "," if group == "." else "."
    unit = "%" if percent else ""
    texts = [f"{value:,}".replace(",", group) + f"{decimal}5{unit}" for value in values]
    form = NumberFormat(decimal, group, unit)
    assert [form.number(text) for text in texts] == [value + (-0.5 if value < 0 else 0.5) for value in values]


HEADER = ["price", "share", "change", "y"]


def money(count=80):
    return [[f"${i * 37:,}", f"{i}%", ("\u2212" if i % 2 else "") + f"{i}.5", i * 3 + 0.5] for i in range(count)]


def test_the_format_is_saved_and_the_same_later(tmp_path):
    path = write(tmp_path / "t.csv", HEADER, money())
    data = load_table(path, target="y")
    assert data.schema.feature_names == HEADER[:3]
    assert [column.number_format for column in data.schema.columns] == [
        NumberFormat(".", ",", "$"), NumberFormat(".", "", "%"), None
    ]  # fmt: skip
    assert data.source["notes"] == [
        "column 'price': '$1,036' is read as 1036; --numbers comma reads it as 1.036",
        "column 'share': '10%' is read as 10",
    ]
    plain = [[i * 37, i, (-1) ** i * (i + 0.5), y] for i, (*_, y) in enumerate(money())]
    assert len(read_rows(path, data.schema)) == 80
    expected = load_table(write(tmp_path / "p.csv", HEADER, plain), target="y")
    assert "notes" not in expected.source
    assert expected.schema.to_json().count("number_format") == 0
    for name in ("train", "validation", "test"):  # equal keys: the same split
        assert (getattr(data, name).x == getattr(expected, name).x).all()
    schema = TableSchema.from_json(data.schema.to_json())
    assert schema == data.schema
    new = write(tmp_path / "new.csv", HEADER[:3], [["1,036", "10%", "-2"], ["$5", "1.5 %", "\u22122"]])
    assert (read_features(new, schema)[:, 2] == read_features(new, schema)[0, 2]).all()
    for cells, message in (
        (["1.036,5", "1%", "1"], r"'price': '1.036,5' where .*; the column's numbers are written as '\$1,234.5'"),
        (["€5", "1%", "1"], "column 'price': '€5' where"),
        (["$5", "0.1", "1"], "column 'share': '0.1' where a finite number is .* written as '1234.5%'"),
        (["$5", "1%", "1,5"], "column 'change': '1,5' where a finite number is expected; correct it$"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=message):
            read_features(write(tmp_path / "bad.csv", HEADER[:3], [cells]), schema)


@pytest.mark.parametrize("cell", ["abc", "€5", "1.2.3"])
def test_one_value_of_another_form_is_a_mistake(tmp_path, cell):
    rows = money()
    rows[7][0] = cell
    with pytest.raises(DataError, match=f"line 9, column 'price': '{cell}' is not a finite number, unlike most"):
        load_table(write(tmp_path / "t.csv", HEADER, rows), target="y")


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_target_is_a_number_too(tmp_path, delimiter):
    rows = [[i, f"1.{i + 100},5 €" if i % 2 else f"{i},25 €"] for i in range(80)]
    data = load_table(write(tmp_path / "t.csv", ["x", "target"], rows, delimiter))
    assert (data.schema.task, data.schema.target_format) == ("regression", NumberFormat(",", ".", "€"))
    raw = data.test.y * data.schema.target_scale + data.schema.target_mean
    assert 0 < raw.min() < 80
    assert 1100 < raw.max() < 1180
    schema = TableSchema.from_json(data.schema.to_json())
    with pytest.raises(DataError, match=r"'5\.5' where the target of a regression must be a finite number"):
        read_rows(write(tmp_path / "o.csv", ["x", "target"], [[1, "5.5"]], delimiter), schema)


def test_numbers_of_a_semicolon_file_as_before(tmp_path):
    rows = [[f"{i},5", f"{i}.25", i] for i in range(60)]
    data = load_table(write(tmp_path / "t.csv", ["a", "b", "target"], rows, ";"))
    assert [column.number_format for column in data.schema.columns] == [None, None]
    comma = write(tmp_path / "n.csv", ["a", "b"], [["3,5", "3,25"]], ";")
    point = write(tmp_path / "m.csv", ["a", "b"], [["3.5", "3.25"]])
    assert (read_features(comma, data.schema) == read_features(point, data.schema)).all()
    grouped = [[f"1.{i + 100},5", f"{i},5", i] for i in range(60)]
    schema = load_table(write(tmp_path / "g.csv", ["a", "b", "target"], grouped, ";")).schema
    assert schema.columns[0].number_format == NumberFormat(",", ".")


def test_what_has_nearly_as_many_categories_as_rows_is_noted(tmp_path):
    rows = [[f"id {i}", f"{i} kg", "ab"[i % 2], i] for i in range(80)]
    notes = load_table(write(tmp_path / "t.csv", ["id", "weight", "kind", "target"], rows)).source["notes"]
    assert [note.split(",")[0] for note in notes] == [
        f"column {name!r} has 56 categories in 56 training rows" for name in ("id", "weight")
    ]
    few = [[f"id {i % 20}", i] for i in range(80)]
    assert "notes" not in load_table(write(tmp_path / "few.csv", ["id", "target"], few)).source


def test_bad_numbers(tmp_path):
    path = write(tmp_path / "t.csv", HEADER, money())
    with pytest.raises(DataError, match="unknown form of numbers 'american': expected one of 'auto', 'plain', 'point'"):
        load_table(path, target="y", numbers="american")


def test_a_decimal_mark_is_for_what_leaves_the_choice(tmp_path):
    rows = [[f"1.{i + 100}", f"{i}.5", i] for i in range(60)]
    path = write(tmp_path / "t.csv", ["a", "b", "target"], rows)
    schema = load_table(path, numbers="comma").schema
    assert [column.number_format for column in schema.columns] == [NumberFormat(",", "."), None]
    assert schema.columns[0].mean > 1000
    assert load_table(path).schema.columns[0].mean < 2
