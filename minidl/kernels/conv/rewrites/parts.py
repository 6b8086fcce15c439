"""A problem in parts: backward phases one by one; a convolution, and then its pool or sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from minidl.kernels import elementwise
from minidl.kernels import pool as pools
from minidl.kernels.conv import costs
from minidl.kernels.conv.problem import PHASE, TRANSPOSED, Operands, Problem, Tensors, Unsupported, backward_phases
from minidl.kernels.conv.rewrites.fill import MOST_PHASES
from minidl.kernels.conv.rewrites.rewrite import DirectRewrite, Result

# us to launch each phase after the first.
PHASE_LAUNCH = 1.5
# Factor for many phases, which all read x.
MANY_PHASES = 1.2


class Phases(DirectRewrite):
    """A transposed convolution as one convolution of stride 1 for each backward phase, which writes its outputs."""

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if problem.direction != TRANSPOSED:
            return Unsupported("not transposed")
        return tuple(problem._replace(direction=PHASE, phases=at) for at in backward_phases(problem.geometry))

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        return PHASE_LAUNCH * (len(times) - 1) + (MANY_PHASES if len(times) > MOST_PHASES else 1.0) * sum(times)

    def label(self, parts: Sequence[str]) -> str:
        forms = "+".join(dict.fromkeys(parts))
        return forms if len(parts) == 1 else f"{len(parts)} phases by {forms}"

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        x, w, bias, scale, _ = operands
        y = torch.empty(problem.shape, dtype=problem.result, device=x.device)
        z = torch.empty_like(y) if problem.preactivation else None
        for plan in plans:  # of forms, as no rewrite takes a PHASE
            plan.write(Tensors(x, w, y, bias, scale, z))
        return y, z


class Pool(DirectRewrite):
    """A convolution, then the 2x2 pool of its result."""

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if not problem.pool or min(problem.at.down.count, problem.at.across.count) < 2:
            return Unsupported("no window to pool")
        return (problem._replace(pool=None),)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        return costs.pool_time(problem) + times[0]

    def label(self, parts: Sequence[str]) -> str:
        return f"{parts[0]}, then a pool"

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        y = plans[0].run(operands)[0].permute(0, 3, 1, 2)
        windows = pools.windows("conv2d", tuple(y.shape[2:]), 2)
        pooled = pools.max_pool2d(y, windows)[0] if problem.pool == "max" else pools.avg_pool2d(y, windows)
        return pooled.permute(0, 2, 3, 1), None


class Sum(DirectRewrite):
    """A convolution, then the sum with another tensor and the activation."""

    def others(self, problem: Problem) -> tuple[Problem, ...] | Unsupported:
        if problem.direction == TRANSPOSED or not problem.added:
            return Unsupported("nothing to add")
        return (problem._replace(added=False, act=None),)

    def cost(self, problem: Problem, others: Sequence[Problem], times: Sequence[float]) -> float:
        return costs.sum_time(problem, separate=True) + times[0]

    def label(self, parts: Sequence[str]) -> str:
        return f"{parts[0]}, then a sum"

    def run(self, problem: Problem, plans: Sequence[Any], operands: Operands) -> Result:
        assert operands.added is not None
        y, _ = plans[0].run(operands._replace(added=None))
        return elementwise.add_act(y, operands.added, problem.act), None
