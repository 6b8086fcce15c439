"""The rules of updates by name, their hyperparameters, their states, and what one launch computes."""

from typing import Any, NamedTuple

from minidl.kernels.update import kernels

RULES = {
    "sgd": kernels.SGD, "rmsprop": kernels.RMSPROP, "adagrad": kernels.ADAGRAD, "adam": kernels.ADAM,
    "adamw": kernels.ADAMW, "adamax": kernels.ADAMAX, "radam": kernels.RADAM, "radamw": kernels.RADAMW,
    "nadam": kernels.NADAM, "nadamw": kernels.NADAMW,
}  # fmt: skip
# The columns of hyperparameters.
HYPER = {
    "lr": kernels.LR, "weight_decay": kernels.WEIGHT_DECAY, "momentum": kernels.MOMENTUM, "alpha": kernels.ALPHA,
    "beta1": kernels.BETA1, "beta2": kernels.BETA2, "eps": kernels.EPS, "lr_decay": kernels.LR_DECAY,
    "dampening": kernels.LR_DECAY, "momentum_decay": kernels.LR_DECAY, "adjust": kernels.ALPHA,
}  # fmt: skip
# The states of a rule per parameter, in the order of the columns of the table.
STATES = {
    "sgd": ("momentum_buffer",),
    "rmsprop": ("square_avg", "momentum_buffer", "grad_avg"),
    "adagrad": ("sum",),
    "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    "adamax": ("exp_avg", "exp_inf"),
    **dict.fromkeys(("radam", "radamw", "nadam", "nadamw"), ("exp_avg", "exp_avg_sq")),
    "muon": ("momentum_buffer", "direction"),
}
# A temporary, rewritten in each step.
SCRATCH = "direction"


class Step(NamedTuple):
    """What an update computes: RULE and HAS_ROWS of `kernels`, states and masters of type ACC, fields of `Update`."""

    RULE: int
    ACC: Any
    HAS_ROWS: int
    HAS_MOMENTUM: bool
    DECAY: bool
    NESTEROV: bool
    DAMPENED: bool
    MAXIMIZE: bool
    THIRD: bool
