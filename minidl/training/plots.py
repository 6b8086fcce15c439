"""Pictures of a run: curves, the confusion matrix, predictions against truth, mistakes, filters.

They need the plots extra.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from minidl.training import files, metrics

_MOST_DRAWN = 40  # of the classes in a confusion matrix, where there are too many
MISSING = "no plots: matplotlib is not installed; install it with pip install 'minidl[plots]'"


def available() -> bool:
    """Whether matplotlib is installed."""
    if find_spec("matplotlib") is None:
        return False
    if "MPLBACKEND" in os.environ and "matplotlib" not in sys.modules:
        # matplotlib cannot be imported with a backend that it does not know; pictures need none.
        backend = os.environ.pop("MPLBACKEND")
        import matplotlib as mpl

        with contextlib.suppress(ValueError):
            mpl.rcParams["backend"] = backend
        os.environ["MPLBACKEND"] = backend
    return True


def curves(
    folder: Path, history: Sequence[dict[str, Any]], kept: int, title: str, loss: str, only_in_training: Sequence[str]
) -> None:
    """loss.png (training and validation) and scores.png (validation scores) from the records of metrics.jsonl.

    `kept` is the epoch whose weights the run keeps, `loss` names the loss, and `only_in_training` names the terms of
    the training loss that the validation loss lacks.
    """
    *first, last = only_in_training or [""]
    what = f"{', '.join(first)} and {last}" if first else last
    training, validation = (f"training, with {what}", "validation, without") if what else ("training", "validation")
    losses = {
        training: [record["loss"] for record in history],
        validation: [record["validation"]["loss"] for record in history],
    }
    scores = {
        metrics.TITLES[name]: [record["validation"][name] for record in history]
        for name in ("accuracy", "macro_f1", "r2")
        if name in history[0]["validation"]
    }
    for name, y, lines in (("loss.png", loss, losses), ("scores.png", "validation score", scores)):
        figure, axes = _figure(6, 4.5)
        _over_epochs(axes, lines)
        axes.axvline(kept, color="grey", linestyle=":", label=f"kept: epoch {kept}")
        _finish(folder / name, figure, axes, title, "epoch", y)


def gan_curves(folder: Path, history: Sequence[dict[str, Any]], title: str) -> None:
    """curves.png: both losses, and the probabilities of being real that the discriminator gives, over the epochs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    figure.suptitle(_plain(f"GAN of {title}"), fontsize=11)
    columns = {
        "loss": {"loss_d": "discriminator", "loss_g": "generator"},
        "mean probability of being real": {"d_real": "D(x), real", "d_fake": "D(G(z)), made"},
    }
    for axes, (y, lines) in zip(figure.subplots(1, len(columns)), columns.items(), strict=True):
        _over_epochs(axes, {label: [record[name] for record in history] for name, label in lines.items()})
        axes.set_xlabel("epoch")
        axes.set_ylabel(y)
        axes.legend()
    axes.axhline(0.5, color="grey", linestyle=":")
    axes.set_ylim(0.0, 1.0)
    _write(folder / "curves.png", figure)


def confusion(folder: Path, truth: np.ndarray, predicted: np.ndarray, labels: Sequence[str], title: str) -> None:
    """confusion.png: the share of each true class (row) by predicted class; numbers are shown up to 25 classes.

    Of more than 256 classes it shows those with the most mistakes, as truth or as answer, or without any the most
    frequent.
    """
    if len(labels) > metrics.MOST_CLASSES:
        found = metrics.counts(truth, predicted, len(labels))
        wrong = found.support + found.predicted - 2 * found.hits
        chosen = np.sort(np.lexsort((-found.support, -wrong))[:_MOST_DRAWN])
        title += f"\nthe {len(chosen)} of {len(labels):,} classes that are most confused, among themselves"
        place = np.full(len(labels), -1)
        place[chosen] = np.arange(len(chosen))
        among = (place[truth] >= 0) & (place[predicted] >= 0)
        truth, predicted, labels = place[truth[among]], place[predicted[among]], [labels[i] for i in chosen]
    counts = metrics.confusion_matrix(truth, predicted, len(labels))
    shares = counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
    size = min(16.0, 4.0 + 0.32 * len(labels))
    figure, axes = _figure(size + 1.5, size)
    image = axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    figure.colorbar(image, ax=axes, fraction=0.046, pad=0.04, label="share of the row")
    names = [_plain(shorten(label)) for label in labels]
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    if len(labels) <= 25:
        for i, j in np.argwhere(counts):
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=colour, fontsize=7)
    _finish(folder / "confusion.png", figure, axes, title, "predicted", "true")


def predictions(folder: Path, truth: np.ndarray, predicted: np.ndarray, target: str, title: str) -> None:
    """predictions.png: predicted against true values of a regression."""
    from matplotlib.ticker import MaxNLocator

    figure, axes = _figure(5, 5)
    low, high = float(min(truth.min(), predicted.min())), float(max(truth.max(), predicted.max()))
    axes.plot([low, high], [low, high], color="grey", linewidth=1)
    axes.scatter(truth, predicted, s=12)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.tick_params(axis="x", rotation=30)
    name = shorten(target)
    _finish(folder / "predictions.png", figure, axes, title, f"true {name}", f"predicted {name}")


def mistakes(
    folder: Path,
    pixels: np.ndarray,
    truth: np.ndarray,
    predicted: np.ndarray,
    sure: np.ndarray,
    labels: Sequence[str],
    title: str,
) -> None:
    """mistakes.png: up to 40 wrongly classified pictures of uint8 [N, H, W, C], the most confident first.

    `sure` [N] are the probabilities of the predictions. Above each picture stand prediction, its probability, and
    truth.
    """
    wrong = np.flatnonzero(predicted != truth)
    surest = wrong[np.argsort(-sure[wrong], kind="stable")][:40]
    columns = 8
    rows = max(1, -(-len(surest) // columns))
    figure, grid = _grid(rows, columns, 1.4, 1.8, f"{title}; the most confident of {len(wrong)} mistakes")
    for place, index in enumerate(surest):
        axes = grid[place // columns][place % columns]
        _show(axes, pixels[index])
        guess = predicted[index]
        said, true = (_plain(shorten(labels[i])[:14]) for i in (guess, truth[index]))
        axes.set_title(f"{said} {sure[index]:.0%}\ntrue: {true}", fontsize=7)
    if not len(wrong):
        grid[0][0].text(0.0, 0.5, f"none of {len(truth)} is wrong")
    _write(folder / "mistakes.png", figure)


def filters(folder: Path, weight: np.ndarray, title: str) -> None:
    """filters.png: the filters of the first layer, [M, C, R, S]; colour where C is 3, else the mean of its channels.

    Grey is 0; each filter is scaled by its own greatest value.
    """
    columns = 8
    shown = weight.astype(np.float32).transpose(0, 2, 3, 1)
    if shown.shape[-1] != 3:
        shown = shown.mean(axis=-1, keepdims=True)
    figure, grid = _grid(-(-len(shown) // columns), columns, 0.9, 0.9, f"{title}; filters of the first layer")
    for place, values in enumerate(shown):
        scaled = 127.5 + 127.5 * values / max(float(np.abs(values).max()), 1e-12)
        _show(grid[place // columns][place % columns], scaled.astype(np.uint8))
    _write(folder / "filters.png", figure)


def _grid(rows: int, columns: int, width: float, height: float, title: str) -> tuple[Any, Any]:
    """Empty axes [rows][columns]."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows + 0.5), layout="constrained")
    figure.suptitle(_plain(title), fontsize=11)
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


def shorten(name: str) -> str:
    """A name as a label, of at most 24 characters."""
    line = " ".join(name.split())
    line = line if line.isprintable() else ascii(line)[1:-1]
    return line if len(line) <= 24 else line[:23] + "…"


def _over_epochs(axes: Any, lines: dict[str, list[float | None]]) -> None:
    """A line of values from epoch 1 on for each name; None leaves a gap."""
    from matplotlib.ticker import MaxNLocator

    for name, values in lines.items():
        known = [float("nan") if value is None else value for value in values]
        axes.plot(range(1, len(known) + 1), known, label=name, marker=".")
        axes.set_xlim(0.5, len(known) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _plain(text: str) -> str:
    """Text with dollar signs escaped, which would begin a formula."""
    return text.replace("$", r"\$")


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _finish(path: Path, figure: Any, axes: Any, title: str, x: str, y: str) -> None:
    axes.set_title(_plain(title), fontsize=11)
    axes.set_xlabel(_plain(x))
    axes.set_ylabel(_plain(y))
    if axes.get_legend_handles_labels()[1]:
        figure.legend(loc="outside lower center")
    _write(path, figure)


def _write(path: Path, figure: Any) -> None:
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # Characters missing from the font are drawn as boxes; a warning for each would not help.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(picture, format="png", dpi=120)
    files.write_bytes(path, picture.getvalue())
