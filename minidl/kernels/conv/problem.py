"""`Problem`: a hashable description of a convolution call, without addresses; the key of the plan cache."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from minidl.kernels import activation
from minidl.kernels.activation import Activation
from minidl.kernels.conv.epilogue import POOLS
from minidl.kernels.conv.geometry import Geometry, Phase
from minidl.kernels.epilogue import ADDED, STATISTICS, Epilogue
from minidl.runtime import launch
from minidl.runtime.descriptors import ConcatPair

FORWARD, TRANSPOSED, GRAD_WEIGHT, PHASE = "forward", "transposed", "grad_weight", "phase"
CORRELATIONS = FORWARD, PHASE  # directions with a single pair of phases
DIRECTION_NAMES = {
    FORWARD: "convolution", TRANSPOSED: "transposed convolution", GRAD_WEIGHT: "gradient of the weight",
    PHASE: "backward phase",
}  # fmt: skip
# Kernels count this many rows or more in 64 bits, where divisions cost more.
INT32_LIMIT = 2**31 - 2**21
INVARIANT_IMAGES = 256  # images that batch-invariant plans are prepared for


class Unsupported(str):
    """The reason why a form cannot compute a problem; returned by `able` and false in a boolean context."""

    __slots__ = ()

    def __bool__(self) -> bool:
        return False


NO_BOXES = Unsupported("no tensor descriptors for x and w here, or for this device")


class Phases(NamedTuple):
    """A phase down the columns of an image and one across its rows, from outputs of size `written` to inputs of size
    `read`, both (height, width)."""

    down: Phase
    across: Phase
    read: tuple[int, int]
    written: tuple[int, int]


class Tensors(NamedTuple):
    """The tensors of one run of a plan, channels-last and contiguous except w.

    x  input [N, H, W, groups * C], or a `ConcatPair` of C / 2 channels each
    w  forward: weights [groups * M, R, S, C]; backward: the convolution's weights [groups * C, M, R, S] in any strides;
       GRAD_WEIGHT: dy [N, OH, OW, groups * M]
    y  output [N, OH, OW, groups * M], None for GRAD_WEIGHT
    z  shaped like y: receives the value before the activation, or holds the tensor that is added to it
    bias, scale  [groups * M]
    """

    x: Any
    w: torch.Tensor
    y: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    z: torch.Tensor | None = None

    @property
    def swapped(self) -> int:
        """Return 1 if the halves of x are exchanged in memory, else 0."""
        return self.x.swapped if isinstance(self.x, ConcatPair) else 0


class Operands(NamedTuple):
    """The arguments of a plan: x, w, bias and scale as in `Tensors`, and the tensor to add, shaped like the result."""

    x: Any
    w: torch.Tensor
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    added: torch.Tensor | None = None


class Problem(NamedTuple):
    """One call of `forward`, `transposed`, `grad_input` or `grad_weight`, or one pair of phases.

    direction  FORWARD, TRANSPOSED (also the gradient of the input), GRAD_WEIGHT, or PHASE: the pair in `phases`, into
               which `rewrites.parts` splits TRANSPOSED problems
    geometry   of the convolution, also for backward directions
    N          images
    C, M       channels per group of the tensor that is read and of the result: backward, of dy and dx; of input and
               output for GRAD_WEIGHT
    precision  of float32 products: "ieee", "tf32x3" or "tf32"; "ieee" for 16 bits, except for spectra (fft);
               that of float8 products
    bias, scale, act, pool, preactivation   the epilogue, as in `forward`
    aligned    whether x (and the output's gradient) starts at a multiple of 16 bytes
    w_aligned  whether the weights do
    strides    in values, of the weights [groups * C, M, R, S] for backward directions; () if in phase order
    form       name of the requested form; None for the cheapest
    batch_invariant  whether an image's result must not depend on the number of images (not GRAD_WEIGHT)
    target, processors   the tile table in use and the number of multiprocessors
    phases     the pair of phases of a PHASE; None for other directions
    out        dtype of the result; None for `dtype`
    added      whether a tensor shaped like the result is added before the activation (FORWARD)
    pitches    strides of x, in values, between rows and between pixels whose channels overlap; () otherwise
    statistics whether to return statistics of the tiles if that is faster (FORWARD with at most a bias)
    concat_pair  whether x is two tensors of half the channels, read in place by forms with `reads_concat_pair`
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
    phases: Phases | None = None
    out: torch.dtype | None = None
    added: bool = False
    pitches: tuple[int, ...] = ()
    statistics: bool = False
    concat_pair: bool = False

    @property
    def groups(self) -> int:
        """Return the number of channel groups."""
        return self.geometry.groups

    @property
    def images(self) -> int:
        """Return the number of images that forms and tiles are chosen for."""
        return INVARIANT_IMAGES if self.batch_invariant else self.N

    @property
    def result(self) -> torch.dtype:
        """Return the dtype of the result."""
        return self.out or self.dtype

    @property
    def beside(self) -> bool:
        """Return whether the epilogue reads or writes a second tensor shaped like the result."""
        return self.preactivation or self.added

    @property
    def at(self) -> Phases:
        """Return the phases from outputs to inputs, without `phases` those of the convolution: not for TRANSPOSED."""
        return self.phases or _forward(self.geometry)

    @property
    def read(self) -> tuple[int, int]:
        """Return the height and width of x."""
        if self.direction == TRANSPOSED:
            return self.geometry.h.output, self.geometry.w.output
        return self.at.read

    @property
    def written(self) -> tuple[int, int]:
        """Return the height and width of the output; of the output's gradient for GRAD_WEIGHT."""
        if self.direction == TRANSPOSED:
            return self.geometry.h.size, self.geometry.w.size
        if self.pool:
            return self.at.down.count // 2, self.at.across.count // 2
        return self.at.written

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result: [N, OH, OW, groups * M], or [groups * M, R, S, C] for GRAD_WEIGHT."""
        if self.direction == GRAD_WEIGHT:
            return self.groups * self.M, self.geometry.h.kernel, self.geometry.w.kernel, self.C
        return self.N, *self.written, self.groups * self.M

    @property
    def taps(self) -> int:
        """Return the number of taps of an output, in a backward phase a subset of the filter's; all for GRAD_WEIGHT."""
        return len(self.at.down.taps) * len(self.at.across.taps)

    @property
    def image_bytes(self) -> int:
        """Return the size of one image of x in bytes."""
        return self.read[0] * self.read[1] * self.groups * self.C * self.dtype.itemsize

    @property
    def in_place(self) -> bool:
        """Return whether backward kernels can read the weights in place, as [groups * C, R, S, M].

        Tensor cores read 16-bit operands in either order, float32 along K only; the interpreter transposes for free.
        Descriptor blocks start at a multiple of 16 bytes.
        """
        if self.direction not in (TRANSPOSED, PHASE) or not self.strides:
            return False
        R, S = self.geometry.h.kernel, self.geometry.w.kernel
        sizes = self.groups * self.C, self.M, R, S
        expected = R * S * self.M, 1, S * self.M, self.M
        in_order = all(size == 1 or a == b for size, a, b in zip(sizes, self.strides, expected, strict=True))
        any_order = self.dtype.itemsize == 2 or self.target == "interpreted"
        return in_order and any_order and self.M % 8 == 0 and self.boxes(R * S * self.M, aligned=self.w_aligned)

    def boxes(self, row: int, aligned: bool = True) -> bool:
        """Return whether a matrix with `row` values per row can have a tensor descriptor."""
        return (
            launch.boxes(self.target) and self.dtype != torch.float64 and aligned
            and row > 0 and row * self.dtype.itemsize % 16 == 0 and row < 2**31 - 2**16
        )  # fmt: skip

    @property
    def x_boxes(self) -> bool:
        """Return whether x, as a matrix with one row per image, can have a tensor descriptor."""
        H, W = self.read
        return self.N > 0 and self.boxes(H * W * self.groups * self.C, self.aligned)

    @property
    def w_boxes(self) -> bool:
        """Return whether the weights, [groups * M, JH, JW, C] or `in_place`, can have a tensor descriptor."""
        return self.M > 0 and self.boxes(self.taps * self.C, self.direction != FORWARD or self.w_aligned)

    def tile(self, family: str, *, floor: int = 16, **shape: int) -> launch.Tile:
        """Return the tile of a family for the problem's target, as `launch.tile` does."""
        return launch.tile(family, self.dtype, floor=floor, precision=self.precision, target_=self.target, **shape)

    def tiles(self, family: str, **shape: int) -> tuple[launch.Tile, ...]:
        """Return the tiles among which an estimate chooses, as `launch.tiles_for` does."""
        return launch.tiles_for(family, self.dtype, floor=16, precision=self.precision, target_=self.target, **shape)

    def block(self, tile: launch.Tile) -> int:
        """Return BLOCK_K, at most that of the tile: a power of two that divides C, so blocks end with a pixel."""
        return min(tile["BLOCK_K"], self.C & -self.C)

    @property
    def has_measured_tiles(self) -> bool:
        """Return whether the time of tiles was measured (`tile_throughput`): 16-bit dtypes on sm_90."""
        return self.dtype.itemsize == 2 and self.target == "sm_90"

    @property
    def splits(self) -> bool:
        """Return whether float32 products are three tf32 products, for which forms were measured too."""
        return self.precision == "tf32x3" and self.on_tf32_cores

    @property
    def on_tf32_cores(self) -> bool:
        """Return whether float32 products are tf32 products, once or three times, of a device that was measured."""
        return self.dtype == torch.float32 and self.precision != "ieee" and self.target == "sm_90"

    @property
    def constants(self) -> dict[str, Any]:
        """Return a kernel's constants for the dtype of sums and the precision of products."""
        return {"ACC": launch.acc(self.dtype), "PRECISION": self.precision}

    @property
    def part(self) -> int:
        """Return the channels of one half of a `ConcatPair`; 0 if x is one tensor."""
        return self.C // 2 if self.concat_pair else 0

    @property
    def epilogue(self) -> Epilogue:
        """Return the constants of the epilogue."""
        name, slope = activation.parse(self.act)
        save_z = STATISTICS.value if self.statistics else ADDED.value if self.added else int(self.preactivation)
        return Epilogue(activation.CODES[name], slope, save_z, POOLS[self.pool])

    def __str__(self) -> str:
        h, w = self.geometry.h, self.geometry.w
        (H, W), (OH, OW), groups = self.read, self.written, self.groups
        parts = [
            f"{DIRECTION_NAMES[self.direction]} {h.kernel}x{w.kernel}",
            f"{self.N} images of {groups * self.C}x{H}x{W} to {groups * self.M}x{OH}x{OW}",
            *(f"{name} {getattr(h, name)}x{getattr(w, name)}" for name in ("stride", "padding", "dilation")),
        ]
        parts += [f"{groups} groups"] * (groups > 1) + [f"{self.pool} pool"] * bool(self.pool)
        parts += ["a sum"] * self.added + ["statistics"] * self.statistics
        parts += ["halves"] * self.concat_pair + ["any number of images"] * self.batch_invariant
        parts += [str(self.dtype).removeprefix("torch.")] + [self.precision] * (self.dtype == torch.float32)
        parts += [f"form {self.form}"] * bool(self.form)
        return f"{', '.join(parts)} on {self.target}"


@functools.lru_cache(maxsize=4096)
def _forward(geometry: Geometry) -> Phases:
    down, across = geometry.h, geometry.w
    return Phases(down.forward(), across.forward(), (down.size, across.size), (down.output, across.output))


def backward_phases(geometry: Geometry) -> list[Phases]:
    """Return the pairs of phases from inputs to outputs, one per vertical and horizontal remainder."""
    height, width = geometry.h, geometry.w
    sizes = (height.output, width.output), (height.size, width.size)
    return [Phases(down, across, *sizes) for down in height.backward() for across in width.backward()]
