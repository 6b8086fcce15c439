"""A kernel that is given a descriptor."""

import triton
import triton.language as tl


@triton.jit
def copies_box(box, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i[:, None] * SIZE + i[None, :], box.load([0, 0]))
