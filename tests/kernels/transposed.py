"""Transposed convolutions of whole numbers, for the forms that do all walks at once."""

import torch
import torch.nn.functional as F

from minidl.kernels import conv
from minidl.kernels.conv.geometry import Axis, Geometry
from minidl.kernels.conv.problem import TRANSPOSED
from minidl.kernels.conv.problem import Problem as Described
from minidl.tensors import default_device


def whole(*shape, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).to(dtype).to(default_device())


class Problem:
    """A transposed convolution of whole numbers with its float64 reference."""

    def __init__(self, form, N, C, M, size, kernel, stride, padding, ends, seed=0, dtype=torch.float32):
        self.form = form
        self.geometry = Geometry(
            *(
                Axis((n - 1) * s - 2 * p + k + e, k, n, s, p, 1)
                for n, k, s, p, e in zip(size, kernel, stride, padding, ends, strict=True)
            )
        )
        self.x, self.w = whole(N, C, *size, seed=seed, dtype=dtype), whole(C, M, *kernel, seed=seed + 1, dtype=dtype)
        self.bias, self.scale = whole(M, seed=seed + 2, dtype=dtype), whole(M, seed=seed + 3, dtype=dtype)
        self.y = F.conv_transpose2d(self.x.double(), self.w.double(), None, stride, padding, ends)

    def described(self, target, precision="ieee"):
        """The problem for a target with 132 multiprocessors."""
        C, M = self.w.shape[:2]
        return Described(
            TRANSPOSED, self.geometry, len(self.x), C, M, self.x.dtype, precision, strides=self.w.stride(),
            form=self.form, target=target, processors=132,
        )  # fmt: skip

    def check(self):
        """All of it exact."""
        plain, none = conv.transposed(self.x, self.w, self.geometry, form=self.form)
        assert none is None
        assert torch.equal(plain, self.y.to(plain.dtype))
        channel = (slice(None), None, None)
        expected = self.y * self.scale.double()[channel] + self.bias.double()[channel]
        y, z = conv.transposed(
            self.x, self.w, self.geometry, self.bias, "relu", scale=self.scale, preactivation=True, form=self.form
        )
        assert torch.equal(z, expected.to(z.dtype))
        assert torch.equal(y, expected.relu().to(y.dtype))


LAYOUTS = ("contiguous", "channels last", "turned")


def laid(w, layout):
    """The same weights in memory of one of LAYOUTS."""
    if layout == "channels last":
        return w.to(memory_format=torch.channels_last)
    return w.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0) if layout == "turned" else w
