"""Inputs of the benchmark of commands, made from a seed."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

CLASSES, WORDS, VOCABULARY, OWN, SHARE = 8, 45, 60_000, 400, 0.12
_LETTERS = "etaoinshrdlu"
_TOGETHER = 10_000


def texts(path: Path, count: int, seed: int = 0) -> Path:
    """A CSV file of texts: 45 words each of 60,000 by Zipf's law, 12 % of them from the 400 of the text's class."""
    draw = np.random.default_rng(seed)
    words = np.array([_word(i) for i in range(VOCABULARY)], dtype=object)
    shares = 1 / np.arange(1, VOCABULARY + 1)
    ends = np.cumsum(shares / shares.sum())
    own = np.stack([draw.permutation(VOCABULARY)[:OWN] for _ in range(CLASSES)])
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for start in range(0, count, _TOGETHER):
            rows = min(_TOGETHER, count - start)
            label = draw.integers(0, CLASSES, rows)
            index = np.searchsorted(ends, draw.random((rows, WORDS))).clip(max=VOCABULARY - 1)
            mine = own[label[:, None], (draw.pareto(1.0, (rows, WORDS)) * 20).astype(np.int64).clip(max=OWN - 1)]
            chosen = words[np.where(draw.random((rows, WORDS)) < SHARE, mine, index)]
            writer.writerows((" ".join(row), f"class {c}") for row, c in zip(chosen, label.tolist(), strict=True))
    return path


def photos(folder: Path, count: int, classes: int = 10, size: int = 256, seed: int = 0) -> Path:
    """A folder of JPEG files per class: blocks of colours under a wave whose direction is the class."""
    from PIL import Image

    draw = np.random.default_rng(seed)
    across = np.arange(size, dtype=np.float32)
    for label in range(classes):
        (folder / f"class {label}").mkdir(parents=True, exist_ok=True)
    for i in range(count):
        label = i % classes
        angle = np.pi * label / classes
        wave = np.cos((across[:, None] * np.sin(angle) + across[None, :] * np.cos(angle)) / 6 + draw.random() * 6)
        ground = draw.integers(40, 216, (8, 8, 3)).repeat(size // 8, axis=0).repeat(size // 8, axis=1)
        pixels = (ground + 36 * wave[:, :, None]).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"class {label}" / f"{i:06d}.jpg", quality=85)
    return folder


def _word(number: int) -> str:
    """A word of letters for a number; no two are equal."""
    number += len(_LETTERS)
    found = ""
    while number:
        number, letter = divmod(number, len(_LETTERS))
        found += _LETTERS[letter]
    return found
