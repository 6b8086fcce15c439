"""Small files that stand for much memory: refused before they take it, and what is not compressed is read."""

import contextlib
import gzip
import os
import random
import resource
import threading

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from minidl.data import DataError, limits, read_texts
from minidl.data.files import read_records

ROWS = 20_000
LINES = {
    "objects.jsonl": b"{}\n" * ROWS,
    "rows.csv": b"a,b\n" + b"1,2\n" * ROWS,
    "decimal commas.csv": b"a;b\n" + b"1;2\n" * ROWS,
    "tabs.tsv": b"a\tb\n" + b"1\t2\n" * ROWS,
    "lists.jsonl": b'{"a": [' + b"[]," * 4 * ROWS + b"1]}\n",
    "objects in a list.jsonl": b'{"a": [' + b"{}," * 4 * ROWS + b"1]}\n",
    "a wide table.csv": b",".join(b"%d" % i for i in range(4 * ROWS)) + b"\n" + b"0," * (4 * ROWS - 1) + b"0\n",
    "lines.txt": b"\n" * ROWS,
    "a quoted field.csv": b'a,b\n"' + b"\n" * ROWS + b'",1\n',
}


def read(path):
    return read_texts(path) if ".txt" in path.name else read_records(path).rows


@pytest.mark.parametrize("name", LINES)
def test_many_objects_of_a_small_compressed_file_are_refused(tmp_path, monkeypatch, name):
    plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_bytes(LINES[name])
    packed.write_bytes(gzip.compress(LINES[name]))
    expected = read(packed)
    assert read(plain) == expected
    monkeypatch.setattr(limits, "LEAST_MEMORY", 10**6)
    monkeypatch.setattr(limits, "TIMES_MEMORY", 1)
    with pytest.raises(
        DataError, match=r"gz unpacks to more than [\d,]+ rows and [\d,]+ values, which take .*; unpack it"
    ):
        read(packed)
    assert read(plain) == expected


COLUMNS = {
    "nulls": lambda: pa.nulls(50_000),
    "zeros": lambda: pa.array([0] * 50_000),
    "lists of nulls": lambda: pa.array([[None] * 25_000] * 2),
    "structures": lambda: pa.array([{"a": None, "b": None}] * 20_000),
    "maps": lambda: pa.array([[("k", None)] * 20_000], pa.map_(pa.string(), pa.null())),
}


@pytest.mark.parametrize("kind", COLUMNS)
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_many_values_of_a_small_table_are_refused(tmp_path, monkeypatch, ending, kind):
    path, table = tmp_path / f"bomb.{ending}", pa.table({"a": COLUMNS[kind]()})
    if ending == "parquet":
        parquet.write_table(table, path)
    else:
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert len(read_records(path).rows) == len(table)
    monkeypatch.setattr(limits, "LEAST_MEMORY", 10**6)
    monkeypatch.setattr(limits, "TIMES_MEMORY", 1)
    with pytest.raises(DataError, match=r"bomb.* unpacks to more than .* rows and .* values.*; write it as \.csv or"):
        read_records(path)


def test_bombs_take_little_memory(tmp_path):
    """61 kB of these lines took 7 GB, 125 kB of this table 8 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with gzip.open(tmp_path / "a.jsonl.gz", "wb", 1) as file:
        for _ in range(20):
            file.write(b"{}\n" * 10**6)
    parquet.write_table(pa.table({"a": pa.nulls(6 * 10**7)}), tmp_path / "a.parquet")
    for name in ("a.jsonl.gz", "a.parquet"):
        assert (tmp_path / name).stat().st_size < 300_000
        with pytest.raises(DataError, match="unpacks to more than"):
            read_records(tmp_path / name)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kB


def test_files_as_people_compress_them_are_read(tmp_path):
    """Ten thousand rows of numbers and of words, and a table of a hundred thousand columns."""
    draw = random.Random(0)
    contents = {
        "numbers.csv.gz": "a,b\n" + "".join(f"{draw.randint(0, 9)},{draw.randint(0, 1)}\n" for _ in range(10_000)),
        "words.csv.gz": "a,b\n" + "".join(f"{draw.choice('abcd') * 5} and more words,x\n" for _ in range(10_000)),
        "wide.csv.gz": "\n".join(",".join(f"{row or 'c'}{i}" for i in range(10**5)) for row in range(4)) + "\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(gzip.compress(content.encode()))
        assert len(read_records(tmp_path / name).rows) == content.count("\n") - 1


def test_a_pipe_is_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "STREAM", 10**6)
    path = tmp_path / "a.txt"
    os.mkfifo(path)

    def give(count):
        def write():
            with contextlib.suppress(BrokenPipeError):
                path.write_bytes(b"a\n" * count)

        threading.Thread(target=write, daemon=True).start()

    give(5)
    assert read_texts(path) == ["a"] * 5
    give(2 * 10**6)
    with pytest.raises(DataError, match=r"a\.txt gives more than 1,000,000 bytes, the limit of a pipe; give a file"):
        read_texts(path)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_a_device_is_refused(tmp_path, device):
    (tmp_path / "a.txt").symlink_to(device)
    with pytest.raises(DataError, match=r"a\.txt is a device, which may have no end; give a file or a pipe"):
        read_texts(tmp_path / "a.txt")
    (tmp_path / "none.txt").symlink_to(os.devnull)
    assert read_texts(tmp_path / "none.txt") == []


def test_a_file_larger_than_the_memory_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    os.truncate(tmp_path / "a.txt", 2**43)
    with pytest.raises(DataError, match=r"a\.txt has 8,796,093,022,208 bytes, more than this machine has memory"):
        read_texts(tmp_path / "a.txt")
