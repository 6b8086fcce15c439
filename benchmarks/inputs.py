"""Inputs for the benchmark of commands, generated from a seed on all processors."""

from __future__ import annotations

import csv
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Pool
from pathlib import Path

import numpy as np

_LETTERS = "etaoinshrdlu"
_BLOCK = 10_000


@dataclass(frozen=True)
class Source:
    """Texts whose words follow Zipf's law, a share of them from the `own` words of the text's class.

    `noise` is the share of texts whose label is drawn anew; lengths lie within `spread` of `words`, as a share of it.
    """

    classes: int = 8
    words: int = 45
    vocabulary: int = 60_000
    own: int = 400
    share: float = 0.12
    noise: float = 0.0
    spread: float = 0.0

    def blocks(self, count: int, seed: int = 0) -> Iterator[tuple[list[str], np.ndarray]]:
        """Yield texts and their int64 labels in blocks."""
        tasks = [
            (self, seed, number, min(_BLOCK, count - start)) for number, start in enumerate(range(0, count, _BLOCK))
        ]
        if len(tasks) == 1:
            yield _block(*tasks[0])
            return
        with Pool() as pool:
            yield from pool.imap(_apply, tasks)


def texts(path: Path, count: int, source: Source | None = None, seed: int = 0) -> Path:
    """A CSV file of texts: 45 words each of 60,000 by Zipf's law, 12 % of them from the 400 of the text's class."""
    with path.open("w", newline="", encoding="utf-8") as file:
        file.write("text,label\r\n")
        for block, labels in (source or Source()).blocks(count, seed):
            part = io.StringIO()
            csv.writer(part).writerows((text, f"class {c}") for text, c in zip(block, labels.tolist(), strict=True))
            file.write(part.getvalue())
    return path


@functools.lru_cache(1)
def _words(source: Source, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the vocabulary, the cumulative shares of its words, and the indices of each class's words."""
    words = np.array([_word(i) for i in range(source.vocabulary)], dtype=object)
    shares = 1 / np.arange(1, source.vocabulary + 1)
    generator = np.random.default_rng([seed, 0])
    class_words = np.stack([generator.permutation(source.vocabulary)[: source.own] for _ in range(source.classes)])
    return words, np.cumsum(shares / shares.sum()), class_words


def _apply(task: tuple[Source, int, int, int]) -> tuple[list[str], np.ndarray]:
    return _block(*task)


def _block(source: Source, seed: int, number: int, rows: int) -> tuple[list[str], np.ndarray]:
    words, ends, class_words = _words(source, seed)
    rng = np.random.default_rng([seed, 1, number])
    shape = (rows, source.words)
    label = rng.integers(0, source.classes, rows)
    index = np.searchsorted(ends, rng.random(shape)).clip(max=source.vocabulary - 1)
    typical = class_words[label[:, None], (rng.pareto(1.0, shape) * 20).astype(np.int64).clip(max=source.own - 1)]
    chosen = words[np.where(rng.random(shape) < source.share, typical, index)]
    low = max(1, round(source.words * (1 - source.spread)))
    lengths = rng.integers(low, source.words + 1, rows) if low < source.words else np.full(rows, source.words)
    noisy = np.where(rng.random(rows) < source.noise, rng.integers(0, source.classes, rows), label)
    return [" ".join(row[:length]) for row, length in zip(chosen, lengths.tolist(), strict=True)], noisy


def photos(folder: Path, count: int, classes: int = 10, size: int = 256, seed: int = 0) -> Path:
    """A folder of JPEG files per class: blocks of colours under a wave whose direction is the class."""
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
    with Pool() as pool:
        pool.starmap(_photo, [(folder, i, classes, size, seed) for i in range(count)], chunksize=16)
    return folder


def _photo(folder: Path, number: int, classes: int, size: int, seed: int) -> None:
    from PIL import Image

    draw = np.random.default_rng([seed, number])
    across = np.arange(size, dtype=np.float32)
    label = number % classes
    angle = np.pi * label / classes
    wave = np.cos((across[:, None] * np.sin(angle) + across[None, :] * np.cos(angle)) / 6 + draw.random() * 6)
    ground = draw.integers(40, 216, (8, 8, 3)).repeat(size // 8, axis=0).repeat(size // 8, axis=1)
    pixels = (ground + 36 * wave[:, :, None]).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(folder / f"class {label}" / f"{number:06d}.jpg", quality=85)


def _word(number: int) -> str:
    """Return a word of letters that is unique to a number."""
    number += len(_LETTERS)
    word = ""
    while number:
        number, letter = divmod(number, len(_LETTERS))
        word += _LETTERS[letter]
    return word
