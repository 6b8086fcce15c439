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
# # From pictures to a classifier
#
# Handwritten digits of 8 x 8 pixels, which come with scikit-learn: nothing is downloaded. The network's convolutions,
# batch norms and pools, forwards and backwards, are Triton kernels; without a GPU, Triton's interpreter runs them on
# the CPU.

# %%
import json
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import minidl
from minidl import nn, ops, optim
from minidl.data import ImageBatches, Images, Pictures, load_images
from minidl.tensors import Tensor

HERE = Path("notebooks") if Path("notebooks").is_dir() else Path()
minidl.manual_seed(0)
dataset = load_images("digits")
train, test = dataset.train, dataset.test
print(f"{len(train)} pictures to learn from, {len(test)} to test with, {len(dataset.labels)} classes")


def pictures(part: Images) -> Pictures:
    """Bytes, with the mean and deviation that the kernel standardises them by."""
    return Pictures(part.pixels, dataset.mean, dataset.std)


figure, axes = plt.subplots(2, 10, figsize=(8, 2))
for position, axis in enumerate(axes.flat):
    axis.imshow(train.pixels[position, :, :, 0], cmap="gray_r")
    axis.set_title(dataset.labels[train.labels[position]], fontsize=8)
    axis.axis("off")
plt.show()

# %% [markdown]
# ## The network
#
# A convolution slides a small filter over the picture; each of its outputs sees nine pixels only. Batch norm brings
# every channel to mean 0 and deviation 1 over the batch. A pool keeps the largest of four neighbours, so that the next
# filters see more of the picture. The last two layers take the mean of each channel and compute ten scores from these
# means.

# %%
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32, act="relu"),
    nn.MaxPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1, bias=False),
    nn.BatchNorm2d(64, act="relu"),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
print(model)
print(f"{model.num_parameters():,} parameters")

# %% [markdown]
# ## The graph
#
# `draw` shows the graph that `backward()` follows.

# %%
batches = ImageBatches(pictures(train), train.labels, batch_size=128, seed=0, augment=dataset.augment)
x, y = next(batches.epoch(0))
minidl.draw(ops.cross_entropy(model(Tensor(x)), Tensor(y)), model)

# %% [markdown]
# ## Training
#
# Each epoch shifts every picture by up to one pixel; the seed, the epoch and the number of the picture determine the
# shift. This is the loop of `minidl train images`, without checkpoints, validation and reports.

# %% tags=["parameters"]
EPOCHS, RATE = 10, 1e-2

# %%
optimizer = optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.05)
schedule = optim.CosineLR(optimizer, EPOCHS * len(batches))
losses = []
start = time.perf_counter()
for epoch in range(EPOCHS):
    for x, y in batches.epoch(epoch):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(Tensor(x)), Tensor(y))
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(float(loss))
    print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
print(f"{time.perf_counter() - start:.1f} s for {len(losses)} steps")

# %%
figure, axis = plt.subplots(figsize=(6, 2.8))
axis.plot(losses)
axis.set_xlabel("step")
axis.set_ylabel("cross-entropy")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## How good is it?

# %%
model.eval()
with minidl.no_grad():
    x, _ = next(ImageBatches(pictures(test), test.labels, len(test), shuffle=False).epoch(0))
    probabilities = ops.softmax(model(Tensor(x))).data.cpu().numpy()
predicted = probabilities.argmax(1)
accuracy = float((predicted == test.labels).mean())
print(f"accuracy {accuracy:.3f} on {len(test)} pictures")
assert accuracy > 0.9

# %% [markdown]
# ## Its most confident mistakes
#
# Above each picture: the predicted label with its probability, and the true label.

# %%
wrong = np.flatnonzero(predicted != test.labels)
surest = wrong[np.argsort(-probabilities[wrong, predicted[wrong]])][:10]
figure, axes = plt.subplots(1, 10, figsize=(9, 1.5))
for axis in axes:
    axis.axis("off")
for axis, index in zip(axes, surest, strict=False):
    axis.imshow(test.pixels[index, :, :, 0], cmap="gray_r")
    label = dataset.labels[predicted[index]]
    axis.set_title(f"{label} {probabilities[index].max():.0%}\ntrue {dataset.labels[test.labels[index]]}", fontsize=7)
plt.show()

# %% [markdown]
# ## For inference: folded batch norms
#
# After training, a batch norm is one factor and one offset per channel. `fold_batch_norms` moves them into the
# preceding convolution, whose kernel applies them together with the activation: one kernel instead of two.

# %%
folded = nn.fold_batch_norms(model)
with minidl.no_grad():
    folded_probabilities = ops.softmax(folded(Tensor(x))).data.cpu().numpy()
print(folded)
assert np.abs(folded_probabilities - probabilities).max() < 1e-4

# %% [markdown]
# ## On a GPU
#
# The same kernels compiled, next to torch with cuDNN, as measured by `minidl bench`:

# %%
stored = json.loads((HERE / "../benchmarks/results/nvidia-h200.json").read_text())
print(f"{stored['device']}, torch {stored['torch']}, Triton {stored['triton']}, {stored['date']}\n")
for row in stored["rows"]:
    if row["name"].startswith(("conv", "cnn", "batch norm", "max pool")):
        print(f"{row['name'][:62]:62} {row['ours_ms']:8.4f} ms   torch {row['peer_ms']:8.4f} ms   {row['ratio']:5.2f}")
