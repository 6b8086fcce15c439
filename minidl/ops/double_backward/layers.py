"""Second derivatives of linear layers, convolutions, norms and losses; see `linear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minidl.autograd import Function
from minidl.autograd.function import recordable
from minidl.autograd.modes import no_grad
from minidl.kernels import conv as kernels
from minidl.kernels import row_norm as rows_kernels
from minidl.kernels.conv.geometry import Geometry
from minidl.ops import batchnorm, conditional, join, linalg, loss, powers, row_norm
from minidl.ops import unary as u
from minidl.ops.activation import log_softmax, sigmoid
from minidl.ops.binary import act_back
from minidl.ops.conditional import where
from minidl.ops.conv import Conv2d, JoinedConv2d
from minidl.ops.conv_sequence import Conv1d, ConvTranspose1d
from minidl.ops.conv_transpose import ConvTranspose2d
from minidl.ops.double_backward.activations import activated_back
from minidl.ops.double_backward.linear import first, second
from minidl.ops.shape import sum_to, to
from minidl.tensors import Tensor

__all__: list[str] = []  # no public operations


def _refuse_fused_activation(ctx: Any) -> None:
    """Raise RuntimeError: the graph lacks the input of a fused activation."""
    name = ctx.act if isinstance(ctx.act, str) else ctx.act[0]
    raise RuntimeError(
        f"create_graph=True needs a second derivative of {ctx.function.__name__} with fused {name}, which minidl "
        f"does not have; apply {name} by itself, in modules under minidl.fusion(False)"
    )


@second(linalg.Linear)
def _linear(ctx: Any, dy: Tensor) -> Any:
    x, weight, y = ctx.saved
    if not ctx.from_output:
        _refuse_fused_activation(ctx)
    dz = dy if y is None else act_back(dy, y, ctx.act)
    dx = linalg.MatMul.apply(dz, weight) if ctx.needs[0] else None
    dw = linalg.MatMul.apply(dz.T, x) if ctx.needs[1] else None
    return dx, dw, dz.sum(0) if ctx.needs[2] else None, None


def _convolve(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return Conv2d.apply(x, weight, None, geometry, None, None)


def _conv_transpose(x: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    return ConvTranspose2d.apply(x, weight, None, geometry, None, None)


@recordable(grad_input=_conv_transpose, infer=_convolve)
class GradWeight(Function):
    """The gradient of a convolution's weight, linear in x and in the gradient dz of the result."""

    grad_input, infer = staticmethod(kernels.grad_input), Conv2d.infer

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dz: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        ctx.save(x, dz)
        ctx.geometry = geometry
        return kernels.grad_weight(x, dz, geometry)

    @classmethod
    def backward(cls, ctx: Any, ddw: Any) -> Any:
        x, dz = ctx.saved
        dx = cls.grad_input(dz, ddw, ctx.geometry) if ctx.needs[0] else None
        return dx, cls.infer(x, ddw, ctx.geometry) if ctx.needs[1] else None, None


@second(JoinedConv2d)
def _joined_convolution(ctx: Any, dy: Tensor) -> Any:
    """Differentiate the convolution of a concatenated copy."""
    if not ctx.from_output:
        _refuse_fused_activation(ctx)
    first, second_, raw_weight, y = ctx.context.saved
    x = join.Cat.apply(1, ctx.input(0, first), ctx.input(1, second_))
    weight = ctx.input(2, raw_weight)
    dz = dy if y is None else act_back(dy, ctx.output(y), ctx.act)
    wants_x = any(ctx.needs[:2])
    dx = _conv_transpose(dz, weight, ctx.geometry).chunk(2, 1) if wants_x else (None, None)
    dw = GradWeight.apply(x, dz, ctx.geometry) if ctx.needs[2] else None
    return *dx, dw, dz.sum((0, 2, 3)) if ctx.needs[3] else None, *(None for _ in ctx.needs[4:])


@second(Conv2d, ConvTranspose2d, Conv1d, ConvTranspose1d)
def _convolution(ctx: Any, dy: Tensor) -> Any:
    at = getattr(ctx, "at", None)  # the extra dimension of size 1 of sequences

    def from_raw(variable_of: Callable[[torch.Tensor], Any], raw: torch.Tensor) -> Tensor:
        return variable_of(raw) if at is None else variable_of(raw.squeeze(at)).unsqueeze(at)

    if not ctx.from_output:
        _refuse_fused_activation(ctx)
    raw_x, raw_weight, y = ctx.context.saved
    x = from_raw(lambda value: ctx.input(0, value), raw_x)
    weight = from_raw(lambda value: ctx.input(1, value), raw_weight)
    dz = dy if at is None else dy.unsqueeze(at)
    if y is not None:
        dz = act_back(dz, from_raw(ctx.output, y), ctx.act)
    transposed = issubclass(ctx.function, ConvTranspose2d)
    back = _convolve if transposed else _conv_transpose
    dx = back(dz, weight, ctx.geometry) if ctx.needs[0] else None
    dw = GradWeight.apply(*((dz, x) if transposed else (x, dz)), ctx.geometry) if ctx.needs[1] else None
    if at is not None:
        dx, dw = (None if t is None else t.squeeze(at) for t in (dx, dw))
    db = dz.sum((0, 2, 3)) if ctx.needs[2] else None
    return dx, dw, db, *(None for _ in ctx.needs[3:])


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _normed(x: Tensor, dims: tuple[int, ...], rstd: Tensor, rms: bool) -> tuple[Tensor, Tensor]:
    """Return x normalised over `dims`, and the factor, as functions of x; eps follows from the value of rstd."""
    away = x if rms else x - x.mean(dims, True)
    var = powers.square(away).mean(dims, True)
    with no_grad():
        eps = powers.reciprocal(powers.square(rstd)) - var.detach()
    factor = powers.reciprocal(powers.sqrt(var + eps))
    return away * factor, factor


def _norm_back(g: Tensor, normed: Tensor, factor: Tensor, dims: tuple[int, ...], rms: bool) -> Tensor:
    along = g - normed * (g * normed).mean(dims, True)
    return factor * (along if rms else along - g.mean(dims, True))


@second(row_norm.RowNorm)
def _row_norm(ctx: Any, dy: Tensor) -> Any:
    raw_x, raw_weight = ctx.context.saved
    x, dy = _wide(ctx.input(0, raw_x)), _wide(dy)
    rows = ctx.mean.numel(), -1
    normed, factor = _normed(x.reshape(rows), (1,), Tensor(ctx.rstd.view(-1, 1)), ctx.rms)
    # The affine parameters have a value per channel, or per position of the last dimensions.
    shape = [x.shape[1], *(1 for _ in x.shape[2:])] if ctx.seen[0] is rows_kernels.groups else None
    g, normalised = dy, normed.reshape(x.shape)
    if raw_weight is not None:
        weight = _wide(ctx.input(1, raw_weight.view(ctx.shapes[0])))
        g = dy * (weight if shape is None else weight.reshape(shape))
    dx = _norm_back(g.reshape(rows), normed, factor, (1,), ctx.rms).reshape(x.shape)
    sums = [
        sum_to(t, size if shape is None else shape).reshape(size).to(raw_x.dtype) if need else None
        for t, size, need in zip((dy * normalised, dy), ctx.shapes, ctx.needs[1:3], strict=True)
    ]
    return dx.to(raw_x.dtype), *sums, None, None, None


@second(batchnorm.BatchNorm, batchnorm.BatchNormAlone)
def _batch_norm(ctx: Any, dy: Tensor) -> Any:
    saved_x, mean, rstd, weight, bias, y = ctx.saved
    x, dy, shape = _wide(saved_x), _wide(dy), [saved_x.shape[1], *(1 for _ in saved_x.shape[2:])]
    dims = (0, *range(2, x.ndim))
    if ctx.training:
        normed, factor = _normed(x, dims, rstd.reshape(shape), False)
    else:
        factor = rstd.reshape(shape)
        normed = (x - mean.reshape(shape)) * factor
    scaled = normed if weight is None else normed * _wide(weight).reshape(shape)
    if y is not None:
        dz = act_back(dy, _wide(y), ctx.act)
    else:
        dz = activated_back(dy, scaled if bias is None else scaled + _wide(bias).reshape(shape), ctx.act)
    g = dz if weight is None else dz * _wide(weight).reshape(shape)
    dx = _norm_back(g, normed, factor, dims, False) if ctx.training else g * factor
    sums = [
        sum_to(t, shape).reshape(-1).to(like.dtype) if need else None
        for t, like, need in zip((dz * normed, dz), (weight, bias), ctx.needs[1:3], strict=True)
    ]
    added = dz.to(saved_x.dtype) if ctx.needs[3] else None
    return dx.to(saved_x.dtype), *sums, added, *(None for _ in ctx.needs[4:])


@second(loss.CrossEntropy)
def _cross_entropy(ctx: Any, dy: Tensor) -> Any:
    x, target, weight = ctx.saved
    ignored, reduction, smoothing = ctx.options
    axis = min(1, x.ndim - 1)
    classes = x.shape[axis]
    each = dy.unsqueeze(axis) if reduction == "none" else dy
    weights = None if weight is None else weight.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
    if target.dtype.is_floating_point:
        share = target * (1 - smoothing) + smoothing / classes
        count: Any = max(x.numel() // classes, 1)
    else:
        labels = target.data.unsqueeze(axis)
        names = torch.arange(classes, device=labels.device).view([-1 if i == axis else 1 for i in range(x.ndim)])
        off = Tensor(labels == ignored)
        hit = where(off, 0, Tensor(labels == names).to(x.dtype))
        share = where(off, 0, hit * (1 - smoothing) + smoothing / classes)
        count = (hit if weights is None else hit * weights).sum()
    each = each / count if reduction == "mean" else each
    log = log_softmax(x, axis)
    share = share if weights is None else share * weights
    dlog = -(each * share)
    dx = dlog - log.exp() * dlog.sum(axis, keepdim=True)
    dt = None
    if ctx.needs[1]:
        dt = log * each * (smoothing - 1)
        dt = dt if weights is None else dt * weights
    return dx, dt, None, None, None, None


@second(loss.NLLLoss)
def _nll(ctx: Any, dy: Tensor) -> Any:
    factor = Tensor(loss.NLLLoss.backward(ctx.context, torch.ones_like(dy.data))[0])
    each = dy.unsqueeze(min(1, factor.ndim - 1)) if dy.ndim else dy
    return first(ctx, each * factor)


@second(loss.ElementLoss)
def _element_loss(ctx: Any, dy: Tensor) -> Any:
    x, target, weight, positive = ctx.saved
    options = ctx.options
    away, target_gradient = x - target, None
    if options.op == "mse_loss":
        dx = away * 2
    elif options.op == "l1_loss" or (options.op == "smooth_l1_loss" and options.beta == 0):
        dx = u.sign(away)
    elif options.op in ("smooth_l1_loss", "huber_loss"):
        size = u.abs(away)
        end, slope = (1.0, 1 / options.beta) if options.op == "smooth_l1_loss" else (options.beta, 1.0)
        # NaN, which is neither within beta nor beyond it, stays NaN, and has a slope of 0 as in torch.
        within = to(size < options.beta, away.dtype) * slope
        dx = where(size >= options.beta, u.sign(away) * end, away * within)
    elif options.op == "binary_cross_entropy_with_logits" and not ctx.needs[1]:
        dx = sigmoid(x) - target
        if positive is not None:
            dx = sigmoid(x) * (1 + (positive - 1) * target) - positive * target
    elif options.op == "binary_cross_entropy" and not ctx.needs[1]:
        dx = away / conditional.clamp(x * (1 - x), 1e-12, None)
    elif options.op == "kl_div" and not ctx.needs[1]:
        dx = -(u.exp(target) if options.log_target else target)
    else:
        raise RuntimeError(
            f"create_graph=True needs a second derivative of {options.op} by its target, which minidl does not have; "
            "write the loss with log and exp, or pass target.detach()"
        )
    if ctx.needs[1]:
        target_gradient = -dx
    each = dy if options.each else dy / options.count(x.data)
    each = each if weight is None else each * weight
    return each * dx, None if target_gradient is None else each * target_gradient, *(None for _ in ctx.needs[2:])
