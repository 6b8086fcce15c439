"""Programs written for torch, with `import minidl as torch`: in float64 they have torch's losses."""

import numpy as np
import pytest
import torch

import minidl
from minidl.runtime import launch
from tests.torch_code.programs import PROGRAMS


@pytest.fixture(autouse=True)
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.skipif(not launch.INTERPRETED, reason="data is on the CPU")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("program", PROGRAMS, ids=[p.__name__ for p in PROGRAMS])
def test_a_program_has_torchs_losses(program):
    states = []

    def keep(model):
        states.append({name: value.clone() for name, value in model.state_dict().items()})
        return model

    def load(model):
        state = states.pop(0)
        assert list(model.state_dict()) == list(state)
        model.load_state_dict(state)
        return model

    torch.manual_seed(0)
    expected = program(torch, keep)
    losses = program(minidl, load)
    assert len(set(expected)) >= 3, "the run must move for the comparison to say anything"
    np.testing.assert_allclose(losses, expected, rtol=1e-9, atol=1e-11)
