"""One writer at a time in a folder."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from minidl.errors import ConfigError
from minidl.training.run_folder import folder_lock

ROOT = Path(__file__).parents[2]


def taken(folder):
    """Whether the lock is held by another."""
    try:
        folder_lock.check_free(folder)
    except ConfigError:
        return True
    return False


@pytest.fixture
def other(tmp_path):
    """A process that holds the lock of `run`."""
    code = (
        "import sys; from pathlib import Path; from minidl.training.run_folder import folder_lock\n"
        "with folder_lock.lock(Path(sys.argv[1])):\n    print('held', flush=True); sys.stdin.read()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "run")], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdout.readline() == b"held\n"
    yield started
    started.kill()
    started.communicate()


def test_the_second_is_told_who_holds_it(tmp_path, other):
    expected = rf"run is being written by process {other.pid} on .* since .* \(-c .*run\); wait until it ends"
    with pytest.raises(ConfigError, match=expected), folder_lock.lock(tmp_path / "run"):
        pass
    other.communicate()
    assert not taken(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_lock(tmp_path, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert [path.name for path in tmp_path.iterdir()] == [".run.lock"]
    with folder_lock.lock(tmp_path / "run"):
        assert taken(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_has_one_lock_whatever_its_name(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    monkeypatch.chdir(tmp_path / "run")
    with folder_lock.lock(tmp_path / "run"):
        assert taken(tmp_path / "link")
        assert taken(Path())
        assert not taken(tmp_path / "other")
    with folder_lock.lock(Path()):
        assert taken(tmp_path / "run")


def test_a_folder_that_is_renamed_stays_locked_under_its_name(tmp_path):
    (tmp_path / "run").mkdir()
    with folder_lock.lock(tmp_path / "run"):
        (tmp_path / "run").rename(tmp_path / "run.previous")
        assert taken(tmp_path / "run")
        (tmp_path / "run").mkdir()
        assert taken(tmp_path / "run")


def test_many_threads_one_at_a_time(tmp_path):
    inside, most, held = [], [], []

    def work():
        for _ in range(50):
            try:
                with folder_lock.lock(tmp_path / "run"):
                    inside.append(1)
                    most.append(len(inside))
                    held.append(1)
                    inside.pop()
            except ConfigError:
                pass

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert held
    assert max(most) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_lock_file_that_is_deleted_in_between_is_not_taken(tmp_path, monkeypatch):
    real, found = fcntl.flock, []

    def flock(handle, how):
        if not found:
            found.append(handle)
            (tmp_path / ".run.lock").unlink()
        real(handle, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_lock.lock(tmp_path / "run"):
        assert (tmp_path / ".run.lock").exists()
        assert taken(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_nothing_can_be_made_beside(tmp_path):
    folder = tmp_path / "above" / "run"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o500)
    try:
        with folder_lock.lock(folder):
            assert (folder / ".lock").exists()
            assert taken(folder)
        assert list(folder.iterdir()) == []
    finally:
        folder.parent.chmod(0o700)


def test_nothing_beside_a_read_only_mount(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()
    real = os.open

    def refuse(path, flags, *rest, **options):
        if Path(path) == tmp_path / ".run.lock":
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", refuse)
    with folder_lock.lock(tmp_path / "run"):
        assert (tmp_path / "run" / ".lock").exists()
        assert taken(tmp_path / "run")


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def flock(handle, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with folder_lock.lock(tmp_path / "run"), folder_lock.lock(tmp_path / "run"):
        assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_no_lock(tmp_path, monkeypatch):
    def pwrite(handle, content, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", pwrite)
    with folder_lock.lock(tmp_path / "run"), pytest.raises(ConfigError, match="is being written by another process;"):
        folder_lock.check_free(tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("owner", "name"), [(os, "open"), (fcntl, "flock"), (os, "ftruncate"), (os, "pwrite")])
def test_a_ctrl_c_leaves_no_lock(tmp_path, monkeypatch, owner, name):
    real, calls = getattr(owner, name), []

    def interrupted(*arguments, **options):
        calls.append(real(*arguments, **options))
        if len(calls) == 1:
            raise KeyboardInterrupt
        return calls[-1]

    monkeypatch.setattr(owner, name, interrupted)
    with pytest.raises(KeyboardInterrupt), folder_lock.lock(tmp_path / "run"):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("kind", "target"), [("link", "mine"), ("link", "nowhere"), ("folder", None)])
def test_a_lock_that_is_no_file_is_named_and_left_alone(tmp_path, kind, target):
    (tmp_path / "mine").write_text("kept")
    lock = tmp_path / ".run.lock"
    lock.symlink_to(target) if target is not None else lock.mkdir()
    message = rf"\.run\.lock, the lock of .*run, is a {kind}, expected a file; delete it"
    with pytest.raises(ConfigError, match=message), folder_lock.lock(tmp_path / "run"):
        pass
    assert (tmp_path / "mine").read_text() == "kept"
    assert {path.name for path in tmp_path.iterdir()} == {"mine", ".run.lock"}


@pytest.mark.parametrize("content", ["", "mine", '{"process"; "mine"}'])
@pytest.mark.parametrize("kind", ["file", "hard link", "pipe"])
@pytest.mark.parametrize("beside", [True, False])
def test_a_file_of_the_users_at_the_name_of_the_lock_stays(tmp_path, monkeypatch, content, kind, beside):
    """Also what a hard link of that name leads to, and where the file system has no locks."""
    path = tmp_path / ".run.lock"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        (tmp_path / "mine").write_text(content)
        path.hardlink_to(tmp_path / "mine")
        if kind == "file":
            (tmp_path / "mine").unlink()
    if not beside:
        monkeypatch.setattr(fcntl, "flock", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks")))
    if kind == "file" and not content:
        with folder_lock.lock(tmp_path / "run"):  # a lock that a killed process has begun
            pass
        return
    with pytest.raises(ConfigError, match=r"\.run\.lock is not a lock file of minidl, which needs this name: move it"):
        folder_lock.check_free(tmp_path / "run")
    assert kind == "pipe" or path.read_text() == content
    assert path.exists()
