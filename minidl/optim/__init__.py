"""Optimisers and learning rate schedules, with torch's names and formulas; the arithmetic is in `kernels/update/`.

    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, max_norm=1.0)
    schedule = optim.CosineLR(optimizer, T_max=1000, warmup=100)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

Beyond torch: clipping (`max_norm`) and the guard against gradients that are not finite belong to the update itself, and
gradients that touch few rows of a matrix are used as they are. The result equals that of the dense gradient; with
`lazy=True` only the rows seen change, their moments included, as in torch.optim.SparseAdam.
"""

from minidl.optim.base import Optimizer, Params
from minidl.optim.optimizers import SGD, Adagrad, Adam, AdamW, RMSprop
from minidl.optim.schedules import ConstantLR, CosineLR, LinearLR, Schedule, StepLR

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "ConstantLR", "CosineLR", "LinearLR", "Optimizer", "Params", "RMSprop",
    "Schedule", "StepLR",
]  # fmt: skip
