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
# # A convolution in six steps
#
# `y[n, h, w, m] = sum over r, s, c of x[n, h + r, w + s, c] w[m, r, s, c]` is seven loops. Each step below is a short
# kernel that runs; each is checked against float64 and timed. On a GPU the times are measured here. Without one,
# `MINIDL_CPU=compiled` compiles the same kernels for the processor; else the interpreter runs them on a small layer.
# The times of an H200 come from a results file that `python -m benchmarks.convolution_ladder` makes.
#
# Images are channels-last, `[N, H, W, C]`, and filters `[M, R, S, C]`. So a row of a filter, its S taps with their C
# channels, is one run of `S * C` numbers without a gap, in the filter and in the image. All six steps use that.

# %%
import json
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F

from minidl.runtime import launch
from minidl.testing import compiled

# minidl comes before Triton: it decides whether kernels are compiled or interpreted.
INTERPRETED, COMPILED_CPU = launch.INTERPRETED, launch.COMPILED_CPU

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

DEVICE = "cpu" if launch.ON_CPU else "cuda"
HERE = Path("notebooks") if Path("notebooks").is_dir() else Path()
RESULTS = HERE / "../benchmarks/results/convolution-ladder-nvidia-h200.json"


def problem(N: int, C: int, M: int, size: int, kernel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images x [N, size, size, C] and filters w [M, kernel, kernel, C] in float16."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(N, size, size, C, generator=generator, device=DEVICE).half()
    w = torch.randn(M, kernel, kernel, C, generator=generator, device=DEVICE) / (C * kernel**2) ** 0.5
    return x, w.half()


def empty_output(x: torch.Tensor, w: torch.Tensor, pooled: bool = False) -> torch.Tensor:
    sides = [x.shape[i] - w.shape[i] + 1 for i in (1, 2)]
    return x.new_empty(x.shape[0], *(side // 2 if pooled else side for side in sides), w.shape[0])


# %% tags=["parameters"]
IMAGES = 4 if INTERPRETED else 16 if COMPILED_CPU else 1000

# %%
x, w = problem(IMAGES, 16, 8, 8, 3) if INTERPRETED else problem(IMAGES, 32, 64, 12, 5)
where = "interpreted on the CPU" if INTERPRETED else "compiled for the CPU" if COMPILED_CPU else "on the GPU"
print(f"x {list(x.shape)}, w {list(w.shape)}, {where}")


def on_device(kernel):
    """The kernel as it is launched here: compiled for the CPU by way of C, if it is to be."""
    return compiled(kernel) if COMPILED_CPU else kernel


# %% [markdown]
# ## The check
#
# A sum of K products whose longest chain of additions has d steps is off by at most about `d u` times the sum of the
# absolute products, with `u = 2^-24` for float32 additions (tensor cores cut a little more: `2^-22` stands for them),
# plus the rounding of the result to float16. ReLU makes no error larger, and a mean of four adds three roundings.


# %%
def check(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> float:
    """Return the largest error relative to the bound, over the first and the last images; raises if it is above 1."""
    u = 2.0**-24 if launch.ON_CPU else 2.0**-22
    some = torch.cat([x[:4], x[4:][-4:]]).double().permute(0, 3, 1, 2)
    y = torch.cat([y[:4], y[4:][-4:]]).double().permute(0, 3, 1, 2)
    w = w.double().permute(0, 3, 1, 2)
    exact, magnitude = F.conv2d(some, w), F.conv2d(some.abs(), w.abs())
    if y.shape != exact.shape:
        exact, magnitude = F.avg_pool2d(exact.relu(), 2), F.avg_pool2d(magnitude, 2)
    bound = (w[0].numel() + 4) * u * magnitude
    bound = bound + 2.0**-11 * (exact.abs() + bound) + 2.0**-25
    worst = ((y - exact).abs() / bound).max().item()
    assert worst <= 1, f"wrong: {worst:.1f} times the bound"
    return worst


RUNGS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {}


def step(name: str, run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Check a kernel and time it."""
    RUNGS[name] = run
    print(f"right: the largest error is {check(run(x, w), x, w):.3f} of the bound")
    if launch.ON_CPU:
        times = []
        for _ in range(1 if INTERPRETED else 7):
            start = time.perf_counter()
            run(x, w)
            times.append((time.perf_counter() - start) * 1e3)
        ms = sorted(times)[len(times) // 2]
        print(f"{ms:.0f} ms in the interpreter, on this small layer" if INTERPRETED else f"{ms:.2f} ms")
    else:
        print(f"{triton.testing.do_bench(lambda: run(x, w), return_mode='median'):.3f} ms")


# %% [markdown]
# ## Step 1: one output per program
#
# The definition, literally, like the first kernel of every report: one program computes one number. It loads a full
# filter and the inputs under it, and uses each of them once. An input is read `R * S * M` times from memory.


# %%
@triton.jit
def one_output(
    p_x, p_w, p_y, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    OH: tl.constexpr = H - R + 1
    OW: tl.constexpr = W - S + 1
    m = tl.program_id(0) % M
    pixel = tl.program_id(0) // M
    start = ((pixel // (OH * OW) * H + pixel // OW % OH) * W + pixel % OW) * C
    o_k = tl.arange(0, BLOCK_K)
    m_k = o_k < R * S * C
    # Position k of a filter lies in its row k // (S C); in the image, rows are W C apart.
    b_x = tl.load(p_x + start + o_k // (S * C) * (W * C) + o_k % (S * C), mask=m_k, other=0.0)
    b_w = tl.load(p_w + m * (R * S * C) + o_k, mask=m_k, other=0.0)
    y = tl.sum(b_x.to(tl.float32) * b_w.to(tl.float32), axis=0)
    tl.store(p_y + pixel * M + m, y.to(p_y.dtype.element_ty))


def run_one_output(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (_, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w)
    on_device(one_output)[(y.numel(),)](
        x, w, y, H=H, W=W, C=C, M=M, R=R, S=S, BLOCK_K=triton.next_power_of_2(R * S * C), enable_fp_fusion=True
    )
    return y


step("one output per program", run_one_output)

# %% [markdown]
# ## Step 2: tiles
#
# A program computes 128 pixels for all M channels. It loops over the filter's positions: each input it loads is
# used for M outputs, and each weight for 128. The reports used shared memory, constant memory and registers for this;
# the multiplications are still scalar.

# %%
PIXELS = 32 if INTERPRETED else 128


@triton.jit
def pixels_of(i_tile, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
              BLOCK: tl.constexpr):  # fmt: skip
    """Return the indices of the pixels of a tile, and the offset of each pixel's first input."""
    o_pixel = i_tile * BLOCK + tl.arange(0, BLOCK)
    return o_pixel, ((o_pixel // (OH * OW) * H + o_pixel // OW % OH) * W + o_pixel % OW) * C


@triton.jit
def tiled(
    p_x, p_w, p_y, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    o_pixel, start = pixels_of(tl.program_id(0), H, W, C, H - R + 1, W - S + 1, BLOCK_M)
    o_m = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(R * S * C):
        b_x = tl.load(p_x + start + k // (S * C) * (W * C) + k % (S * C), mask=o_pixel < pixels, other=0.0)
        b_w = tl.load(p_w + o_m * (R * S * C) + k, mask=o_m < M, other=0.0)
        acc += b_x.to(tl.float32)[:, None] * b_w.to(tl.float32)[None, :]
    m_y = (o_pixel < pixels)[:, None] & (o_m < M)[None, :]
    tl.store(p_y + o_pixel[:, None] * M + o_m[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


def run_tiled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (_, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w)
    pixels = y.numel() // M
    on_device(tiled)[(triton.cdiv(pixels, PIXELS),)](
        x, w, y, pixels, H=H, W=W, C=C, M=M, R=R, S=S, BLOCK_M=PIXELS, BLOCK_N=triton.next_power_of_2(M),
        enable_fp_fusion=True,
    )  # fmt: skip
    return y


step("tiled", run_tiled)

# %% [markdown]
# ## Step 3: the matrix form
#
# The inputs under the filter at all pixels are a matrix `[pixels, R S C]`, and the filters are `[R S C, M]`. The
# reports unrolled that matrix in memory, R S times the image. That is not necessary: a block of it is a load whose
# addresses are `start[pixel] + offset[k]`. One line changes: a `tl.dot` over a block of k replaces the loop over
# single k, so the tensor cores do the work.


# %%
@triton.jit
def matrix_form(
    p_x, p_w, p_y, pixels, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = R * S * C
    o_pixel, start = pixels_of(tl.program_id(0), H, W, C, H - R + 1, W - S + 1, BLOCK_M)
    o_m = tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        o_k = k + tl.arange(0, BLOCK_K)
        offset = o_k // (S * C) * (W * C) + o_k % (S * C)
        m_x = (o_pixel < pixels)[:, None] & (o_k < K)[None, :]
        b_x = tl.load(p_x + start[:, None] + offset[None, :], mask=m_x, other=0.0)  # [BLOCK_M, BLOCK_K]
        m_w = (o_k < K)[:, None] & (o_m < M)[None, :]
        b_w = tl.load(p_w + o_k[:, None] + o_m[None, :] * K, mask=m_w, other=0.0)  # [BLOCK_K, BLOCK_N]
        acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    m_y = (o_pixel < pixels)[:, None] & (o_m < M)[None, :]
    tl.store(p_y + o_pixel[:, None] * M + o_m[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


def run_matrix_form(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (_, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w)
    pixels = y.numel() // M
    on_device(matrix_form)[(triton.cdiv(pixels, PIXELS),)](
        x, w, y, pixels, H=H, W=W, C=C, M=M, R=R, S=S, BLOCK_M=PIXELS, BLOCK_N=max(16, triton.next_power_of_2(M)),
        BLOCK_K=32, num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y


step("matrix form", run_matrix_form)

# %% [markdown]
# ## Step 4: batch-tiled, in boxes
#
# In step 3 every row of a block has its own address. Let the rows be *images at one output pixel* instead: seen
# as `[N, H W C]`, the inputs of 128 images at one tap are a plain box, 128 rows by C columns. On Hopper the tensor
# memory accelerator (TMA) fetches such a box with one instruction, and no address is computed. Padding, if there were
# any, would be a bound on the loops over taps. A box needs rows of 16 bytes or more, so this form is for many
# channels.


# %%
@triton.jit
def batch_tiled(
    d_x, d_w, p_y, N, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
    OH: tl.constexpr, OW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    runs = tl.cdiv(N, BLOCK_M)
    n = tl.program_id(0) % runs * BLOCK_M
    pixel = tl.program_id(0) // runs
    start = (pixel // OW * W + pixel % OW) * C
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for r in range(R):
        for k in range(0, S * C, BLOCK_K):
            b_x = d_x.load([n, start + r * (W * C) + k])  # [BLOCK_M, BLOCK_K]
            b_w = d_w.load([0, r * (S * C) + k])  # [BLOCK_N, BLOCK_K]
            acc = tl.dot(b_x, b_w.T, acc, input_precision="ieee")
    o_n = n + tl.arange(0, BLOCK_M)
    o_m = tl.arange(0, BLOCK_N)
    o_y = (o_n * (OH * OW) + pixel)[:, None] * M + o_m[None, :]
    tl.store(p_y + o_y, acc.to(p_y.dtype.element_ty), mask=(o_n < N)[:, None] & (o_m < M)[None, :])


def run_batch_tiled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (N, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w)
    BLOCK_M, BLOCK_N = 16 if INTERPRETED else 128, max(16, triton.next_power_of_2(M))
    BLOCK_K = min(64, S * C & -(S * C))  # a power of two that cuts a row of taps into equal boxes
    d_x = TensorDescriptor(x, [N, H * W * C], [H * W * C, 1], [BLOCK_M, BLOCK_K])
    d_w = TensorDescriptor(w, [M, R * S * C], [R * S * C, 1], [BLOCK_N, BLOCK_K])
    batch_tiled[(triton.cdiv(N, BLOCK_M) * y.shape[1] * y.shape[2],)](
        d_x, d_w, y, N, W=W, C=C, M=M, R=R, S=S, OH=y.shape[1], OW=y.shape[2], BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N,
        BLOCK_K=BLOCK_K, num_stages=4, enable_fp_fusion=True,
    )  # fmt: skip
    return y


if COMPILED_CPU:
    print("A processor has no TMA: descriptors run on a GPU and in the interpreter.")
else:
    step("batch-tiled", run_batch_tiled)

# %% [markdown]
# ## Step 5: banded, for few channels
#
# The first layer of a network has one channel, or three. Then M columns and K = C do not fill a tensor core, each load
# is 2 bytes, and nearly all the time goes into addresses. So let a row of the matrix cover *G neighbouring pixels*:
# their inputs from one image row lie side by side, `(G + S - 1) C` numbers, and so do their `G M` outputs. The filter
# row becomes a band: a matrix that contains it G times, each time C positions further down.
#
# ```
#              pixel 0   pixel 1   pixel 2
#     input 0   w[0]        0         0
#     input 1   w[1]      w[0]        0
#     input 2   w[2]      w[1]      w[0]
#     input 3     0       w[2]      w[1]
#     input 4     0         0       w[2]
# ```
#
# This multiplies zeros, but on tensor cores that were idle. In exchange, loads and stores are complete rows.


# %%
@triton.jit
def make_band(
    p_w, p_band, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr, S: tl.constexpr, HALVES: tl.constexpr,
    COLUMNS: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """band [R + 2, KP, NP] with nothing in its first and last block; in HALVES, pixels i, i + HALVES, ... together."""
    r = tl.program_id(0) - 1
    o_k = tl.arange(0, KP)[:, None]
    o_n = tl.arange(0, NP)[None, :]
    column = o_n % (NP // HALVES)
    pixel = column // M * HALVES + o_n // (NP // HALVES)
    at = o_k - pixel * C
    m_w = (at >= 0) & (at < S * C) & (column < COLUMNS) & (r >= 0) & (r < R)
    b_w = tl.load(p_w + (column % M * R + r) * (S * C) + at, mask=m_w, other=0.0)
    tl.store(p_band + (tl.program_id(0) * KP + o_k) * NP + o_n, b_w)


@triton.jit
def banded(
    p_x, p_band, p_y, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, G: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    OH: tl.constexpr = H - R + 1
    OW: tl.constexpr = W - S + 1
    GROUPS: tl.constexpr = (OW + G - 1) // G
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = o_row % GROUPS
    image_row = o_row // (GROUPS * OH) * H + o_row // GROUPS % OH
    acc = tl.zeros((BLOCK_M, NP), dtype=tl.float32)
    o_n = tl.arange(0, NP)
    for i in range(R * (KP // BLOCK_K)):
        r = i // (KP // BLOCK_K)
        o_k = i % (KP // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
        # The last group may end beyond the row.
        m_x = (o_row < rows)[:, None] & (g[:, None] * (G * C) + o_k[None, :] < W * C)
        b_x = tl.load(
            p_x + ((image_row + r) * (W * C) + g * (G * C))[:, None] + o_k[None, :], mask=m_x, other=0.0
        )  # [BLOCK_M, BLOCK_K]
        b_band = tl.load(p_band + ((r + 1) * KP + o_k)[:, None] * NP + o_n[None, :])  # [BLOCK_K, NP]
        acc = tl.dot(b_x, b_band, acc, input_precision="ieee")
    o_y = (o_row // GROUPS * OW + g * G) * M
    m_y = (o_row < rows)[:, None] & (o_n[None, :] < (tl.minimum(G, OW - g * G) * M)[:, None])
    tl.store(p_y + o_y[:, None] + o_n[None, :], acc.to(p_y.dtype.element_ty), mask=m_y)


def group(w: torch.Tensor, width: int) -> tuple[int, int, int]:
    """(G, KP, NP): an even number of pixels whose outputs fill up to 128 columns, and the sides of the band."""
    M, _, S, C = w.shape
    G = max(2, min(128 // M, 17 - S if C == 1 else 128 // C - S + 1, width) // 2 * 2)
    return G, max(16, triton.next_power_of_2((G + S - 1) * C)), max(16, triton.next_power_of_2(G * M))


def run_banded(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (_, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w)
    G, KP, NP = group(w, y.shape[2])
    band = w.new_empty(R + 2, KP, NP)
    on_device(make_band)[(R + 2,)](
        w, band, C=C, M=M, R=R, S=S, HALVES=1, COLUMNS=G * M, KP=KP, NP=NP, enable_fp_fusion=True
    )
    rows = y.shape[0] * y.shape[1] * triton.cdiv(y.shape[2], G)
    BLOCK_M = 32 if INTERPRETED else 64
    on_device(banded)[(triton.cdiv(rows, BLOCK_M),)](
        x, band, y, rows, H=H, W=W, C=C, M=M, R=R, S=S, G=G, KP=KP, NP=NP, BLOCK_M=BLOCK_M, BLOCK_K=min(KP, 64),
        num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y


step("banded", run_banded)

# %% [markdown]
# ## Step 6: ReLU and pool on the way out
#
# After step 5 the arithmetic is nearly free, and writing y takes longest; ReLU and a 2x2 average pool would read it
# and write it again. In registers, y never reaches memory, and a quarter of its size is stored. One program sums
# two image rows at once: an image row is loaded once and multiplied by band r for the upper and by band r - 1 for the
# lower outputs. The band's columns are sorted, even pixels in its left half, odd ones in its right half: the neighbours
# to pool are then the two halves of the block.


# %%
@triton.jit
def fused(
    p_x, p_band, p_y, rows, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr, R: tl.constexpr,
    S: tl.constexpr, G: tl.constexpr, KP: tl.constexpr, NP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    OH: tl.constexpr = (H - R + 1) // 2
    OW: tl.constexpr = (W - S + 1) // 2
    GROUPS: tl.constexpr = (2 * OW + G - 1) // G
    o_row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    g = o_row % GROUPS
    image_row = o_row // (GROUPS * OH) * H + o_row // GROUPS % OH * 2
    upper = tl.zeros((BLOCK_M, NP), dtype=tl.float32)
    lower = tl.zeros((BLOCK_M, NP), dtype=tl.float32)
    o_n = tl.arange(0, NP)
    for i in range((R + 1) * (KP // BLOCK_K)):
        r = i // (KP // BLOCK_K)
        o_k = i % (KP // BLOCK_K) * BLOCK_K + tl.arange(0, BLOCK_K)
        m_x = (o_row < rows)[:, None] & (g[:, None] * (G * C) + o_k[None, :] < W * C)
        b_x = tl.load(
            p_x + ((image_row + r) * (W * C) + g * (G * C))[:, None] + o_k[None, :], mask=m_x, other=0.0
        )  # [BLOCK_M, BLOCK_K]
        p_bands = p_band + (r * KP + o_k)[:, None] * NP + o_n[None, :]
        upper = tl.dot(b_x, tl.load(p_bands + KP * NP), upper, input_precision="ieee")
        lower = tl.dot(b_x, tl.load(p_bands), lower, input_precision="ieee")
    pair = tl.maximum(upper, 0.0) + tl.maximum(lower, 0.0)
    even, odd = tl.split(tl.permute(tl.reshape(pair, (BLOCK_M, 2, NP // 2)), (0, 2, 1)))
    o_n = tl.arange(0, NP // 2)
    o_y = (o_row // GROUPS * OW + g * (G // 2)) * M
    m_y = (o_row < rows)[:, None] & (o_n[None, :] < (tl.minimum(G // 2, OW - g * (G // 2)) * M)[:, None])
    tl.store(p_y + o_y[:, None] + o_n[None, :], (0.25 * (even + odd)).to(p_y.dtype.element_ty), mask=m_y)


def run_fused(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    (_, H, W, C), (M, R, S, _) = x.shape, w.shape
    y = empty_output(x, w, pooled=True)
    G, KP, NP = group(w, 2 * y.shape[2])
    band = w.new_empty(R + 2, KP, NP)
    on_device(make_band)[(R + 2,)](
        w, band, C=C, M=M, R=R, S=S, HALVES=2, COLUMNS=G // 2 * M, KP=KP, NP=NP, enable_fp_fusion=True
    )
    rows = y.shape[0] * y.shape[1] * triton.cdiv(2 * y.shape[2], G)
    BLOCK_M = 32 if INTERPRETED else 64
    on_device(fused)[(triton.cdiv(rows, BLOCK_M),)](
        x, band, y, rows, H=H, W=W, C=C, M=M, R=R, S=S, G=G, KP=KP, NP=NP, BLOCK_M=BLOCK_M, BLOCK_K=min(KP, 32),
        num_stages=3, enable_fp_fusion=True,
    )  # fmt: skip
    return y


step("banded, with ReLU and pool", run_fused)

# %% [markdown]
# ## minidl's kernel
#
# `minidl.kernels.conv` has steps 3, 4 and 5 with the features of real use: stride, padding, dilation, groups, both
# gradients, every activation, and a choice of the form by the shape.

# %%
from minidl.kernels import conv
from minidl.kernels.conv.geometry import Geometry


def run_minidl(x: torch.Tensor, w: torch.Tensor, pool: str | None = "avg") -> torch.Tensor:
    geometry = Geometry.of(x.shape[1:3], w.shape[1:3], (1, 1), ((0, 0), (0, 0)), (1, 1))
    act = "relu" if pool else None
    return conv.forward(x.permute(0, 3, 1, 2), w.permute(0, 3, 1, 2), geometry, act=act, pool=pool)[0].permute(
        0, 2, 3, 1
    )


step("minidl.kernels.conv", lambda x, w: run_minidl(x, w, pool=None))
step("minidl.kernels.conv, with ReLU and pool", run_minidl)

# %% [markdown]
# ## The ladder and the reports
#
# Three student projects climbed this ladder by hand, on the GPUs of their years, in float32 and for 10,000 images:
# report 1 the layers 1 to 32 and 32 to 64 (5x5, on 28x28 and 12x12), reports 2 and 5 the layers 1 to 12 and 12 to 24
# (7x7, on 72x72 and 33x33). Their figures are orange; steps of this notebook, in float16, are blue, torch is grey.

# %%
LAYERS = {"1 to 32, 5x5 at 28x28": (1, 32, 28, 5), "32 to 64, 5x5 at 12x12": (32, 64, 12, 5),
          "1 to 12, 7x7 at 72x72": (1, 12, 72, 7), "12 to 24, 7x7 at 33x33": (12, 24, 33, 7)}  # fmt: skip
REPORT_1 = {
    "report 1: one thread per output": (2800, 17200),
    "report 1: fewer idle threads": (2000, 5400),
    "report 1: shared and constant memory": (450, 1700),
    "report 1: four images per block": (150, 670),
    "report 1: unrolled matrix in tiles": (52, 260),
    "report 1: with a layout transformation": (35, 188),
}
REPORTS_2_AND_5 = {
    "report 5: CPU": (7500, 25700),
    "report 5: first kernel": (200, 510),
    "report 5: unrolled matrix": (490, 740),
    "report 5: shared memory": (124, 388),
    "report 5: restrict, unrolled loop": (109, 320),
    "report 5: channels in parallel, atomics": (115, 322),
    "report 5: corner turning": (107, 315),
    "report 2: shared-memory tiles": (52, 174),
    "report 2: weights in constant memory": (44, 142),
    "report 2: loop unrolled": (41, 107),
}
stored = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"layers": {}}
title = "the reports alone"
if stored["layers"]:
    title = "{device}, {dtype}, torch {torch}, Triton {triton}".format(**stored)

plt.rcParams["font.size"] = 8
figure, axes = plt.subplots(4, 1, figsize=(9, 22 if stored["layers"] else 11))
for i, (layer, panel) in enumerate(zip(LAYERS, axes, strict=True)):
    reports = {name: ms[i % 2] for name, ms in (REPORT_1 if i < 2 else REPORTS_2_AND_5).items()}
    ours = {name: row["ms"] for name, row in stored["layers"].get(layer, {}).get("10000", {}).items()}
    colours = ["#f58518"] * len(reports) + ["#9d9da1" if "torch" in name else "#4c78a8" for name in ours]
    times = reports | ours
    bars = panel.barh(list(times), list(times.values()), color=colours)
    panel.bar_label(bars, [f"{ms:,.0f} ms" if ms > 100 else f"{ms:.3g} ms" for ms in times.values()], padding=4)
    panel.invert_yaxis()
    panel.set_xscale("log")
    panel.set_xlim(0.5 * min(times.values()), 8 * max(times.values()))
    panel.set_title(f"{layer}, 10,000 images (ms)", fontsize=10)
figure.suptitle(title, fontsize=10)
figure.tight_layout(rect=(0, 0, 1, 0.985))
plt.show()

# %% [markdown]
# The same at 10, 100 and 10,000 images, in milliseconds. A layer with too few channels for a box has no batch-tiled
# step.

# %%
for layer, batches in stored["layers"].items():
    print(f"{layer:42}" + "".join(f"{int(batch):>10,}" for batch in batches))
    for name in dict.fromkeys(name for batch in batches.values() for name in batch):
        row = [batch[name]["ms"] if name in batch else None for batch in batches.values()]
        print(f"  {name:40}" + "".join(f"{'':>10}" if ms is None else f"{ms:>10.4f}" for ms in row))
if not stored["layers"]:
    print("No results of a GPU are committed: run python -m benchmarks.convolution_ladder on one.")
