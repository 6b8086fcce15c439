"""Search settings by the number of texts: accuracy of the text network over a grid, and of linear classifiers.

    python -m benchmarks.text_defaults [SOURCE ...] --texts 30000 [...] --grid lr=0.01,0.003 batch_size=256,1024 ...

Each source is a generator of texts (--list). A network learns from four fifths of its texts and is scored on the rest;
settings outside the grid are those of `minidl train text`. Each line is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.inputs import Source
from minidl.compilation.compiler_processes import Compilers

SOURCES = {
    # The settings' rule was fitted on these,
    "usual": Source(),
    "hard": Source(share=0.06),
    "noisy": Source(noise=0.2),
    "many": Source(classes=100, own=200, words=60),
    "short": Source(words=12, share=0.2),
    # and checked on these.
    "two": Source(classes=2, share=0.04, own=2000),
    "long": Source(classes=20, words=150, share=0.05, spread=0.9),
    "wide": Source(vocabulary=200_000, own=1000, share=0.15, words=30, noise=0.1, spread=0.5),
    "few words": Source(vocabulary=5_000, classes=30, words=20, share=0.15, own=100),
}


def split(source: Source, count: int, seed: int) -> tuple[Any, np.ndarray, Any, np.ndarray, int]:
    """Return features and classes of training and of validation, and the number of features."""
    from minidl.data import terms
    from minidl.data.vectorizer import Tfidf, TfidfOptions
    from minidl.data.workers import Workers, available

    texts: list[str] = []
    labels = []
    for block, classes in source.blocks(count, seed):
        texts += block
        labels.append(classes)
    options = TfidfOptions()
    with Workers(available()) as workers:
        counted = terms.count_texts(texts, options.analyzer, workers=workers)
    rows = np.arange(count)
    train, rest = rows[rows % 5 != 0], rows[rows % 5 == 0]
    vocabulary = Tfidf.of_counts(counted, options, train)
    y = np.concatenate(labels)
    return (
        vocabulary.weighted(counted.taken(train)), y[train],
        vocabulary.weighted(counted.taken(rest)), y[rest], len(vocabulary),
    )  # fmt: skip


def linear(parts: tuple[Any, np.ndarray, Any, np.ndarray, int], kind: str) -> dict[str, Any]:
    from sklearn.linear_model import SGDClassifier
    from sklearn.svm import LinearSVC

    x, y, x_rest, y_rest, _ = parts
    start = time.perf_counter()
    classifier = (SGDClassifier(random_state=0, n_jobs=-1) if kind == "SGDClassifier" else LinearSVC()).fit(x, y)
    return {"kind": kind, "accuracy": classifier.score(x_rest, y_rest), "seconds": time.perf_counter() - start}


def network(
    parts: tuple[Any, np.ndarray, Any, np.ndarray, int], classes: int, settings: dict[str, Any], compilers: Compilers
) -> dict[str, Any]:
    """Train with these settings; return the accuracy after each epoch, and the seconds of training."""
    import minidl
    from minidl import models
    from minidl.compilation import rehearsal
    from minidl.data.batches import Batches
    from minidl.tensors import Tensor, default_device
    from minidl.training.loop.optimizers import make_optimizer, make_schedule
    from minidl.training.loop.targets import Classification
    from minidl.training.settings import text_defaults
    from minidl.training.tasks.text_settings import TrainText

    defaults = {name: f.default for name, f in TrainText.model_fields.items() if not f.is_required()}
    x, y, x_rest, y_rest, features = parts
    config = SimpleNamespace(**{**defaults, **text_defaults.text(len(y), classes), **settings})
    device = default_device()
    minidl.manual_seed(config.seed)
    model = models.TextMLP(features, classes, config.hidden, config.dropout)
    optimizer = make_optimizer(config, model)
    batches = Batches(x, y, config.batch_size, config.seed, device=device if device.type == "cuda" else None)
    schedule = make_schedule(config, optimizer, len(batches))
    targets = Classification([str(i) for i in range(classes)])
    loss = targets.criterion(model, y, config)

    def plain(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        value = loss(x, y)
        value.backward()
        optimizer.step()
        return value.data

    step = minidl.capture(plain, shapes=2) if device.type == "cuda" else plain
    if device.type == "cuda":
        some = [next(iter(batches.epoch(0, place))) for place in sorted({0, len(batches) - 1})]
        missing = rehearsal.missing(
            lambda: [rehearsal.rehearse(step, x.to(device), Tensor(y.to(device))) for x, y in some]
        )
        if missing:
            compilers.compile(missing)
    scores, started = [], time.perf_counter()
    for epoch in range(config.epochs):
        model.train()
        for x, y in batches.epoch(epoch):
            step(x.to(device), Tensor(y.to(device)))
            schedule.step()
        model.eval()
        scores.append(round(targets.judge(model, x_rest, y_rest).score, 4))
    return {"kind": "network", **settings, "accuracy": scores[-1], "epochs": scores,
            "seconds": time.perf_counter() - started}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", choices=[*SOURCES, []], metavar="SOURCE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--texts", type=int, nargs="+", default=[30_000])
    parser.add_argument("--seed", type=int, default=0, help="of the texts")
    parser.add_argument("--grid", nargs="*", default=[], metavar="NAME=VALUE,...")
    parser.add_argument("--linear", nargs="*", default=["SGDClassifier"], choices=["SGDClassifier", "LinearSVC"])
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name}: {source}" for name, source in SOURCES.items()))
    axes = []
    for axis in options.grid:
        name, _, values = axis.partition("=")
        axes.append([(name, json.loads(value)) for value in values.split(",")])
    with Compilers(["minidl.models", "minidl.optim"]) as compilers:
        for name, count in itertools.product(options.sources, options.texts):
            source, about = SOURCES[name], {"source": name, "texts": count}
            parts = split(source, count, options.seed)
            for kind in options.linear:
                print(json.dumps({**about, **linear(parts, kind)}), flush=True)
            for settings in itertools.product(*axes):
                print(json.dumps({**about, **network(parts, source.classes, dict(settings), compilers)}), flush=True)


if __name__ == "__main__":
    main()
