"""The axes of the charts of report.html."""

import pytest

from minidl.training.report import chart


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.41, 0.56, [0.4, 0.45, 0.5, 0.55, 0.6]),
        (2.03, 2.85, [2.0, 2.25, 2.5, 2.75, 3.0]),
        (-3.0, 140.0, [-50.0, 0.0, 50.0, 100.0, 150.0]),
        (0.0, 0.0, [0.0, 0.25]),
    ],
)
def test_ticks_are_round_and_enclose_the_values(low, high, expected):
    assert chart._ticks(low, high) == pytest.approx(expected)


@pytest.mark.parametrize("low", [-5.0, 0.0, 1e-30, 0.1, 1e9])
def test_any_values_have_ticks(low):
    for high in (low, 2 * abs(low), 1e9, 1e300):
        ticks = chart._ticks(low, high)
        assert ticks[0] <= low + 1e-9
        assert ticks[-1] >= high * (1 - 1e-9)
        assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, [1]), (6, [1, 2, 3, 4, 5, 6]), (12, [1, 2, 4, 6, 8, 10, 12]), (100, [1, 20, 40, 60, 80, 100])],
)
def test_epochs_are_whole(count, expected):
    assert chart._epoch_ticks(count) == expected
