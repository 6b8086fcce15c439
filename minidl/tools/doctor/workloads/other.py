"""Calls of the other kernels: optimizers, norms, pictures, sums and random numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from minidl import optim
from minidl.kernels import average, bias_act, crops, elementwise, images, mixing, norm, recurrent, scaled_sum, tree
from minidl.kernels import random as random_kernels
from minidl.kernels.norm import alone
from minidl.runtime import launch
from minidl.sparse.rows import RowGrad
from minidl.tensors import Tensor
from minidl.tools.doctor.workloads.convolution import Calls


def optimizers(dtype: torch.dtype) -> Calls:
    """Yield a step of each optimizer, with dense gradients and row gradients."""
    makers: dict[str, Callable[[list[Tensor], bool], optim.Optimizer]] = {
        "sgd": lambda params, lazy: optim.SGD(params, lr=0.1, max_norm=1.0),
        "sgd, nesterov": lambda params, lazy: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        "sgd, dampening": lambda params, lazy: optim.SGD(params, momentum=0.9, dampening=0.1, maximize=True),
        "rmsprop": lambda params, lazy: optim.RMSprop(params, momentum=0.9, centered=True, weight_decay=0.1),
        "adagrad": lambda params, lazy: optim.Adagrad(params, weight_decay=0.1, lazy=lazy),
        "adam": lambda params, lazy: optim.Adam(params, lazy=lazy),
        "adam, amsgrad": lambda params, lazy: optim.Adam(params, amsgrad=True, skip_nonfinite=False),
        "adamw": lambda params, lazy: optim.AdamW(params, max_norm=1.0, lazy=lazy),
        "adamw, scaled loss": lambda params, lazy: optim.AdamW(params, max_norm=1.0, lazy=lazy, loss_scale=65536.0),
        "adamax": lambda params, lazy: optim.Adamax(params, weight_decay=0.1, lazy=lazy),
        "radam": lambda params, lazy: optim.RAdam(params, lazy=lazy),
        "radam, decoupled": lambda params, lazy: optim.RAdam(params, 0.1, decoupled_weight_decay=True, lazy=lazy),
        "nadam": lambda params, lazy: optim.NAdam(params, weight_decay=0.1, lazy=lazy),
        "nadam, decoupled": lambda params, lazy: optim.NAdam(params, 0.1, decoupled_weight_decay=True, lazy=lazy),
        "muon": lambda params, lazy: optim.Muon([param for param in params if param.ndim == 2]),
    }
    for rows, lazy in ((False, False), (True, False), (True, True)):
        variant = f"{', rows' if rows else ''}{', lazy' if lazy else ''}"
        for name, make in makers.items():
            yield name + variant, partial(_step, make, dtype, rows, lazy)
        yield f"adam, two dtypes{variant}", partial(_step, makers["adam"], dtype, rows, lazy, second_dtype=True)


def _step(
    make: Callable[[list[Tensor], bool], optim.Optimizer], dtype: torch.dtype, rows: bool, lazy: bool,
    second_dtype: bool = False,
) -> None:  # fmt: skip
    shapes = ((1000, 128), (128,), (33, 7))
    params = [Tensor(torch.zeros(shape, dtype=dtype), requires_grad=True) for shape in shapes]
    if second_dtype:
        other = torch.float64 if dtype == torch.float32 else torch.float32
        params.append(Tensor(torch.zeros(128, dtype=other), requires_grad=True))
    optimizer = make(params, lazy)
    for param in params:
        param.grad = Tensor(torch.zeros(param.shape, dtype=param.dtype))
    if rows:
        params[0]._grad = RowGrad(torch.arange(50, dtype=torch.int32), torch.zeros(50, 128, dtype=dtype), (1000, 128))
    optimizer.step()


def pictures(dtype: torch.dtype) -> Calls:
    """Yield pictures that are picked, moved, cropped and mixed."""
    index, moves = torch.zeros(128, dtype=torch.int64), torch.zeros(128, 3, dtype=torch.int32)
    for shape in ((8, 8, 1), (28, 28, 1), (64, 48, 3)):
        x = torch.zeros(1000, *shape, dtype=torch.uint8)
        scaling, label = (torch.zeros(shape[-1]), torch.ones(shape[-1]), dtype), " x ".join(map(str, shape))
        yield label, partial(images.pick, x, index, None, *scaling)
        yield f"{label}, moved", partial(images.pick, x, index, moves, *scaling)
        yield f"{label}, moved, edges repeated", partial(images.pick, x, index, moves, *scaling, replicate=True)
        parts = torch.zeros(128, 5, dtype=torch.int32)
        for size in ((shape[0] // 2, shape[1] // 2), (3 * shape[0], 3 * shape[1])):
            yield f"parts of {label} as {size[0]} x {size[1]}", partial(crops.crop, x, index, parts, size, *scaling)
        repeated = partial(crops.crop, x, index, parts, shape[:2], *scaling, replicate=True)
        yield f"parts of {label}, edges repeated", repeated
        batch = torch.zeros(128, shape[2], *shape[:2], dtype=dtype).to(memory_format=torch.channels_last)
        box, share = torch.zeros(128, 4, dtype=torch.int32), torch.zeros(128)
        yield f"{label}, mixed", partial(mixing.mix, batch, index, share, box)
        yield f"targets of {label}, mixed", partial(mixing.mix_targets, index, index, share, 10 * shape[2])


def fused(dtype: torch.dtype) -> Calls:
    """Yield launches of fused operations: a batch norm with a sum, a sum with an activation; dropout of images."""
    x, y = (torch.zeros(4, 64, 8, 8, dtype=dtype).to(memory_format=torch.channels_last) for _ in "xy")
    wide = launch.acc_torch(dtype)
    statistics = norm.Statistics(torch.zeros(64, dtype=wide), torch.ones(64, dtype=wide))
    for act in (None, "relu", "relu6"):
        yield f"batch norm, sum, {act}", partial(norm.normalise, x, statistics, None, None, act, y)
        for more in (None, y):
            back = partial(norm.normalise_grad, x, x, statistics, None, None, act, True, y=y, more=more)
            yield f"gradient of it, {act}{'' if more is None else ', in two parts'}", back
    fused_statistics = torch.zeros(16, 2, 64, dtype=wide)
    yield "fused statistics", partial(norm.batch_statistics, x, 1e-5, None, None, fused_statistics)
    yield "gradient in two parts", partial(norm.normalise_grad, x, x, statistics, None, None, "gelu", True, more=y)
    yield "sum and activation", partial(elementwise.add_act, x, y, "relu")
    yield "scaled sum in place", partial(elementwise.add_scaled, x, y, 0.5, x)
    yield "dropout of images", partial(random_kernels.dropout, x, 0.5, 1)


def planes(dtype: torch.dtype) -> Calls:
    """Yield batch norms of contiguous images, of many pixels and of few, with vector loads and without."""
    wide = launch.acc_torch(dtype)
    for C, size in ((8, 64), (64, 7)):
        x = torch.zeros(4, C, size, size, dtype=dtype)
        statistics = norm.Statistics(torch.zeros(C, dtype=wide), torch.ones(C, dtype=wide))
        label = f"{C} planes of {size}x{size}"
        yield f"{label}, statistics", partial(norm.batch_statistics, x, 1e-5, 0.1, None)
        for act, y in ((None, None), ("relu", x), ("gelu", None)):
            yield f"{label}, {act}", partial(norm.normalise, x, statistics, None, None, act, y)
            back = partial(norm.normalise_grad, x, x, statistics, None, None, act, True, y=y, more=x, so_far=x)
            yield f"{label}, {act}, gradient", back


def padded_rows(dtype: torch.dtype) -> Calls:
    """Yield channels of a wider tensor: a batch norm reads them without a copy, a sum of gradients copies them."""
    wide = launch.acc_torch(dtype)
    for C, width in ((64, 192), (20, 40)):
        few, x = (torch.zeros(4, n, n, width, dtype=dtype)[..., :C].movedim(-1, 1) for n in (8, 64))
        w = torch.ones(C, dtype=wide)
        moments, affine, label = norm.Statistics(torch.zeros(C, dtype=wide), w), (w, w), f"{C} of {width} channels"
        yield f"{label}, few values", partial(alone.normalised, few, *affine, None, 0.1, 1e-5, "relu")
        gradient = partial(alone.normalised_grad, few, few, moments, *affine, "relu", few)
        yield f"{label}, few values, gradient", gradient
        yield f"{label}, statistics", partial(norm.batch_statistics, x, 1e-5, 0.1, None)
        yield f"{label}, values", partial(norm.normalise, x, moments, *affine, "relu")
        yield f"{label}, gradient", partial(norm.normalise_grad, x, x, moments, *affine, "relu", True, so_far=x)
        rows = x.movedim(1, -1)
        yield f"{label}, copied and summed", partial(bias_act.bias_act_grad, rows, rows, None, None)


def scaled_sums(dtype: torch.dtype) -> Calls:
    """Yield sums with a tensor of the same dtype and, as under autocast, of float32."""
    for N, other in itertools.product((96, 77), {dtype, torch.promote_types(dtype, torch.float32)}):
        x, added, scale = torch.zeros(8, 49, N, dtype=dtype), torch.zeros(8, 49, N, dtype=other), torch.ones(N)
        for factor in (None, torch.ones(8)):
            label = f"{N} channels, {other}{'' if factor is None else ', examples dropped'}"
            yield label, partial(scaled_sum.scaled_sum, x, scale.to(other), factor, added)
            gradient = partial(scaled_sum.scaled_sum_grad, added, x, scale.to(other), factor)
            yield f"{label}, gradient", gradient
            yield f"{label}, gradient of the scale", partial(gradient, want_x=False)
            yield f"{label}, gradient of x", partial(gradient, want_scale=False)


def averages(dtype: torch.dtype) -> Calls:
    """Yield moving averages."""
    share = torch.zeros((), dtype=torch.float64)
    y, wide = torch.zeros(777, dtype=dtype), torch.zeros(777, dtype=launch.acc_torch(dtype))
    yield "moving averages", lambda: average.Averages([y], [y])(share)
    yield "moving averages in a wider type", lambda: average.Averages([wide], [y])(share)


def trees(dtype: torch.dtype) -> Calls:
    """Yield sums over shards."""
    rows, weight = torch.zeros(8, 1000, dtype=dtype), torch.ones(8, dtype=torch.float64)
    parts = torch.zeros(2, 2, 512, dtype=launch.acc_torch(dtype))
    yield "sum over eight shards", partial(tree.sum_rows, rows, range(8), 8, weight)
    yield "a node in segments", partial(tree.sum_rows, rows[:2], (0, 1), 2, weight, parts[:, 0])
    yield "nodes of three processes", partial(tree.sum_rows, rows[:5], (0, 2, 3, 4, 6), 8, y=rows[6])


def shard_statistics(dtype: torch.dtype) -> Calls:
    """Yield the statistics of a batch norm over shards."""
    x, sums = torch.zeros(4, 40, 16, 16, dtype=dtype), torch.zeros(2, 40, dtype=launch.acc_torch(dtype))
    rows, shares = torch.zeros(64, 80, dtype=torch.float64), torch.zeros(64, dtype=torch.float64)
    mean, var = torch.zeros(2, 40, dtype=launch.acc_torch(dtype))
    buffers = norm.Buffers(mean, var, torch.zeros((), dtype=torch.int64))
    yield "of a shard", partial(norm.batch_statistics, x, None, 0.1, buffers)
    for count, momentum in ((8, 0.1), (64, None)):
        join = partial(norm.join_shards, rows[:count], shares[:count], 1000, dtype, 1e-5)
        yield f"{count} shards", partial(join, momentum, buffers)
    arguments = x, x, norm.Statistics(mean, var), mean, None, None, True
    yield "gradient with sums", partial(norm.normalise_grad, *arguments, sums=sums, want_affine=False)


def recurrences(dtype: torch.dtype) -> Calls:
    """Yield recurrences over sequences of two lengths, and their gradients."""
    steps = (0, 12), (12, 5), (17, 5)

    def run(mode: str, D: int, H: int, save: bool) -> None:
        width = recurrent.GATES[mode] * H
        shapes = (22, D * width), (D, width, H), (D, width), (D, 12, H)
        x, weight, bias, h = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        c, both = h if mode == "LSTM" else None, (steps, steps[::-1])[:D]
        y, *_, saved = recurrent.recurrence(mode, x, h, c, weight, bias, both, save)
        if saved is not None:
            recurrent.recurrence_grad(mode, y, h, c, weight, saved, both, 12)

    for mode in recurrent.GATES:
        for D, H, save in itertools.product((1, 2), (33, 304), (True, False)):
            yield f"{mode}, {H}, {D} directions{', with gradients' if save else ''}", partial(run, mode, D, H, save)


def random_numbers(dtype: torch.dtype) -> Calls:
    """Yield random numbers and dropout, also recorded and of a part of a tensor."""
    t = torch.zeros(300, 1000, dtype=dtype)
    yield "uniform", partial(random_kernels.uniform_, t, 0.0, 1.0, seed=1)
    yield "normal", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1)
    yield "integers", partial(random_kernels.randint, (300, 1000), 0, 10, seed=1)
    recorded = random_kernels.DeviceStream(torch.zeros(2, dtype=torch.int64), 1)
    yield "normal, recorded", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1, stream=recorded)
    yield "normal, rows", partial(random_kernels.normal_rows, range(300), 100)
    yield "a part's normal", partial(random_kernels.normal_, t, 0.0, 1.0, seed=1, first=2001)
    yield "a part's dropout", partial(random_kernels.dropout, t, 0.5, seed=1, stream=recorded, first=2002)
    yield "dropout, recorded", partial(random_kernels.dropout, t, 0.5, seed=1, stream=recorded)
