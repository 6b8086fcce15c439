"""Launches that differ in one thing that Triton compiles a kernel anew for, and some that it does not."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

MOST = 64
OFFSET = tl.constexpr(3)


@triton.jit
def twice(x):
    return x + x


@triton.jit
def thrice(x):
    return x + x + x


@triton.jit(do_not_specialize=["k"])
def probe_kernel(
    p_x, p_b, p_y, n, k, factor, negate,
    SHIFT: tl.constexpr, NAME: tl.constexpr, ACC: tl.constexpr, FUNCTION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = +-(function(x) factor + b + k + SHIFT + OFFSET), rounded to ACC, of the first n (at most 64) elements."""
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < tl.minimum(n, 64)
    b_y = FUNCTION(tl.load(p_x + o, mask=m, other=0).to(tl.float32)) * factor + k + SHIFT + OFFSET
    if p_b is not None:
        b_y += tl.load(p_b + o, mask=m, other=0)
    if NAME == "halved":
        b_y = b_y * 0.5
    if negate:
        b_y = -b_y
    tl.store(p_y + o, b_y.to(ACC).to(tl.float32), mask=m)


@triton.jit
def box_kernel(d_x, p_y, COLUMNS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """y = x, box by box."""
    m = tl.program_id(0) * BLOCK_M
    n = tl.program_id(1) * BLOCK_N
    b_x = d_x.load([m, n])  # [BLOCK_M, BLOCK_N]
    o_m = m + tl.arange(0, BLOCK_M)
    o_n = n + tl.arange(0, BLOCK_N)
    tl.store(p_y + o_m[:, None] * COLUMNS + o_n[None, :], b_x.to(tl.float32))


class Launch(NamedTuple):
    """`same` names the launch whose compiled kernel this one shares; else it has one of its own."""

    name: str
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]
    same: str | None = None


def launches(device: torch.device | str) -> list[Launch]:
    """Every launch with memory of its own, so that results can be compared; y is args[2] or, of boxes, args[1]."""
    found: list[Launch] = []

    def x_of(dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
        return torch.arange(MOST + start, dtype=dtype, device=device)[start:]

    def probe(name: str, same: str | None = None, **changed: Any) -> None:
        y = torch.full((MOST,), torch.nan, device=device)
        args = {"p_x": x_of(), "p_b": x_of(), "p_y": y, "n": 48, "k": 5, "factor": 0.5, "negate": False}
        meta = {
            "SHIFT": 1, "NAME": "", "ACC": tl.float32, "FUNCTION": twice, "BLOCK": 32, "num_warps": 4, "num_stages": 3,
            "enable_fp_fusion": True,
        }  # fmt: skip
        for key, value in changed.items():
            (args if key in args else meta)[key] = value
        found.append(Launch(name, probe_kernel, (2,), tuple(args.values()), meta, same))

    probe("plain")
    probe("again", "plain")
    probe("other multiples of 16", "plain", n=32)
    probe("unaligned pointer", p_x=x_of(start=1))
    probe("pointer aligned again", "plain", p_x=x_of(start=4))
    probe("another unaligned pointer", p_b=x_of(start=3))
    probe("float16", p_x=x_of(torch.float16))
    probe("float64", p_x=x_of(torch.float64))
    probe("int8", p_x=x_of(torch.int8))
    probe("no pointer", p_b=None)
    probe("size 1", n=1)
    probe("size 17", n=17)
    probe("size 23", "size 17", n=23)
    probe("int64", n=2**40 + 1)
    probe("int64, divisible by 16", n=2**40)
    probe("uint64", n=2**63 + 1)
    probe("bool for a size", n=True)
    probe("1, not specialised", "plain", k=1)
    probe("16, not specialised", "plain", k=16)
    probe("int64, not specialised", k=2**33)
    probe("1.0", "plain", factor=1.0)
    probe("an integer for a float", factor=2)
    probe("1 for a bool", negate=1)
    probe("true", "plain", negate=True)
    probe("constant", SHIFT=2)
    probe("constant of another type", SHIFT=0.25)
    probe("text", NAME="halved")
    probe("type", ACC=tl.float16)
    probe("function", FUNCTION=thrice)
    probe("block", BLOCK=64)
    probe("warps", num_warps=8)
    probe("stages", num_stages=2)
    probe("no fusion", enable_fp_fusion=False)

    def box(name: str, m: int, n: int, dtype: torch.dtype = torch.float32, same: str | None = None) -> None:
        x = x_of(dtype).repeat(32, 1)
        y = torch.full((32, MOST), torch.nan, device=device)
        d_x = TensorDescriptor(x, [32, MOST], [MOST, 1], [m, n])
        meta = {"COLUMNS": MOST, "BLOCK_M": m, "BLOCK_N": n, "num_warps": 4, "num_stages": 3, "enable_fp_fusion": True}
        found.append(Launch(name, box_kernel, (32 // m, MOST // n), (d_x, y), meta, same))

    box("box", 16, 32)
    box("box again", 16, 32, same="box")
    box("box of another shape", 32, 16)
    box("box of float16", 16, 32, torch.float16)
    return found
