"""`minidl tune --estimates`: trials of drawn shapes, constants found again from times, rows that go on from a file."""

import json
import math
from dataclasses import replace
from random import Random

import pytest

from minidl.errors import ConfigError
from minidl.runtime.cost_model import devices, schema, selection
from minidl.tools.tuning import estimates as tuned
from minidl.tools.tuning import fit, trials

ABOUT = {
    "device": "NVIDIA H100 80GB HBM3", "driver": "570.1", "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-25",
    "seed": 4, "target": "sm_90", "processors": 132,
    "figures": json.loads(devices.usual("sm_90").read_text())["figures"],
}  # fmt: skip


@pytest.fixture(scope="module")
def setup():
    return trials.Setup(4, "sm_90", 132)


@pytest.fixture(scope="module")
def drawn(setup):
    """Trials of products and of convolutions that take a second to fit."""
    return [trial for of, count in (("gemm", 30), ("conv", 8)) for i in range(count) for trial in setup.trials(of, i)]


def test_trials_are_the_same_again_and_each_problem_has_several(setup, drawn):
    again = trials.Setup(4, "sm_90", 132)
    assert again.trials("gemm", 3) == setup.trials("gemm", 3)
    assert again.trials("conv", 1) == setup.trials("conv", 1)
    forms = {trial.form for trial in drawn}
    assert {"gemm", "gemm_pointer", "pixel_tiled", "pixel_grad_weight"} <= forms
    assert max(sum(one.problem == other.problem for other in drawn) for one in drawn) <= trials.MOST
    assert [trials.Trial.from_json(json.loads(json.dumps(trial.as_json()))) for trial in drawn] == drawn


def test_shapes_that_were_measured_are_not_drawn_again():
    first = [drawn for drawn, _ in zip(trials.shapes(set()), range(6), strict=False)]
    assert first == [("gemm", 0), ("conv", 0), ("gemm", 1), ("conv", 1), ("conv_transpose", 0), ("gemm", 2)]
    assert next(trials.shapes(set(first))) == ("conv", 2)


def test_known_constants_are_found_again_from_noisy_times(setup, drawn):
    """With an outlier in 50, as a device that others use has them; and what nothing says is not moved."""
    random, start = Random(0), selection.of("sm_90")
    known = schema.as_json(start)
    tile = "tiles", "pixel 128x64", 1
    moved = {("gemm", "gemm", "l2_all"): 0.8, ("gemm", "gemm_pointer", "loads"): 0.75, tile: 1.25}
    others = {("tiles", name, 1): 1.2 for name in known["tiles"]}
    for path, times in (others | moved).items():
        fit._set(known, path, times * fit._get(known, path))
    true = schema.from_json(known)
    with selection.use(true):
        exact = [setup.microseconds(trial) / 1e3 for trial in drawn]
    noise = [math.exp(random.gauss(0, 0.03)) * (3 if n % 50 == 7 else 1) for n in range(len(drawn))]
    rows = [replace(trial, ms=ms * times) for trial, ms, times in zip(drawn, exact, noise, strict=True)]
    rows.append(replace(drawn[0], ms=None))  # failed
    found = fit.fitted(setup, rows, start)
    got = schema.as_json(found)
    for path, times in moved.items():  # held, they come about half of the way and more
        assert abs(math.log(fit._get(got, path) / fit._get(known, path))) < 0.6 * abs(math.log(times)), path
    assert found.steps.fill == start.steps.fill
    before, after, best = (fit.score(setup, rows, constants) for constants in (start, found, true))
    assert after.error < before.error
    assert after.regret < best.regret + 0.02


def test_rows_go_on_from_a_file_of_the_same_device_and_seed(tmp_path, drawn):
    path = tmp_path / "trials.json"
    rows = tuned.Rows(ABOUT, {"copy": 2.9e6}, [replace(drawn[0], ms=0.01), drawn[-1]])
    rows.save(path)
    assert tuned.stored_rows(path, ABOUT) == rows
    assert tuned.stored_rows(tmp_path / "none.json", ABOUT).trials == []
    with pytest.raises(ConfigError, match="has rows of seed 4; this is 5: give another file"):
        tuned.stored_rows(path, {**ABOUT, "seed": 5})
    other = path.read_text().replace('"index"', '"place"')
    for content in ("[]", "{", '{"estimates": {}, "rates": {}, "rows": []}', other):
        path.write_text(content)
        with pytest.raises(ConfigError, match="has no rows of `minidl tune --estimates`"):
            tuned.stored_rows(path, ABOUT)


def test_trials_that_fail_have_no_time_and_those_that_run_are_measured_in_turn(setup, drawn, monkeypatch):
    """Until the seconds are over, and a whole shape at a time."""

    class Clock:
        def __init__(self, calls, whole_step):
            self.calls = calls

        def time(self):
            return self.calls[0]()

    def calls(setup, every, device):
        def of(trial):
            if trial is every[0]:
                raise RuntimeError("out of resource")
            return [lambda: 0.25]

        return of

    monkeypatch.setattr(trials, "_calls", calls)
    kept, rows = [], []
    trials.run(setup, rows, 0.5, "cpu", Clock, lambda done, said: None, lambda: kept.append(len(rows)), together=2)
    assert len(kept) > 0
    assert kept[-1] == len(rows)
    by_problem = [trial.ms for trial in rows if trial.problem[:2] == rows[0].problem[:2]]
    assert by_problem[0] is None
    assert set(by_problem[1:]) == {0.25}


def test_the_file_of_a_device_is_read_as_it_was_written(tmp_path, drawn):
    rows = tuned.Rows(ABOUT, {"copy": 2.9e6, "ieee": 45e6}, [replace(drawn[0], ms=0.01)])
    constants = tuned.with_rates(selection.of("sm_90"), rows.rates)
    assert (constants.copy, constants.products["ieee"]) == (2.9e6, 45e6)
    path = tmp_path / devices.NAME
    path.write_text(tuned.as_text(tuned.content(rows, constants, path)))
    assert devices.of_file(path) == constants
    assert max(map(len, path.read_text().splitlines())) <= 200
