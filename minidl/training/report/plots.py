"""The plots of a run: curves, the confusion matrix, predictions against truth, mistakes, filters.

The first argument of a function with the decorator `plot` is the folder of a run, to which it writes PNG files.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minidl.common.console import one_line
from minidl.training.report import metrics
from minidl.training.report.plot_processes import Files, plot
from minidl.training.run_folder.provenance import SOFTWARE

_MOST_DRAWN = 40  # classes in a confusion matrix, if there are too many
_GREY = "#767676"  # readable on white and on black
_LEAST_FILTER = 5  # pixels of a side; smaller filters show nothing


def curves(
    folder: Path, history: Sequence[dict[str, Any]], chosen: int, title: str, loss: str, only_in_training: Sequence[str]
) -> None:
    """Draw loss.png (training and validation) and scores.png (validation scores) from the records of metrics.jsonl.

    `chosen` is the epoch whose weights the run keeps, `loss` names the loss, and `only_in_training` names the terms of
    the training loss that the validation loss lacks.
    """
    *first, last = only_in_training or [""]
    terms = f"{', '.join(first)} and {last}" if first else last
    training, validation = (f"training, with {terms}", "validation, without") if terms else ("training", "validation")
    losses = {
        training: [record["loss"] for record in history],
        validation: [record["validation"]["loss"] for record in history],
    }
    scores = {
        metrics.TITLES[name]: [record["validation"][name] for record in history]
        for name in ("accuracy", "macro_f1", "r2")
        if name in history[0]["validation"]
    }
    over_epochs(folder, "loss.png", losses, chosen, title, loss)
    over_epochs(folder, "scores.png", scores, chosen, title, "validation score")


@plot
def over_epochs(name: str, lines: dict[str, list[float | None]], chosen: int, title: str, y: str) -> Files:
    """Draw a line for each list of figures of the epochs, and mark the epoch that is kept."""
    figure, axes = _figure(6, 4.5)
    _over_epochs(axes, lines)
    axes.axvline(chosen, color="grey", linestyle=":", label=f"kept: epoch {chosen}")
    return {name: _labelled(figure, axes, title, "epoch", y)}


@plot
def gan_curves(history: Sequence[dict[str, Any]], title: str) -> Files:
    """Draw curves.png: both losses, and the discriminator's probabilities of being real, over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(_plain(f"GAN of {title}"), fontsize=11)
    columns = {
        "loss": {"loss_d": "discriminator", "loss_g": "generator"},
        "mean probability of being real": {"d_real": "D(x), real", "d_fake": "D(G(z)), generated"},
    }
    for axes, (y, lines) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        _over_epochs(axes, {label: [record[name] for record in history] for name, label in lines.items()})
        axes.set_xlabel("epoch")
        axes.set_ylabel(y)
        axes.legend()
    axes.axhline(0.5, color="grey", linestyle=":")
    axes.set_ylim(0.0, 1.0)
    return {"curves.png": _png(figure)}


@plot
def confusion(truth: np.ndarray, predicted: np.ndarray, labels: Sequence[str], title: str) -> Files:
    """Draw confusion.png: the share of each true class (row) by predicted class, with numbers up to 25 classes.

    Of more than 256 classes it shows those with the most mistakes, as truth or as prediction, then the most frequent.
    """
    if len(labels) > metrics.MOST_CLASSES:
        totals = metrics.counts(truth, predicted, len(labels))
        mistakes = totals.support + totals.predicted - 2 * totals.hits
        selection = np.sort(np.lexsort((-totals.support, -mistakes))[:_MOST_DRAWN])
        title += f"\nthe {len(selection)} classes of {len(labels):,} that are confused most often"
        rows = np.full(len(labels), -1)
        rows[selection] = np.arange(len(selection))
        is_shown = (rows[truth] >= 0) & (rows[predicted] >= 0)
        truth, predicted, labels = rows[truth[is_shown]], rows[predicted[is_shown]], [labels[i] for i in selection]
    counts = metrics.confusion_matrix(truth, predicted, len(labels))
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    size = min(16.0, 4.0 + 0.32 * len(labels))
    figure, axes = _figure(size + 1.5, size)
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04, label="share of the true class")
    names = [_plain(shorten(label)) for label in labels]
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(labels) <= 25:
        for i, j in np.argwhere(counts):
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=colour, fontsize=7)
    return {"confusion.png": _labelled(figure, axes, title, "predicted", "true")}


@plot
def reliability(parts: dict[str, list[dict[str, float]]], title: str) -> Files:
    """Draw reliability.png: the accuracy of predictions by their probability, for each of the parts.

    The area of a point is the number of its predictions.
    """
    figure, axes = _figure(5, 5)
    axes.plot([0, 1], [0, 1], color="grey", linewidth=1, linestyle=":")
    for name, entries in parts.items():
        most = max((entry["count"] for entry in entries), default=1)
        x, y = ([entry[key] for entry in entries] for key in ("probability", "accuracy"))
        axes.plot(x, y, linewidth=1)
        axes.scatter(x, y, s=[8 + 100 * entry["count"] / most for entry in entries], label=name, alpha=0.6)
    axes.set_xlim(0.0, 1.0)
    axes.set_ylim(0.0, 1.0)
    return {"reliability.png": _labelled(figure, axes, title, "probability of the predicted label", "accuracy")}


@plot
def predictions(truth: np.ndarray, predicted: np.ndarray, target: str, title: str) -> Files:
    """Draw predictions.png: predicted against true values of a regression."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(5, 5)
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.scatter(truth, predicted, s=12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.tick_params(axis="x", rotation=30)
    axes.tick_params(colors=_GREY)
    axes.spines[:].set_color(_GREY)
    figure.patch.set_alpha(0.0)
    axes.patch.set_alpha(0.0)
    name = shorten(target)
    return {"predictions.png": _labelled(figure, axes, title, f"true {name}", f"predicted {name}", _GREY)}


def mistakes(
    folder: Path, pixels: np.ndarray, truth: np.ndarray, predicted: np.ndarray, confidence: np.ndarray,
    labels: Sequence[str], title: str, maps: Callable[[np.ndarray], np.ndarray | None] | None = None,
) -> None:  # fmt: skip
    """Draw mistakes.png: up to 40 wrongly classified pictures of uint8 [N, H, W, C], the most confident first.

    `confidence` [N] are the probabilities of the predictions. The caption of each picture has the prediction, its
    probability and the truth. `maps` returns the class activation maps of pictures with these indices, float32
    [n, h, w], for activations.png, or None.
    """
    wrong = np.flatnonzero(predicted != truth)
    rows = wrong[np.argsort(-confidence[wrong], kind="stable")][:40]
    names = [_plain(shorten(label)[:14]) for label in labels]
    captions = [f"{names[predicted[i]]} {confidence[i]:.0%}\ntrue: {names[truth[i]]}" for i in rows]
    empty = f"no mistakes in {len(truth)} predictions"
    title = f"{title}; the most confident of {len(wrong)} mistakes"
    _captioned(folder, "mistakes.png", pixels[rows], captions, title, empty)
    activations = maps(rows) if maps is not None and len(rows) else None
    if activations is not None:
        title += "; class activation maps of the predicted label"
        _captioned(folder, "activations.png", pixels[rows], captions, title, empty, activations)


@plot
def _captioned(
    name: str, pixels: np.ndarray, captions: Sequence[str], title: str, empty: str, maps: np.ndarray | None = None
) -> Files:
    """Draw pictures uint8 [N, H, W, C] with captions, and maps [N, h, w] over them, each scaled to its own range.

    `empty` is the text for no pictures.
    """
    columns = 8
    figure, grid = _grid(max(1, -(-len(captions) // columns)), columns, 1.4, 1.8, title)
    for index, caption in enumerate(captions):
        axes = grid[index // columns][index % columns]
        _show(axes, pixels[index])
        if maps is not None:
            height, width = pixels.shape[1:3]
            extent = (-0.5, width - 0.5, height - 0.5, -0.5)
            axes.imshow(maps[index], cmap="inferno", alpha=0.5, interpolation="bilinear", extent=extent)
        axes.set_title(caption, fontsize=7, color=_GREY)
    if not captions:
        grid[0][0].text(0.0, 0.5, empty, color=_GREY)
    return {name: _png(figure)}


@plot
def filters(weight: np.ndarray, title: str) -> Files:
    """Draw filters.png: the filters of the first layer, [M, C, R, S], in colour if C is 3, else the channels' mean.

    Grey is 0; each filter is scaled by its largest absolute value. Filters below 5x5 are not drawn.
    """
    if min(weight.shape[2:]) < _LEAST_FILTER:
        return {}
    columns = 8
    pictures = weight.astype(np.float32).transpose(0, 2, 3, 1)
    if pictures.shape[-1] != 3:
        pictures = pictures.mean(axis=-1, keepdims=True)
    figure, grid = _grid(-(-len(pictures) // columns), columns, 0.9, 0.9, f"{title}; filters of the first layer")
    for index, values in enumerate(pictures):
        scaled = 127.5 + 127.5 * values / max(float(np.abs(values).max()), 1e-12)
        _show(grid[index // columns][index % columns], scaled.astype(np.uint8))
    return {"filters.png": _png(figure)}


def _grid(rows: int, columns: int, width: float, height: float, title: str) -> tuple[Any, Any]:
    """Return a figure and its empty axes [rows][columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    figure.suptitle(_plain(title), fontsize=11, color=_GREY)
    figure.patch.set_alpha(0.0)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    return figure, grid


def _show(axes: Any, pixels: np.ndarray) -> None:
    """Show pixels uint8 [H, W, C] without smoothing."""
    if pixels.shape[-1] == 1:
        axes.imshow(pixels[:, :, 0], cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    else:
        axes.imshow(pixels, interpolation="nearest")


def shorten(name: str) -> str:
    """Return a name as a label of at most 24 characters."""
    line = one_line(" ".join(name.split()))
    return line if len(line) <= 24 else line[:23] + "…"


def _over_epochs(axes: Any, lines: dict[str, list[float | None]]) -> None:
    """Draw a line of values from epoch 1 on for each name; None leaves a gap."""
    from matplotlib.ticker import MaxNLocator

    for name, values in lines.items():
        numbers = [float("nan") if value is None else value for value in values]
        axes.plot(range(1, len(numbers) + 1), numbers, label=name, marker=".")
        axes.set_xlim(0.5, len(numbers) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _plain(text: str) -> str:
    """Escape dollar signs, which would begin a formula."""
    return text.replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _labelled(figure: Any, axes: Any, title: str, x: str, y: str, colour: str = "black") -> bytes:
    axes.set_title(_plain(title), fontsize=11, color=colour)
    axes.set_xlabel(_plain(x), color=colour)
    axes.set_ylabel(_plain(y), color=colour)
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center")
    return _png(figure)


def _png(figure: Any) -> bytes:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(picture, format="png", dpi=120, metadata={"Software": SOFTWARE})
    return picture.getvalue()
