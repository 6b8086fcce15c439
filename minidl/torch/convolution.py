"""Convolutions in 1, 2 and 3 dimensions, also transposed, as torch operators."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch

from minidl.kernels import activation, bias_act, conv, elementwise
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair, numbers
from minidl.kernels.conv.geometry import Axis, Geometry, Volume
from minidl.ops import conv as of_images
from minidl.ops import conv_geometry
from minidl.ops.conv_sequence import Conv1d, ConvTranspose1d
from minidl.ops.conv_transpose import ConvTranspose2d
from minidl.ops.conv_transpose import check_settings as transposed_settings
from minidl.ops.conv_volume import Conv3d, ConvTranspose3d
from minidl.torch.activations import act, act_gradients, parts
from minidl.torch.registry import LOWER, Gradients, act_of, last, operator, spread

KINDS: dict[tuple[int, bool], Any] = {
    (1, False): Conv1d, (1, True): ConvTranspose1d, (2, False): of_images.Conv2d, (2, True): ConvTranspose2d,
    (3, False): Conv3d, (3, True): ConvTranspose3d,
}  # fmt: skip
# The settings of every convolution operator; padding has two values per axis, before and after.
SETTINGS = "int[] stride, int[] padding, int[] dilation, int[] output_padding, int groups, bool transposed"
Settings = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...], int, bool]


def sizes(x: torch.Tensor, weight: torch.Tensor, settings: Any) -> list[Any]:
    """Return the shape [N, M, ...] of the result; sizes may be symbolic."""
    stride, padding, dilation, output_padding, groups, transposed = settings
    result = [x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0]]
    for axis, (size, kernel) in enumerate(zip(x.shape[2:], weight.shape[2:], strict=True)):
        reach, pad = dilation[axis] * (kernel - 1) + 1, padding[2 * axis] + padding[2 * axis + 1]
        if transposed:
            result.append((size - 1) * stride[axis] - pad + reach + output_padding[axis])
        else:
            result.append((size + pad - reach) // stride[axis] + 1)
    return result


class Convolution:
    """A convolution: its kind, its geometry, and its tensors in the shapes of the kernels.

    Raises ValueError for shapes that do not match, because kernels do not check bounds."""

    def __init__(self, x: torch.Tensor, weight: torch.Tensor, settings: Any, **vectors: torch.Tensor | None) -> None:
        stride, padding, dilation, output_padding, groups, transposed = settings
        axes = weight.dim() - 2
        op = f"conv{'_transpose' if transposed else ''}{axes}d"
        size, kernel = conv_geometry.sizes_of(op, x.shape, weight.shape, groups)
        shapes = {name: None if vector is None else vector.shape for name, vector in vectors.items()}
        conv_geometry.check_vectors(op, weight.shape[1] * groups if transposed else weight.shape[0], **shapes)
        self.kind = KINDS[axes, transposed]
        at = conv_geometry.added_dim(weight.shape) if axes == 1 else 0
        self.at = at
        self.geometry = _geometry(
            transposed, size, kernel, tuple(stride), tuple(padding), tuple(dilation), tuple(output_padding), groups, at
        )  # fmt: skip

    def up(self, x: torch.Tensor) -> torch.Tensor:
        """Return a sequence as an image."""
        return x.unsqueeze(self.at) if self.at else x

    def down(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze(self.at) if self.at else x

    def forward(self, x: torch.Tensor, weight: torch.Tensor, *how: Any, **more: Any) -> tuple[torch.Tensor, Any]:
        y, z = self.kind.compute(self.up(x), self.up(weight), self.geometry, *how, form=None, **more)
        return self.down(y), z

    def backward(
        self, dz: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, want_x: bool, want_weight: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the requested gradients of x and weight from dz [N, M, ...] in channels-last layout."""
        ctx, dz = SimpleNamespace(geometry=self.geometry, form=None), self.up(dz)
        dx = self.down(self.kind.grad_input(ctx, dz, self.up(weight))) if want_x else None
        if not want_weight:
            return dx, None
        dw = self.down(self.kind.grad_weight(ctx, dz, self.up(x)))
        return dx, _with_strides_of(dw.movedim(1, -1).contiguous().movedim(-1, 1), weight)


def _with_strides_of(dw: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return dw with the strides of weight if only axes of size 1 differ, because DDP compares all strides."""
    strides = zip(weight.shape, weight.stride(), dw.stride(), strict=True)
    is_equal = all(size == 1 or one == other for size, one, other in strides)
    return dw.as_strided(weight.shape, weight.stride()) if is_equal else dw


@functools.lru_cache(maxsize=4096)
def _geometry(
    transposed: bool, size: tuple[int, ...], kernel: tuple[int, ...], stride: tuple[int, ...],
    padding: tuple[int, ...], dilation: tuple[int, ...], output_padding: tuple[int, ...], groups: int, at: int,
) -> Geometry | Volume:  # fmt: skip
    axes = []
    op = f"conv{'_transpose' if transposed else ''}{len(size)}d"
    for i, name in enumerate(conv_geometry.AXES[len(size)]):
        pad = padding[2 * i], padding[2 * i + 1]
        if transposed:
            out = (size[i] - 1) * stride[i] - sum(pad) + dilation[i] * (kernel[i] - 1) + output_padding[i] + 1
            if out < 1:
                raise ValueError(f"{op}: the result would have a {name} of {out}; use less padding")
            axes.append(Axis(out, kernel[i], size[i], stride[i], pad[0], dilation[i]))
        else:
            axes.append(Axis.of(op, name, size[i], kernel[i], stride[i], pad, dilation[i]))
    return conv_geometry.arranged(tuple(axes), groups, at)


def _fake(x: Any, weight: Any, bias: Any, scale: Any, added: Any, *more: Any) -> torch.Tensor:
    return last(sizes(x, weight, more[:6]), x)


def _save(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    x, weight, _, _, _, *more = inputs
    *settings, name, slope = more
    if inputs[3] is not None:
        raise ValueError("minidl::convolution: a scale is for inference; call under no_grad(), or use a batch norm")
    ctx.settings, ctx.name, ctx.slope = settings, name, slope
    if name is not None and name not in activation.FROM_OUTPUT:
        raise ValueError(f"minidl::convolution: the gradient of {name} needs its input; apply it after the convolution")
    ctx.save_for_backward(x, weight, None if name is None else output)


def _gradients(ctx: Any, dy: torch.Tensor) -> Any:
    x, weight, y = ctx.saved_tensors
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[1], needs[2], needs[4] and y is not None]
    name = ctx.name
    if y is not None and torch.is_grad_enabled():
        rows = act_gradients(dy.movedim(1, -1), y.movedim(1, -1), None, name, ctx.slope, [True, False])
        dy, y, name, mask[3] = rows[0].movedim(-1, 1), None, None, False
    dx, dw, db, dz = convolution_backward(dy, x, weight, y, *ctx.settings, name, ctx.slope, mask)
    if needs[4] and y is None:
        dz = dy
    return dx, dw, db, None, dz, *[None] * 8


@operator(
    f"convolution(Tensor x, Tensor weight, Tensor? bias, Tensor? scale, Tensor? added, {SETTINGS}, str? act, "
    "float slope) -> Tensor",
    _fake, save=_save, backward=_gradients, pack=1, cast=(LOWER, (0, 1, 2, 4)), replay=True,
)  # fmt: skip
def convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None,
    added: torch.Tensor | None, *more: Any,
) -> torch.Tensor:  # fmt: skip
    *settings, name, slope = more
    how = act_of(name, slope)
    run = Convolution(x, weight, settings, bias=bias, scale=scale)
    if added is None:
        return run.forward(x, weight, bias, how, scale=scale)[0]
    if run.kind is of_images.Conv2d:
        return run.forward(x, weight, bias, how, scale=scale, added=added)[0]
    y, _ = run.forward(x, weight, bias, None, scale=scale)
    if added.shape != y.shape:
        raise ValueError(f"convolution: added has shape {list(added.shape)}, expected {list(y.shape)}")
    return elementwise.add_act(y, added, how)


def _fake_backward(dy: Any, x: Any, weight: Any, *_: Any) -> list[torch.Tensor]:
    return [last(x.shape, x), last(weight.shape, x), dy.new_empty(dy.shape[1]), last(dy.shape, x)]


def _save_backward(ctx: Any, inputs: Any, output: Any) -> None:
    dy, x, weight, y, *ctx.settings, _, _, ctx.mask = inputs
    if y is not None:
        raise NotImplementedError("minidl::convolution_backward: with an activation it has no derivative")
    ctx.save_for_backward(dy, x, weight)


def _second_gradients(ctx: Any, *gradients: torch.Tensor | None) -> Any:
    """The gradients of x and of weight are linear in dy and in the other: convolutions, so every order follows."""
    (dy, x, weight), plain = ctx.saved_tensors, (*ctx.settings, None, 0.0)
    ddx, ddw, ddb, _ = spread(gradients, ctx.mask)
    wants_dy, wants_x, wants_weight = ctx.needs_input_grad[:3]
    ddy = dx = dw = None
    if ddx is not None and wants_weight:
        dw = convolution_backward(dy, ddx, weight, None, *plain, [False, True, False, False])[1]
    if ddw is not None and wants_x:
        dx = convolution_backward(dy, x, ddw, None, *plain, [True, False, False, False])[0]
    if wants_dy and ddw is not None:
        ddy = convolution(x, ddw, ddb, None, None, *plain)
    if wants_dy and ddx is not None:
        ddy = convolution(ddx, weight, ddb if ddy is None else None, None, ddy, *plain)
    if ddy is None and ddb is not None:
        ddy = ddb.view(-1, *[1] * (dy.dim() - 2)).expand_as(dy)
    return ddy, dx, dw, *[None] * 10


@operator(
    f"convolution_backward(Tensor dy, Tensor x, Tensor weight, Tensor? y, {SETTINGS}, str? act, float slope, "
    "bool[] wanted) -> Tensor[]",
    _fake_backward, save=_save_backward, backward=_second_gradients, replay=True,
)  # fmt: skip
def convolution_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor | None, *more: Any
) -> Gradients:
    """Return the requested gradients of x, weight, bias and `added`."""
    *settings, name, slope, (want_x, want_weight, want_bias, _) = more
    dy = dy.movedim(1, -1)
    if dy.stride(-1) != 1:
        dy = dy.contiguous()
    output = dy if y is None else conv.channels_last(y)
    dz, db = bias_act.bias_act_grad(dy, output, None, act_of(name, slope), y is not None, want_bias=want_bias)
    assert dz is not None
    dz = dz.contiguous().movedim(-1, 1)
    return *Convolution(x, weight, settings).backward(dz, x, weight, want_x, want_weight), db, dz


def settings_of(
    op: str, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any = None
) -> Settings:
    """Return the settings of an operator from torch's arguments; output_padding means a transposed convolution."""
    key = op, tuple(weight.shape[2:]), stride, padding, dilation, groups, output_padding
    if torch.compiler.is_compiling():
        return _settings(*key)
    try:
        return _cached_settings(*key)
    except TypeError:  # lists are unhashable
        return _settings(*key)


def _settings(
    op: str, kernel: tuple[int, ...], stride: Any, padding: Any, dilation: Any, groups: int, output_padding: Any
) -> Settings:
    axes = conv_geometry.axes_in(op)
    if len(kernel) != axes:
        raise ValueError(f"{op}: weight has {len(kernel) + 2} dimensions, expected {axes + 2}")
    if output_padding is not None:
        strides, pads, ends, dilations = transposed_settings(op, stride, padding, output_padding, dilation)
        return tuple(strides), tuple(p for p in pads for _ in "ab"), tuple(dilations), tuple(ends), groups, True
    strides, dilations = numbers(op, "stride", stride, 1, axes), numbers(op, "dilation", dilation, 1, axes)
    pads_ = conv_geometry._padding(op, padding, kernel, strides, dilations)
    return tuple(strides), tuple(p for pair in pads_ for p in pair), tuple(dilations), (0,) * axes, groups, False


# typed, because True equals 1 but is not a valid stride.
_cached_settings = functools.lru_cache(maxsize=4096, typed=True)(_settings)


def convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, settings: Settings, how: Activation,
    scale: torch.Tensor | None = None, added: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Run a convolution with its activation, in the same kernel unless the gradient needs the activation's input.

    x is a batch, or one example as `added`."""
    if x.dim() == weight.dim() - 1:
        added = None if added is None else added.unsqueeze(0)
        return convolved(x.unsqueeze(0), weight, bias, settings, how, scale, added).squeeze(0)
    name, slope = parts(how)
    if name not in activation.FROM_OUTPUT and torch.is_grad_enabled():
        return act(convolution(x, weight, bias, scale, added, *settings, None, 0.0), how)
    return convolution(x, weight, bias, scale, added, *settings, name, slope)


def _functional(op: str) -> Any:
    def forward(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Pair = 1,
        padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1, act: Activation = None, *,
        scale: torch.Tensor | None = None, added: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        settings = settings_of(op, weight, stride, padding, dilation, groups)
        return convolved(input, weight, bias, settings, act, scale, added)

    forward.__name__ = forward.__qualname__ = op
    forward.__doc__ = (
        f"torch.nn.functional.{op} with scale, addition and activation in one kernel: act(scale * conv + bias + added)."
        " scale is for inference; act as in minidl.ops.conv2d. The result is channels-last."
    )
    return forward


def _functional_transposed(op: str) -> Any:
    def forward(
        input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, stride: Pair = 1,
        padding: Pair = 0, output_padding: Pair = 0, groups: int = 1, dilation: Pair = 1, act: Activation = None, *,
        scale: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        settings = settings_of(op, weight, stride, padding, dilation, groups, output_padding)
        return convolved(input, weight, bias, settings, act, scale)

    forward.__name__ = forward.__qualname__ = op
    forward.__doc__ = f"torch.nn.functional.{op} with scale and activation in the same kernel, as `conv2d`."
    return forward


conv1d, conv2d, conv3d = map(_functional, ("conv1d", "conv2d", "conv3d"))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    _functional_transposed(f"conv_transpose{n}d") for n in (1, 2, 3)
)
