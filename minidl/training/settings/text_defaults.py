"""Default settings of the text network by the number of training texts.

Few texts need many epochs at a high learning rate. With many texts, a network at that rate learns the noise: with a
fifth of 40,000 labels wrong, accuracy 0.761 at 0.01, 0.812 at 0.0015 and 0.818 at 0.0006; a linear classifier has
0.818. More classes have fewer texts each and need a higher rate: 100 classes of 40,000 texts 0.983 at 0.0006 and 0.993
at 0.0015. The constants are fitted on four generators of 10,000 to 1,000,000 texts; the other generators of
`benchmarks/text_defaults.py` validate them.
"""

from __future__ import annotations

import math
from typing import Any

_FEW = 5000  # docstrings and R8 have fewer texts; cross-validation gave their settings
_MANY = 8000  # more texts do not lower the rate further
_SIZES = ((20_000, 12, 256), (80_000, 8, 512), (500_000, 5, 1024))  # largest number of texts, epochs, batch size
_MOST_SMOOTHED = 100_000  # with more texts, label smoothing does not improve the accuracy

# Measured on 4,706 docstrings and 5,871 texts of R52, see benchmarks/notes.md; more texts were not tried.
_SGD, _MOST_SGD = 15.0, 5.0


def of_settings(config: Any, texts: int, classes: int) -> dict[str, Any]:
    """Return `text` for the optimizer of the settings."""
    return text(texts, classes, config.momentum if config.optimizer == "sgd" else None)


def text(texts: int, classes: int, momentum: float | None = None) -> dict[str, Any]:
    """Return epochs, batch size, learning rate and label smoothing for `texts` training texts.

    momentum: of SGD; None for the adaptive optimizers.
    """
    epochs, batch_size = next(((e, b) for most, e, b in _SIZES if texts <= most), (3, 1024))
    low_rate = min(0.004, max(0.0004, 0.0007 * (classes / 8) ** 0.35))
    share = min(1.0, max(0.0, math.log(max(texts, 1) / _FEW) / math.log(_MANY / _FEW)))
    rate = 0.01 ** (1 - share) * low_rate**share
    if momentum is not None:
        rate = min(_MOST_SGD, _SGD * (1 - momentum))
    return {
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": float(f"{rate:.2g}"),
        "label_smoothing": 0.1 if texts <= _MOST_SMOOTHED else 0.0,
    }
