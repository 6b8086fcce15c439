"""The seconds of a command by phase."""

import time

from minidl.common import timing


def test_inner_blocks_are_of_their_own_phase_and_all_add_up():
    clock, started = timing.Phases(age=5.0), time.monotonic()
    with clock.timed("train"):
        time.sleep(0.02)
        with clock.timed("evaluate"):
            time.sleep(0.03)
        time.sleep(0.02)
    found, all_of_it = clock.phases(), time.monotonic() - started
    assert 0.03 <= found["evaluate"] < found["train"] + 0.03
    assert found["train"] >= 0.04
    assert found["import"] == 5.0
    assert abs(found["total"] - 5.0 - all_of_it) < 0.01
    assert abs(sum(found[name] for name in timing.NAMES) - found["total"]) < 0.01


def test_time_that_belonged_to_another_phase():
    clock = timing.Phases()
    with clock.timed("train"):
        time.sleep(0.02)
        clock.moved("compile", 0.015)
    found = clock.phases()
    assert found["compile"] == 0.015
    assert 0.004 <= found["train"] < 0.02 + 0.05


def test_an_exception_ends_a_phase():
    clock = timing.Phases()
    try:
        with clock.timed("read"):
            raise KeyError
    except KeyError:
        time.sleep(0.02)
    assert clock.phases()["other"] >= 0.02


def test_only_the_first_command_of_a_process_has_begun_with_it():
    timing.begin()
    assert timing.begin() is timing.current()
    assert timing.current().phases()["import"] == 0.0


def test_the_table_has_what_took_time():
    seconds = {**dict.fromkeys(timing.NAMES, 0.0), "read": 1.5, "train": 0.5, "total": 2.0}
    assert timing.table(seconds).splitlines() == [
        "phase            time  share", "read           1.50 s    75%", "train          0.50 s    25%",
        "total          2.00 s   100%",
    ]  # fmt: skip
