"""The optimisers: each is an update rule, its settings and the states it keeps."""

from __future__ import annotations

from minidl.optim.base import Optimizer, Params, check_number, read_groups


class SGD(Optimizer):
    """b = momentum b + g, p -= lr b; with Nesterov's momentum p -= lr (g + momentum b). Sutskever et al., ICML 2013.

    `weight_decay` adds weight_decay p to the gradient. As torch.optim.SGD with dampening 0.
    """

    _rule = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        groups = read_groups("SGD", params)
        momenta = [group.get("momentum", momentum) for group in groups]
        if nesterov and any(value == 0.0 for value in momenta):
            raise ValueError("SGD: nesterov needs a momentum above 0, got 0")
        super().__init__(
            groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, nesterov=nesterov,
            states=["momentum_buffer"] if any(value != 0.0 for value in momenta) else [],
        )  # fmt: skip


class RMSprop(Optimizer):
    """s = alpha s + (1 - alpha) g^2, p -= lr g / (sqrt(s) + eps). Hinton, Coursera 2012, lecture 6e.

    `centered` subtracts the square of a running mean of g from s (Graves, arXiv 1308.0850); `momentum` accumulates
    the steps; `weight_decay` adds weight_decay p to the gradient. As torch.optim.RMSprop.
    """

    _rule = "rmsprop"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        alpha: float = 0.99,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        momentum: float = 0.0,
        centered: bool = False,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        groups = read_groups("RMSprop", params)
        states = ["square_avg"]
        if any(group.get("momentum", momentum) != 0.0 for group in groups):
            states.append("momentum_buffer")
        if centered:
            states.append("grad_avg")
        super().__init__(
            groups, {"lr": lr, "alpha": alpha, "eps": eps, "weight_decay": weight_decay, "momentum": momentum},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=states,
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
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        check_number("Adagrad", "initial_accumulator_value", initial_accumulator_value)
        super().__init__(
            params, {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=["sum"], initial=initial_accumulator_value,
        )  # fmt: skip


class Adam(Optimizer):
    """m += (1 - beta1) (g - m), v = beta2 v + (1 - beta2) g^2, p -= lr m' / (sqrt(v') + eps). arXiv 1412.6980.

    m' and v' are m and v divided by 1 - beta^t; `weight_decay` adds weight_decay p to the gradient. As
    torch.optim.Adam.
    """

    _rule = "adam"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            max_norm=max_norm, lazy=lazy, loss_scale=loss_scale, states=["exp_avg", "exp_avg_sq"],
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
        *,
        max_norm: float | None = None,
        lazy: bool = False,
        loss_scale: float | None = None,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, max_norm=max_norm, lazy=lazy, loss_scale=loss_scale)
