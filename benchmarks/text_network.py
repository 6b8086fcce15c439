"""Time a 32,754-128-4 text network (sigmoid): 100 passes over 9,954 documents of 65 words.

    python -m benchmarks.text_network

Documents are synthetic: each class has typical words, so that the loss shows whether training works. The time covers
forward, loss, backward and update of every step; batches are copied and CUDA graphs captured before.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import minidl
from minidl import nn, ops, optim
from minidl.compilation.capture import EAGER
from minidl.runtime import launch
from minidl.sparse.csr import CSR
from minidl.tensors import Tensor, default_device
from minidl.tools.bench.machine import machine

DOCUMENTS, COLUMNS, HIDDEN, CLASSES, NONZEROS = 9954, 32754, 128, 4, 65


def documents(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns [DOCUMENTS, NONZEROS] and classes [DOCUMENTS]; one word in five is one of 500 of the class."""
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(CLASSES, (DOCUMENTS,), generator=generator)
    typical = torch.randint(500, (DOCUMENTS, NONZEROS), generator=generator) + 500 * label[:, None]
    other = torch.randint(COLUMNS, (DOCUMENTS, NONZEROS), generator=generator)
    return torch.where(torch.rand(DOCUMENTS, NONZEROS, generator=generator) < 0.2, typical, other), label


def batches(size: int) -> list[tuple[CSR, Tensor]]:
    """Return the documents as device batches with values 1 / sqrt(NONZEROS)."""
    col, label = documents()
    full, last = [], []
    for start in range(0, DOCUMENTS, size):
        part = col[start : start + size]
        count = len(part)
        crow = torch.arange(count + 1, dtype=torch.int32) * NONZEROS
        val = torch.full((count * NONZEROS,), NONZEROS**-0.5)
        x = CSR.from_torch(crow, part.reshape(-1).to(torch.int32), val, (count, COLUMNS))
        (full if count == size else last).append((x, label[start : start + size]))
    # A captured step takes batches of one size, so all are padded to the largest number of columns.
    touched = max((len(x.rows) for x, _ in full), default=0)
    full = [(x.pad(x.nnz, touched), y) for x, y in full]
    return [(x.to(default_device()), Tensor(y.to(default_device()))) for x, y in full + last]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--passes", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if launch.INTERPRETED:
        parser.error("the network is timed on a CUDA device; this process interprets kernels")
    minidl.manual_seed(0)
    model = nn.MLP(COLUMNS, [HIDDEN], CLASSES, act="sigmoid", sparse=True)
    adam = optim.Adam(model.parameters(), lr=1e-3)
    data = batches(options.batch_size)

    def train_step(x: CSR, y: Tensor) -> Tensor:
        adam.zero_grad()
        loss = ops.cross_entropy(model(x), y)
        loss.backward()
        adam.step()
        return loss

    step = minidl.capture(train_step, shapes=2)  # the last batch is smaller

    def one_pass() -> Tensor:
        for x, y in data:
            loss = step(x, y)
        return loss

    first = float(one_pass())
    for _ in range(EAGER):
        one_pass()
    started = time.perf_counter()
    for _ in range(options.passes):
        loss = one_pass()
    last = float(loss)
    seconds = time.perf_counter() - started
    result = {
        "network": f"{COLUMNS}-{HIDDEN}-{CLASSES}", "documents": DOCUMENTS, "passes": options.passes,
        "batch_size": options.batch_size, "passes_before": 1 + EAGER, "seconds": round(seconds, 3),
        "first_loss": first, "last_loss": last,
    }  # fmt: skip
    if torch.cuda.is_available():
        result = {**machine(), **result}
    print(json.dumps(result, indent=1))
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
