"""Compare a published network of `minidl train images` on digits with the same network in torch.

    python -m benchmarks.digits_networks [--model resnet18] [--epochs 2] [--batch-size 32] [--seeds 3] [--out FILE]

Both sides train from scratch with the command's settings (AdamW, cosine with warm-up, shifts by a pixel), on the same
batches of the same pictures; torch runs the module of `minidl.models` with its layers. Each side draws its initial
weights with its random generator. The script compares the mean accuracies over seeds, after the last epoch on the test
split, with the standard error of the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from benchmarks.bench.network_rows import in_torch
from minidl import data, models, ops, optim, random
from minidl.autograd import no_grad
from minidl.data.image_batches import ImageBatches
from minidl.data.records import ImageDataset, Pictures
from minidl.tensors import Tensor
from minidl.training.loop.optimizers import make_schedule
from minidl.training.tasks.images import TrainImages
from minidl.training.tasks.images.settings import suited


def batches_of(dataset: ImageDataset, config: TrainImages) -> ImageBatches:
    pictures = Pictures(dataset.train.pixels, dataset.mean, dataset.std)
    return ImageBatches(pictures, dataset.train.labels, config.batch_size, config.seed, augment=dataset.augment)


def test_of(dataset: ImageDataset) -> torch.Tensor:
    pictures = Pictures(dataset.test.pixels, dataset.mean, dataset.std)
    x, _ = next(ImageBatches(pictures, dataset.test.labels, len(dataset.test), shuffle=False).epoch(0))
    return x


def ours(dataset: ImageDataset, config: TrainImages) -> float:
    random.manual_seed(config.seed)
    model = getattr(models, config.model)(10, channels=1, small=True)
    optimizer = optim.AdamW(list(model.parameters()), lr=config.lr, weight_decay=config.weight_decay)
    batches = batches_of(dataset, config)
    schedule = make_schedule(config, optimizer, len(batches))
    for epoch in range(config.epochs):
        for x, y in batches.epoch(epoch):
            optimizer.zero_grad()
            ops.cross_entropy(model(Tensor(x)), Tensor(y)).backward()
            optimizer.step()
            schedule.step()
    with no_grad():
        logits = model.eval()(Tensor(test_of(dataset))).data
    return right(logits, dataset)


def torchs(dataset: ImageDataset, config: TrainImages) -> float:
    torch.manual_seed(config.seed)
    model = in_torch(config.model, 10, channels=1, small=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay)
    batches = batches_of(dataset, config)
    steps = config.epochs * len(batches)
    warmup = min(round(config.warmup * len(batches)), steps - 1)
    step = 0
    for epoch in range(config.epochs):
        for x, y in batches.epoch(epoch):
            cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
            optimizer.param_groups[0]["lr"] = config.lr * ((step + 1) / warmup if step < warmup else cosine)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
    with torch.no_grad():
        logits = model.eval()(test_of(dataset))
    return right(logits, dataset)


def right(logits: torch.Tensor, dataset: ImageDataset) -> float:
    return float(np.mean(logits.argmax(1).numpy() == dataset.test.labels))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    dataset = data.load_images("digits")
    scores: dict[str, list[float]] = {"minidl": [], "torch": []}
    for seed in range(options.seeds):
        settings = {
            "data": "digits",
            "model": options.model,
            "epochs": options.epochs,
            "batch_size": options.batch_size,
            "seed": seed,
        }
        config = TrainImages(**settings, out=Path(tempfile.gettempdir()) / "digits-networks")
        config = config.model_copy(update=suited(config, (8, 8), half=False))
        for side, train in (("minidl", ours), ("torch", torchs)):
            start = time.monotonic()
            scores[side].append(train(dataset, config))
            print(f"seed {seed} {side} {scores[side][-1]:.4f}, {time.monotonic() - start:.0f} s", flush=True)
    means = {side: statistics.mean(values) for side, values in scores.items()}
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in scores.values()))
    print(f"means: minidl {means['minidl']:.4f}, torch {means['torch']:.4f}, error of the difference {error:.4f}")
    if options.out is not None:
        options.out.write_text(json.dumps({**vars(options), "out": None, "accuracies": scores, "error": error}) + "\n")


if __name__ == "__main__":
    main()
