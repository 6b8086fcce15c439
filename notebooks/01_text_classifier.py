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
# # From raw texts to a classifier
#
# The task: given a docstring of the Python standard library, say which chapter of the Library Reference its module
# belongs to. The texts come with Python itself, so nothing is downloaded. Every multiplication below, forwards and
# backwards, is a Triton kernel; without a GPU, Triton's interpreter runs the same kernels on the CPU.

# %%
import json
import time
from pathlib import Path

import matplotlib.pyplot as plt

import minidl
from minidl import nn, ops, optim
from minidl.data import Batches, Texts, Tfidf, TfidfOptions, load_text
from minidl.tensors import Tensor, default_device

HERE = Path("notebooks") if Path("notebooks").is_dir() else Path()
minidl.manual_seed(0)
dataset = load_text("docstrings")
print(f"{len(dataset.train)} texts to learn from, {len(dataset.test)} to test with, {len(dataset.labels)} chapters")
for index in (0, 1000, 2000):
    text, label = dataset.train.texts[index], dataset.labels[dataset.train.labels[index]]
    print(f"\n[{label}]\n{text[:160].strip()}")

# %% [markdown]
# On a GPU the notebook uses all texts. The interpreter is slower, so on a CPU it uses the five largest chapters.

# %%
on_gpu = default_device().type == "cuda"
counts = [dataset.train.labels.count(i) for i in range(len(dataset.labels))]
chosen = sorted(range(len(counts)), key=lambda i: -counts[i])[: len(counts) if on_gpu else 5]
labels = [dataset.labels[i] for i in chosen]


def of_chosen(texts: Texts, limit: int) -> Texts:
    pairs = [(t, chosen.index(k)) for t, k in zip(texts.texts, texts.labels, strict=True) if k in chosen][:limit]
    return Texts([t for t, _ in pairs], [k for _, k in pairs])


train = of_chosen(dataset.train, 10**6 if on_gpu else 1200)
test = of_chosen(dataset.test, 10**6 if on_gpu else 400)
print(f"{len(train)} texts in {len(labels)} chapters: {', '.join(labels)}")

# %% [markdown]
# ## Texts to numbers
#
# TF-IDF: a text becomes a row with one weight per term it contains, larger for terms that few other texts contain, and
# scaled to length 1. Nearly all entries are zero, and only the others are stored.

# %% tags=["parameters"]
TERMS, EPOCHS, RATE = 4000, 4, 5e-3

# %%
tfidf = Tfidf.fit(train.texts, TfidfOptions(max_features=TERMS))
features = tfidf.transform(train.texts)
print(
    f"{features.shape[0]} rows of {features.shape[1]} columns, {features.nnz / features.shape[0]:.0f} non-zeros a row"
)

# %% [markdown]
# ## The network
#
# One hidden layer. The first layer is sparse: it reads only the rows of its weight that belong to a text's terms, and
# its gradient has only the rows that a batch has seen.

# %%
model = nn.Sequential(
    nn.SparseLinear(len(tfidf), 64, act="relu"),
    nn.Dropout(0.3),
    nn.Linear(64, len(labels)),
)
print(model)
print(f"{model.num_parameters():,} parameters")

# %% [markdown]
# ## The graph
#
# minidl records each operation on a tensor that requires a gradient. `draw` shows the graph that `backward()` follows.

# %%
batches = Batches(features, train.labels, batch_size=128, seed=0)
x, y = next(batches.epoch(0))
loss = ops.cross_entropy(model(x.to(default_device())), Tensor(y.to(default_device())))
minidl.draw(loss, model)

# %% [markdown]
# ## Training
#
# This is the loop of `minidl train text`, without checkpoints, validation and reports.

# %%
optimizer = optim.Adam(model.parameters(), lr=RATE)
losses = []
start = time.perf_counter()
for epoch in range(EPOCHS):
    for x, y in batches.epoch(epoch):
        optimizer.zero_grad()
        loss = ops.cross_entropy(model(x.to(default_device())), Tensor(y.to(default_device())))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    print(f"epoch {epoch + 1}: loss {losses[-1]:.3f}")
print(f"{time.perf_counter() - start:.1f} s for {len(losses)} steps")

# %%
figure, axes = plt.subplots(figsize=(6, 2.8))
axes.plot(losses)
axes.set_xlabel("step")
axes.set_ylabel("cross-entropy")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## How good is it?

# %%
model.eval()
with minidl.no_grad():
    x, _ = next(Batches(tfidf.transform(test.texts), test.labels, len(test), shuffle=False).epoch(0))
    probabilities = ops.softmax(model(x.to(default_device())))
predicted = probabilities.argmax(1).tolist()
accuracy = sum(p == k for p, k in zip(predicted, test.labels, strict=True)) / len(test)
majority = max(test.labels.count(i) for i in range(len(labels))) / len(test)
print(f"accuracy {accuracy:.3f}; always answering the largest chapter would give {majority:.3f}")
assert accuracy > majority + 0.2

# %% [markdown]
# ## Influential terms
#
# A hidden unit is active if its input is positive. Take the units that an average term activates: the influence of
# a term on a chapter is then the sum, over these units, of the product of the weights on the way. The strongest terms
# of each chapter, relative to the other chapters:

# %%
hidden, out = model[0], model[2]
with minidl.no_grad():
    is_open = (hidden.bias + hidden.weight.mean(0) > 0).float()
    influence = (hidden.weight * is_open) @ out.weight.T
    influence = influence - influence.mean(1, keepdim=True)
for index, label in enumerate(labels):
    column = influence[:, index].tolist()
    best = sorted(range(len(column)), key=column.__getitem__, reverse=True)[:8]
    print(f"{label:>28}: {', '.join(tfidf.terms[i] for i in best)}")

# %% [markdown]
# ## On a GPU
#
# The same training step on a GPU, next to torch (from the committed results):

# %%
results = HERE / "../benchmarks/results/nvidia-h200.json"
if results.exists():
    stored = json.loads(results.read_text())
    row = next((r for r in stored["rows"] if r["name"].startswith("text training step")), None)
    if row:
        print(f"{row['name']} on {stored['device']}: {row['ours_ms']:.3f} ms; {row['peer']}: {row['peer_ms']:.3f} ms")
else:
    print("No results are committed yet.")
