"""Signals at any moment: exit status 130, no trace, and none is lost."""

import signal
import sys
import threading
import time
import weakref

import pytest
import typer
from pydantic_core import SchemaError

from minidl import cli
from minidl.cli import common


@pytest.fixture(autouse=True)
def _heeded():
    """A process that a shell has put in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


def test_a_ctrl_c_that_pydantic_makes_an_error_of_its_own_is_told_as_one(capsys):
    """As it comes while a class of settings is built, at its first use."""
    with pytest.raises(typer.Exit) as told, common.errors():
        raise SchemaError('Error building "literal" validator:\n  KeyboardInterrupt: ')
    assert told.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SchemaError), common.errors():
        raise SchemaError("another")


def test_nothing_is_left_of_it():
    before = signal.getsignal(signal.SIGTERM), threading.active_count()
    with common.terminated():
        assert signal.getsignal(signal.SIGTERM) is not before[0]
    assert (signal.getsignal(signal.SIGTERM), threading.active_count()) == before


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
