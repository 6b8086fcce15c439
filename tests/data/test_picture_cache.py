"""Cached pictures give the same data set or are decoded again, and never raise an error."""

import errno
import os
from contextlib import contextmanager

import numpy as np
import PIL
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from minidl.data import load_images, picture_cache, pictures
from minidl.data.picture_cache import PictureCache

KEPT = "note: the decoded pictures are cached for the next run with --cache; to clear the cache: rm -r "


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return write(tmp_path / "photos")


def write(folder, first=0):
    draw = np.random.default_rng(first)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(draw.integers(0, 256, (5, 7, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return folder


class Decodings:
    """Counts the decodings of pictures, and collects notes."""

    def __init__(self, monkeypatch):
        self.count, self.notes, self._read = 0, [], pictures._read
        monkeypatch.setattr(pictures, "_read", self.read)

    def read(self, *arguments, **options):
        self.count += 1
        return self._read(*arguments, **options)

    def load(self, folder, **options):
        """The content of the data set, times decoded, and notes."""
        self.count, self.notes = 0, []
        dataset = load_images(folder, cache=PictureCache(self.notes.append), **options)
        return contents(dataset), self.count, self.notes


@pytest.fixture
def decodings(monkeypatch):
    return Decodings(monkeypatch)


def contents(dataset):
    parts = [(part.pixels.tobytes(), part.pixels.shape, part.labels.tolist()) for part in
             (dataset.train, dataset.validation, dataset.test)]  # fmt: skip
    return parts, dataset.labels, dataset.mean, dataset.std, dataset.source


def entries():
    return list(picture_cache.cache_folder().glob("pictures/*"))


@pytest.mark.parametrize("options", [{}, {"size": (4, 3)}, {"split_seed": 3}])
def test_the_second_time_nothing_is_decoded(folder, decodings, options, monkeypatch):
    expected = contents(load_images(folder, **options))
    assert entries() == []
    _, count, notes = decodings.load(folder, **options)
    assert count == 1
    assert notes == [f"{KEPT}{picture_cache.cache_folder() / 'pictures'}"]
    monkeypatch.chdir(folder.parent)  # the same folder, named in another way
    dataset, count, notes = decodings.load("photos", **options)
    assert (count, notes) == (0, [])
    assert dataset[:4] == expected[:4]
    assert [path.suffix for path in entries()] == [".pictures"]


def test_other_folders_have_entries_of_their_own(folder, decodings):
    other = write(folder.parent / "test", first=1)
    expected = contents(load_images(folder, test=other))
    assert decodings.load(folder, test=other)[:2] == (expected, 2)
    assert decodings.load(folder, test=other) == (expected, 0, [])
    assert len(entries()) == 2


def changed_content(folder):
    path = folder / "cat" / "1.png"
    Image.fromarray(np.zeros((5, 7, 3), dtype=np.uint8)).save(path)


def later(folder):
    path = folder / "dog" / "5.png"
    stat = path.stat()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def longer(folder):
    path = folder / "dog" / "5.png"
    stat = path.stat()
    path.write_bytes(path.read_bytes() + b"\0")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        changed_content, later, longer,
        lambda folder: (folder / "cat" / "1.png").unlink(),
        lambda folder: (folder / "cat" / "1.png").rename(folder / "cat" / "a.png"),
        lambda folder: (folder / "cat" / "1.png").rename(folder / "dog" / "9.png"),
    ],
)  # fmt: skip
def test_any_change_decodes_again(folder, decodings, change):
    decodings.load(folder)
    change(folder)
    expected = contents(load_images(folder))
    assert decodings.load(folder)[:2] == (expected, 1)
    assert decodings.load(folder) == (expected, 0, [])
    assert len(entries()) == 1


def test_another_size_or_pillow_decodes_again(folder, decodings, monkeypatch):
    decodings.load(folder)
    assert decodings.load(folder, size=(5, 7))[1] == 1
    assert decodings.load(folder)[1] == 0
    monkeypatch.setattr(PIL, "__version__", "0.0")
    assert decodings.load(folder)[1] == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(position=st.integers(0, 10**6), mask=st.integers(1, 255), cut=st.booleans())
def test_damaged_entries_are_rebuilt(folder, decodings, position, mask, cut):
    expected = decodings.load(folder)[0]
    (path,) = entries()
    content = bytearray(path.read_bytes())
    position %= len(content)
    if cut:
        del content[position:]
    else:
        content[position] ^= mask
    path.write_bytes(content)
    dataset, count, notes = decodings.load(folder)
    # Spaces and digits of the length may stand for the same number.
    if (count, notes) != (0, []):
        assert count == 1
        assert notes[0] == f"note: {path} is damaged: all pictures are decoded, and it is rebuilt"
        assert notes[1].startswith(KEPT)
    else:
        assert not cut
        assert 64 <= position < picture_cache._HEAD
    assert dataset == expected
    assert decodings.load(folder) == (expected, 0, [])


@pytest.mark.parametrize("content", [b"", b"\n", b"\x80" * 200, b"a 1\n{}"])
def test_another_file_in_its_place(folder, decodings, content):
    expected = decodings.load(folder)[0]
    entries()[0].write_bytes(content)
    assert decodings.load(folder)[:2] == (expected, 1)


def test_a_full_disk_is_one_note(folder, decodings, monkeypatch):
    expected = contents(load_images(folder))
    atomic = picture_cache.write_files.atomic

    @contextmanager
    def full(path):
        with atomic(path) as file:
            file.write(b"a part")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        yield

    monkeypatch.setattr(picture_cache.write_files, "atomic", full)
    dataset, count, notes = decodings.load(folder)
    assert (dataset, count) == (expected, 1)
    (note,) = notes
    assert note.startswith("note: the decoded pictures are not cached, as ")
    assert note.endswith("cannot be written: No space left on device")
    assert entries() == []


def test_a_cache_that_is_no_folder(folder, decodings):
    expected = contents(load_images(folder))
    (folder.parent / "cache").write_text("")
    dataset, count, notes = decodings.load(folder)
    assert (dataset, count) == (expected, 1)
    assert any("cannot be written" in note for note in notes), notes
    entry = picture_cache.cache_folder() / "pictures"
    (folder.parent / "cache").unlink()
    decodings.load(folder)
    (path,) = entries()
    path.unlink()
    path.mkdir()
    dataset, count, notes = decodings.load(folder)
    assert (dataset, count) == (expected, 1)
    assert notes[0] == f"note: {path} cannot be read (Is a directory): all pictures are decoded"
    assert entry.is_dir()


def test_there_is_a_limit(folder, decodings, monkeypatch):
    each = 12 * 5 * 7 * 3
    monkeypatch.setattr(picture_cache, "MAX_BYTES", each - 1)
    (note,) = decodings.load(folder)[2]
    assert f"are not cached: they take {each:,} bytes, others 0, and all may take {each - 1:,}; to clear" in note
    assert f"rm -r {picture_cache.cache_folder() / 'pictures'}" in note
    monkeypatch.setattr(picture_cache, "MAX_BYTES", each)
    assert decodings.load(folder)[2][0].startswith(KEPT)
    other = write(folder.parent / "test", first=1)
    assert any("are not cached" in note for note in decodings.load(folder, test=other)[2])
    later(folder)
    assert decodings.load(folder)[2][0].startswith(KEPT), "its own old entry does not count"


def test_a_bad_picture_is_told_as_without(folder, decodings):
    (folder / "cat" / "1.png").write_bytes(b"none")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.png is not a picture"):
            decodings.load(folder)
    assert entries() == []
