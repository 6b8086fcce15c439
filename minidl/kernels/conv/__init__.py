"""2-D convolution: forward, gradient of the input, gradient of the weight, each in the form that suits its shape.

    x  [N, groups * C, H, W]     w  [groups * M, C, R, S]     y  [N, groups * M, OH, OW]
    y[n, m, oh, ow] = act(sum over c, r, s of x[n, c, oh stride - padding + r dilation, ...] w[m, c, r, s] + bias[m])

Shapes are torch's; memory is channels-last inside ([N, H, W, C]): a tensor in `torch.channels_last` is used as it is,
any other is copied once, and results are channels-last. The gradient of the input is the transposed convolution, whose
own gradients are the convolution and, input and output exchanged, the gradient of the weight.

Forms: `batch_tiled` for many images and channels, `paired` for many images and some channels, `boxed` for few images
or large ones, `banded` for few channels, `few_outputs` for few channels of a transposed convolution and `merged` for
some, `pixel_tiled` for every shape; `fft` where it is asked for.
"""

import itertools

import torch

from minidl.kernels import check, launch
from minidl.kernels import pool as pools
from minidl.kernels.activation import Activation
from minidl.kernels.conv import (
    banded,
    batch_back,
    batch_grad_weight,
    batch_tiled,
    boxed,
    few_outputs,
    fft,
    merged,
    paired,
    pixel_tiled,
)
from minidl.kernels.conv.geometry import Geometry, Walk
from minidl.kernels.conv.problem import POOLS, Epilogue, turned

FORMS = ("pixel", "box", "batch", "pair", "banded", "fft", "few", "merge")
FAMILIES = (
    "conv", "conv_flat", "conv_grad_weight", "conv_batch", "conv_batch_narrow", "conv_batch_grad_weight", "conv_back",
    "conv_box", "conv_band", "conv_banded", "conv_banded_grad_weight", "conv_held", "conv_pair_pool", "conv_turn",
    "conv_two_rows", "conv_few", "conv_fft", "conv_fft_product",
)  # fmt: skip

# These read weights on the way back as they are.
UNTURNED = ("batch", "box")
# Bytes of an image from which on boxes of its pixels are faster than runs of images.
LARGE = 2**20
RUN = 64  # images, or parts of them, that fill a row tile
HALF_RUN = RUN // 2  # for the gradient of the weight, where half of a tile is still better than the pixel form


class UnableError(ValueError):
    """A form was asked for that cannot take the shape."""


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    pool: str | None = None,
    preactivation: bool = False,
    form: str | None = None,
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, z): z is the value before the activation where `preactivation` is set, else None.

    scale and bias [groups * M]: y = act(scale * conv(x, w) + bias), as a folded batch norm has it; together they may
    have the dtype in which x is accumulated. pool "max" or "avg" takes the maximum or the mean of 2x2 windows (stride
    2, incomplete windows left out) after the activation: in the same kernel, or in one of its own where the form cannot
    do both, or only the slow one could.
    Raises ValueError for shapes that do not fit, a form that cannot take the shape, or pool with preactivation.
    """
    _check("conv2d", x=x, w=w)
    _check_epilogue("conv2d", x, bias, scale)
    if pool not in POOLS:
        raise ValueError(f"conv2d: unknown pool {pool!r}, expected 'max', 'avg' or None")
    if pool and preactivation:
        raise ValueError("conv2d: preactivation has no meaning for pooled outputs; pool afterwards")
    h, v = geometry.h.forward(), geometry.w.forward()
    x_last, w_last = channels_last(x), channels_last(w)
    if pool and _pooled_apart(x_last, w_last, h, v, geometry.groups, form):
        y, _ = forward(x_last.permute(0, 3, 1, 2), w, geometry, bias, act, scale=scale, form=form, precision=precision)
        windows = pools.windows("conv2d", (h.count, v.count), 2)
        return pools.max_pool2d(y, windows)[0] if pool == "max" else pools.avg_pool2d(y, windows), None
    size = (h.count // 2, v.count // 2) if pool else (h.count, v.count)
    y = torch.empty(x.shape[0], *size, w.shape[0], dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if preactivation else None
    epilogue = Epilogue(_contiguous(bias), _contiguous(scale), act, pool, z)
    _correlate(x_last, w_last, y, h, v, geometry.groups, epilogue, form, precision)
    return y.permute(0, 3, 1, 2), None if z is None else z.permute(0, 3, 1, 2)


def transposed(
    x: torch.Tensor,
    w: torch.Tensor,
    geometry: Geometry,
    bias: torch.Tensor | None = None,
    act: Activation = None,
    *,
    scale: torch.Tensor | None = None,
    preactivation: bool = False,
    form: str | None = None,
    precision: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(y, z) of the transposed convolution of x [N, groups * M, OH, OW]: y [N, groups * C, H, W], z as in `forward`.

    geometry and w [groups * M, C, R, S] are those of the convolution from y to x, whose gradient of the input this is;
    bias and scale [groups * C] are applied as in `forward`.
    """
    _check("conv_transpose2d", x=x, w=w)
    _check_epilogue("conv_transpose2d", x, bias, scale)
    groups = geometry.groups
    shape = (x.shape[0], geometry.h.size, geometry.w.size, groups * w.shape[1])
    y = torch.empty(shape, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if preactivation else None
    epilogue = Epilogue(_contiguous(bias), _contiguous(scale), act, z=z)
    x_last, w_last = channels_last(x), w.permute(0, 2, 3, 1)
    precision = precision or launch.precision(x.dtype)
    if _at_once(x_last, w, y, geometry, epilogue, form, precision):
        return y.permute(0, 3, 1, 2), None if z is None else z.permute(0, 3, 1, 2)
    as_is = w_last.is_contiguous() and batch_tiled.takes_unturned(w_last)
    for h, v in itertools.product(geometry.h.backward(), geometry.w.backward()):
        like = torch.empty(shape[3], len(h.taps), len(v.taps), w.shape[0] // groups, dtype=w.dtype, device="meta")
        chosen = _choose(form, _forms(x_last, like, h, v, groups, False), x_last, like)
        turn = as_is and chosen in UNTURNED
        if chosen == "batch" and batch_back.takes(geometry):
            # It is so for every walk.
            weights = w_last if turn else turned(w, geometry.h.forward(), geometry.w.forward(), groups)
            batch_back.correlate(x_last, weights, y, geometry, epilogue, precision, turn=turn)
            break
        weights = w_last if turn else turned(w, h, v, groups)
        _correlate(x_last, weights, y, h, v, groups, epilogue, chosen, precision, turn=turn)
    return y.permute(0, 3, 1, 2), None if z is None else z.permute(0, 3, 1, 2)


def grad_input(
    dy: torch.Tensor, w: torch.Tensor, geometry: Geometry, *, form: str | None = None, precision: str | None = None
) -> torch.Tensor:
    """The gradient [N, groups * C, H, W] of the input, given that of the output, dy [N, groups * M, OH, OW]."""
    return transposed(dy, w, geometry, form=form, precision=precision)[0]


def grad_weight(
    x: torch.Tensor,
    dy: torch.Tensor,
    geometry: Geometry,
    *,
    form: str | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """The weight gradient [groups * M, C, R, S], given x [N, groups * C, H, W] and dy [N, groups * M, OH, OW]."""
    _check("conv2d", x=x, dy=dy)
    precision = precision or launch.precision(x.dtype)
    x_last, dy_last = channels_last(x), channels_last(dy)
    if 0 in (*x.shape, *dy.shape):
        return torch.zeros(
            dy.shape[1], x.shape[1] // geometry.groups, geometry.h.kernel, geometry.w.kernel, dtype=x.dtype,
            device=x.device,
        )  # fmt: skip
    able = ["pixel"]
    if batch_grad_weight.takes(x_last, dy_last, geometry.groups):
        able.append("batch")
    if banded.takes_grad_weight(x_last, dy_last, geometry):
        able.append("banded")
    rows = batch_grad_weight.rows_of(x_last, dy_last, geometry.h.forward(), geometry.groups)
    chosen = _choose(form, able, x_last, rows=rows, least=HALF_RUN)
    form_ = {"pixel": pixel_tiled, "batch": batch_grad_weight, "banded": banded}[chosen]
    return form_.grad_weight(x_last, dy_last, geometry, precision).permute(0, 3, 1, 2)


def _correlate(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    h: Walk,
    v: Walk,
    groups: int,
    epilogue: Epilogue,
    form: str | None,
    precision: str | None,
    *,
    turn: bool = False,
) -> None:
    """One pair of walks, in the form that suits it. To `turn` is for the weights of the forms that are UNTURNED."""
    precision = precision or launch.precision(x.dtype)
    if x.shape[3] == 0:
        # No channels: one of zeros, so that the sum is empty and the epilogue still runs.
        x = x.new_zeros(1).expand(*x.shape[:3], groups)
        x = x.contiguous()
        w = w.new_zeros(*w.shape[:3], 1)
    chosen = form if turn else _choose(form, _forms(x, w, h, v, groups, epilogue.pool is not None), x, w)
    if chosen == "batch":
        batch_tiled.correlate(x, w, y, h, v, groups, epilogue, precision, turn=turn)
    elif chosen == "box":
        boxed.correlate(x, w, y, h, v, groups, epilogue, precision, turn=turn)
    elif chosen == "pair":
        paired.correlate(x, w, y, h, v, epilogue, precision)
    elif chosen == "banded":
        banded.correlate(x, w, y, h, v, epilogue, precision)
    elif chosen == "fft":
        fft.correlate(x, w, y, h, v, epilogue, precision)
    else:
        pixel_tiled.correlate(x, w, y, h, v, groups, epilogue, precision)


def _at_once(
    x: torch.Tensor,
    w: torch.Tensor,
    y: torch.Tensor,
    geometry: Geometry,
    epilogue: Epilogue,
    form: str | None,
    precision: str,
) -> bool:
    """Do all walks back of x [N, H, W, C] with w [C, M, R, S] at once, where the outputs have few channels.

    Returns whether it was done: where such a form was asked for and can, or suits the shape.
    """
    if form in ("few", None) and few_outputs.takes(x, w, geometry):
        few_outputs.correlate(x, w, y, geometry, epilogue, precision)
        return True
    wanted = form == "merge" or (form is None and not launch.INTERPRETED)
    if wanted and merged.takes(x, w, geometry) and (form or merged.pays(x, w, geometry, precision)):
        merged.correlate(x, w, y, geometry, epilogue, precision)
        return True
    return False


def _forms(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, groups: int, pool: bool) -> list[str]:
    """The forms that can take x [N, H, W, channels] and w [channels, JH, JW, C] on these walks."""
    able = ["pixel"]
    if batch_tiled.takes(x, w, groups) and not pool:
        able.append("batch")
    if boxed.takes(x, w, h, v, groups) and not pool:
        able.append("box")
    if (paired.takes_pool if pool else paired.takes)(x, w, h, v, groups):
        able.append("pair")
    if banded.takes(x, w, h, v, groups, pool):
        able.append("banded")
    if fft.takes(x, w, h, v, groups, pool):
        able.append("fft")
    return able


def _pooled_apart(x: torch.Tensor, w: torch.Tensor, h: Walk, v: Walk, groups: int, form: str | None) -> bool:
    """Whether a pool after the convolution of x [N, H, W, channels] with w is one of its own.

    So it is where the form asked for cannot pool, or where of all only the pixel form could and is not needed: it takes
    several times as long as another form with a pool after it.
    """
    if min(h.count, v.count) < 2:
        return False
    fused, alone = (_forms(x, w, h, v, groups, pool) for pool in (True, False))
    if form is not None:
        return form in alone and form not in fused
    return _choose(None, fused, x, w) == "pixel" != _choose(None, alone, x, w)


def _choose(
    wanted: str | None,
    able: list[str],
    x: torch.Tensor,
    w: torch.Tensor | None = None,
    *,
    rows: int | None = None,
    least: int = RUN,
) -> str:
    """The form to use of those that are able to, for x [N, H, W, channels] and weights w; runs are cut from `rows`
    (None: N), and the batch-tiled form wants `least` of them.

    Raises ValueError for an unknown name, UnableError for a form that is not able.

    Few channels (less than a block of K) gain most by bands. Runs of images fill a row tile from 64 on, and boxes of
    pixels at any number of images; where an image is large a run of them lies in too many pages of memory. The
    interpreter runs programs one after another: it is quickest with few, and with boxes, which are slices of arrays.
    """
    if wanted is not None:
        if wanted not in FORMS:
            raise ValueError(f"conv2d: unknown form {wanted!r}; known: {', '.join(FORMS)}")
        if wanted not in able:
            raise UnableError(f"conv2d: the {wanted} form cannot take this shape; these can: {', '.join(able)}")
        return wanted
    if not launch.INTERPRETED:
        large = x.shape[0] > 0 and x[0].numel() * x.element_size() >= LARGE
        if "box" in able and (x.shape[0] < RUN or large):
            return "box"
        if "pair" in able and w is not None and x.shape[0] >= RUN and paired.pays(x, w):
            return "pair"
        if "batch" in able and (x.shape[0] if rows is None else rows) >= least:
            return "batch"
    elif "box" in able:
        return "box"
    return "banded" if "banded" in able else "pixel"


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """x [N, C, H, W] as a contiguous [N, H, W, C]: a view where it is channels-last, else a copy."""
    return x.permute(0, 2, 3, 1).contiguous()


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def _check_epilogue(op: str, x: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None) -> None:
    wide = scale is not None and (scale.dtype, scale.device) == (launch.acc_torch(x.dtype), x.device)
    _check(op, **({} if wide else {"x": x}), scale=scale, bias=bias)


def _check(op: str, **tensors: torch.Tensor | None) -> None:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    check.floating(op, **given)
    check.same(op, **given)
