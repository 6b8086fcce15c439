# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A matrix product in five steps
#
# `C = A B` looks like three loops. On a GPU, speed depends on the number and timing of loads. Each step below
# is a short kernel that runs; each is checked against float64 and timed. On a GPU the times are measured here. Without
# one, `MINIDL_CPU=compiled` compiles the same kernels for the processor; else Triton's interpreter runs them at a small
# size, and the times shown come from the committed results of an H200.

# %%
import json
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch

from minidl.runtime import launch
from minidl.testing import compiled

# minidl comes before Triton: it decides whether kernels are compiled or interpreted.
INTERPRETED, COMPILED_CPU = launch.INTERPRETED, launch.COMPILED_CPU

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cpu" if launch.ON_CPU else "cuda"
HERE = Path("notebooks") if Path("notebooks").is_dir() else Path()
RESULTS = HERE / "../benchmarks/results/gemm-ladder-nvidia-h200.json"

# %% tags=["parameters"]
SIZE = 48 if INTERPRETED else 512 if COMPILED_CPU else 4096

# %%
torch.manual_seed(0)
a = torch.randn(SIZE, SIZE, device=DEVICE).half()
b = torch.randn(SIZE, SIZE, device=DEVICE).half()
exact = a.double() @ b.double()
where = "interpreted on the CPU" if INTERPRETED else "compiled for the CPU" if COMPILED_CPU else "on the GPU"
print(f"{SIZE} x {SIZE} products of float16 values, {where}")


def on_device(kernel):
    """The kernel as it is launched here: compiled for the CPU by way of C, if it is to be."""
    return compiled(kernel) if COMPILED_CPU else kernel


# %% [markdown]
# ## The check
#
# A sum of K products whose longest chain of additions has d steps is off by at most about `d u` times the sum of the
# absolute products, with `u = 2^-24` for float32 additions (tensor cores cut a little more: `2^-22` stands for them),
# plus the rounding of the result to float16. That is a theorem, so a kernel that exceeds it is wrong, however little.


# %%
def check(c: torch.Tensor) -> None:
    u = 2.0**-24 if launch.ON_CPU else 2.0**-22
    bound = (SIZE + 1) * u * (a.double().abs() @ b.double().abs())
    bound = bound + 2.0**-11 * (exact.abs() + bound) + 2.0**-25
    worst = ((c.double() - exact).abs() / bound).max().item()
    assert worst <= 1, f"wrong: {worst:.1f} times the bound"
    print(f"right: the largest error is {worst:.3f} of the bound")


measured = {}


def step(name: str, run) -> None:
    """Check a kernel and time it."""
    c = run()
    check(c)
    if INTERPRETED:
        start = time.perf_counter()
        run()
        print(f"{(time.perf_counter() - start) * 1e3:.0f} ms in the interpreter, at this small size")
        return
    ms = milliseconds(run) if COMPILED_CPU else triton.testing.do_bench(run, return_mode="median")
    measured[name] = {"ms": ms, "tflops": 2 * SIZE**3 / ms / 1e9}
    print(f"{ms:.3f} ms, {measured[name]['tflops']:.3g} TFLOP/s")


def milliseconds(run) -> float:
    """The median of nine runs on the CPU."""
    times = []
    for _ in range(9):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return sorted(times)[4]


# %% [markdown]
# ## Step 1: one output per program
#
# The definition, literally: program (i, j) reads row i of A and column j of B. Every number of A is read N times from
# memory, and the tensor cores are idle.


# %%
@triton.jit
def one_output(p_a, p_b, p_c, M, N, K, BLOCK_K: tl.constexpr):
    i = tl.program_id(0) // N
    j = tl.program_id(0) % N
    total = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        row = tl.load(p_a + i * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        column = tl.load(p_b + o_k * N + j, mask=o_k < K, other=0.0).to(tl.float32)
        total += row * column
    tl.store(p_c + i * N + j, tl.sum(total, axis=0).to(tl.float16))


def run_one_output():
    c = torch.empty_like(a)
    on_device(one_output)[(SIZE * SIZE,)](a, b, c, SIZE, SIZE, SIZE, BLOCK_K=64, enable_fp_fusion=True)
    return c


step("one output per program", run_one_output)

# %% [markdown]
# ## Step 2: tiles
#
# A program computes a 128 x 128 tile. For every 64 steps of K it loads two blocks and multiplies them with `tl.dot`,
# which runs on the tensor cores. Each number loaded is now used 128 times.

# %%
BLOCK = 16 if INTERPRETED else 64 if COMPILED_CPU else 128


@triton.jit
def tile_product(p_a, p_b, p_c, i_m, i_n, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    o_m = i_m * BLOCK + tl.arange(0, BLOCK)
    o_n = i_n * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        b_a = tl.load(p_a + o_m[:, None] * K + o_k[None, :], mask=(o_m < M)[:, None] & m_k[None, :], other=0.0)
        b_b = tl.load(p_b + o_k[:, None] * N + o_n[None, :], mask=m_k[:, None] & (o_n < N)[None, :], other=0.0)
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
    tl.store(p_c + o_m[:, None] * N + o_n[None, :], acc.to(tl.float16), mask=(o_m < M)[:, None] & (o_n < N)[None, :])


@triton.jit
def tiled(p_a, p_b, p_c, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    tiles_n = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    tile_product(p_a, p_b, p_c, pid // tiles_n, pid % tiles_n, M, N, K, BLOCK, BLOCK_K)


def run_tiled(kernel=tiled, num_stages=1):
    c = torch.empty_like(a)
    grid = (triton.cdiv(SIZE, BLOCK) ** 2,)
    on_device(kernel)[grid](
        a, b, c, SIZE, SIZE, SIZE, BLOCK=BLOCK, BLOCK_K=min(BLOCK, 64), num_stages=num_stages, num_warps=8,
        enable_fp_fusion=True,
    )  # fmt: skip
    return c


step("tiled", run_tiled)

# %% [markdown]
# ## Step 3: an order that shares
#
# Programs that run at the same time should want the same blocks, so that the L2 cache serves most loads. Walking the
# tiles in groups of eight tile rows does that; nothing else changes.


# %%
@triton.jit
def grouped(p_a, p_b, p_c, M, N, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    GROUP: tl.constexpr = 8
    tiles_m = tl.cdiv(M, BLOCK)
    tiles_n = tl.cdiv(N, BLOCK)
    pid = tl.program_id(0)
    first = pid // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    within = pid % (GROUP * tiles_n)
    tile_product(p_a, p_b, p_c, first + within % rows, within // rows, M, N, K, BLOCK, BLOCK_K)


step("grouped", lambda: run_tiled(grouped))

# %% [markdown]
# ## Step 4: loads ahead of their use
#
# With `num_stages=4` the compiler loads three blocks ahead while the tensor cores work on the fourth, so they no
# longer wait. The kernel is unchanged. (A CPU, compiled or interpreted, ignores `num_stages`.)

# %%
step("pipelined", lambda: run_tiled(grouped, num_stages=4))

# %% [markdown]
# ## Step 5: the copy engine, and persistent programs
#
# On Hopper a descriptor gives the tensor memory accelerator (TMA) the address of the matrix; a load is then one
# instruction for a full box, with zeros outside the matrix and no address arithmetic. One program per multiprocessor
# computes many tiles, so the first loads of the next tile overlap the last stores of this one.


# %%
@triton.jit
def persistent(d_a, d_b, p_c, M, N, K, PROGRAMS, BM: tl.constexpr, BN: tl.constexpr, BLOCK_K: tl.constexpr):
    GROUP: tl.constexpr = 8
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    for pid in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        first = pid // (GROUP * tiles_n) * GROUP
        rows = tl.minimum(tiles_m - first, GROUP)
        within = pid % (GROUP * tiles_n)
        m = (first + within % rows) * BM
        n = within // rows * BN
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BLOCK_K)):
            acc = tl.dot(d_a.load([m, k * BLOCK_K]), d_b.load([k * BLOCK_K, n]), acc, input_precision="ieee")
        o_m = m + tl.arange(0, BM)
        o_n = n + tl.arange(0, BN)
        tl.store(
            p_c + o_m[:, None] * N + o_n[None, :], acc.to(tl.float16), mask=(o_m < M)[:, None] & (o_n < N)[None, :]
        )


def run_persistent():
    c = torch.empty_like(a)
    BM, BN, BLOCK_K = (16, 32, 16) if INTERPRETED else (128, 256, 64)
    programs = 4 if INTERPRETED else launch.processors()
    d_a = TensorDescriptor(a, list(a.shape), list(a.stride()), [BM, BLOCK_K])
    d_b = TensorDescriptor(b, list(b.shape), list(b.stride()), [BLOCK_K, BN])
    persistent[(programs,)](
        d_a, d_b, c, SIZE, SIZE, SIZE, programs, BM=BM, BN=BN, BLOCK_K=BLOCK_K, num_warps=8, num_stages=3,
        enable_fp_fusion=True,
    )  # fmt: skip
    return c


if COMPILED_CPU:
    print("A processor has no TMA: descriptors run on a GPU and in the interpreter.")
else:
    step("TMA, persistent", run_persistent)

# %% [markdown]
# ## minidl's kernel, and cuBLAS
#
# `minidl.kernels.gemm` is step 5 with the features of real use: all four transpositions, bias and activation before the
# store, K split across programs for skinny matrices, and float32 as three tf32 products.

# %%
from minidl.kernels.gemm import gemm

step("minidl.kernels.gemm", lambda: gemm(a, b))
if COMPILED_CPU:
    step("torch.matmul", lambda: a @ b)
elif not INTERPRETED:
    step("torch.matmul (cuBLAS)", lambda: a @ b)
    record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    if "--write" in sys.argv:
        RESULTS.write_text(json.dumps({**record, "size": SIZE, "dtype": "float16", "steps": measured}, indent=1) + "\n")

# %% [markdown]
# ## The ladder

# %%
results = measured
title = "this processor" if COMPILED_CPU else "this GPU"
if INTERPRETED and RESULTS.exists():
    stored = json.loads(RESULTS.read_text())
    results = stored["steps"]
    title = f"{stored['device']}, {stored['size']}^3 float16, torch {stored['torch']}, Triton {stored['triton']}"
if results:
    figure, axes = plt.subplots(figsize=(8, 3.2))
    bars = axes.barh(list(results), [r["tflops"] for r in results.values()], color="#4c78a8")
    axes.bar_label(bars, [f"{r['tflops']:.3g} TFLOP/s, {r['ms']:.3g} ms" for r in results.values()], padding=4)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * max(r["tflops"] for r in results.values()))
    axes.set_xlabel("TFLOP/s")
    axes.set_title(title, fontsize=10)
    figure.tight_layout()
    plt.show()
else:
    print("No GPU here, and no committed results: nothing to draw.")
