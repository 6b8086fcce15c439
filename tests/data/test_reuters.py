"""Reuters-21578: the SGML parser on made-up documents, and the published counts on the real ones."""

import contextlib
import gzip
import io
import os
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import DataError, load_text, reuters
from minidl.data.reuters import Document, parse_sgml, single_topic_dataset, unpack
from tests.trials.fuzz.data_targets import _sparse

FOLDER = os.environ.get("MINIDL_DATA", "")
needs_reuters = pytest.mark.skipif(
    not (Path(FOLDER) / reuters.RESOURCE.path).is_file(),
    reason=f"needs {reuters.RESOURCE.path} below MINIDL_DATA",
)

SGML = """<!DOCTYPE lewis SYSTEM "lewis.dtd">
<REUTERS TOPICS="YES" LEWISSPLIT="TRAIN" CGISPLIT="TRAINING-SET" OLDID="5544" NEWID="1">
<DATE>26-FEB-1987</DATE><TOPICS><D>crude</D></TOPICS><PLACES><D>usa</D></PLACES>
<TEXT>&#2;
<TITLE>OIL &lt;XYZ> UP &amp; AWAY</TITLE>
<DATELINE> HOUSTON, Feb 26 - </DATELINE><BODY>Prices rose
  by 2 mln&#127; barrels. Reuter &#3;</BODY></TEXT>
</REUTERS>
<REUTERS TOPICS="YES" LEWISSPLIT="TEST" NEWID="2">
<TOPICS><D>acq</D><D>earn</D></TOPICS>
<TEXT TYPE="BRIEF">&#2;<TITLE>A TITLE ONLY</TITLE>Ignored</TEXT></REUTERS>
<REUTERS TOPICS="YES" LEWISSPLIT="TEST" NEWID="3">
<TOPICS></TOPICS>
<TEXT TYPE="UNPROC">&#2;RAW TEXT <AUTHOR>X</AUTHOR> MORE&#3;</TEXT></REUTERS>
<REUTERS TOPICS="NO" LEWISSPLIT="TRAIN" NEWID="4"><TOPICS><D>ship</D></TOPICS></REUTERS>
<REUTERS TOPICS="BYPASS" LEWISSPLIT="NOT-USED" NEWID="5"><TEXT><BODY>x</BODY></TEXT></REUTERS>
"""


def test_every_text_type_is_parsed():
    assert parse_sgml(SGML) == [
        Document("train", ("crude",), "OIL <XYZ> UP & AWAY\nPrices rose\n  by 2 mln barrels. Reuter"),
        Document("test", ("acq", "earn"), "A TITLE ONLY"),
        Document("test", (), "RAW TEXT  X  MORE"),
        Document("unused", ("ship",), ""),
        Document("unused", (), "x"),
    ]


@given(st.text(alphabet='<>&;#RETUSXDOPIC"=/ab \n', max_size=200))
def test_any_text_parses_without_an_exception(text):
    parse_sgml(text)
    parse_sgml(f"<REUTERS {text}>{text}</REUTERS>")
    parse_sgml(SGML.replace("Prices", text))


def archive(members, compress=gzip.compress):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return compress(buffer.getvalue())


def test_unpack_reads_sgml_members_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = unpack(archive({"reut2-000.sgm": b"a", "./reut2-001.sgm": b"b", "lewis.dtd": b"c", "../evil.sgm": b"d"}))
    assert parts == {"reut2-000.sgm": b"a", "reut2-001.sgm": b"b", "evil.sgm": b"d"}
    assert list(tmp_path.parent.rglob("*.sgm")) == []


def test_unpack_is_bounded(monkeypatch):
    monkeypatch.setattr(reuters, "_MAX_UNPACKED", 10_000)
    with pytest.raises(DataError, match="unpacks to more than 10000 bytes"):
        unpack(gzip.compress(bytes(20_000)))


@given(st.binary(max_size=300) | st.binary(max_size=300).map(gzip.compress), st.integers(1, 60))
def test_unpack_of_junk_raises_one_error(junk, cut):
    whole = archive({"a.sgm": b"text" * 40})
    for raw in (junk, whole[:-cut]):
        with contextlib.suppress(DataError):
            assert unpack(raw) == {}  # nothing but an archive without members


def test_a_wrong_count_is_an_error():
    with pytest.raises(
        DataError, match="reuters-r8 from here has 1 training and 1 test documents, expected 5485 and 2189"
    ):
        single_topic_dataset("reuters-r8", [Document("train", ("acq",), "x"), Document("test", ("acq",), "y")], "here")


@needs_reuters
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"), [("reuters-r8", 5485, 2189, 8), ("reuters-r52", 6532, 2568, 52)]
)
def test_published_counts(name, train, test, classes):
    data = load_text(name)
    assert (len(data.train) + len(data.validation), len(data.test)) == (train, test)
    assert len(data.labels) == classes
    assert data.labels == sorted(data.labels)
    assert 0.08 < len(data.validation) / train < 0.12
    assert set(data.train.labels) == set(data.test.labels) == set(range(classes))
    assert set(data.train.texts).isdisjoint(data.validation.texts)
    assert all(text.isprintable() or "\n" in text for text in data.test.texts[:50])
    assert data.source["origin"].startswith(FOLDER)


@needs_reuters
def test_the_two_sets_agree_on_a_document():
    r8, r52 = load_text("reuters-r8"), load_text("reuters-r52")
    wide = dict(zip(r52.test.texts, r52.test.labels, strict=True))
    same = [
        r52.labels[wide[text]] == r8.labels[label] for text, label in zip(r8.test.texts, r8.test.labels, strict=True)
    ]
    assert sum(same) > 0.99 * len(same)  # some texts occur twice with different topics


@pytest.mark.parametrize("size", [2**20, 2**50])
def test_a_sparse_member_is_refused(size):
    """Of its size only a part is in the archive; the rest would be made of zeros."""
    with pytest.raises(DataError, match=rf"its member 'a.sgm' says that it is {size} bytes"):
        unpack(_sparse(size))
