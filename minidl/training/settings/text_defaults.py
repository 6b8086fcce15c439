"""Settings of the text network by the number of training texts, where the user gives none.

Few texts want many passes at a high rate. From many, a network at that rate learns the noise and falls behind a linear
machine: with a fifth of 40,000 labels wrong, accuracy 0.761 at 0.01, 0.812 at 0.0015 and 0.818 at 0.0006, beside 0.818
of the linear machine. More classes have fewer texts each and want a higher rate: 100 classes of 40,000 texts 0.983 at
0.0006 and 0.993 at 0.0015. Fitted on four generators of texts with 10,000 to 1,000,000 of them
(`benchmarks/text_defaults.py`, whose other generators are the check).
"""

from __future__ import annotations

import math
from typing import Any

_FEW = 5000  # docstrings and R8 have fewer; their settings were chosen by cross-validation
_SETTLED = 8000  # from here on the rate does not fall further
_SIZES = ((20_000, 12, 256), (80_000, 8, 512), (500_000, 5, 1024))  # at most so many texts, epochs, batch size
_SMOOTHED = 100_000  # with more texts, smoothed labels have no part in the accuracy but cost some


def text(texts: int, classes: int) -> dict[str, Any]:
    """Epochs, batch size, learning rate and label smoothing for so many training texts."""
    epochs, batch_size = next(((e, b) for most, e, b in _SIZES if texts <= most), (3, 1024))
    many = min(0.004, max(0.0004, 0.0007 * (classes / 8) ** 0.35))
    share = min(1.0, max(0.0, math.log(max(texts, 1) / _FEW) / math.log(_SETTLED / _FEW)))
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": float(f"{0.01 ** (1 - share) * many**share:.2g}"),
        "label_smoothing": 0.1 if texts <= _SMOOTHED else 0.0,
    }
