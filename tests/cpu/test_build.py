import os
import stat
import subprocess
import sys

import pytest

from minidl.cpu import build

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C compiler")
SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "folder", lambda: tmp_path / "cache")
    return tmp_path / "cache"


def test_a_library_is_kept_and_found_again(folder):
    assert build.lookup("answer") is None
    assert build.library("answer", SOURCE).answer() == 42
    (path,) = folder.iterdir()
    written = path.stat().st_mtime_ns
    assert build.library("answer", "no C").answer() == 42
    assert path.stat().st_mtime_ns == written


def test_a_damaged_file_is_compiled_again(folder):
    build.library("answer", SOURCE)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.unlink()  # the loaded one keeps its memory
    path.write_bytes(content[: len(content) // 2])
    assert build.lookup("answer") is None
    assert build.library("answer", SOURCE).answer() == 42


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(folder):
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert build.library("answer", SOURCE).answer() == 42


def test_a_file_in_place_of_the_folder(folder):
    folder.write_text("")
    assert build.library("answer", SOURCE).answer() == 42


def test_what_the_compiler_says_is_in_the_error(folder):
    with pytest.raises(build.CompilerError, match=r"failed with 1: .*error: unknown type name"):
        build.library("wrong", "no C")
    assert not folder.exists()


def test_without_a_compiler_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr(build, "compiler", lambda: None)
    with pytest.raises(build.CompilerError, match="install gcc or clang, or run pip install ziglang"):
        build.library("answer", SOURCE)


def test_a_compiler_that_does_not_work_is_passed_over(tmp_path):
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    code = "from minidl.cpu import build; print(build.compiler())"
    environment = {**os.environ, "PATH": str(tmp_path), "CC": str(broken)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "None" or "ziglang" in done.stdout


def test_a_failed_write_leaves_nothing_behind(folder, monkeypatch):
    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert build.library("answer", SOURCE).answer() == 42
    assert list(folder.iterdir()) == []
