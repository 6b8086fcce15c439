"""A convolution as a problem: all that decides how it is computed, but for addresses; hashable, to be looked up."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.conv.epilogue import POOLS
from minidl.kernels.conv.geometry import Geometry, Walk
from minidl.kernels.gemm.tiled import ADDED, STATISTICS
from minidl.runtime import launch
from minidl.runtime.descriptors import ConcatPair

FORWARD, TRANSPOSED, GRAD_WEIGHT, WALK = "forward", "transposed", "grad_weight", "walk"
CORRELATIONS = FORWARD, WALK  # one pair of walks
SAID = {
    FORWARD: "convolution", TRANSPOSED: "transposed convolution", GRAD_WEIGHT: "gradient of the weight",
    WALK: "walk back",
}  # fmt: skip
# From so many rows on they are counted in 64 bits, whose divisions cost more.
MANY = 2**31 - 2**21
# What a plan that is blind to the number of images is made for.
BLIND = 256


class Unsupported(str):
    """A reason, and false: what `able` returns for a problem that a form cannot take."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


NO_BOXES = Unsupported("no tensor descriptors for x and w here, or for this device")


class Walks(NamedTuple):
    """A walk down and one across, from an image of the size `written` to one of the size `read`."""

    h: Walk
    v: Walk
    read: tuple[int, int]
    written: tuple[int, int]


class Tensors(NamedTuple):
    """What a plan runs on, channels-last and contiguous but for w.

    x [N, H, W, groups * C] is read, or two halves of C / 2 channels. w is [groups * M, R, S, C] forward; on the way
    back the convolution's own [groups * C, M, R, S] in any strides; for the gradient of the weight that of the output,
    [N, OH, OW, groups * M].
    y [N, OH, OW, groups * M] is written, None for the gradient of the weight; bias and scale [groups * M]; z like y,
    where the value before the activation is kept, or what is added to it.
    """

    x: torch.Tensor | ConcatPair
    w: torch.Tensor
    y: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    z: torch.Tensor | None = None

    @property
    def turned(self) -> int:
        """1 where halves of x are exchanged, else 0."""
        return self.x.swapped if isinstance(self.x, ConcatPair) else 0


class Problem(NamedTuple):
    """One call of `forward`, `transposed`, `grad_input` or `grad_weight`, or one pair of walks of these.

    direction  FORWARD, TRANSPOSED (the gradient of the input, too), GRAD_WEIGHT, or WALK: a pair of walks back
    geometry   the convolution's, also on the way back
    N          images
    C, M       channels of a group that are read, and that are written; of input and output for GRAD_WEIGHT
    precision  of float32 products: "ieee", "tf32x3" or "tf32"; "ieee" for other dtypes, but for spectra (fft)
    bias, scale, act, pool, preactivation   what follows the sum, as `forward` takes it
    aligned    whether x (and the output's gradient) begin at a multiple of 16 bytes
    w_aligned  whether the weights do
    strides    of the weights [groups * M, C, R, S] on the way back
    form       the form asked for by name; None for the cheapest
    blind      whether what decides an image's floats is to be the same for any number of images (not GRAD_WEIGHT)
    target, processors   the tile table in use and the number of multiprocessors
    walks      those of a WALK; None for the others
    out        the dtype of the results; None for `dtype`
    added      whether a tensor like the result is added before the activation (FORWARD)
    pitches    values of x from a row to the next and from a pixel to the next, whose channels overlap; () of others
    statistics whether those of the tiles are handed on if that pays (FORWARD, and nothing but a bias follows the sum)
    concat_pair  whether x is two tensors of half the channels, read in place by forms with `reads_concat_pair`
    mirrored   whether it is the mirror image of another one (`mirrored`; GRAD_WEIGHT)
    """

    direction: str
    geometry: Geometry
    N: int
    C: int
    M: int
    dtype: torch.dtype
    precision: str = "ieee"
    bias: bool = False
    scale: bool = False
    act: Activation = None
    pool: str | None = None
    preactivation: bool = False
    aligned: bool = True
    w_aligned: bool = True
    strides: tuple[int, ...] = ()
    form: str | None = None
    batch_invariant: bool = False
    target: str = "interpreted"
    processors: int = 1
    walks: Walks | None = None
    out: torch.dtype | None = None
    added: bool = False
    pitches: tuple[int, ...] = ()
    statistics: bool = False
    concat_pair: bool = False
    mirrored: bool = False

    @property
    def groups(self) -> int:
        """Parts of the channels that are convolved each for itself."""
        return self.geometry.groups

    @property
    def images(self) -> int:
        """The number of images that forms and tiles are chosen for."""
        return BLIND if self.batch_invariant else self.N

    @property
    def result(self) -> torch.dtype:
        """The dtype of the results."""
        return self.out or self.dtype

    @property
    def beside(self) -> bool:
        """Whether the epilogue reads or writes a tensor like the result."""
        return self.preactivation or self.added

    @property
    def at(self) -> Walks:
        """The walks from outputs to inputs, forward and for GRAD_WEIGHT those of the convolution."""
        return self.walks or _forward(self.geometry)

    @property
    def read(self) -> tuple[int, int]:
        """Rows and columns of x."""
        if self.direction == TRANSPOSED:
            return self.geometry.h.output, self.geometry.w.output
        return self.at.read

    @property
    def written(self) -> tuple[int, int]:
        """Rows and columns of the outputs; of the output's gradient for GRAD_WEIGHT."""
        if self.direction == TRANSPOSED:
            return self.geometry.h.size, self.geometry.w.size
        if self.pool:
            return self.at.h.count // 2, self.at.v.count // 2
        return self.at.written

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the outputs, [N, OH, OW, groups * M]; of the gradient of the weight, [groups * M, R, S, C]."""
        if self.direction == GRAD_WEIGHT:
            return self.groups * self.M, self.geometry.h.kernel, self.geometry.w.kernel, self.C
        return self.N, *self.written, self.groups * self.M

    @property
    def taps(self) -> int:
        """Of each output, of which a stride leaves a part on the way back; of the filter for GRAD_WEIGHT."""
        return len(self.at.h.taps) * len(self.at.v.taps)

    @property
    def image_bytes(self) -> int:
        """Of one image of x."""
        return self.read[0] * self.read[1] * self.groups * self.C * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Whether a form can read the weights of a way back as they lie, [groups * C, R, S, M].

        Tensor cores read 16-bit operands either way round, float32 along K only; the interpreter turns any for nothing.
        Boxes begin at a multiple of 16 bytes.
        """
        if self.direction not in (TRANSPOSED, WALK) or not self.strides:
            return False
        R, S = self.geometry.h.kernel, self.geometry.w.kernel
        sizes = self.groups * self.C, self.M, R, S
        wanted = R * S * self.M, 1, S * self.M, self.M
        lie = all(size == 1 or have == want for size, have, want in zip(sizes, self.strides, wanted, strict=True))
        either = self.dtype.itemsize == 2 or self.target == "interpreted"
        return lie and either and self.M % 8 == 0 and self.boxes(R * S * self.M, aligned=self.w_aligned)

    def boxes(self, row: int, aligned: bool = True) -> bool:
        """Whether boxes can be read of a matrix with rows of so many values."""
        return (
            launch.boxes(self.target) and self.dtype != torch.float64 and aligned
            and row > 0 and row * self.dtype.itemsize % 16 == 0 and row < 2**31 - 2**16
        )  # fmt: skip

    @property
    def x_boxes(self) -> bool:
        """Whether boxes can be read of x as a matrix with a row for each image."""
        H, W = self.read
        return self.N > 0 and self.boxes(H * W * self.groups * self.C, self.aligned)

    @property
    def w_boxes(self) -> bool:
        """Whether boxes can be read of the weights of a pair of walks, [groups * M, JH, JW, C] or `in_place`."""
        return self.M > 0 and self.boxes(self.taps * self.C, self.direction != FORWARD or self.w_aligned)

    def tile(self, family: str, *, floor: int = 16, **shape: int) -> launch.Tile:
        """The tile of a family on the problem's target, as `launch.tile`."""
        return launch.tile(family, self.dtype, floor=floor, precision=self.precision, target_=self.target, **shape)

    def tiles(self, family: str, **shape: int) -> tuple[launch.Tile, ...]:
        """Those between which an estimate chooses, as `launch.tiles_for`."""
        return launch.tiles_for(family, self.dtype, floor=16, precision=self.precision, target_=self.target, **shape)

    @property
    def paced(self) -> bool:
        """Whether the time of tiles is known (`tile_throughput`): of 16-bit numbers on sm_90."""
        return self.dtype.itemsize == 2 and self.target == "sm_90"

    @property
    def constants(self) -> dict[str, Any]:
        """The types of a kernel's sums and products."""
        return {"ACC": launch.acc(self.dtype), "PRECISION": self.precision}

    @property
    def taps_read(self) -> dict[str, int]:
        """The constants by which a kernel finds the inputs of an output."""
        h, v = self.at.h, self.at.v
        return {
            "C": self.C, "JH": len(h.taps), "JW": len(v.taps),
            "IN_STEP_H": h.in_step, "IN_STEP_W": v.in_step, "IN_TAP_H": h.in_tap, "IN_TAP_W": v.in_tap,
        }  # fmt: skip

    @property
    def part(self) -> int:
        """Channels of one half; 0 where x is one tensor."""
        return self.C // 2 if self.concat_pair else 0

    def flags(self, *without: str) -> dict[str, Any]:
        """The constants of the epilogue that kernels take, but for those a kernel does not have."""
        name, slope = activation.parse(self.act)
        beside = STATISTICS.value if self.statistics else ADDED.value if self.added else self.preactivation
        found = {
            "HAS_BIAS": self.bias, "HAS_SCALE": self.scale, "ACT": activation.CODES[name], "SLOPE": slope,
            "SAVE_Z": beside, "POOL": POOLS[self.pool],
        }  # fmt: skip
        return {name: value for name, value in found.items() if name not in without}

    def __str__(self) -> str:
        h, w = self.geometry.h, self.geometry.w
        (H, W), (OH, OW), groups = self.read, self.written, self.groups
        said = [
            f"{SAID[self.direction]} {h.kernel}x{w.kernel}",
            f"{self.N} images of {groups * self.C}x{H}x{W} to {groups * self.M}x{OH}x{OW}",
            *(f"{name} {getattr(h, name)}x{getattr(w, name)}" for name in ("stride", "padding", "dilation")),
        ]
        said += [f"{groups} groups"] * (groups > 1) + [f"{self.pool} pool"] * bool(self.pool)
        said += ["a sum"] * self.added + ["statistics"] * self.statistics
        said += ["halves"] * self.concat_pair + ["any number of images"] * self.batch_invariant
        said += [str(self.dtype).removeprefix("torch.")] + [self.precision] * (self.dtype == torch.float32)
        said += [f"form {self.form}"] * bool(self.form)
        return f"{', '.join(said)} on {self.target}"


@functools.lru_cache(maxsize=4096)
def _forward(geometry: Geometry) -> Walks:
    h, v = geometry.h, geometry.w
    return Walks(h.forward(), v.forward(), (h.size, v.size), (h.output, v.output))


def walks_back(geometry: Geometry) -> list[Walks]:
    """The pairs of walks from inputs to outputs, one for each remainder down and across."""
    h, v = geometry.h, geometry.w
    sizes = (h.output, v.output), (h.size, v.size)
    return [Walks(down, across, *sizes) for down in h.backward() for across in v.backward()]


def all_inside(walk: Walk, size: int) -> bool:
    """Whether every tap of every output is in [0, size)."""
    last = walk.in_start + (walk.count - 1) * walk.in_step + (len(walk.taps) - 1) * walk.in_tap
    return walk.in_start >= 0 and last < size


def taps_of(problem: Problem) -> tuple[int, int, int]:
    """Where in a row of w [groups * C, R, S, M] the walks' first tap is, and how far the next one down and across.

    For weights that are not read in place, of which kernels do not ask it: of [groups * M, JH, JW, C].
    """
    h, v, M = problem.at.h, problem.at.v, problem.M
    row = (problem.geometry.w.kernel if problem.in_place else len(v.taps)) * M
    return h.taps[0] * row + v.taps[0] * M, h.tap_step * row, v.tap_step * M
