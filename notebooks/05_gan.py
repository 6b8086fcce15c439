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
# # From noise to pictures
#
# A generator is a classifier backwards: a hundred random numbers go in, a picture comes out. Where a classifier halves
# the picture from layer to layer, the generator doubles it, by a transposed convolution. This notebook computes that
# operation in four ways, shows the generator that comes with minidl, and then trains a small one.

# %%
import time

import matplotlib.pyplot as plt
import numpy as np
import torch

import minidl
from minidl import ops, optim
from minidl.data import ImageBatches, Pictures, load_images
from minidl.generation import latents, output, passes
from minidl.generation.model import load
from minidl.models import Discriminator, Generator
from minidl.runtime import launch
from minidl.tensors import Tensor, default_device
from minidl.testing import compiled

DEVICE = default_device()  # minidl comes before Triton: it decides whether kernels are compiled or interpreted

import triton
import triton.language as tl

minidl.manual_seed(0)


def show(pictures: np.ndarray, rows: int, columns: int, width: float = 6.0) -> None:
    """Pictures uint8 [N, H, W, 1] in a grid."""
    sheet = output.grid(pictures, rows, columns)
    _, axis = plt.subplots(figsize=(width, width * sheet.shape[0] / sheet.shape[1]))
    axis.imshow(sheet[:, :, 0], cmap="gray", vmin=0, vmax=255)
    axis.axis("off")
    plt.show()


# %% [markdown]
# ## The transposed convolution
#
# Every input pixel, times the filter, is added to a window of the output; the windows of neighbours are `stride` pixels
# apart and overlap. As loops, for filters `w [C, M, R, S]`:

# %%
N, C, M, size, K, stride, padding = 2, 16, 16, 8, 4, 2, 1
x = minidl.randn(N, C, size, size).data
w = minidl.randn(C, M, K, K).data / (C * K) ** 0.5


def scattered(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The definition, in float64."""
    full = np.zeros((N, M, stride * (size - 1) + K, stride * (size - 1) + K))
    for h in range(size):
        for v in range(size):
            window = np.einsum("nc,cmrs->nmrs", x[:, :, h, v], w)
            full[:, :, stride * h : stride * h + K, stride * v : stride * v + K] += window
    return full[:, :, padding : padding + 2 * size, padding : padding + 2 * size]


expected = scattered(x.cpu().double().numpy(), w.cpu().double().numpy())


def check(name: str, y: torch.Tensor, taps: int) -> None:
    worst = np.abs(y.cpu().double().numpy() - expected).max()
    print(f"{name:28} {list(y.shape)}  largest difference {worst:.1e}  {taps} multiplications per output and channel")
    assert worst < 1e-4


check("ops.conv_transpose2d", ops.conv_transpose2d(Tensor(x), Tensor(w), None, stride, padding).data, K * K // 4)

# %% [markdown]
# ### With zeros between the pixels
#
# The textbooks' way: spread the pixels apart, fill with zeros, and slide the filter, rotated by 180 degrees, over all
# of it. Three of four pixels are zeros, so three of four multiplications are wasted.

# %%
stuffed = torch.zeros(N, C, 2 * size - 1, 2 * size - 1, device=DEVICE)
stuffed[:, :, ::2, ::2] = x
rotated = w.flip(2, 3).transpose(0, 1).contiguous()
y = ops.conv2d(Tensor(stuffed), Tensor(rotated), padding=K - 1 - padding).data
check("zeros between the pixels", y, K * K)

figure, axes = plt.subplots(1, 3, figsize=(7, 2.4))
for axis, picture, title in zip(axes, (x, stuffed, y), ("input", "with zeros", "output"), strict=True):
    axis.imshow(picture[0, 0].cpu(), cmap="coolwarm", vmin=-2, vmax=2)
    axis.set_title(f"{title}: {picture.shape[2]} x {picture.shape[3]}", fontsize=9)
    axis.axis("off")
plt.show()

# %% [markdown]
# ### By parity
#
# Which taps of the filter meet a pixel and not a zero? Along one side, output 2i gets tap 1 of pixel i and tap 3 of
# pixel i - 1; output 2i + 1 gets tap 2 of pixel i and tap 0 of pixel i + 1. So outputs come in four kinds, even or odd
# in each direction, and each kind is a plain 2x2 convolution of the input. No zero is multiplied.

# %%
TAPS = ([3, 1], [2, 0])  # of even and odd outputs, for neighbours in the order of the input
y = torch.empty(N, M, 2 * size, 2 * size, device=DEVICE)
for a in range(2):
    for b in range(2):
        part = w[:, :, TAPS[a]][:, :, :, TAPS[b]].transpose(0, 1).contiguous()  # [M, C, 2, 2]
        part_y = ops.conv2d(Tensor(x), Tensor(part), padding=1).data
        y[:, :, a::2, b::2] = part_y[:, :, a : a + size, b : b + size]
check("four convolutions by parity", y, K * K // 4)

# %% [markdown]
# The same as one kernel. A program makes a row of the output; its loops visit only the taps of the right parity, and
# skip those outside the picture before loading anything. minidl's kernels do this with a run of images instead of
# a row of pixels.


# %%
@triton.jit
def upward_kernel(p_x, p_w, p_y, H, W: tl.constexpr, C: tl.constexpr, M: tl.constexpr):
    """y [N, 2H, 2W, M] of x [N, H, W, C] and w [4, 4, C, M]; W, C and M are powers of two, 16 or more on a GPU."""
    n, oh = tl.program_id(0), tl.program_id(1)
    o_w, o_c, o_m = tl.arange(0, W), tl.arange(0, C), tl.arange(0, M)
    for b in tl.static_range(2):  # even and odd columns
        acc = tl.zeros((W, M), dtype=tl.float32)
        for k in tl.static_range(2):
            r = (oh + 1) % 2 + 2 * k
            h = (oh + 1 - r) // 2
            if (h >= 0) & (h < H):
                for j in tl.static_range(2):
                    s = (b + 1) % 2 + 2 * j
                    o_v = o_w + (b + 1 - s) // 2
                    m_v = (o_v >= 0) & (o_v < W)
                    p_row = p_x + (n * H + h) * W * C
                    b_x = tl.load(p_row + o_v[:, None] * C + o_c[None, :], mask=m_v[:, None], other=0.0)  # [W, C]
                    b_w = tl.load(p_w + ((r * 4 + s) * C + o_c[:, None]) * M + o_m[None, :])  # [C, M]
                    acc += tl.dot(b_x, b_w, input_precision="ieee")
        p_out = p_y + ((n * 2 * H + oh) * 2 * W + 2 * o_w + b)[:, None] * M + o_m[None, :]
        tl.store(p_out, acc)


wide = minidl.randn(N, C, size, 16).data  # a GPU's matrix instructions want rows of 16
y = torch.empty(N, 2 * size, 32, M, device=DEVICE)
upward = compiled(upward_kernel) if launch.COMPILED_CPU else upward_kernel  # by C instead of CUDA
upward[(N, 2 * size)](
    wide.permute(0, 2, 3, 1).contiguous(), w.permute(2, 3, 0, 1).contiguous(), y, size, W=16, C=C, M=M
)
same = ops.conv_transpose2d(Tensor(wide), Tensor(w), None, stride, padding).data.permute(0, 2, 3, 1)
print(f"largest difference from minidl's kernel: {float((y - same).abs().max()):.1e}")
assert torch.allclose(y, same, atol=1e-4)

# %% [markdown]
# ### Banded
#
# The last layer of a generator has one output channel, or three: four convolutions of 2x2 with so few outputs leave a
# GPU's matrix units idle. All four read only the 3x3 pixels around pixel i, so they fit into one 3x3 convolution with
# 4 M outputs, whose filters are zero at the taps that a parity does not use (a band). It multiplies some zeros again,
# 9 taps instead of 4, but in one matrix product with full rows.

# %%
band = torch.zeros(2, 2, M, C, 3, 3, device=DEVICE)
for a in range(2):
    for b in range(2):
        band[a, b, :, :, a : a + 2, b : b + 2] = w[:, :, TAPS[a]][:, :, :, TAPS[b]].transpose(0, 1)
together = ops.conv2d(Tensor(x), Tensor(band.reshape(4 * M, C, 3, 3)), padding=1).data
y = together.reshape(N, 2, 2, M, size, size).permute(0, 3, 4, 1, 5, 2).reshape(N, M, 2 * size, 2 * size)
check("one banded convolution", y, 9)

# %% [markdown]
# ## A trained generator
#
# It comes with minidl: two transposed convolutions, trained on MNIST by `minidl train gan`. Each picture is made from a
# seed; the same seed always makes the same picture.

# %%
built_in = load("mnist")
print(built_in.generator)


def pictures_of(z: np.ndarray) -> np.ndarray:
    """Pixels uint8 [N, H, W, 1] of latents [N, 100]."""
    return output.pixels(passes.everything(built_in.generator, z, built_in.channels, built_in.size, together=64))


start = time.perf_counter()
show(pictures_of(latents.from_seeds(range(40), built_in.latent)), 5, 8)
print(f"{time.perf_counter() - start:.1f} s for 40 pictures")

# %% [markdown]
# ### Truncation
#
# A latent of n normal numbers has a length close to the square root of n: here 10. Truncation shortens longer latents.
# From top to bottom: at most 1, 0.7 and 0.5 times this length, with the same eight seeds. Strokes become thicker. At
# 0.5 some digits dissolve: the generator never saw latents this short in training.

# %%
shortened = [latents.from_seeds(range(8), built_in.latent, limit) for limit in (1, 0.7, 0.5)]
show(pictures_of(np.concatenate(shortened)), 3, 8)

# %% [markdown]
# ### A walk
#
# Between two latents lie pictures that no one has drawn. The path follows the sphere (slerp): in a hundred dimensions
# nearly all random vectors have a length of about 10, but the middle of a straight line between two of them is
# shorter.

# %%
ends = latents.from_seeds([3, 17], built_in.latent)
walk = latents.slerp(ends[0], ends[1], 24)
middle = (ends[0] + ends[1]) / 2
print(f"lengths: ends {np.linalg.norm(ends[0]):.1f} and {np.linalg.norm(ends[1]):.1f}, ", end="")
print(f"middle of the walk {np.linalg.norm(walk[12]):.1f}, of the straight line {np.linalg.norm(middle):.1f}")
show(pictures_of(walk), 2, 12, 8.0)

# %% [markdown]
# ## Training one
#
# Two networks play against each other. The discriminator learns to tell real from generated pictures; the generator
# learns to make pictures that it takes for real. Here they train on digits of 8 x 8 pixels, for about a minute.
# `minidl train gan` trains longer, and keeps a moving average of the generator.
#
# A discriminator that grows ever more certain is steep at the real pictures, and drives the generator past them and
# back without end. So its loss has the gradient penalty R1 (Mescheder, Geiger and Nowozin, arXiv 1801.04406): the
# squared length of the gradient of its logit D(x) with respect to the pixels, averaged over real pictures. With it the
# discriminator becomes flat at the solution, and both networks converge.
#
# The gradient of the penalty would need second derivatives; a finite difference avoids them. `uphill` takes a step
# along the gradient from each picture. Take the logit there, subtract the logit after the same step downhill, and
# divide by the distance between the two points: the result is the length of the gradient, and an ordinary backward
# pass goes through it.

# %% tags=["parameters"]
BATCH, STEPS, LATENT = 64, 70, 16
PENALTY, REACH = 3.0, 0.3  # a short step: pictures are about 7 long

# %%
dataset = load_images("digits")
pixels = Pictures(dataset.train.pixels, (127.5,), (127.5,))  # from -1 to 1
batches = ImageBatches(pixels, dataset.train.labels, BATCH, seed=0)
generator = Generator(latent=LATENT, size=(8, 8), width=16, kernel=4)
discriminator = Discriminator(size=(8, 8), width=16, kernel=4)
print(f"{generator.num_parameters():,} and {discriminator.num_parameters():,} parameters")
adam_g = optim.Adam(generator.parameters(), lr=4e-3, betas=(0.0, 0.99))
adam_d = optim.Adam(discriminator.parameters(), lr=16e-3, betas=(0.0, 0.99))
real = Tensor(torch.ones(BATCH, device=DEVICE))
judged = Tensor(torch.cat([torch.ones(BATCH), torch.zeros(BATCH)]).to(DEVICE))
losses, beliefs, slopes = [], [], []


def uphill(x: Tensor) -> Tensor:
    """From each picture the step of length REACH along which its logit grows fastest."""
    start = Tensor(x.data).requires_grad_()
    ops.sum(discriminator(start)).backward()
    with minidl.no_grad():
        lengths = ops.norm(start.grad.flatten(1), 2, 1)
        return start.grad * (REACH / lengths).reshape(-1, 1, 1, 1)


def step(x: Tensor) -> None:
    fakes = generator(minidl.randn(BATCH, LATENT))

    discriminator.requires_grad_(False)  # only pictures need a gradient here
    ahead = uphill(x)
    discriminator.requires_grad_(True)
    logits = discriminator(ops.cat([x, fakes.detach(), x + ahead, x - ahead])).reshape(4, BATCH)
    loss_d = ops.binary_cross_entropy_with_logits(logits[:2].flatten(0), judged)
    slope = (logits[2] - logits[3]) / (2 * REACH)
    penalty = ops.mean(slope * slope)
    adam_d.zero_grad()
    (loss_d + PENALTY / 4 * penalty).backward()  # half of the paper's: loss_d is a mean over real and generated ones
    adam_d.step()

    discriminator.requires_grad_(False)
    loss_g = ops.binary_cross_entropy_with_logits(discriminator(fakes), real)
    adam_g.zero_grad()
    loss_g.backward()
    adam_g.step()
    discriminator.requires_grad_(True)

    losses.append((float(loss_d), float(loss_g)))
    slopes.append((float(penalty) ** 0.5,))
    with minidl.no_grad():
        beliefs.append(ops.sigmoid(logits[:2].detach()).data.cpu().numpy().mean(axis=1))


def grid_now() -> np.ndarray:
    """The pictures of the same eight latents at each time."""
    generator.eval()
    with minidl.no_grad():
        fakes = generator(Tensor(torch.from_numpy(latents.from_seeds(range(8), LATENT)).to(DEVICE))).data.cpu().numpy()
    generator.train()
    return output.pixels(fakes)


film = []
start = time.perf_counter()
for epoch in range(STEPS):
    for x, _ in batches.epoch(epoch):
        if len(x) < BATCH or len(losses) == STEPS:
            break
        step(Tensor(x))
        if len(losses) % 10 == 0:
            film.append(grid_now())
    if len(losses) == STEPS:
        break
print(f"{time.perf_counter() - start:.0f} s for {STEPS} steps")

# %% [markdown]
# If both losses are log 2 = 0.69, the discriminator only guesses: the probabilities of being real that it gives
# real pictures, D(x), and generated ones, D(G(z)), meet at one half. On the right: the penalty, which measures how
# steep the discriminator is at real pictures.

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 2.8))
for axis, curves, names in (
    (axes[0], losses, ("loss of the discriminator", "loss of the generator")),
    (axes[1], beliefs, ("D(x), real", "D(G(z)), made")),
    (axes[2], slopes, ("slope at real pictures",)),
):
    for values, name in zip(zip(*curves, strict=True), names, strict=True):
        axis.plot(values, label=name)
    axis.set_xlabel("step")
    axis.legend()
figure.tight_layout()
plt.show()

# %% [markdown]
# Eight latents, every tenth step, from top to bottom; below them real digits.

# %%
show(np.concatenate([*film, dataset.train.pixels[:8]]), len(film) + 1, 8, 5.0)

# %% [markdown]
# After a minute some digits are legible, others are only strokes. `minidl evaluate RUN` measures how far such pictures
# are from real ones; `minidl train gan --data mnist --out RUN` on a GPU trains a generator like the built-in one.
