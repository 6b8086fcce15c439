"""Batch norm with a residual addition and an activation, as torch operators.

In training the launches that compute the statistics also update the running statistics. In inference `fold_batch_norm`
turns the batch norm into a scale and a shift, which the convolution applies.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from minidl.kernels import activation
from minidl.kernels import norm as kernels
from minidl.kernels.activation import Activation
from minidl.kernels.norm import alone
from minidl.kernels.norm.fold import running_rstd
from minidl.ops import folds, norm_grad
from minidl.runtime.launch_cache.replay import replayed
from minidl.tensors import Tensor
from minidl.torch.activations import parts
from minidl.torch.recorded import recorded
from minidl.torch.registry import LOWER, Gradients, accumulator, act_of, last, may_want, operator, straight

RUNNING = "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? batches, float? momentum, float eps"


def normalise_batch(
    x: torch.Tensor, weight: Any, bias: Any, added: Any, running: Any, act: Activation, sums: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (y, mean, rstd) in training, and update the running statistics."""
    mean, var, batches, momentum, eps = running
    buffers = None if mean is None else kernels.Buffers(mean, var, batches)
    if momentum is None and buffers is not None and batches is None:
        raise ValueError("batch_norm: momentum is None, which needs num_batches_tracked to count the batches")
    if added is None and momentum is not None and alone.fits(x):
        y, statistics = alone.normalised(x, weight, bias, buffers, momentum, eps, act)
    else:
        statistics = kernels.batch_statistics(x, eps, momentum, buffers, sums)
        y = kernels.normalise(x, statistics, weight, bias, act, added)
    return y, *statistics


def mark_updated(mean: Any, var: Any, batches: Any) -> None:
    """Increment torch's version counters of buffers that kernels wrote."""
    buffers = [buffer for buffer in (mean, var, batches) if buffer is not None and not buffer.is_inference()]
    torch.autograd.graph.increment_version(buffers)


def _fake(x: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    vector = x.new_empty(x.shape[1], dtype=accumulator(x.dtype))
    return _like(x), vector, torch.empty_like(vector)


def _like(x: Any) -> torch.Tensor:
    """Return a result in the memory order that the kernels choose for x."""
    return torch.empty_like(x) if kernels.in_planes(x) else last(x.shape, x)


def _save(ctx: Any, inputs: Any, output: Any, training: bool = True) -> None:
    x, weight, bias, added, *_, ctx.name, ctx.slope = inputs
    y, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.training = training
    _save_tensors(ctx, x, mean, rstd, weight, bias, added, y)


def _save_tensors(ctx: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, added: Any, y: Any) -> None:
    if added is not None and ctx.name not in activation.FROM_OUTPUT:
        raise ValueError(f"batch_norm: the gradient of {ctx.name} after an addition is not supported; apply it later")
    # With an addition, the activation's derivative is computed from the result, not from x.
    ctx.save_for_backward(x, mean, rstd, weight, bias, None if added is None or ctx.name is None else y)


def _input_gradients(ctx: Any, dy: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gradients of x, weight, bias and `added`."""
    x, mean, rstd, weight, bias, y = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[:4])
    mask = [*needs[:3], needs[3] and y is not None]
    settings = ctx.training, ctx.name, ctx.slope
    grads: list[torch.Tensor | None] = norm_gradients(dy, x, mean, rstd, weight, bias, y, *settings, mask)
    if needs[3] and y is None:
        grads[3] = dy
    return grads


def norm_gradients(dy: torch.Tensor, x: torch.Tensor, mean: Any, rstd: Any, *more: Any) -> Any:
    """Return `batch_norm_backward`, which has a gradient with `create_graph`."""
    weight, bias, y, training, name, slope, mask = more
    if not torch.is_grad_enabled() or not straight((dy, x, weight, bias, y)):
        return list(batch_norm_backward(dy, x, mean, rstd, *more))

    def gradients(dy: Tensor, *tensors: Any) -> Any:
        x, *others = tensors
        saved = x, Tensor(mean), Tensor(rstd), *others
        ctx = SimpleNamespace(saved=saved, training=training, act=act_of(name, slope), needs=mask)
        return norm_grad.batch_norm(ctx, dy)

    return list(recorded(gradients, dy, x, weight, bias, y))


def _gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return *_input_gradients(ctx, dy), *[None] * 7


@operator(
    f"batch_norm(Tensor x, Tensor? weight, Tensor? bias, Tensor? added, {RUNNING}, str? act, float slope) -> "
    "(Tensor, Tensor, Tensor)",
    _fake, save=_save, backward=_gradients,
)  # fmt: skip
def batch_norm_training(x: torch.Tensor, weight: Any, bias: Any, added: Any, *more: Any) -> Any:
    outputs = _in_training(x, weight, bias, added, *more)
    mark_updated(*more[:3])
    return outputs


@replayed
def _in_training(x: torch.Tensor, weight: Any, bias: Any, added: Any, *more: Any) -> Any:
    *running, name, slope = more
    kernels.check_arguments(x, running[0], running[1], weight, bias, True, running[4])
    return normalise_batch(x, weight, bias, added, running, act_of(name, slope))


def _save_inference(ctx: Any, inputs: Any, output: Any) -> None:
    _save(ctx, inputs, output, training=False)


def _inference_gradients(ctx: Any, dy: torch.Tensor, *_: Any) -> Any:
    return *_input_gradients(ctx, dy), *[None] * 5


@operator(
    "batch_norm_inference(Tensor x, Tensor? weight, Tensor? bias, Tensor? added, Tensor running_mean, "
    "Tensor running_var, float eps, str? act, float slope) -> (Tensor, Tensor, Tensor)",
    _fake, save=_save_inference, backward=_inference_gradients,
)  # fmt: skip
def batch_norm_inference(
    x: torch.Tensor, weight: Any, bias: Any, added: Any, mean: torch.Tensor, var: torch.Tensor, eps: float, name: Any,
    slope: float,
) -> Any:  # fmt: skip
    kernels.check_arguments(x, mean, var, weight, bias, False, eps)
    statistics = folds.running_statistics(mean, var, eps, x.dtype)
    return kernels.normalise(x, statistics, weight, bias, act_of(name, slope), added), *statistics


def normalise_running(x: torch.Tensor, weight: Any, bias: Any, added: Any, *more: Any) -> torch.Tensor:
    """Return the result of `batch_norm_inference`, with one replay if no gradient is recorded."""
    tensors = x, weight, bias, added, *more[:2]
    if may_want(*tensors) or torch.compiler.is_compiling() or not straight(tensors):
        result: torch.Tensor = batch_norm_inference(x, weight, bias, added, *more)[0]
        return result
    return _with_running(x, weight, bias, added, *more)


@replayed
def _with_running(
    x: torch.Tensor, weight: Any, bias: Any, added: Any, mean: Any, var: Any, eps: float, name: Any, slope: float
) -> torch.Tensor:
    kernels.check_arguments(x, mean, var, weight, bias, False, eps)
    statistics = kernels.Statistics(mean, running_rstd(var, eps, x.dtype))
    return kernels.normalise(x, statistics, weight, bias, act_of(name, slope), added)


def _fake_backward(
    dy: Any, x: Any, mean: Any, rstd: Any, weight: Any, bias: Any, y: Any, training: Any, name: Any, slope: Any,
    mask: Any,
) -> list[torch.Tensor]:  # fmt: skip
    vectors = (x.new_empty(x.shape[1], dtype=(x if vector is None else vector).dtype) for vector in (weight, bias))
    return [_like(x), *vectors, _like(x)]


@operator(
    "batch_norm_backward(Tensor dy, Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, Tensor? y, "
    "bool training, str? act, float slope, bool[] wanted) -> Tensor[]",
    _fake_backward, replay=True,
)  # fmt: skip
def batch_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, weight: Any, bias: Any, y: Any,
    training: bool, name: Any, slope: float, mask: list[bool],
) -> Gradients:  # fmt: skip
    """Return the requested gradients of x, weight, bias and `added`."""
    arguments = x, kernels.Statistics(mean, rstd), weight, bias, act_of(name, slope)
    want_x, want_weight, want_bias, _ = mask
    dx: torch.Tensor | None
    dz = dy
    if training and want_x and y is None and alone.fits(x):
        dx, dweight, dbias = alone.normalised_grad(dy, *arguments)
    else:
        dx, dweight, dbias, dz = kernels.normalise_grad(
            dy, *arguments, training, y=y, want_x=want_x, want_affine=want_weight or want_bias
        )
    return dx, dweight, dbias, dz


def batch_norm(
    input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
    momentum: float | None = 0.1, eps: float = 1e-5, act: Activation = None,
    num_batches_tracked: torch.Tensor | None = None, added: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """torch.nn.functional.batch_norm with addition and activation in the same kernel: act(batch_norm + added).

    Training increments num_batches_tracked; a momentum of None averages over all batches. The result of a contiguous
    input is contiguous, else channels-last.
    """
    name, slope = parts(act)
    if training:
        batches = num_batches_tracked if running_mean is not None else None
        running = running_mean, running_var, batches, momentum, eps
        return batch_norm_training(input, weight, bias, added, *running, name, slope)[0]
    if running_mean is None or running_var is None:
        raise ValueError("batch_norm: evaluation needs running_mean and running_var")
    return batch_norm_inference(input, weight, bias, added, running_mean, running_var, eps, name, slope)[0]


def _fake_fold(x: Any, mean: Any, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    scale = mean.new_empty(mean.shape, dtype=accumulator(x.dtype))
    return scale, torch.empty_like(scale)


@operator(
    "fold_batch_norm(Tensor x, Tensor mean, Tensor var, Tensor? conv_bias, Tensor? weight, Tensor? bias, float eps) -> "
    "(Tensor, Tensor)",
    _fake_fold, cast=(LOWER, (0,)),
)  # fmt: skip
def fold_batch_norm(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, conv_bias: Any, weight: Any, bias: Any, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (scale, shift) that replace the bias and batch norm of a convolution of x, in x's accumulator dtype."""
    return folds.fold(accumulator(x.dtype), conv_bias, mean, var, weight, bias, eps)


def folded(x: torch.Tensor, *tensors: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `fold_batch_norm` without a gradient."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or not straight((x, *tensors)):
        return fold_batch_norm(x, *tensors)
    mean, var, conv_bias, weight, bias, eps = tensors
    return folds.fold(accumulator(x.dtype), conv_bias, mean, var, weight, bias, eps)
