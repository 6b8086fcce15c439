"""Cross-entropy of logits, and its gradient from the same launch.

For logits x of N classes, with target shares q in each row:

    loss = sum_c q_c (log s - z_c)      dx_c = (sum q) exp(z_c) / s - q_c      z = x - max x,  s = sum exp(z)
    class t, weights w, smoothing e:    q_c = (1 - e) w_t [c = t] + e w_c / N
    probabilities p:                    q_c = w_c ((1 - e) p_c + e / N)

    x   [R, N], [N] or [R, N, ...], any strides        t   [R], [] or [R, ...] integers, or p of x's shape

The mean divides by the sum of w_t over the rows that are not ignored (by the number of rows for probabilities), as
torch.nn.functional.cross_entropy does. A program takes BLOCK_M rows, reads rows that fit BLOCK_N once and longer ones
twice. Ignored rows give 0 for any logits. A class out of range is an error on the CPU; on a GPU, where the check would
wait for the device, its row becomes NaN. Sums are computed as in `loss`. The divisor of a mean depends on all rows: an
extra launch computes it, or for few rows each program does, in one order, so that all get the same bits.
Read `targets` first, then `kernels`; `softmax.rows` has the plan of a launch.
"""

from typing import NamedTuple

import torch

from minidl.kernels import memory_layout
from minidl.kernels.cross_entropy.kernels import Form, cross_entropy_kernel, cross_entropy_loop_kernel, scale_kernel
from minidl.kernels.cross_entropy.targets import check_arguments, divisor_parts
from minidl.kernels.loss_total import write_total
from minidl.kernels.softmax.rows import RowsPlan, in_shape, rows_of
from minidl.runtime import dependent_launch, launch
from minidl.runtime.launch_cache.replay import replayed

# Programs sum the weights of all targets themselves, which saves a launch, if together they read at most this many
# targets (2 MB). The CPU always needs the launch, to check the targets.
READS = 0 if launch.ON_CPU else 2**18


class CrossEntropy(NamedTuple):
    """A cross-entropy and the gradient of its logits (or None), in the memory layout of the logits or contiguous.

    The gradient must still be divided by `divisor` (one number on the device), if it is not None: in float16 the
    gradient of a mean over many rows would underflow before loss scaling is applied.
    """

    loss: torch.Tensor
    grad: torch.Tensor | None
    divisor: torch.Tensor | None


def cross_entropy(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, with_grad: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the cross-entropy, and with `with_grad` also its gradient in x. See `cross_entropy_parts`."""
    loss, grad, divisor = cross_entropy_parts(
        x, target, weight, ignore_index, reduction, label_smoothing, with_grad=with_grad
    )
    if grad is None:
        return loss
    return loss, grad if divisor is None else cross_entropy_grad_(grad, None, divisor)


@replayed
def cross_entropy_parts(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, ignore_index: int = -100,
    reduction: str = "mean", label_smoothing: float = 0.0, with_grad: bool = False,
) -> CrossEntropy:  # fmt: skip
    """Return the cross-entropy of logits x [N], [R, N] or [R, N, ...] with classes or probabilities.

    target        classes: int64, int32 or uint8, x's shape without dimension 1 (a scalar for [N]), or
                  probabilities: x's shape and dtype
    weight        [N] in x's dtype: a factor for each class
    ignore_index  the class value of ignored rows
    reduction     "mean", "sum", or "none" for the loss of each row, in x's dtype
    Raises TypeError for dtypes, ValueError for shapes, options or devices that do not fit, and IndexError on the CPU
    for a class out of range (on a GPU its row becomes NaN).
    """
    soft = check_arguments(x, target, weight, ignore_index, reduction, label_smoothing)
    axis = class_axis = min(1, x.dim() - 1)
    if memory_layout.channels_last(x):
        axis, x = x.dim() - 1, x.movedim(1, -1)
        target = target.movedim(1, -1) if soft else target
    (rows, *probabilities), plan = rows_of("cross_entropy", axis, *((x, target) if soft else (x,)))
    R, N, *_ = plan.sizes
    acc, device = launch.acc_torch(x.dtype), x.device
    target = (probabilities[0] if soft else target).contiguous()
    weight = memory_layout.contiguous(weight)
    each, mean = reduction == "none", reduction == "mean"
    loss = torch.empty(x.shape[:axis] + x.shape[axis + 1 :] if each else (), dtype=x.dtype, device=device)
    grad = torch.empty(rows.shape, dtype=x.dtype, device=device) if with_grad else None
    defer = mean and with_grad and x.dtype == torch.float16
    programs = plan.grid[0]
    alone = mean and not soft and plan.fits and 0 < programs * R <= READS
    sums, count = divisor_parts("cross_entropy", target, weight, R, N, ignore_index, x.dtype, mean and not alone)
    if alone:
        sums = torch.empty(1, dtype=acc, device=device)
    # With a single program no second launch has to add partial sums.
    single = plan.fits and programs == 1 and not each and (alone or not mean)
    parts = loss if each or single else torch.empty(programs, dtype=acc, device=device)
    form = Form(float(label_smoothing), soft, each, mean and not defer, alone, alone and single)
    _launch(plan, (rows, target, weight, sums, parts, grad), ignore_index, count, form)
    if grad is not None:
        grad = in_shape(grad, x.shape, axis).movedim(axis, class_axis)
    if each or single:
        return CrossEntropy(loss, grad, sums.view(()) if defer else None)
    divisor = write_total(parts, loss, sums, count)
    return CrossEntropy(loss, grad, divisor if defer else None)


def _launch(
    plan: RowsPlan, tensors: tuple[torch.Tensor | None, ...], ignore_index: int, count: int, form: Form
) -> None:
    kernel = cross_entropy_kernel if plan.fits else cross_entropy_loop_kernel
    plan.run(kernel, *tensors, plan.sizes, ignore_index, count, form=form)


def in_place(
    x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float,
    divisors: tuple[torch.Tensor | None, int], each: torch.dtype | None, with_grad: bool,
) -> torch.Tensor:  # fmt: skip
    """Return the loss of each row of contiguous x [R, N] in the dtype `each`, or partial sums if it is None.

    With `with_grad` the gradient overwrites x, divided by the sum of the parts in `divisors` if there are any. The
    caller checks the arguments.
    """
    (rows,), plan = rows_of("cross_entropy", 1, x)
    count = len(x) if each else plan.grid[0]
    parts = torch.empty(count, dtype=each or launch.acc_torch(x.dtype), device=x.device)
    sums, sums_count = divisors
    form = Form(float(smoothing), target.dtype.is_floating_point, each is not None, sums is not None)
    _launch(plan, (rows, target, weight, sums, parts, rows if with_grad else None), ignore_index, sums_count, form)
    return parts


def cross_entropy_grad_(
    grad: torch.Tensor, dy: torch.Tensor | None, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the gradient from `cross_entropy_parts` by dy / divisor, in place, and return it.

    dy is one number on the device, or the gradient of each row's loss; None means 1.
    """
    each = dy is not None and dy.dim() > 0
    if dy is not None and each:
        dy = dy.contiguous()
    axis, n = min(1, grad.dim() - 1), grad.numel()
    inner = 1 if memory_layout.channels_last(grad) else grad.shape[axis + 1 :].numel()
    tile = launch.tile("loss", grad.dtype, N=n)
    launch.run(
        scale_kernel, (launch.cdiv(n, tile["BLOCK_N"]),), grad, dy, divisor, n,
        grad.shape[axis], inner, EACH=each, ACC=launch.acc(grad.dtype),
        **dependent_launch.options(), **tile.options,
    )  # fmt: skip
    return grad
