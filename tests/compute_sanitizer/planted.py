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


@triton.jit
def hands_over(out, BLOCK: tl.constexpr):
    """Each thread writes into shared memory and reads what one of another warp writes there, without a barrier."""
    i = tl.arange(0, BLOCK)
    b_x = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b32 handed[128];
        .reg .u32 base, own, other;
        mov.u32 base, handed;
        mov.u32 own, %tid.x;
        xor.b32 other, own, 32;
        mad.lo.u32 own, own, 4, base;
        mad.lo.u32 other, other, 4, base;
        st.shared.u32 [own], $1;
        ld.shared.u32 $0, [other];
        }""",
        "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + i, b_x)


@triton.jit
def meets_in_half(out, BLOCK: tl.constexpr):
    """Half of a warp comes to a barrier of a whole one."""
    i = tl.arange(0, BLOCK)
    b_x = tl.inline_asm_elementwise(
        """{
        .reg .u32 own;
        .reg .pred comes;
        mov.u32 own, %tid.x;
        setp.lt.u32 comes, own, 16;
        @comes bar.sync 1, 32;
        mov.b32 $0, $1;
        }""",
        "=r,r", [i], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    tl.store(out + i, b_x)


def main() -> None:
    """memcheck: a read far beyond its tensor; initcheck: a read of what nothing has written; racecheck: shared memory
    without a barrier; synccheck: a barrier that half of a warp comes to.

    box: no bug, a read of what a tensor descriptor has written.
    """
    what = sys.argv[1]
    x, out = torch.empty(1024, device="cuda"), torch.zeros(1024, device="cuda")
    if what == "box":
        stores_a_box[(1,)](TensorDescriptor(x.view(32, 32), [32, 32], [32, 1], [32, 32]), BLOCK=32)
    if what in ("racecheck", "synccheck"):
        planted = hands_over if what == "racecheck" else meets_in_half
        planted[(1,)](torch.zeros(128, dtype=torch.int32, device="cuda"), BLOCK=128, num_warps=4)
    else:
        copies[(1,)](x, out, 2**24 if what == "memcheck" else 0, BLOCK=1024)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
