"""The optimisers: each has an update rule, settings and states. Arguments are torch's, then minidl's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from minidl.optim.base import Optimizer
from minidl.optim.groups import Params, adjustment, check_not_recording, check_number, iterations


class SGD(Optimizer):
    """b = momentum b + (1 - dampening) g, p -= lr b; with Nesterov's momentum p -= lr (g + momentum b).

    b begins as g. `weight_decay` adds weight_decay p to the gradient; `maximize` follows the gradient upward. As
    torch.optim.SGD. Sutskever et al., ICML 2013.
    """

    _rule = "sgd"
    _optional: ClassVar = {"momentum": "momentum_buffer"}

    def __init__(
        self, params: Params, lr: float = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float = 0,
        nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None, differentiable: bool = False,
        fused: bool | None = None, max_norm: float | None = None, lazy: bool = False, loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, locals())


class RMSprop(Optimizer):
    """s = alpha s + (1 - alpha) g^2, p -= lr g / (sqrt(s) + eps). Hinton, Coursera 2012, lecture 6e.

    `centered` subtracts the square of a running mean of g from s (Graves, arXiv 1308.0850); `momentum` accumulates
    the steps; `weight_decay` adds weight_decay p to the gradient. As torch.optim.RMSprop.
    """

    _rule = "rmsprop"
    _optional: ClassVar = {"momentum": "momentum_buffer", "centered": "grad_avg"}

    def __init__(
        self, params: Params, lr: float = 1e-2, alpha: float = 0.99, eps: float = 1e-8, weight_decay: float = 0,
        momentum: float = 0, centered: bool = False, capturable: bool = False, foreach: bool | None = None,
        maximize: bool = False, differentiable: bool = False, *, max_norm: float | None = None, lazy: bool = False,
        loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, locals())


class Adagrad(Optimizer):
    """s += g^2, p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). Duchi et al., JMLR 12.

    s starts at `initial_accumulator_value`; `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adagrad.
    """

    _rule = "adagrad"

    def __init__(
        self, params: Params, lr: float = 1e-2, lr_decay: float = 0, weight_decay: float = 0,
        initial_accumulator_value: float = 0, eps: float = 1e-10, foreach: bool | None = None, *,
        maximize: bool = False, differentiable: bool = False, fused: bool | None = None, max_norm: float | None = None,
        lazy: bool = False, loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        check_number("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        super().__init__(params, locals())


class Adam(Optimizer):
    """m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p -= lr m' / (sqrt(v') + eps). arXiv 1412.6980.

    m' and v' are m and v divided by 1 - beta^t; with `amsgrad` v' comes from the largest v so far (Reddi et al., ICLR
    2018). `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adam.
    """

    _rule = "adam"
    _optional: ClassVar = {"amsgrad": "max_exp_avg_sq"}

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, foreach: bool | None = None, maximize: bool = False,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        decoupled_weight_decay: bool = False, max_norm: float | None = None, lazy: bool = False,
        loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            self._rule = "adamw"
        super().__init__(params, locals())


class AdamW(Adam):
    """Adam with decoupled weight decay: first p *= 1 - lr weight_decay. arXiv 1711.05101.

    As torch.optim.AdamW.
    """

    _rule = "adamw"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None,
        max_norm: float | None = None, lazy: bool = False, loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, differentiable=differentiable,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip


class Adamax(Optimizer):
    """m as in `Adam`, u = max(beta2 u, |g| + eps), p -= lr / (1 - beta1^t) m / u. arXiv 1412.6980.

    `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adamax.
    """

    _rule = "adamax"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, foreach: bool | None = None, *, maximize: bool = False, differentiable: bool = False,
        capturable: bool = False, max_norm: float | None = None, lazy: bool = False, loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, locals())


class RAdam(Optimizer):
    """`Adam` with a step whose variance is corrected, and without v in the first steps. Liu et al., arXiv 1908.03265.

    `weight_decay` adds weight_decay p to the gradient, or with `decoupled_weight_decay` first p *= 1 - lr weight_decay.
    As torch.optim.RAdam; `kernels.update` has the formula.
    """

    _rule = "radam"

    def __init__(
        self, params: Params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, decoupled_weight_decay: bool = False, *, foreach: bool | None = None,
        maximize: bool = False, capturable: bool = False, differentiable: bool = False, max_norm: float | None = None,
        lazy: bool = False, loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            self._rule = "radamw"
        super().__init__(params, locals())


class NAdam(Optimizer):
    """`Adam` with Nesterov's momentum, which grows from beta1 / 2 to beta1 by momentum_decay. Dozat, 2016.

    `weight_decay` and `decoupled_weight_decay` as in `RAdam`. As torch.optim.NAdam; `kernels.update` has the formula.
    The product of all momenta is computed from the number of steps, with the present settings.
    """

    _rule = "nadam"

    def __init__(
        self, params: Params, lr: float = 2e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, momentum_decay: float = 4e-3, decoupled_weight_decay: bool = False, *,
        foreach: bool | None = None, maximize: bool = False, capturable: bool = False, differentiable: bool = False,
        max_norm: float | None = None, lazy: bool = False, loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        if decoupled_weight_decay:
            self._rule = "nadamw"
        super().__init__(params, locals())


class Muon(Optimizer):
    """b += (1 - momentum) (g - b), p -= lr adjust N(b), first p *= 1 - lr weight_decay; for matrices. Jordan, 2024.

    N applies `ns_steps` Newton-Schulz iterations to a matrix, which bring its singular values near 1, see
    `kernels.update.newton`; `nesterov` uses g + momentum (b - g) in place of b. With `adjust_lr_fn` "original" (or
    None) adjust is sqrt(max(1, rows / columns)), with "match_rms_adamw" 0.2 sqrt(max(rows, columns)). As
    torch.optim.Muon, which rounds the iterations to bfloat16; here they are float32, or as the parameters if these are
    float64. All groups share `nesterov` and the settings of the iterations. Biases, gains, embeddings and the first and
    the last layer are usually trained with AdamW.

    Raises ValueError for a parameter that is no matrix.
    """

    _rule = "muon"
    _dense = True

    def __init__(
        self, params: Params, lr: float = 1e-3, weight_decay: float = 0.1, momentum: float = 0.95,
        nesterov: bool = True, ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7, ns_steps: int = 5, adjust_lr_fn: str | None = None, *, max_norm: float | None = None,
        loss_scale: float | None = None, skip_nonfinite: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(params, locals())

    def _start(self, groups: Iterable[dict[str, Any]]) -> None:
        self._adjusted: list[float] = []
        super()._start(groups)

    def _append(self, group: dict[str, Any]) -> None:
        iterations([*self.param_groups, group])
        for param in group["params"]:
            if getattr(param, "ndim", 2) != 2:
                raise ValueError(
                    f"Muon: a parameter has shape {list(param.shape)}, expected matrices; give the others to AdamW"
                )
        super()._append(group)

    def _synchronize(self) -> None:
        super()._synchronize()
        self._update.newton = iterations(self.param_groups)
        adjusted = [adjustment(group["adjust_lr_fn"], *p.shape) for group in self.param_groups for p in group["params"]]
        if adjusted != self._adjusted:
            check_not_recording("Muon", "adjust_lr_fn")
            for index, value in enumerate(adjusted):
                self._update.set("adjust", value, index, index + 1)
            self._adjusted = adjusted
