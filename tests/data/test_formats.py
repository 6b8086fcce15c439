"""Compressed files and tables of Arrow: the same rows, and limits on what they unpack to."""

import gzip
import struct
import sys

import pyarrow as pa
import pytest
from pyarrow import compute, feather, ipc, parquet

from minidl.data import DataError, TfidfOptions, limits, read_labelled, read_texts
from minidl.data.corpus import read_corpus
from minidl.data.files import read_records
from tests.data.test_files import write_csv

ROWS = [(f"text number {i}", "ab"[i % 2]) for i in range(20)]


def zstd(raw):
    out = pa.BufferOutputStream()
    with pa.CompressedOutputStream(out, "zstd") as stream:
        stream.write(raw)
    return out.getvalue().to_pybytes()


PACKERS = {".gz": gzip.compress, ".zst": zstd}
TABLE = pa.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]})


def arrow_file(table, path):
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


def arrow_stream(table, path):
    with ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "a.parquet": parquet.write_table, "a.arrow": arrow_file, "b.arrow": arrow_stream, "a.feather": feather.write_feather
}  # fmt: skip


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl"])
@pytest.mark.parametrize("packed", PACKERS)
def test_a_compressed_file_is_the_file(tmp_path, ending, packed):
    path = tmp_path / f"data{ending}"
    if ending == ".jsonl":
        path.write_text("".join(f'{{"text": "{text}", "label": "{label}"}}\n' for text, label in ROWS))
    else:
        write_csv(path, ["text", "label"], ROWS, "\t" if ending == ".tsv" else ",")
    other = tmp_path / f"data{ending}{packed.upper() if ending == '.csv' else packed}"
    other.write_bytes(PACKERS[packed](path.read_bytes()))
    expected, found = read_labelled(path), read_labelled(other)
    assert found[:2] == expected[:2]
    assert {**found[2], "name": ""} == {**expected[2], "name": ""}  # the checksum is that of the content
    assert read_texts(other) == [text for text, _ in ROWS]
    corpus = read_corpus(other, TfidfOptions().analyzer)
    assert corpus.classes.tolist() == expected[0].labels


@pytest.mark.parametrize("name", WRITERS)
def test_a_table_is_the_file(tmp_path, name):
    path = tmp_path / name
    WRITERS[name](TABLE, path)
    texts, labels, source = read_labelled(path)
    assert (texts.texts, labels, source["rows"]) == ([text for text, _ in ROWS], ["a", "b"], 20)
    assert read_texts(path) == texts.texts
    assert read_corpus(path, TfidfOptions().analyzer).classes.tolist() == texts.labels


def test_lines_of_a_compressed_file_are_texts(tmp_path):
    path = tmp_path / "lines.txt.gz"
    path.write_bytes(gzip.compress(b"one\ntwo\n"))
    assert read_texts(path) == ["one", "two"]


def test_values_of_a_table_keep_their_types(tmp_path):
    path = tmp_path / "t.parquet"
    values = {
        "n": [1, None, 3],
        "x": [0.5, 1.5, None],
        "b": [True, False, None],
        "s": ["a", "", None],
        "l": [[1], [], None],
    }
    parquet.write_table(pa.table(values), path)
    records = read_records(path)
    assert records.columns == list(values)
    assert records.rows == [list(row) for row in zip(*values.values(), strict=True)]
    assert records.lines == [1, 2, 3]
    with pytest.raises(DataError, match=r"t\.parquet, line 1: a list in text column 'l' where a string is expected"):
        read_texts(path, "l")


def test_a_large_arrow_file_is_read(tmp_path):
    """Its batches are cut, and the parts counted by themselves."""
    table = pa.table({"text": [f"{i:0100d}" for i in range(40_000)], "label": ["a", "b"] * 20_000})
    arrow_file(table, tmp_path / "large.arrow")
    assert len(read_records(tmp_path / "large.arrow").rows) == 40_000


def test_a_table_without_rows_or_columns(tmp_path):
    for number, table in enumerate((TABLE.slice(0, 0), pa.table({}))):
        path = tmp_path / f"{number}.parquet"
        parquet.write_table(table, path)
        with pytest.raises(DataError, match="has a header and no rows"):
            read_labelled(path)


@pytest.mark.parametrize("write", [arrow_file, arrow_stream, parquet.write_table])
def test_a_column_that_occurs_twice_is_told(tmp_path, write):
    """Either of them would be a guess."""
    path = tmp_path / f"twice{'.parquet' if write is parquet.write_table else '.arrow'}"
    write(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"]), pa.array(["c"])], ["text", "text", "label"]), path)
    with pytest.raises(DataError, match="column 'text' occurs 2 times; rename all but one of them"):
        read_labelled(path)


def values_of(kind):
    """Many rows of a few long texts, or of many: as a dictionary, as runs, or as views into one buffer."""
    texts = pa.array([f"{i % 500:0200d}" for i in range(20_000)])
    if kind == "dictionary":
        return texts.dictionary_encode()
    if kind == "dictionary of views":
        found = texts.dictionary_encode()
        return pa.DictionaryArray.from_arrays(found.indices, found.dictionary.cast(pa.string_view()))
    if kind == "runs":
        return compute.run_end_encode(texts)
    return texts.cast(pa.string_view() if kind == "views" else pa.binary_view())


@pytest.mark.parametrize("kind", ["dictionary", "dictionary of views", "runs", "views", "views of bytes"])
def test_what_parts_of_a_column_share_is_not_counted_for_each(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(limits, "LEAST", 5 * 2**20)
    monkeypatch.setattr(limits, "TIMES", 0)
    column = values_of(kind)
    arrow_file(pa.table({"text": column}), tmp_path / "a.arrow")
    expected = [f"{i % 500:0200d}" for i in range(20_000)]
    found = [row[0] for row in read_records(tmp_path / "a.arrow").rows]
    assert found == ([text.encode() for text in expected] if kind == "views of bytes" else expected)


@pytest.mark.parametrize("kind", ["dictionary", "runs", "nulls"])
def test_one_value_for_many_rows_counts_for_each(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(limits, "LEAST", 2**16)
    monkeypatch.setattr(limits, "TIMES", 0)
    monkeypatch.setattr(limits, "LEAST_MEMORY", 10**6)
    texts = pa.nulls(10**5) if kind == "nulls" else pa.array(["a" * 1000] * 2000)
    makers = {"dictionary": pa.Array.dictionary_encode, "runs": compute.run_end_encode, "nulls": lambda column: column}
    path = tmp_path / "bomb.arrow"
    arrow_file(pa.table({"text": makers[kind](texts)}), path)
    with pytest.raises(DataError, match=r"bomb\.arrow unpacks to more than (65,536 bytes|5,120 rows and 5,120)"):
        read_records(path)


@pytest.mark.parametrize("write", [arrow_file, arrow_stream])
@pytest.mark.parametrize("offset", [900, 2 * 10**9])
def test_a_text_outside_of_its_file_is_not_read(tmp_path, write, offset):
    """Arrow believes the offsets of a file: it would read other memory, or end the process."""
    path = tmp_path / "a.arrow"
    write(pa.table({"text": [f"text {i}" for i in range(9)], "label": ["a"] * 9}), path)
    raw = path.read_bytes()
    assert raw.count(struct.pack("<iii", 0, 6, 12)) == 1
    path.write_bytes(raw.replace(struct.pack("<iii", 0, 6, 12), struct.pack("<iii", 0, offset, 12)))
    with pytest.raises(DataError, match=r"a\.arrow cannot be read \(.*offset"):
        read_records(path)


@pytest.mark.parametrize("ending", [".csv.gz", ".csv.zst", ".parquet", ".arrow", ".feather"])
@pytest.mark.parametrize("harm", ["empty", "junk", "cut", "flip"])
def test_damage_is_told(tmp_path, ending, harm):
    path = tmp_path / f"data{ending}"
    whole = WRITERS.get(f"a{ending}")
    if whole is None:
        path.write_bytes(PACKERS[ending[4:]](b"text,label\n" + b"".join(f"{t},{c}\n".encode() for t, c in ROWS * 20)))
    else:
        whole(TABLE, path)
    raw = path.read_bytes()
    flipped = bytearray(raw)
    for place in range(len(raw) // 3, len(raw), 7):
        flipped[place] ^= 0x55
    path.write_bytes(
        {"empty": b"", "junk": b"PK\x03\x04junk", "cut": raw[: len(raw) // 2], "flip": bytes(flipped)}[harm]
    )
    with pytest.raises(DataError, match=rf"data{ending}"):
        read_labelled(path)


@pytest.mark.parametrize("packed", PACKERS)
def test_a_bomb_is_refused(tmp_path, monkeypatch, packed):
    monkeypatch.setattr(limits, "LEAST", 2**20)
    path = tmp_path / f"bomb.csv{packed}"
    path.write_bytes(PACKERS[packed](b"text,label\n" + b"a" * 2**24))
    assert path.stat().st_size < 2**16
    with pytest.raises(DataError, match=r"bomb\.csv.* unpacks to more than [\d,]+ bytes, the limit for its size"):
        read_labelled(path)


def test_a_table_that_promises_too_much_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "bomb.parquet"
    parquet.write_table(pa.table({"text": ["a" * 100] * 10**5, "label": ["b"] * 10**5}), path)
    assert len(read_records(path).rows) == 10**5
    monkeypatch.setattr(limits, "LEAST", 2**20)
    with pytest.raises(DataError, match=r"bomb\.parquet unpacks to more than"):
        read_records(path)


def test_without_pyarrow_its_files_are_told_to_need_it(tmp_path, monkeypatch):
    parquet.write_table(TABLE, tmp_path / "a.parquet")
    (tmp_path / "a.csv.zst").write_bytes(zstd(b"text,label\na,b\n"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("a.parquet", "a.csv.zst"):
        with pytest.raises(DataError, match=rf"{name} cannot be read without pyarrow: pip install pyarrow"):
            read_labelled(tmp_path / name)


@pytest.mark.parametrize("name", ["a.xlsx", "a.gz", "a.txt.gz", "a.parquet.gz", "csv"])
def test_other_endings_are_no_data_files(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(
        DataError, match=r"give a file ending in \.csv, \.tsv, \.jsonl, \.parquet, \.arrow, \.feather \("
    ):
        read_labelled(tmp_path / name)
