"""Pictures of a run: curves, the confusion matrix, predictions against truth, mistakes, filters.

They need the plots extra.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from minidl.training import files

MISSING = "no plots: matplotlib is not installed; pip install 'minidl[plots]' brings it"


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def curves(folder: Path, history: Sequence[dict[str, Any]]) -> None:
    """loss.png (training and validation) and scores.png (validation scores) from the records of metrics.jsonl."""
    epochs = [record["epoch"] for record in history]
    figure, axes = _figure(6, 4)
    axes.plot(epochs, _column([record["loss"] for record in history]), label="training (as it is trained)")
    axes.plot(epochs, _column([record["validation"]["loss"] for record in history]), label="validation")
    _finish(folder / "loss.png", figure, axes, "epoch", "loss")
    figure, axes = _figure(6, 4)
    for name, title in _TITLES.items():
        if name in history[0]["validation"]:
            axes.plot(epochs, _column([record["validation"][name] for record in history]), label=title)
    _finish(folder / "scores.png", figure, axes, "epoch", "validation score")


def confusion(folder: Path, matrix: Sequence[Sequence[int]], labels: Sequence[str]) -> None:
    """confusion.png: the share of each true class (row) by predicted class; numbers are shown up to 25 classes."""
    counts = np.asarray(matrix)
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    size = min(16.0, 3.0 + 0.35 * len(labels))
    figure, axes = _figure(size, size)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    names = [_short(label, 24) for label in labels]
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(labels) <= 25:
        for i, j in np.argwhere(counts):
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=colour, fontsize=7)
    _finish(folder / "confusion.png", figure, axes, "predicted", "true")


def predictions(folder: Path, truth: np.ndarray, predicted: np.ndarray, target: str) -> None:
    """predictions.png: predicted against true values of a regression."""
    figure, axes = _figure(5, 5)
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.scatter(truth, predicted, s=12)
    _finish(folder / "predictions.png", figure, axes, f"true {target}", f"predicted {target}")


def mistakes(
    folder: Path, pixels: np.ndarray, truth: np.ndarray, probabilities: np.ndarray, labels: Sequence[str]
) -> None:
    """mistakes.png: up to 40 wrongly classified pictures of uint8 [N, H, W, C], the surest first.

    `probabilities` [N, classes] are the model's. Above each picture stand prediction, its probability, and truth.
    """
    predicted = probabilities.argmax(1)
    wrong = np.flatnonzero(predicted != truth)
    wrong = wrong[np.argsort(-probabilities[wrong, predicted[wrong]], kind="stable")][:40]
    columns = 8
    rows = max(1, -(-len(wrong) // columns))
    figure, grid = _grid(rows, columns, 1.4, 1.8)
    for place, index in enumerate(wrong):
        axes = grid[place // columns][place % columns]
        _show(axes, pixels[index])
        guess = predicted[index]
        title = f"{_short(labels[guess], 12)} {probabilities[index, guess]:.0%}\ntrue: {_short(labels[truth[index]], 12)}"
        axes.set_title(title, fontsize=7)
    if not len(wrong):
        grid[0][0].text(0.0, 0.5, f"none of {len(truth)} is wrong")
    _write(folder / "mistakes.png", figure)


def filters(folder: Path, weight: np.ndarray) -> None:
    """filters.png: the filters of the first layer, [M, C, R, S]; colour where C is 3, else the mean of its channels.

    Grey is 0; each filter is scaled by its own greatest value.
    """
    columns = 8
    shown = weight.astype(np.float32).transpose(0, 2, 3, 1)
    if shown.shape[-1] != 3:
        shown = shown.mean(axis=-1, keepdims=True)
    figure, grid = _grid(-(-len(shown) // columns), columns, 0.9, 0.9)
    for place, values in enumerate(shown):
        scaled = 127.5 + 127.5 * values / max(float(np.abs(values).max()), 1e-12)
        _show(grid[place // columns][place % columns], scaled.astype(np.uint8))
    _write(folder / "filters.png", figure)


def _grid(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """Empty axes [rows][columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    return figure, grid


def _show(axes: Any, pixels: np.ndarray) -> None:
    """Pixels uint8 [H, W, C] without smoothing."""
    if pixels.shape[-1] == 1:
        axes.imshow(pixels[:, :, 0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    else:
        axes.imshow(pixels, interpolation="nearest")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


_TITLES = {"accuracy": "accuracy", "macro_f1": "macro-F1", "r2": "R2"}


def _column(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(path: Path, figure: Any, axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    _write(path, figure)


def _write(path: Path, figure: Any) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    files.write_bytes(path, picture.getvalue())
