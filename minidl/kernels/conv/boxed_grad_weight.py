"""The weight gradient in the "box" form: that of volumes of one slice (`cubes_grad_weight`)."""

import torch

from minidl.kernels.conv import cubes_grad_weight
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.kernels.conv.voxels import VolumeProblem

NAME = "box"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = (cubes_grad_weight.FAMILY,)
ONE_SLICE = Axis(1, 1, 1, 1, 0, 1)


def able(problem: Problem) -> bool | Unsupported:
    return cubes_grad_weight.able(VolumeProblem(problem, ONE_SLICE)) or Unsupported("dtype, channels or strides")


def estimate(problem: Problem) -> float:
    return cubes_grad_weight.estimate(VolumeProblem(problem, ONE_SLICE))


def prepare(problem: Problem) -> Shares:
    return cubes_grad_weight.prepare(VolumeProblem(problem, ONE_SLICE))._replace(shape=problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x)
