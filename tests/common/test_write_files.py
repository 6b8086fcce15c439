"""Files are written whole or not at all, whichever step fails."""

import builtins
import errno
import os
import signal
import stat
from pathlib import Path

import pytest

from minidl.common import write_files

FAULTS = [errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES]


def names(folder):
    return [path.name for path in folder.iterdir()]


def failing(monkeypatch, step, code):
    """Make one step of writing fail."""

    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    real_open, real_fsync = open, os.fsync

    class Full:
        """A file that takes half of what is written."""

        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, content):
            self.file.write(content[: len(content) // 2])
            fail()

    def flush(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode) == (step == "flush the folder"):
            fail()
        real_fsync(handle)

    if step == "open":
        monkeypatch.setattr(builtins, "open", fail)
    elif step == "write":
        monkeypatch.setattr(builtins, "open", lambda *given, **named: Full(real_open(*given, **named)))
    elif step == "rename":
        monkeypatch.setattr(os, "replace", fail)
    else:
        monkeypatch.setattr(os, "fsync", flush)


@pytest.mark.parametrize("code", FAULTS)
@pytest.mark.parametrize("step", ["open", "write", "flush", "rename"])
def test_a_step_that_fails_leaves_the_old_content(tmp_path, monkeypatch, step, code):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with monkeypatch.context() as patched:
        failing(patched, step, code)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            write_files.write_bytes(path, b"new content")
    assert (caught.value.errno, caught.value.filename) == (code, str(path))
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_folder_that_cannot_be_flushed_is_told_and_holds_the_new_content(tmp_path, monkeypatch, code):
    """The rename may not survive a power cut: nothing that relies on it, such as deleting older states, may follow."""
    path = tmp_path / "a"
    with monkeypatch.context() as patched:
        failing(patched, "flush the folder", code)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            write_files.write_bytes(path, b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("parents", [False, True])
def test_a_folder_is_made_and_flushed(tmp_path, monkeypatch, parents):
    path = tmp_path / "a" / "b" if parents else tmp_path / "b"
    with monkeypatch.context() as patched:
        failing(patched, "flush the folder", errno.EIO)
        with pytest.raises(OSError, match="Input/output error") as caught:
            write_files.make_folder(path, parents)
    assert caught.value.filename == str(tmp_path)
    flushed, real = [], os.fsync

    def flush(handle):
        flushed.append(str(Path(f"/proc/self/fd/{handle}").readlink()))
        real(handle)

    monkeypatch.setattr(os, "fsync", flush)
    for name in ("c", "c"):
        write_files.make_folder(tmp_path / name / "d", parents=True)
    assert flushed == [str(tmp_path), str(tmp_path / "c")]
    with pytest.raises(FileNotFoundError):
        write_files.make_folder(tmp_path / "x" / "y")


def test_folders_that_nothing_fills_are_deleted(tmp_path):
    (tmp_path / "there").mkdir()
    path = tmp_path / "there" / "a" / "b"
    with pytest.raises(ZeroDivisionError), write_files.folder_for(path):
        raise ZeroDivisionError if path.is_dir() else AssertionError
    assert names(tmp_path / "there") == []
    with write_files.folder_for(path):
        (path / "c").write_text("")
    with write_files.folder_for(path.with_name("d")), write_files.folder_for(tmp_path / "there"):
        pass
    assert names(path.parent) == ["b"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folders_is_left_as_it_is(tmp_path, monkeypatch, code):
    with monkeypatch.context() as patched:
        failing(patched, "flush the folder", code)
        write_files.write_bytes(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"


def test_a_block_that_fails_leaves_nothing_and_its_own_error(tmp_path):
    def fill():
        with write_files.atomic(tmp_path / "a") as file:
            file.write(b"half")
            raise FileNotFoundError(errno.ENOENT, "No such file", "another")

    with pytest.raises(FileNotFoundError, match="another"):
        fill()
    assert names(tmp_path) == []


# Python closes the file that was open when the signal came, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("after", ["open", "fsync", "replace"])
def test_a_signal_at_any_step_leaves_no_temporary_file(tmp_path, monkeypatch, after):
    owner, name = (builtins, "open") if after == "open" else (os, after)
    real = getattr(owner, name)

    def stopped(*args, **options):
        result = real(*args, **options)
        signal.raise_signal(signal.SIGINT)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, stopped)
        with pytest.raises(KeyboardInterrupt):
            write_files.write_bytes(tmp_path / "a", b"new")
    assert names(tmp_path) == (["a"] if after == "replace" else [])


def test_a_name_taken_by_a_folder_is_told(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError) as caught:
        write_files.write_bytes(tmp_path / "a", b"new")
    assert caught.value.filename == str(tmp_path / "a")
    assert names(tmp_path) == ["a"]


@pytest.fixture
def folders(tmp_path):
    """A folder with one in it, and another of the user's with files of the same names."""
    for name in ("run", "other"):
        (tmp_path / name / "inside").mkdir(parents=True)
        for folder in (tmp_path / name, tmp_path / name / "inside"):
            (folder / "a").write_text("mine")
    return tmp_path / "run", tmp_path / "other"


def tree(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("place", "kind"), [("run", "link"), ("run", "folder"), ("run/inside", "link")])
@pytest.mark.parametrize(
    "write",
    [
        lambda folder: write_files.write_bytes(folder / "a", b"new"),
        lambda folder: write_files.write_new(folder, {"b": b"new"}),
        lambda folder: write_files.remove(folder / "a"),
        lambda folder: write_files.make_folder(folder / "made"),
    ],
)
def test_nothing_is_written_where_another_folder_takes_the_place(folders, place, kind, write):
    run, other = folders
    path, before = run.parent / place, tree(other)
    with write_files.pin_folder(run):
        path.rename(run.parent / "moved")
        if kind == "link":
            path.symlink_to(other)
        else:
            other.rename(path)
        with pytest.raises(OSError, match="another folder, or a link, is in its place"):
            write(path)
    assert tree(path) == before
    assert not list(run.parent.rglob("made"))


def test_a_folder_of_the_users_that_is_a_link_is_written_to(folders):
    run, other = folders
    (run.parent / "link").symlink_to(other)
    with write_files.pin_folder(run.parent / "link"):
        write_files.write_bytes(run.parent / "link" / "inside" / "a", b"new")
    assert (other / "inside" / "a").read_text() == "new"


def test_unfinished_files_are_known_by_their_names(tmp_path):
    seen = []
    for name in ("a", "model.safetensors", "n" * 255, "a.b c\u00e9", "\udc80"):
        with write_files.atomic(tmp_path / name) as file:
            file.write(b"")
            seen += [each for each in names(tmp_path) if each.startswith(".")]
    assert len(seen) == 5
    assert all(map(write_files.is_part, seen))
    for name in (".notes.part", "a.part", ".part", ".a.0123456789abcdef.part", ".a..part", seen[0][1:], "x" + seen[0]):
        assert not write_files.is_part(name), name
    assert not write_files.is_part(seen[0].replace(".a.", ".b."))
