"""Products of blocks whose bits depend on the sum over K alone, as on a GPU.

The interpreter's products are NumPy's, and on some processors OpenBLAS adds the terms of an element in an order that
depends on M and N. A sum in float64, rounded once, has the same bits in every order.
"""

import numpy as np
import pytest

from minidl.runtime import launch


@pytest.fixture
def rounded_once(monkeypatch):
    """Products in float64, each rounded once to the accumulation dtype; nothing where kernels are compiled."""
    if not launch.INTERPRETED:
        return
    matmul = np.matmul

    def in_double(a, b, dtype=None, **options):
        return matmul(a, b, dtype=np.float64, **options).astype(dtype or np.result_type(a, b))

    monkeypatch.setattr(np, "matmul", in_double)
