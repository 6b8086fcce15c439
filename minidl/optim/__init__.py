"""Optimisers with torch's names, arguments and formulas; the arithmetic is in `kernels/update/`.

    optimizer = optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, max_norm=1.0)
    schedule = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1000)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()

Beyond torch, the update itself clips gradients (`max_norm`) and skips steps whose gradients are not finite (it counts
them and warns once; `skip_nonfinite=False` updates anyway). A gradient that touches few rows of a matrix stays sparse:
the result equals that of the dense gradient; with `lazy=True` only these rows and their moments change, as in
torch.optim.SparseAdam. Read `optimizers` first, then `base`, `groups` and `schedules`.
"""

from typing import NoReturn

from minidl.common import suggestions
from minidl.optim import lr_scheduler
from minidl.optim.base import Optimizer
from minidl.optim.groups import Params
from minidl.optim.lbfgs import LBFGS
from minidl.optim.optimizers import SGD, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop
from minidl.optim.schedules import CosineLR, LinearDecayLR, Schedule, WarmupLR
from minidl.optim.skips import NotFiniteWarning

__all__ = [
    "LBFGS", "SGD", "Adagrad", "Adam", "AdamW", "Adamax", "CosineLR", "LinearDecayLR", "Muon", "NAdam",
    "NotFiniteWarning", "Optimizer", "Params", "RAdam", "RMSprop", "Schedule", "WarmupLR", "lr_scheduler",
]  # fmt: skip


def __getattr__(name: str) -> NoReturn:
    if name in lr_scheduler.__all__:
        raise AttributeError(f"minidl.optim has no {name}: it is minidl.optim.lr_scheduler.{name}, as in torch")
    raise suggestions.attribute("minidl.optim", name, __all__)
