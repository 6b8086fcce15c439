"""Operations with a recorded gradient, and what the engine's tests make of them."""

import torch

from minidl.autograd import Function, PendingSum
from minidl.kernels import elementwise
from minidl.tensors import Tensor, default_device


class Add(Function):
    @staticmethod
    def forward(ctx, a, b):
        return elementwise.add(a, b)

    @staticmethod
    def backward(ctx, dy):
        return dy, dy


class Mul(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save(a, b)
        return elementwise.mul(a, b)

    @staticmethod
    def backward(ctx, dy):
        a, b = ctx.saved
        return elementwise.mul(dy, b), elementwise.mul(dy, a)


class Square(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return elementwise.mul(x, x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved
        return elementwise.mul(dy, elementwise.add(x, x))


class Pair(Function):
    """(2 x, 3 x), and which of the two were used."""

    seen: tuple[bool, bool] | None = None

    @staticmethod
    def forward(ctx, x):
        ctx.save(x)
        return elementwise.add(x, x), elementwise.add(elementwise.add(x, x), x)

    @staticmethod
    def accepts_pending_sums():
        return True

    @staticmethod
    def backward(ctx, dy, dz):
        dy, dz = (grad.dense() if isinstance(grad, PendingSum) else grad for grad in (dy, dz))
        Pair.seen = dy is not None, dz is not None
        total = None
        for weight, grad in ((2, dy), (3, dz)):
            for _ in range(weight if grad is not None else 0):
                total = grad if total is None else elementwise.add(total, grad)
        return total


class View(Function):
    @staticmethod
    def forward(ctx, x, *shape):
        ctx.shape = x.shape
        return x.view(shape)

    @staticmethod
    def backward(ctx, dy):
        return dy.reshape(ctx.shape), *[None] * (dy.dim())


def leaf(*values, requires_grad=True):
    return Tensor(torch.tensor(values, dtype=torch.float32, device=default_device()), requires_grad)


def grad_of(tensor):
    return None if tensor.grad is None else tensor.grad.tolist()
