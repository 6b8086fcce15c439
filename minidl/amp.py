"""Mixed precision as in torch.amp: `autocast` is torch's, and operations convert their operands by it."""

from typing import Any

import torch
from torch import autocast as autocast

from minidl.kernels import elementwise
from minidl.tensors import Tensor


class GradScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler for minidl's optimizers, which divide gradients by the scale while they read them.

    A step with a gradient that is not finite changes nothing, and the next `update` lowers the scale. `step` waits for
    the device. `device` is ignored: the scale is on the host.
    """

    def __init__(self, device: Any = "cuda", *args: Any, **kwargs: Any) -> None:
        super().__init__("cpu", *args, **kwargs)
        if self._enabled:
            self._lazy_init_scale_growth_tracker(torch.device("cpu"))

    def scale(self, outputs: Any) -> Any:
        """Return a Tensor, or each of a list, times the scale."""
        if isinstance(outputs, list | tuple):
            return type(outputs)(map(self.scale, outputs))
        return outputs * self.get_scale() if self._enabled else outputs

    def unscale_(self, optimizer: Any) -> None:
        """Divide an optimizer's gradients by the scale now, to clip them. Raises RuntimeError for a second time before
        `update`, ValueError for float16, which may underflow."""
        if not self._enabled:
            return
        state = self._per_optimizer_states[id(optimizer)]
        if "unscaled" in state:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        params = [param for param in optimizer._params if param.grad is not None]
        if any(param.dtype == torch.float16 for param in params):
            raise ValueError("Attempting to unscale FP16 gradients: clip them by max_norm= of the optimizer")
        for param in params:
            param.grad = Tensor(elementwise.mul(param.grad.data, 1 / self.get_scale()))
        state["unscaled"] = True

    def step(self, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Take a step of an optimizer. Raises ValueError for torch's, and with loss_scale or skip_nonfinite=False."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        kernel: Any = getattr(optimizer, "_update", None)
        if kernel is None or kernel.scale is not None or not optimizer.skip_nonfinite:
            raise ValueError("GradScaler.step: expected minidl's optimizer without loss_scale, skip_nonfinite=False")
        state, skipped, warns = self._per_optimizer_states[id(optimizer)], optimizer.skipped, optimizer.warns
        optimizer.warns = False
        if "unscaled" not in state:
            kernel.scale = torch.tensor([self.get_scale(), 0.0], device=kernel.device)
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            kernel.scale, optimizer.warns = None, warns
            state["found_inf_per_device"] = {kernel.device: torch.tensor(float(optimizer.skipped != skipped))}
