"""Tiny data for trials, and the flags to train on it."""

import numpy as np
from PIL import Image

WORDS = {"crude": "oil barrel opec refinery tanker well", "grain": "wheat corn harvest bushel farmer flour"}
SHARED = "the of and a in to was said for on that it by with from year"
TEXTS, PICTURES = 100, 12  # PICTURES of each class


def write(folder):
    """Make the data in `folder`; the flags of each trainer."""
    draw = np.random.default_rng(0)
    labels = sorted(WORDS)
    lines = ["text,label"]
    for i in range(TEXTS):
        label = labels[i % len(labels)]
        words = [*draw.choice(WORDS[label].split(), 2), *draw.choice(SHARED.split(), 5), f"word{i}"]
        lines.append(f"{' '.join(draw.permutation(words))},{label}")
    texts = folder / "texts.csv"
    texts.write_text("\n".join(lines) + "\n")
    pictures = folder / "pictures"
    for label in ("across", "down"):
        (pictures / label).mkdir(parents=True)
        for i in range(PICTURES):
            pixels = draw.integers(0, 80, (8, 8), dtype=np.uint8)
            line = pixels[i % 8] if label == "across" else pixels[:, i % 8]
            line += 150
            Image.fromarray(pixels).save(pictures / label / f"{i}.png")
    shared = ["--data", str(pictures), "--size", "8"]
    # Rates that move the weights, dropout and a smaller last batch, so that a step too few or many is seen.
    return {
        "text": [
            "--data", str(texts), "--epochs", "3", "--batch-size", "16", "--hidden", "8", "--lr", "0.02",
            "--dropout", "0.3",
        ],
        "images": [*shared, "--epochs", "2", "--batch-size", "6", "--shift", "1", "--dropout", "0.2"],
        "gan": [*shared, "--epochs", "2", "--batch-size", "6", "--width", "4", "--latent", "5", "--lr", "0.01"],
    }  # fmt: skip
