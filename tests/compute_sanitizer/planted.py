"""Bugs that compute-sanitizer must report, so that its silence elsewhere says something."""

import sys

import torch
import triton
import triton.language as tl


@triton.jit
def copies(x, out, at, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(out + i, tl.load(x + at + i) + 1)


def main() -> None:
    """memcheck: a read far beyond its tensor; initcheck: a read of what nothing has written."""
    x, out = torch.empty(1024, device="cuda"), torch.zeros(1024, device="cuda")
    copies[(1,)](x, out, 2**24 if sys.argv[1] == "memcheck" else 0, BLOCK=1024)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
