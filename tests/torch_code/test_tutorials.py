"""Programs written for torch run with minidl, and lose as much: each is run with both.

The reference is torch in float64. torch in float32 leaves it by its rounding errors, which training amplifies; minidl
may leave it as far, with a factor for another order of sums, and no further.
"""

import numpy as np
import pytest

from tests.torch_code.frameworks import EXACT, PEER, ours
from tests.torch_code.tutorials import TUTORIALS

FACTOR = 8


@pytest.mark.slow
@pytest.mark.parametrize("tutorial", TUTORIALS, ids=[t.__name__ for t in TUTORIALS])
def test_a_tutorial_loses_as_with_torch(tutorial, tmp_path):
    exact, peer, own = (np.array(tutorial(f, tmp_path)) for f in (EXACT, PEER, ours()))
    assert len(own) >= 20
    assert np.ptp(exact) > 0.05 * exact[0], "the run must move for the comparison to say anything"
    bound = FACTOR * np.maximum.accumulate(np.abs(peer - exact)) + 8 * np.finfo(np.float32).eps * np.abs(exact)
    assert (np.abs(own - exact) <= bound).all(), (np.abs(own - exact) / bound).max()
