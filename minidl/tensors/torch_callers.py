"""Refuse modules of torch that accept only torch tensors, and fail on others without an error."""

from __future__ import annotations

import sys

# Modules of torch that take torch's tensors alone, and fail on others without saying so; and what to write.
_CALLERS = {
    "torch.nn.utils.clip_grad": "minidl.nn.utils.clip_grad_norm_ or clip_grad_value_, or max_norm= of an optimiser",
    "torch.amp.grad_scaler": "minidl.amp.GradScaler",
    "torch.nn.utils.parametrize": "minidl.nn.utils.parametrizations, or an expression of the parameters in forward()",
    "torch.nn.utils.weight_norm": "minidl.nn.utils.weight_norm",
}


def refuse_callers(depth: int = 1) -> None:
    """Raise TypeError where code of one of these asks, as far up as `depth` calls."""
    frame = sys._getframe(2)
    for _ in range(depth):
        module = frame.f_globals.get("__name__", "")
        if module in _CALLERS:
            raise TypeError(f"{module} got a minidl Tensor, which it cannot take; use {_CALLERS[module]}")
        if frame.f_back is None:
            return
        frame = frame.f_back
