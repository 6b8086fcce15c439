"""Recurrences within their derived bound of float64: what `tests/test_operations.py` asks of an operation."""

import pytest
import torch

from minidl.kernels import recurrent
from minidl.runtime import launch
from tests import battery
from tests.kernels.recurrences import SPEC
from tests.test_operations import holds

DTYPES = [pytest.param(dtype, id=battery.NAMES[dtype]) for dtype in battery.dtypes(SPEC)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("check", ["forward", "gradients", "specials"])
def test_drawn_cases(check, dtype):
    holds(check, SPEC, dtype)


def test_gradients_of_the_real_kernels():
    holds("real gradients", SPEC, torch.float64, 0.25)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPEC.examples)
def test_fixed_examples(name, dtype):
    problem = battery.examples(SPEC, dtype)[name]
    battery.check_forward(problem)
    battery.check_gradients(problem)
    battery.check_repeats(problem)
    battery.check_aliases(problem)


@pytest.mark.parametrize("family", ["recurrent", "recurrent_fused", "recurrent_grad", "recurrent_grad_fused"])
def test_every_tile(family, monkeypatch):
    fused = family.endswith("_fused")
    monkeypatch.setattr(recurrent, "_fuses", lambda *_, **__: fused)
    names = ("interpreted", "sm_90", "sm_80") if launch.INTERPRETED else (launch.target(),)
    dtypes = battery.dtypes(SPEC)
    tiles = {str(tile.sizes): tile for name in names for d in dtypes for tile in launch.tiles(family, name, d)}
    for tile in (*tiles.values(), launch.Tile(dict.fromkeys(("BLOCK_M", "BLOCK_N", *["BLOCK_K"] * fused), 16))):
        with launch.force(**{family: tile}):
            for problem in battery.examples(SPEC, torch.float32).values():
                battery.check_forward(problem)
                battery.check_gradients(problem)


@pytest.mark.parametrize("bad", SPEC.bad, ids=lambda bad: bad.message)
def test_bad_inputs_are_refused(bad):
    make = battery.SeededMake(0, torch.float32, battery.default_device())
    with pytest.raises(bad.error, match=bad.message):
        battery.call(SPEC, bad.inputs(make))
