"""Second derivatives: the way back of an operation once more, of Tensors and by operations on Tensors.

`backward(create_graph=True)` and `autograd.grad` take these in place of `Function.backward`. What is not here has none,
and is refused by its name. Layers, norms and losses are in `second_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from minidl.autograd import Function
from minidl.kernels import activation, elementwise
from minidl.kernels import lookup as lookup_kernels
from minidl.kernels.activation import Activation
from minidl.modes import no_grad
from minidl.ops import activation as acts
from minidl.ops import assignment, join, lookup, pieces, pool, random, reduce, resample, sorting, view
from minidl.ops import elementwise as e
from minidl.tensors import Tensor

__all__: list[str] = []  # used by the engine, no operations

Raw = Callable[[torch.Tensor], torch.Tensor]


def second(*functions: type[Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: the second derivative of these functions."""

    def of(way: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            function.second = staticmethod(way)
        return way

    return of


def summed(dy: Tensor, shape: Sequence[int]) -> Tensor:
    """The sum that undoes a broadcast from `shape`."""
    if tuple(dy.shape) == tuple(shape):
        return dy
    new = dy.ndim - len(shape)
    dims = [i for i in range(dy.ndim) if i < new or (shape[i - new] == 1 and dy.shape[i] != 1)]
    return dy.sum(dims, keepdim=True).reshape(shape)


def first(ctx: Any, dx: Tensor) -> tuple[Any, ...]:
    """The gradient of the first input; others are settings."""
    return dx, *(None for _ in ctx.needs[1:])


class Back(Function):
    """The way back of a linear operation as an operation, whose own way back is the operation: `there`."""

    @staticmethod
    def forward(ctx: Any, dy: torch.Tensor, back: Raw, there: Callable[[Tensor], Tensor]) -> torch.Tensor:
        ctx.there = there
        return back(dy)

    @staticmethod
    def backward(ctx: Any, ddx: torch.Tensor) -> Any:
        return ctx.there(Tensor(ddx)).data, None, None


@second(Back)
def _back(ctx: Any, ddx: Tensor) -> Any:
    return ctx.there(ddx), None, None


# Views and copies go back by views and copies, which Tensors have as torch's do.
for plain in (view.Reshape, view.Permute, view.Clone, view.Contiguous, view.To, join.Cat, pieces.Flip, reduce.Sum):
    second(plain)(plain.backward)


def _linear(function: type[Function], settings: Callable[[Any], tuple[Any, ...]]) -> None:
    @second(function)
    def way(ctx: Any, dy: Tensor) -> Any:
        how = settings(ctx)
        kept = ctx.context
        back = Back.apply(dy, lambda d: function.backward(kept, d)[0], lambda ddx: function.apply(ddx, *how))
        return first(ctx, back)


for function, settings in (
    (view.GetItem, lambda ctx: (ctx.index,)),
    (pieces.Cumsum, lambda ctx: (ctx.dim,)),
    (pool.AvgPool2d, lambda ctx: (ctx.at,)),
    (resample.Resample, lambda ctx: ctx.taps),
):
    _linear(function, settings)


@second(e.Abs, e.Sign, e.Clamp, acts.Hardtanh, random.Dropout)
def _diagonal(ctx: Any, dy: Tensor) -> Any:
    """Of straight pieces: a factor for each element, which does not change with it."""
    factor = ctx.function.backward(ctx.context, torch.ones_like(dy.data))
    return first(ctx, dy * Tensor(factor[0] if isinstance(factor, tuple) else factor))


@second(reduce.Amax, reduce.Amin)
def _most(ctx: Any, dy: Tensor) -> Any:
    factor = ctx.function.backward(ctx.context, torch.ones_like(dy.data))[0]
    return first(ctx, dy.reshape(ctx.kept) * Tensor(factor))


@second(reduce.Extreme, reduce.Topk, sorting.Sort)
def _chosen(ctx: Any, dy: Tensor, *_: None) -> Any:
    (found,), kept = ctx.context.saved, ctx.context
    shape, _, dim = ctx.place
    if not shape:
        return first(ctx, dy)
    at = Tensor(found if found.dim() == len(shape) else found.unsqueeze(dim))

    def there(ddx: Tensor) -> Tensor:
        return pieces.gather(ddx, dim, at).reshape(found.shape)

    return first(ctx, Back.apply(dy, lambda d: reduce.Chosen.backward(kept, d, None)[0], there))


@second(pool.MaxPool2d, pool.MaxPool2dPlaces)
def _max_pool(ctx: Any, dy: Tensor, *_: None) -> Any:
    (places,), kept = ctx.context.saved, ctx.context
    at = pool._positions(places, ctx.at).flatten(2)

    def there(ddx: Tensor) -> Tensor:
        return pieces.gather(ddx.flatten(2), 2, Tensor(at)).reshape(places.shape)

    return first(ctx, Back.apply(dy, lambda d: pool.MaxPool2d.backward(kept, d)[0], there))


@second(lookup.Embedding)
def _embedding(ctx: Any, dy: Tensor) -> Any:
    (index,), rows, padding = ctx.context.saved, ctx.rows, ctx.padding

    def back(d: torch.Tensor) -> torch.Tensor:
        return lookup_kernels.embedding_grad(d, index, rows, padding)

    def there(table: Tensor) -> Tensor:
        found = lookup.Embedding.apply(index, table, padding)
        return found if padding < 0 else e.where(Tensor((index == padding).unsqueeze(-1)), 0, found)

    return None, Back.apply(dy, back, there), None


@second(view.Expand)
def _expand(ctx: Any, dy: Tensor) -> Any:
    return summed(dy, ctx.shape), None


@second(assignment.Assign)
def _assign(ctx: Any, dy: Tensor) -> Any:
    basic, parts = ctx.index
    dv = None
    if ctx.needs[1]:
        dv = dy[basic] if parts is ... else dy[basic][parts]
        dv = summed(dv, ctx.shape[max(len(ctx.shape) - dv.ndim, 0) :]).reshape(ctx.shape)
    return assignment.Assign.apply(dy, 0, ctx.index, False), dv, None, None


@second(pieces.Split)
def _split(ctx: Any, *grads: Tensor | None) -> Any:
    parts = [
        Tensor(torch.zeros(shape, dtype=dtype, device=device)) if dy is None else dy
        for dy, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    return view.cat(parts, ctx.dim), None, None


@second(reduce.Mean)
def _mean(ctx: Any, dy: Tensor) -> Any:
    count = ctx.shape.numel() // torch.Size(ctx.kept).numel() if dy.numel() else 1
    return first(ctx, (dy.reshape(ctx.kept) / count).expand(ctx.shape))


@second(reduce.Norm)
def _norm(ctx: Any, dy: Tensor) -> Any:
    x, y = ctx.saved
    y, dy = y.reshape(ctx.kept), dy.reshape(ctx.kept)
    zero = y == 0
    return first(ctx, x * e.where(zero, 0, dy / e.where(zero, 1, y)))


@second(e.Neg)
def _neg(ctx: Any, dy: Tensor) -> Any:
    return -dy


@second(e.Exp)
def _exp(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    return dy * y


@second(e.Log)
def _log(ctx: Any, dy: Tensor) -> Any:
    (x,) = ctx.saved
    return dy / x


@second(e.Sqrt)
def _sqrt(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    return dy / (y * 2)


@second(e.Square)
def _square(ctx: Any, dy: Tensor) -> Any:
    (x,) = ctx.saved
    return dy * (x * 2)


@second(e.Reciprocal)
def _reciprocal(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    return -(dy * y * y)


def _both(function: type[Function]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator: of functions of two operands. It is given them, and gives the two gradients as they are needed."""

    def of(ways: Callable[..., tuple[Callable[[], Tensor], ...]]) -> Callable[..., Any]:
        @second(function)
        def way(ctx: Any, dy: Tensor) -> Any:
            saved = ctx.saved
            numbers = getattr(ctx, "numbers", [None] * len(saved))
            operands = (x if number is None else number for x, number in zip(saved, numbers, strict=True))
            grads = ways(dy, *operands)
            needed = zip(grads, ctx.shapes[-2:], ctx.needs[-2:], strict=True)
            return *(None for _ in ctx.needs[2:]), *(summed(g(), shape) if need else None for g, shape, need in needed)

        return way

    return of


@_both(e.Add)
def _add(dy: Tensor) -> Any:
    return lambda: dy, lambda: dy


@_both(e.Sub)
def _sub(dy: Tensor) -> Any:
    return lambda: dy, lambda: -dy


@_both(e.Mul)
def _mul(dy: Tensor, a: Any, b: Any) -> Any:
    return lambda: dy * b, lambda: dy * a


@_both(e.Div)
def _div(dy: Tensor, a: Any, b: Any) -> Any:
    return lambda: dy / b, lambda: -(dy * a) / (b * b)


@_both(e.Pow)
def _pow(dy: Tensor, a: Any, b: Any) -> Any:
    def of_a() -> Tensor:
        if not isinstance(b, Tensor):
            return dy * 0 if b == 0 else dy * (b * a ** (b - 1))
        return dy * e.where(b == 0, 0, b * a ** (b - 1))

    def of_b() -> Tensor:
        base = a if isinstance(a, Tensor) else Tensor(torch.full((), a, dtype=dy.dtype, device=dy.device))
        zero = Tensor(torch.logical_and((base == 0).data, (b >= 0).data))
        return dy * e.where(zero, 0, base**b * e.where(zero, 1, base).log())

    return of_a, of_b


@_both(e.Maximum)
def _maximum(dy: Tensor, a: Any, b: Any) -> Any:
    return _shares(elementwise.maximum_grad, dy, a, b)


@_both(e.Minimum)
def _minimum(dy: Tensor, a: Any, b: Any) -> Any:
    return _shares(elementwise.minimum_grad, dy, a, b)


def _shares(gradient: Callable[..., torch.Tensor], dy: Tensor, a: Any, b: Any) -> Any:
    a, b = (x.data if isinstance(x, Tensor) else x for x in (a, b))
    ones = torch.ones_like(dy.data)
    return lambda: dy * Tensor(gradient(ones, a, b)), lambda: dy * Tensor(gradient(ones, b, a))


@_both(e.Where)
def _where(dy: Tensor, condition: Tensor) -> Any:
    return lambda: e.where(condition, dy, 0), lambda: e.where(condition, 0, dy)


@_both(acts.PReLU)
def _prelu(dy: Tensor, a: Tensor, b: Tensor) -> Any:
    return lambda: dy * e.where(a > 0, 1, b), lambda: dy * e.where(a > 0, 0, a)


def act_back(dy: Tensor, y: Tensor, act: Activation) -> Tensor:
    """The gradient before an activation of `FROM_OUTPUT`, from its result."""
    name, _ = activation.parse(act)
    if name is None:
        return dy
    if name == "sigmoid":
        return dy * (y * (1 - y))
    if name == "tanh":
        return dy * (1 - e.square(y))
    return dy * Tensor(elementwise.act_grad(torch.ones_like(y.data), y.data, act, from_output=True))


# Second derivatives of activations that are kept by what goes in.
CURVES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "silu": lambda z, _: _bent(acts.sigmoid(z), z),
    "softplus": lambda z, beta: beta * acts.sigmoid(beta * z) * acts.sigmoid(-beta * z),
    "elu": lambda z, alpha: e.where(z > 0, 0, alpha * e.where(z > 0, 0, z).exp()),
    "gelu": lambda z, _: (2 - z * z) * (z * z * -0.5).exp() * 0.3989422804014327,
}


def _bent(s: Tensor, z: Tensor) -> Tensor:
    return s * (1 - s) * (2 + z * (1 - 2 * s))


class Slope(Function):
    """The derivative of an activation at z."""

    @staticmethod
    def forward(ctx: Any, z: torch.Tensor, act: Activation) -> torch.Tensor:
        ctx.save(z)
        ctx.act = act
        return elementwise.act_grad(torch.ones_like(z), z, act)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        (z,) = ctx.saved
        name, slope = activation.parse(ctx.act)
        with no_grad():
            return elementwise.mul(dy, CURVES[name or ""](Tensor(z), slope).data), None


@second(Slope)
def _slope(ctx: Any, dy: Tensor) -> Any:
    (z,) = ctx.saved
    name, slope = activation.parse(ctx.act)
    return dy * CURVES[name or ""](z, slope), None


def activated_back(dy: Tensor, z: Tensor, act: Activation) -> Tensor:
    """The gradient before an activation, from what went in. Raises RuntimeError for one without a second derivative."""
    name, _ = activation.parse(act)
    if name in activation.FROM_OUTPUT:
        return act_back(dy, z if name is None else acts.activated(z, act), act)
    if name not in CURVES:
        raise RuntimeError(
            f"create_graph=True wants a second derivative of {name}, which minidl does not have; use relu, leaky_relu, "
            f"sigmoid, tanh, relu6 or {', '.join(CURVES)}"
        )
    return dy * Slope.apply(z, act)


@second(acts.BiasAct)
def _bias_act(ctx: Any, dy: Tensor) -> Any:
    kept, b = ctx.saved
    if ctx.from_output:
        dz = act_back(dy, kept, ctx.act)
    else:
        dz = activated_back(dy, kept if b is None else kept + b, ctx.act)
    return dz, summed(dz, dz.shape[-1:]) if ctx.needs[1] else None, None


@second(e.AddAct)
def _add_act(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    dz = act_back(dy, y, ctx.act)
    return dz, dz, None


@second(acts.Softmax)
def _softmax(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    weighed = dy * y
    return first(ctx, weighed - y * weighed.sum(ctx.dim, keepdim=True))


@second(acts.LogSoftmax)
def _log_softmax(ctx: Any, dy: Tensor) -> Any:
    (y,) = ctx.saved
    return first(ctx, dy - y.exp() * dy.sum(ctx.dim, keepdim=True))
