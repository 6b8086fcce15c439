"""The weight gradient in the "box" form: that of one volume whose slices are the images (`cubes_grad_weight`).

The images become the depth of the volume, with a 1 x R x S kernel, so that a box of K may span images. dy is
`Tensors.w`.
"""

import torch

from minidl.kernels.conv import cubes_grad_weight
from minidl.kernels.conv.geometry import Axis
from minidl.kernels.conv.prepared import Shares
from minidl.kernels.conv.problem import GRAD_WEIGHT, Problem, Tensors, Unsupported
from minidl.kernels.conv.voxels import VolumeProblem

NAME = "box"
DIRECTIONS = (GRAD_WEIGHT,)
FAMILIES = (cubes_grad_weight.FAMILY,)


def _volume(problem: Problem) -> VolumeProblem:
    return VolumeProblem(problem._replace(N=1), Axis(problem.N, 1, problem.N, 1, 0, 1))


def able(problem: Problem) -> bool | Unsupported:
    return cubes_grad_weight.able(_volume(problem)) or Unsupported("dtype, channels or strides")


def reads_concat_pair(problem: Problem) -> bool:
    return cubes_grad_weight.reads_concat_pair(_volume(problem))


def estimate(problem: Problem) -> float:
    return cubes_grad_weight.estimate(_volume(problem))


def prepare(problem: Problem) -> Shares:
    return cubes_grad_weight.prepare(_volume(problem))._replace(shape=problem.shape)


def run(prepared: Shares, t: Tensors) -> torch.Tensor:
    return prepared.run(t.w, t.x, t.swapped)
