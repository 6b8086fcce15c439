"""The optimisers: each is an update rule, its settings and the states it keeps. Arguments are torch's, then our own."""

from __future__ import annotations

from typing import ClassVar

from minidl.optim.base import Optimizer
from minidl.optim.groups import Params, check_number


class SGD(Optimizer):
    """b = momentum b + (1 - dampening) g, p -= lr b; with Nesterov's momentum p -= lr (g + momentum b).

    b begins as g. `weight_decay` adds weight_decay p to the gradient; `maximize` follows the gradient upward. As
    torch.optim.SGD. Sutskever et al., ICML 2013.
    """

    _rule = "sgd"
    _optional: ClassVar = {"momentum": "momentum_buffer"}

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
                "nesterov": nesterov, "maximize": maximize,
            },
            differentiable=differentiable,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip


class RMSprop(Optimizer):
    """s = alpha s + (1 - alpha) g^2, p -= lr g / (sqrt(s) + eps). Hinton, Coursera 2012, lecture 6e.

    `centered` subtracts the square of a running mean of g from s (Graves, arXiv 1308.0850); `momentum` accumulates
    the steps; `weight_decay` adds weight_decay p to the gradient. As torch.optim.RMSprop.
    """

    _rule = "rmsprop"
    _optional: ClassVar = {"momentum": "momentum_buffer", "centered": "grad_avg"}

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0,
        momentum: float = 0,
        centered: bool = False,
        capturable: bool = False,
        foreach: bool | None = None,
        maximize: bool = False,
        differentiable: bool = False,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum,
                "centered": centered, "maximize": maximize,
            },
            differentiable=differentiable,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip


class Adagrad(Optimizer):
    """s += g^2, p -= lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps). Duchi et al., JMLR 12.

    s starts at `initial_accumulator_value`; `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adagrad.
    """

    _rule = "adagrad"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        check_number("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        super().__init__(
            params,
            {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay, "maximize": maximize},
            differentiable=differentiable, initial=initial_accumulator_value,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip


class Adam(Optimizer):
    """m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p -= lr m' / (sqrt(v') + eps). arXiv 1412.6980.

    m' and v' are m and v divided by 1 - beta^t; with `amsgrad` v' is made of the largest v so far (Reddi et al., ICLR
    2018). `weight_decay` adds weight_decay p to the gradient. As torch.optim.Adam.
    """

    _rule = "adam"
    _optional: ClassVar = {"amsgrad": "max_exp_avg_sq"}

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        if decoupled_weight_decay:
            self._rule = "adamw"
        super().__init__(
            params,
            {
                "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
                "maximize": maximize,
            },
            differentiable=differentiable,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip


class AdamW(Adam):
    """Adam with decoupled weight decay: first p *= 1 - lr weight_decay. arXiv 1711.05101.

    As torch.optim.AdamW.
    """

    _rule = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, differentiable=differentiable,
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, skip_nonfinite=skip_nonfinite,
        )  # fmt: skip
