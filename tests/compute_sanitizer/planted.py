"""Bugs that compute-sanitizer must report, so that its silence elsewhere says something; and what it misses."""

import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def stores_a_box(out, BLOCK: tl.constexpr):
    out.store([0, 0], tl.zeros((BLOCK, BLOCK), dtype=tl.float32))


@triton.jit
def copies(x, out, at, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + at + i) + 1)


def main() -> None:
    """memcheck: a read far beyond its tensor; initcheck: a read of what nothing has written.

    box: no bug, a read of what a tensor descriptor has written.
    """
    x, out = torch.empty(1024, device="cuda"), torch.zeros(1024, device="cuda")
    if sys.argv[1] == "box":
        stores_a_box[(1,)](TensorDescriptor(x.view(32, 32), [32, 32], [32, 1], [32, 32]), BLOCK=32)
    copies[(1,)](x, out, 2**24 if sys.argv[1] == "memcheck" else 0, BLOCK=1024)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
