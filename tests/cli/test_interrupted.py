"""Signals at any moment: exit status 130, no trace, and none is lost."""

import contextlib
import importlib
import os
import re
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import typer

from minidl import cli
from minidl.cli import common
from minidl.distributed import workers
from minidl.errors import DamagedError
from tests.cli.conftest import start, wait_for


@pytest.fixture
def _no_threads(monkeypatch):
    """The number of threads is limited."""

    def refused(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("_thread.start_new_thread", refused)
    monkeypatch.setattr("threading._start_new_thread", refused)


class Thing:
    pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_python_drops_in_a_callback_is_raised_again(number, capsys):
    def wait():
        with common.terminated():
            thing = Thing()
            kept = weakref.ref(thing, lambda _: signal.raise_signal(number))
            del thing
            assert kept() is None
            end = time.monotonic() + 60
            while time.monotonic() < end:
                time.sleep(0.001)

    with pytest.raises(KeyboardInterrupt):
        wait()
    assert "Exception ignored" not in capsys.readouterr().err


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.usefixtures("_no_threads")
def test_a_signal_during_an_import_comes_after_it(tmp_path, monkeypatch, times):
    """Libraries take an exception for a module that is not there, and go on; a second signal does not wait."""
    (tmp_path / "half_imported.py").write_text(
        "import signal, time\n"
        "try:\n"
        f"    [signal.raise_signal(signal.SIGTERM) for _ in range({times})]\n"
        "    time.sleep(0.1)\n"
        "    found = True\n"
        "except KeyboardInterrupt:\n"
        "    found = False\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reached = []
    with contextlib.suppress(KeyboardInterrupt), common.terminated():
        reached.append(importlib.import_module("half_imported").found)
        end = time.monotonic() + (60 if times == 1 else 0.1)
        while time.monotonic() < end:
            time.sleep(0.001)
        reached.append("no other")
    del sys.modules["half_imported"]
    assert reached == ([True] if times == 1 else [False, "no other"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_exceptions_that_python_drops_are_told_as_before():
    def told(_):
        raise ValueError("of a callback")

    hook = common.sys.unraisablehook
    with common.terminated():
        thing = Thing()
        kept = weakref.ref(thing, told)
        del thing
    assert kept() is None
    assert common.sys.unraisablehook is hook


def test_a_start_of_a_process_is_not_interrupted():
    code = workers._Process.__init__.__code__
    assert any(part in f"{code.co_filename}:{code.co_qualname}" for part in common._UNINTERRUPTED)


def test_nothing_is_left_of_it():
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    with common.terminated():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == before


def test_a_timer_of_it_ends_with_it(tmp_path, monkeypatch):
    """A signal that came in the last import is raised no later."""
    (tmp_path / "last_imported.py").write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")
    monkeypatch.syspath_prepend(tmp_path)
    before = signal.getsignal(signal.SIGALRM)
    with common.terminated():
        importlib.import_module("last_imported")
    time.sleep(3 * common._RETRY)
    assert signal.getsignal(signal.SIGALRM) is before
    del sys.modules["last_imported"]


def interrupt(process, number):
    """One signal ends a process as it should. It has usual warnings: others are of files that the signal left open."""
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "interrupted\n")


def catches_signals(process):
    """Whether a process catches SIGTERM, as none does before minidl begins."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())[1]
    return int(caught, 16) >> (signal.SIGTERM - 1) & 1


@pytest.mark.parametrize("moment", range(10))
def test_a_signal_at_any_moment(tmp_path, moment):
    process = start("train", "text", "--data", "docstrings", "--out", "run", folder=tmp_path, flags=())
    wait_for(lambda: catches_signals(process), process)
    time.sleep(0.03 * moment)
    interrupt(process, (signal.SIGINT, signal.SIGTERM)[moment % 2])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_waits_for_input(text_run, tmp_path, number):
    process = start("predict", text_run[0], folder=tmp_path, flags=())
    process.stdin.write("oil\n")
    process.stdin.flush()
    assert "label" in process.stdout.readline()
    interrupt(process, number)

    pipe, opened = tmp_path / "pipe.csv", []
    os.mkfifo(pipe)
    process = start("predict", text_run[0], "--file", pipe, folder=tmp_path, flags=())

    def is_read():
        with contextlib.suppress(OSError):
            opened.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return opened

    wait_for(is_read, process)
    time.sleep(0.5)  # until it waits again, for what is written
    interrupt(process, number)
    os.close(opened[0])


def test_a_signal_while_the_command_line_is_read_is_told(monkeypatch, capsys):
    def raised(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(common.Group, "make_context", raised)
    monkeypatch.setattr(sys, "argv", ["minidl", "info"])
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        with pytest.raises(SystemExit) as end:
            cli.main()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("error", [DamagedError("model.safetensors is damaged"), TypeError("could not determine")])
def test_a_signal_that_a_library_takes_for_an_error_is_told_as_one(error, capsys):
    def work():
        with common.errors():
            try:
                signal.raise_signal(signal.SIGINT)
                time.sleep(1)
            except KeyboardInterrupt:
                raise error from None

    with pytest.raises(typer.Exit) as stop:
        work()
    assert stop.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"
