"""What a command has done elsewhere meanwhile: imports in a thread, plots in processes."""

import threading

import numpy as np
import pytest

from minidl.data import DataError
from minidl.training.process import helpers
from minidl.training.report import plot_processes, plots


def draw_all(folder):
    folder.mkdir()
    history = [{"epoch": i, "loss": 1 / i, "validation": {"loss": float("nan"), "accuracy": None}} for i in (1, 2)]
    truth, found = np.array([0, 1, 1, 0]), np.array([0, 1, 0, 0])
    with plot_processes.in_processes():
        plots.curves(folder, history, 1, "a $", "loss", ["dropout"])
        plots.confusion(folder, truth, found, ["one", "two"], "b")
        plots.predictions(folder, truth * 2.5, found * 1.5, "price", "c")
        pixels = np.arange(4 * 6 * 5, dtype=np.uint8).reshape(4, 6, 5, 1)
        plots.mistakes(folder, pixels, truth, found, np.full(4, 0.75), ["one", "two"], "d")
        plots.filters(folder, np.linspace(-1, 1, 150, dtype=np.float32).reshape(3, 2, 5, 5), "e")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_plots_are_the_same_wherever_they_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    here = draw_all(tmp_path / "here")
    with helpers.start_processes(2):
        there = draw_all(tmp_path / "there")
    assert here.keys() == {"loss.png", "scores.png", "confusion.png", "predictions.png", "mistakes.png", "filters.png"}
    assert here == there


def test_plots_are_drawn_here_when_the_processes_are_gone(tmp_path):
    pytest.importorskip("matplotlib")
    with helpers.start_processes(2):
        for process in helpers.ready_processes()._processes:
            process._popen.kill()
        there = draw_all(tmp_path / "there")
    assert there == draw_all(tmp_path / "here")


def test_no_process_outlives_the_block():
    with helpers.start_processes(2):
        processes = [process._popen for process in helpers.ready_processes()._processes]
        assert len(processes) == 2
    assert helpers.ready_processes() is None
    assert all(process.poll() is not None for process in processes)


def test_processes_that_cannot_be_started_are_done_without(monkeypatch):
    def refused(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("minidl.data.workers.subprocess.Popen", refused)
    with helpers.start_processes(2):
        assert helpers.ready_processes() is None


def test_what_a_thread_raises_is_raised_by_who_waits():
    done = []
    helpers.in_thread(lambda: done.append(1))()
    assert done == [1]
    assert helpers.in_thread(lambda: 2)() == 2
    wait = helpers.in_thread(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wait()


def test_items_are_made_in_order_while_the_one_before_is_used():
    begun = [threading.Event() for _ in range(4)]

    def made():
        for number in range(3):
            begun[number].set()
            yield number
        begun[3].set()
        raise DataError("the fourth")

    found = helpers.one_ahead(made())
    assert begun[0].wait(60)
    for number in range(3):
        assert not begun[number + 1].is_set()
        assert next(found) == number
        assert begun[number + 1].wait(60)
    with pytest.raises(DataError, match="the fourth"):
        next(found)
    assert list(helpers.one_ahead(iter([]))) == []
