"""Cross-entropy of logits, and its gradient from the same launch.

For logits x with shares q of the classes (N of them) in each row:

    loss = sum_c q_c (log s - z_c)      dx_c = (sum q) exp(z_c) / s - q_c      z = x - max x,  s = sum exp(z)
    class t, weights w, smoothing e:    q_c = (1 - e) w_t [c = t] + e w_c / N
    probabilities p:                    q_c = w_c ((1 - e) p_c + e / N)

    x   [R, N], [N] or [R, N, ...], any strides        t   [R], [] or [R, ...] integers, or p of x's shape

The mean divides by the sum of w_t over the rows that are not ignored (by the number of rows for probabilities), as
torch.nn.functional.cross_entropy does. A program takes BLOCK_M rows, reads rows that fit BLOCK_N once and walks longer
ones twice. Ignored rows give 0 whatever they hold. A class out of range is reported on the CPU; on a GPU, where looking
would wait for the device, its row becomes NaN. Sums are made as in `loss`. The divisor of a mean is that of all rows: a
launch finds it before, or for few rows each program for itself, in one order, so that all find the same bits.
"""

from typing import NamedTuple

import torch

from minidl.kernels import memory_layout
from minidl.kernels.cross_entropy.kernels import cross_entropy_kernel, cross_entropy_loop_kernel, scale_kernel
from minidl.kernels.cross_entropy.targets import check_arguments, target_weights
from minidl.kernels.loss import add_up
from minidl.kernels.softmax.rows import ended, in_shape, lanes, levels, row_strides, rows_of, vectors
from minidl.runtime import dependent_launch, launch

# Programs sum the weights of all targets in place of a launch (2.1 us on an H200) if together they read at most this
# many targets (2 MB). On the CPU the launch is needed in any case, to look for invalid targets.
READS = 0 if launch.INTERPRETED else 2**18


class CrossEntropy(NamedTuple):
    """A cross-entropy and, when wanted, the gradient of its logits, which lies as they do or is contiguous.

    `divisor` (one number on the device, or None) remains to be divided out of the gradient: in float16 the gradient of
    a mean over many rows would vanish before a scaled loss could lift it.
    """

    loss: torch.Tensor
    grad: torch.Tensor | None
    divisor: torch.Tensor | None


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    with_grad: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The cross-entropy, and with `with_grad` the pair of it and its gradient in x. See `cross_entropy_parts`."""
    loss, grad, divisor = cross_entropy_parts(
        x, target, weight, ignore_index, reduction, label_smoothing, with_grad=with_grad
    )
    if grad is None:
        return loss
    return loss, grad if divisor is None else cross_entropy_grad_(grad, None, divisor)


def cross_entropy_parts(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    with_grad: bool = False,
) -> CrossEntropy:
    """Cross-entropy of logits x [N], [R, N] or [R, N, ...] with classes or probabilities.

    target        classes: int64, int32 or uint8, x's shape without dimension 1 (without any for [N]), or
                  probabilities: x's shape and dtype
    weight        [N] in x's dtype: a factor for each class
    ignore_index  a class value whose rows count nothing
    reduction     "mean", "sum", or "none" for the loss of each row, in x's dtype
    Raises TypeError for dtypes, ValueError for shapes, options or devices that do not fit, and IndexError on the CPU
    for a target that is no class (on a GPU its row becomes NaN).
    """
    soft = check_arguments(x, target, weight, ignore_index, reduction, label_smoothing)
    if memory_layout.channels_last(x):
        whole = x.movedim(1, -1)
        flat = whole.reshape(-1, x.shape[1])
        found = cross_entropy_parts(
            flat, target.movedim(1, -1).reshape(flat.shape) if soft else target.reshape(-1), weight, ignore_index,
            reduction, label_smoothing, with_grad,
        )  # fmt: skip
        grad = None if found.grad is None else found.grad.view(whole.shape).movedim(-1, 1)
        return CrossEntropy(
            found.loss.view(whole.shape[:-1]) if reduction == "none" else found.loss, grad, found.divisor
        )
    axis = min(1, x.dim() - 1)
    (rows, *shares_), tile, fits = rows_of(
        "cross_entropy", "cross_entropy_loop", axis, *((x, target) if soft else (x,))
    )
    outer, N, inner = rows.shape
    R, acc, device = outer * inner, launch.acc_torch(x.dtype), x.device
    target = (shares_[0] if soft else target).contiguous()
    weight = None if weight is None else weight.contiguous()
    each, mean = reduction == "none", reduction == "mean"
    loss = torch.empty(x.shape[:axis] + x.shape[axis + 1 :] if each else (), dtype=x.dtype, device=device)
    # Its strides are those of probabilities, also where it is not wanted.
    grad = torch.empty(rows.shape, dtype=x.dtype, device=device if with_grad else "meta")
    defer = mean and with_grad and x.dtype == torch.float16
    programs = launch.cdiv(R, tile["BLOCK_M"])
    alone = mean and not soft and fits and 0 < programs * R <= READS
    sums, count = None, 1
    if soft and mean:
        sums = torch.full((1,), R, dtype=acc, device=device)
    elif not soft and (launch.INTERPRETED or (mean and not alone)):
        sums, count = target_weights("cross_entropy", target, weight, R, N, ignore_index, acc, x.dtype)
    if alone:
        sums, count = torch.empty(1, dtype=acc, device=device), 1
    # An only program needs no launch after it to add up.
    only = fits and programs == 1 and not each and (alone or not mean)
    parts = loss if each or only else torch.empty(programs, dtype=acc, device=device)
    meta = {"SMOOTHING": float(label_smoothing), "SOFT": soft, "EACH": each, "DIVIDE": mean and not defer}
    _launch(
        rows, target, weight, sums, parts, grad, (ignore_index, count), with_grad, tile,
        {"ALONE": alone, "ONLY": only} if fits else None, meta,
    )  # fmt: skip
    found = in_shape(grad, x.shape, axis) if with_grad else None
    if each or only:
        return CrossEntropy(loss, found, sums.view(()) if defer else None)
    divisor = torch.empty((), dtype=acc, device=device) if mean else None
    add_up(parts, loss, *((sums, count) if mean else (None, 1)), divisor)
    return CrossEntropy(loss, found, divisor if defer else None)


def _launch(rows, target, weight, sums, parts, grad, numbers, with_grad, tile, fits, meta):
    """The kernel for rows of their length: with the flags `fits`, or in a loop where these are None."""
    outer, N, inner = rows.shape
    R = outer * inner
    programs = launch.cdiv(R, tile["BLOCK_M"])
    pointers = rows, target, weight, sums, parts, grad if with_grad else None
    meta = {**meta, "WEIGHTED": weight is not None, "GRAD": with_grad, "ACC": launch.acc(rows.dtype), **tile.options}
    align = vectors(rows, grad)
    if fits is not None:
        launch.run(
            cross_entropy_kernel, (programs,), *pointers, R, N, inner, *row_strides(rows), *row_strides(grad), *numbers,
            LEVELS=levels(rows), ALIGN=align, LANES=lanes(align, tile, rows, grad), **fits,
            **dependent_launch.options(), **meta,
        )  # fmt: skip
        return
    align, with_ends = ended(align, rows, grad)
    launch.run(
        cross_entropy_loop_kernel, (programs,), *pointers, R, N, rows.stride(0), *numbers, ALIGN=align, ENDS=with_ends,
        **meta,
    )  # fmt: skip


def in_place(
    x: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    divisors: tuple[torch.Tensor | None, int],
    each: torch.dtype | None,
    with_grad: bool,
) -> torch.Tensor:
    """The loss of each row of x [R, N], contiguous, in the dtype `each`, or without one partial sums of them.

    x becomes its gradient `with_grad`, divided by the sum of the parts of `divisors` if there are some. Arguments are
    checked before.
    """
    (rows, *_), tile, fits = rows_of("cross_entropy", "cross_entropy_loop", 1, x)
    count = len(x) if each else launch.cdiv(len(x), tile["BLOCK_M"])
    parts = torch.empty(count, dtype=each or launch.acc_torch(x.dtype), device=x.device)
    sums, shares_ = divisors
    meta = {
        "SMOOTHING": float(smoothing), "SOFT": target.dtype.is_floating_point, "EACH": each is not None,
        "DIVIDE": sums is not None,
    }  # fmt: skip
    flags = {"ALONE": False, "ONLY": False} if fits else None
    _launch(rows, target, weight, sums, parts, rows, (ignore_index, shares_), with_grad, tile, flags, meta)
    return parts


def cross_entropy_grad_(
    grad: torch.Tensor, dy: torch.Tensor | None, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the gradient that `cross_entropy_parts` gave by dy / divisor, in place, and return it.

    dy is one number on the device, or the gradient of each row's loss; None stands for 1.
    """
    each = dy is not None and dy.dim() > 0
    if memory_layout.channels_last(grad):
        flat = grad.movedim(1, -1).view(-1, grad.shape[1])
        cross_entropy_grad_(flat, dy.reshape(-1) if each else dy, divisor)
        return grad
    axis = min(1, grad.dim() - 1)
    n = grad.numel()
    tile = launch.tile("loss", grad.dtype, N=n)
    launch.run(
        scale_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), grad, dy.contiguous() if each else dy, divisor, n,
        grad.shape[axis], grad.shape[axis + 1 :].numel(), EACH=each, ACC=launch.acc(grad.dtype),
        **dependent_launch.options(),
        **tile.options,
    )  # fmt: skip
    return grad
