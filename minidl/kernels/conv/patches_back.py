"""A way back from patches side by side as one matrix product: kernel and stride are the same, and nothing is padded.

    y [patches, R * S * M] = act(scale x [patches, C] w [C, R * S * M] + bias)

Every output is of one patch, so each patch is a row of the product and the weights are read as they lie. Its R rows of
S pixels are then copied to where they belong in the image. Walk by walk there would be R * S launches of one tap each:
16x16 patches of 768 channels, 205 images of 224x224, took 8.1 ms so on an H100.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from minidl.kernels.conv import costs
from minidl.kernels.conv.problem import MANY, TRANSPOSED, No, Problem, Tensors
from minidl.kernels.gemm import choice, launches
from minidl.runtime import estimates, launch

NAME = "product"
DIRECTIONS = (TRANSPOSED,)
FAMILIES = ("gemm", "gemm_pointer")
# Walks of smaller strides are taken together in one launch.
LEAST = 5


class Prepared(NamedTuple):
    """The product, patches [N, QH, QW] of [R, S * M] values, and the shape of y."""

    product: launches.Product
    patches: tuple[int, ...]
    rows: tuple[int, int]
    shape: tuple[int, ...]


def able(problem: Problem) -> bool | No:
    h, v, groups = problem.geometry
    side_by_side = all(
        axis.kernel == axis.stride and axis.padding == 0 and axis.dilation == 1
        and axis.size == axis.output * axis.kernel for axis in (h, v)
    )  # fmt: skip
    return (
        (problem.pool is None or No("a pool"))
        and (groups == 1 or No("more than one group"))
        and (side_by_side or No("patches that are not side by side"))
        and (max(h.stride, v.stride) >= LEAST or problem.form == NAME or No("a stride below 5"))
        and (0 < _patches(problem) < MANY or No("no patches, or more than 32 bits count"))
        and (min(problem.C, problem.M) > 0 or No("no channels"))
        and (_as_they_lie(problem) or No("weights that do not lie in rows of channels"))
        and (problem.dtype != torch.float32 or problem.target == "interpreted" or problem.precision == "ieee"
             or No("float32 that does not lie along the rows, for tensor cores"))
    )  # fmt: skip


def estimate(problem: Problem) -> float:
    tile, split, family, shape = _choice(problem)
    device = estimates.of(problem.target)
    copied = 2 * shape.M * shape.N * problem.dtype.itemsize / device.copy + device.launch
    if problem.paced:
        time = choice.microseconds(family, shape, tile, split, problem.processors, problem.target)
        return costs.beside_tiles(problem, NAME, time) + copied
    programs = launches.tiles_of(shape.M, shape.N, tile) * (1 + launch.cdiv(shape.K, tile["BLOCK_K"])) / 2
    return costs.microseconds(problem, NAME, costs.dense(problem), programs) + copied


def prepare(problem: Problem) -> Prepared:
    h, v, _ = problem.geometry
    tile, split, family, shape = _choice(problem)
    split = launches.filled(launch.cdiv(shape.K, tile["BLOCK_K"]), split)
    made = launches.prepare(
        _patches(problem), shape.N, shape.K, (False, False), family == "gemm", tile, split, problem.dtype,
        problem.precision, problem.flags("POOL"), problem.target, problem.processors,
    )  # fmt: skip
    return Prepared(made, (problem.N, h.output, v.output), (h.kernel, v.kernel * problem.M), problem.shape)


def run(prepared: Prepared, t: Tensors) -> None:
    R, width = prepared.rows
    pixels = R * width // prepared.shape[-1]
    y = torch.empty(*prepared.patches, R, width, dtype=t.x.dtype, device=t.x.device)
    z = None if t.z is None else torch.empty_like(y)
    bias, scale = (None if each is None else each.repeat(pixels) for each in (t.bias, t.scale))
    prepared.product.run(t.x, t.w, bias, scale, y, z)
    for made, wanted in ((y, t.y), (z, t.z)):
        if wanted is not None:
            N, QH, QW = prepared.patches
            wanted.view(N, QH, R, QW, width).copy_(made.transpose(2, 3))


def _patches(problem: Problem) -> int:
    h, v, _ = problem.geometry
    return problem.N * h.output * v.output


def _as_they_lie(problem: Problem) -> bool:
    """Whether the weights are [C, R, S, M] in memory, one after another."""
    h, v, _ = problem.geometry
    sizes, M = (problem.C, problem.M, h.kernel, v.kernel), problem.M
    wanted = h.kernel * v.kernel * M, 1, v.kernel * M, M
    return len(problem.strides) == 4 and all(
        size == 1 or have == want for size, have, want in zip(sizes, problem.strides, wanted, strict=True)
    )


def _choice(problem: Problem) -> tuple[launch.Tile, int, str, choice.Shape]:
    """The tile, the shares of K, the family of the tile, and the product."""
    h, v, _ = problem.geometry
    M, N, K = _patches(problem._replace(N=problem.images)), h.kernel * v.kernel * problem.M, problem.C
    boxed = problem.boxes(K, problem.aligned) and problem.boxes(N, problem.w_aligned)
    units = (8, 8, 8) if boxed else (launches.unit(K), launches.unit(N), launches.unit(N))
    family, shape = FAMILIES[0 if boxed else 1], choice.Shape(M, N, K, units=units)
    tile, split, _ = choice.choose(
        family, problem.dtype, problem.precision, shape, None, problem.target, problem.processors, tail=False
    )  # fmt: skip
    return tile, split, family, shape
