"""Standard input of `predict`: what a file of the same content gives; faults come after what was good."""

import io
import itertools

import pytest

from minidl.data import DataError
from minidl.data.files import read_records, read_texts
from minidl.training.prediction import inputs


def rows(content):
    """Columns and rows of standard input, and the sentence that ended them."""
    read, complaint = [], None
    try:
        for records in inputs.rows_as_they_come(io.BytesIO(content), []):
            read += [dict(zip(records.columns, row, strict=True)) for row in records.rows]
    except DataError as error:
        complaint = str(error)
    return read, complaint


@pytest.mark.parametrize(
    "content",
    [
        b"a,b\n1,2\n3,4\n",
        b"\xef\xbb\xbfa;b\r\n1,5;2\r\n",
        b" a , b \n1,2\n",
        b"\n\na,b\n\n1,2\n",
        b'a,b\n"x,y","say ""no"""\n',
        b"a,b\n" + b"x" * 200_000 + b",1\n",
        b"a\nx\n \n",
    ],
)
def test_csv_is_read_as_from_a_file(tmp_path, content):
    (tmp_path / "rows.csv").write_bytes(content)
    records = read_records(tmp_path / "rows.csv")
    assert rows(content) == ([dict(zip(records.columns, row, strict=True)) for row in records.rows], None)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a,a\n1,2\n", "line 1: column 'a' occurs twice; rename one of them"),
        (b"a,b\n1,\0\n", "line 2: a zero byte, so this is not a text file"),
        (b"a;b\n1;2;3\n", "line 2: 3 fields where the header has 2; put a field that contains a semicolon"),
        ("a,b\n1,2\n".encode("utf-16"), "is UTF-16 text: save it as UTF-8"),
    ],
)
def test_csv_is_refused_as_from_a_file(tmp_path, content, message):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_records(tmp_path / "rows.csv")
    assert message in str(caught.value)
    assert message in rows(content)[1]


@pytest.mark.parametrize(
    ("content", "bad"),
    [
        (b'{"a": 1}\n{"a": 2}\nnot json\n{"a": 3}\n', "line 3: not JSON"),
        (b'{"a": 1}\n{"a": 2}\n[]\n', "line 3: a list where an object is expected"),
        (b'{"a": 1}\n{"a": 2}\n\xff\n', "line 3: byte 0xff is not UTF-8 text"),
        (b"a\n1\n2\n3,4\n5\n", "line 4: 2 fields where the header has 1"),
        (b'a\n1\n2\n"3\n', "line 4: unexpected end of data; each row must be on one line"),
    ],
)
def test_good_rows_come_before_the_fault(content, bad):
    read, complaint = rows(content)
    assert [int(row["a"]) for row in read] == [1, 2]
    assert f"standard input, {bad}" in complaint


class Failing(io.BytesIO):
    def __init__(self, error):
        super().__init__(b"one\ntwo\n")
        self.error = error

    def read1(self, size=-1):
        block = super().read1(size)
        if not block:
            raise self.error
        return block


class Slow(io.BytesIO):
    """A stream whose every read brings a few bytes."""

    def read1(self, size=-1):
        return super().read1(3)


@pytest.mark.parametrize("content", [b"", b"\n", b"a\n\nlong line\r\n\nend", b"first\nx\n", b"\n\n\nabc"])
def test_lines_do_not_depend_on_how_they_arrive(content):
    expected = [line.removesuffix("\r") for line in content.decode().split("\n")]
    if not expected[-1]:
        expected.pop()
    for stream in (io.BytesIO(content), Slow(content)):
        lines = itertools.chain.from_iterable(inputs.lines_as_they_come(stream))
        assert list(lines) == list(enumerate(expected, 1))


def test_a_line_is_handed_on_before_the_next_one_is_read():
    chunks = inputs.lines_as_they_come(Failing(RuntimeError("read too far")))
    assert next(chunks) == [(1, "one"), (2, "two")]


def test_many_lines_come_in_chunks():
    chunks = list(inputs.lines_as_they_come(io.BytesIO(b"x\n" * 1000)))
    assert {len(chunk) for chunk in chunks[:-1]} == {inputs.CHUNK}
    assert sum(map(len, chunks)) == 1000


@pytest.mark.parametrize("content", [b"a\0b\n", b"one\n\0\n", b"x\0"])
def test_zero_bytes_are_no_text_as_in_a_file(tmp_path, content):
    (tmp_path / "lines.txt").write_bytes(content)
    complaints = []
    for read in (
        lambda: read_texts(tmp_path / "lines.txt"),
        lambda: list(inputs.lines_as_they_come(io.BytesIO(content))),
    ):
        with pytest.raises(DataError, match=r"a zero byte, so this is not a text file") as caught:
            read()
        complaints.append(str(caught.value).partition(", ")[2])
    assert complaints[0] == complaints[1]


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(5, "Input/output error"), DataError, "standard input cannot be read: Input/output error; give a file"),
        (MemoryError("no room"), MemoryError, "no room"),
    ],
)
def test_reading_that_fails_ends_with_its_error(error, raised, message):
    lines = itertools.chain.from_iterable(inputs.lines_as_they_come(Failing(error)))
    assert list(itertools.islice(lines, 2)) == [(1, "one"), (2, "two")]
    with pytest.raises(raised, match=message):
        next(lines)


def test_no_standard_input_is_told(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(DataError, match="standard input is closed: give the inputs as arguments or by --file"):
        inputs.standard_input()


class Endless(io.RawIOBase):
    """Text, then a line that has no end."""

    def __init__(self, text):
        self.text, self.read = text, 0

    def readable(self):
        return True

    def read1(self, size):
        block, self.text = self.text or b"a" * size, b""
        self.read += len(block)
        return block


def test_a_line_without_end_is_refused_with_its_number(monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST", 10**6)
    stream, lines = Endless(b"one\ntwo\nth"), []
    with pytest.raises(DataError) as caught:
        lines.extend(itertools.chain.from_iterable(inputs.lines_as_they_come(stream)))
    assert lines == [(1, "one"), (2, "two")]
    assert str(caught.value) == (
        "standard input, line 3: more than 1,000,000 bytes, the limit for a line; split it into several lines, "
        "or pass a file with --file"
    )
    assert stream.read < 1.2e6


def test_a_line_of_the_limit_is_read(monkeypatch):
    monkeypatch.setattr(inputs, "LONGEST", 200_000)
    longest, longer = b"x" * 200_000, b"y" * 200_001
    stream, lines = io.BytesIO(b"\n".join([longest, longest, b"z", longer, b""])), []
    with pytest.raises(DataError, match=r"line 4: more than 200,000 bytes"):
        lines.extend(itertools.chain.from_iterable(inputs.lines_as_they_come(stream)))
    assert lines == [(1, longest.decode()), (2, longest.decode()), (3, "z")]
