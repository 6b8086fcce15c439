"""Optimisers and learning rate schedules, with torch's names and formulas; the arithmetic is in `kernels/update/`.

    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, max_norm=1.0)
    schedule = optim.CosineLR(optimizer, T_max=1000, warmup=100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

Beyond torch, the update itself clips gradients (`max_norm`) and skips steps whose gradients are not finite, and a
gradient that touches few rows of a matrix stays sparse. The result equals that of the dense gradient; with `lazy=True`
only these rows and their moments change, as in torch.optim.SparseAdam.
"""

from minidl.optim.base import Optimizer, Params
from minidl.optim.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop
from minidl.optim.schedules import ConstantLR, CosineLR, LinearLR, Schedule, StepLR

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "ConstantLR", "CosineLR", "LinearLR", "Optimizer", "Params", "RMSprop",
    "Schedule", "StepLR",
]  # fmt: skip
