"""Convolution of images, with bias and activation in the product's epilogue; and the base of every convolution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function, is_grad_enabled
from minidl.autograd.deferred import Deferred, fuse, may_wait
from minidl.kernels import activation, bias_act, conv
from minidl.kernels.activation import Activation
from minidl.kernels.check import Pair
from minidl.kernels.conv.geometry import Geometry
from minidl.ops import folds
from minidl.ops import pool as pools
from minidl.ops.conv_geometry import check_pool, geometry_of
from minidl.ops.join import Cat
from minidl.ops.shape import one_or_many
from minidl.runtime.descriptors import ConcatPair
from minidl.tensors import Tensor

__all__ = ["conv2d"]


def keeps_z(act: Activation) -> bool:
    """Return whether the gradient of an activation needs its input."""
    return activation.parse(act)[0] not in activation.FROM_OUTPUT


class Convolution(Function):
    """The base of all convolutions. Subclasses define the kernels."""

    compute: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    grad_input: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]
    grad_weight: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    concat = ConcatPair

    @classmethod
    def run(
        cls, op: str, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, geometry: Any,
        act: Activation, form: str | None = None, pool: str | None = None,
    ) -> Tensor:  # fmt: skip
        """Return the result, recorded if a gradient is needed; `pool` is for `conv2d`.

        Raises ValueError for a scale with a gradient.
        """
        if records_gradient(op, x, weight, bias, scale):
            y = cls.apply(x, weight, bias, geometry, act, form)
            return y if pool is None else pools.max_pool2d(y, 2) if pool == "max" else pools.avg_pool2d(y, 2)
        bias_data, scale_data = [None if t is None else t.data for t in (bias, scale)]
        options = {} if pool is None else {"pool": pool}
        return Tensor(cls.infer(x.data, weight.data, geometry, bias_data, act, scale=scale_data, form=form, **options))

    @classmethod
    def infer(cls, *args: Any, **options: Any) -> torch.Tensor:
        """Return the kernel's result alone."""
        return cls.compute(*args, **options)[0]

    @classmethod
    def forward(
        cls, ctx: Any, x: Any, weight: torch.Tensor, bias: torch.Tensor | None, geometry: Geometry, act: Activation,
        form: str | None, statistics: list[torch.Tensor | None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Run the kernel; it appends y's statistics for a batch norm, or None, to the empty list `statistics` if there
        is one."""
        name, _ = activation.parse(act)
        ctx.act, ctx.geometry, ctx.form, ctx.from_output = act, geometry, form, not keeps_z(act)
        keep_z = any(ctx.needs) and not ctx.from_output
        concat_pair = isinstance(x, ConcatPair)
        if not concat_pair:
            x = conv.channels_last(x).movedim(-1, 1)  # a copy serves the gradient of the weight as well
        more = {"preactivation": keep_z} if statistics is None else {"statistics": True}
        y, z = cls.compute(x, weight, geometry, bias, act, form=form, **more)
        if statistics is not None:
            statistics.append(z)
        if any(ctx.needs):
            ctx.save(*(x if concat_pair else (x,)), weight, z if keep_z else y if name is not None else None)
        return y

    @staticmethod
    def operands(ctx: Any) -> Any:
        """Return the saved inputs and weight, and the result or its value before the activation if that is saved."""
        return ctx.saved

    @staticmethod
    def epilogue_grad(ctx: Any, dy: torch.Tensor, saved: torch.Tensor | None, want_bias: bool) -> Any:
        """Return the gradients of the product before bias and activation, channels-last, and of the bias."""
        dy = dy.movedim(1, -1)
        if dy.stride(-1) != 1:
            dy = dy.contiguous()
        saved = dy if saved is None else conv.channels_last(saved)
        # dy may be some channels of a larger gradient, with gaps between rows; then the result is contiguous.
        dz, db = bias_act.bias_act_grad(dy, saved, None, ctx.act, ctx.from_output, want_bias=want_bias)
        assert dz is not None
        return dz.contiguous().movedim(-1, 1), db

    @classmethod
    def backward(cls, ctx: Any, dy: Any) -> Any:
        *inputs, weight, saved = cls.operands(ctx)
        x = cls.concat(*inputs) if len(inputs) > 1 else inputs[0]
        needs = ctx.needs if x is inputs[0] else (any(ctx.needs[:2]), *ctx.needs[2:])
        dz, db = cls.epilogue_grad(ctx, dy, saved, needs[2])
        dx = cls.grad_input(ctx, dz, weight) if needs[0] else None
        dw = cls.grad_weight(ctx, dz, x) if needs[1] else None
        return dx, dw, db, *[None] * (len(needs) - 3)


class Conv2d(Convolution):
    compute = staticmethod(conv.forward)

    @staticmethod
    def grad_input(ctx: Any, dz: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        fft = ctx.form == "fft" and ctx.geometry.h.stride == ctx.geometry.w.stride == 1
        return conv.grad_input(dz, weight, ctx.geometry, form="fft" if fft else None)

    @staticmethod
    def grad_weight(ctx: Any, dz: torch.Tensor, x: Any) -> torch.Tensor:
        return conv.grad_weight(x, dz, ctx.geometry)


class JoinedConv2d(Conv2d):
    """A convolution of two tensors concatenated along their channels, without a copy."""

    @classmethod
    def forward(cls, ctx: Any, first: torch.Tensor, second: torch.Tensor, *how: Any) -> torch.Tensor:
        return super().forward(ctx, ConcatPair(first, second), *how)

    @classmethod
    def backward(cls, ctx: Any, dy: torch.Tensor) -> Any:
        dx, *others = super().backward(ctx, dy)
        return *((None, None) if dx is None else dx.chunk(2, 1)), *others


class DeferredConv(Deferred):
    """A deferred convolution, perhaps transposed. An activation can be fused with it; if no gradient is recorded, also
    a batch norm with running statistics and, unless transposed, a sum.

    x: one tensor, or two that are concatenated along their channels
    """

    def __init__(
        self, function: type[Convolution], shape: tuple[int, ...], x: tuple[Tensor, ...], weight: Tensor,
        bias: Tensor | None, geometry: Geometry, scale: Tensor | None = None, act: Activation = None,
        added: Tensor | None = None,
    ) -> None:  # fmt: skip
        wants = True in [t is not None and t._requires_grad for t in (*x, weight, bias)]
        super().__init__(shape, weight.dtype, weight.device, wants, *x, weight, bias, scale, added)
        self.function, self.x, self.weight, self.bias, self.geometry = function, x, weight, bias, geometry
        self.scale, self.act, self.added = scale, act, added
        self.statistics: list[torch.Tensor | None] | None = None

    def compute(self) -> Tensor:
        x = self.x
        if len(x) == 2 and not self._reads(ConcatPair(*(t.data for t in x))):
            x = (Cat.apply(1, *x),)  # the form chosen for an activation or a sum does not read pairs
        if self.requires_grad:
            function = self.function if len(x) == 1 else JoinedConv2d
            return function.apply(*x, self.weight, self.bias, self.geometry, self.act, None, self.statistics)
        more = {} if self.added is None else {"added": self.added.data}
        values = x[0].data if len(x) == 1 else ConcatPair(*(t.data for t in x))
        bias, scale = [None if t is None else t.data for t in (self.bias, self.scale)]
        return Tensor(self.function.infer(values, self.weight.data, self.geometry, bias, self.act, scale=scale, **more))

    def _reads(self, concat_pair: ConcatPair) -> bool:
        """Return whether the kernel of this convolution reads both tensors without a copy."""
        bias, scale, added = (None if t is None else t.data for t in (self.bias, self.scale, self.added))
        return conv.reads_concat_pair(
            concat_pair, self.weight.data, self.geometry, bias, self.act, scale=scale, added=added,
            preactivation=self.requires_grad and self.statistics is None and keeps_z(self.act),
            statistics=self.statistics is not None,
        )  # fmt: skip

    def keep_statistics(self) -> list[torch.Tensor | None] | None:
        if self.function is Conv2d and self.requires_grad and self.act is None:
            self.statistics = []
        return self.statistics

    def with_act(self, act: Activation) -> Deferred | None:
        if self.act is not None:
            return None
        extended = DeferredConv.__new__(DeferredConv)
        extended.__dict__.update(self.__dict__, act=act)
        return extended

    def with_sum(self, other: Any) -> Deferred | None:
        recorded = self.requires_grad or (is_grad_enabled() and other.requires_grad)
        if recorded or self.act is not None or self.added is not None or self.function is not Conv2d:
            return None
        return DeferredConv(
            self.function, self.shape, self.x, self.weight, self.bias, self.geometry, self.scale, None, other
        )  # fmt: skip

    def with_norm(self, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        wants = [t is not None and t._requires_grad for t in (weight, bias)]
        has_epilogue = self.act is not None or self.scale is not None or self.added is not None
        if self.requires_grad or (True in wants and torch.is_grad_enabled()) or has_epilogue:
            return None
        shift, factor, offset = [None if t is None else t.data for t in (self.bias, weight, bias)]
        scale, bias = map(Tensor, folds.fold(self.dtype, shift, mean.data, var.data, factor, offset, eps))
        return DeferredConv(self.function, self.shape, self.x, self.weight, bias, self.geometry, scale)


@one_or_many(4)
def conv2d(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1, act: Activation = None, *, scale: Tensor | None = None,
    pool: str | None = None, form: str | None = None,
) -> Tensor:  # fmt: skip
    """Return act(scale * conv(input, weight) + bias), the cross-correlation called convolution.

    Shapes: x [N, C, H, W], weight [M, C / groups, R, S], bias and scale [M] -> [N, M, OH, OW], all without N for one
    image, with OH = (H + 2 padding - dilation (R - 1) - 1) // stride + 1, in x's dtype. Memory is channels-last inside:
    x in torch.channels_last is used as it is, other layouts are copied once, and the result is channels-last.

    stride, padding, dilation: a number or a (height, width) pair; padding also "valid" (none) or "same" (keeps the
    size, with an odd pixel at the end; for stride 1). act: as in `linear`. pool: "max" or "avg" over 2x2 windows after
    the activation, in the same kernel if no gradient is recorded. scale, only without a gradient: a factor per output
    channel, as of a folded batch norm; for float16 and bfloat16 it and the bias may be float32.

    With few channels the product has zeros between the weights. NaN or infinity in input or weight may then spread to
    neighbouring outputs in the same rows and, with strides, in rows above or below.

    form: None takes the fastest direct form for the shape. "fft", for stride and dilation 1, convolves by Fourier
    transforms: for float32 with 64 channels or more and kernels of 5x5 or more 2 to 8 times as fast (H200). Its error
    is relative to the largest values of the image, not to each result, and NaN and infinity spread over a tile of
    pixels. Gradients take their fastest form; with "fft" and stride 1 that of
    the input uses Fourier transforms as well.

    Raises ValueError for shapes that do not fit, a kernel larger than the padded image, or a scale with a gradient;
    TypeError for different dtypes and for settings that are not whole numbers. Source: Dumoulin and Visin, arXiv
    1603.07285.
    """
    shapes: list[Any] = [None if t is None else t.shape for t in (input, weight, bias, scale)]
    geometry = geometry_of("conv2d", *shapes, stride, padding, dilation, groups)
    check_pool(pool)
    if pool is not None and min(geometry.h.output, geometry.w.output) < 2:
        raise ValueError(
            f"conv2d: a 2x2 pool needs two rows and columns, got {geometry.h.output} x {geometry.w.output}"
        )
    if scale is None and pool is act is form is None and may_wait(input):
        plain = weight.data, None if bias is None else bias.data

        def reads(*parts: Tensor) -> bool:
            conv.check_arguments("conv2d", parts[0].data, *plain)
            return conv.reads_concat_pair(ConcatPair(*(part.data for part in parts)), plain[0], geometry, plain[1])

        x = fuse(input, "as_concat_pair", reads)
        if x is None:
            x = (input,)
            conv.check_arguments("conv2d", input.data, *plain)
        shape = shapes[0][0], shapes[1][0], geometry.h.output, geometry.w.output
        return Tensor._of_deferred(DeferredConv(Conv2d, shape, x, weight, bias, geometry))
    return Conv2d.run("conv2d", input, weight, bias, scale, geometry, act, form, pool)


def records_gradient(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None) -> bool:
    """Return whether a gradient is recorded. Raises ValueError for a scale, which has no gradient."""
    needs_gradient = is_grad_enabled() and True in [t is not None and t.requires_grad for t in (x, weight, bias, scale)]
    if needs_gradient and scale is not None:
        raise ValueError(f"{op}: a scale is for inference; call under no_grad(), or use a batch norm")
    return needs_gradient
