"""Time fastText and scikit-learn on the rows of minidl's split: python -m benchmarks.text_peers FILE EPOCHS [--fast]

The last line is JSON: for each peer its name, the seconds from the file to the last answer, and its accuracy. The time
includes reading, but not the split, which is minidl's. With --fast only fastText runs.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from minidl.data import load_text

Rows = list[tuple[str, str]]


def split(path: Path) -> tuple[set[str], set[str]]:
    """Return the texts of training and test."""
    dataset = load_text(path)
    return set(dataset.train.texts), set(dataset.test.texts)


def read(path: Path) -> Rows:
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.reader(file)
        next(rows)
        return [(text, label) for text, label in rows]


def linear(path: Path, training: set[str], testing: set[str]) -> dict[str, Any]:
    """Time TF-IDF with minidl's settings, and a linear classifier trained by SGD."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import SGDClassifier

    started = time.perf_counter()
    rows = read(path)
    train = [row for row in rows if row[0] in training]
    test = [row for row in rows if row[0] in testing]
    vectorizer = TfidfVectorizer(min_df=2, max_features=20_000, sublinear_tf=True)
    x = vectorizer.fit_transform([text for text, _ in train])
    machine = SGDClassifier(random_state=0, n_jobs=-1).fit(x, [label for _, label in train])
    accuracy = machine.score(vectorizer.transform([text for text, _ in test]), [label for _, label in test])
    return {"name": "TF-IDF and SGDClassifier", "seconds": time.perf_counter() - started, "accuracy": accuracy}


def fasttext(path: Path, training: set[str], testing: set[str], epochs: int) -> dict[str, Any] | None:
    """Time fastText with its defaults on all processors; return None if it is not installed."""
    try:
        import fasttext as library
    except ImportError:
        return None
    started = time.perf_counter()
    rows = read(path)
    with tempfile.TemporaryDirectory() as folder:
        files = {"train": training, "test": testing}
        for name, texts in files.items():
            with (Path(folder) / name).open("w", encoding="utf-8") as file:
                file.writelines(f"__label__{c.replace(' ', '_')} {text}\n" for text, c in rows if text in texts)
        model = library.train_supervised(
            str(Path(folder) / "train"), epoch=epochs, thread=len(os.sched_getaffinity(0)), verbose=0
        )
        accuracy = model.test(str(Path(folder) / "test"))[1]
    return {"name": "fastText", "seconds": time.perf_counter() - started, "accuracy": accuracy}


def main() -> None:
    path, epochs = Path(sys.argv[1]), int(sys.argv[2])
    training, testing = split(path)
    peers = [fasttext(path, training, testing, epochs)]
    if "--fast" not in sys.argv:
        peers.append(linear(path, training, testing))
    print(json.dumps({peer["name"]: peer for peer in peers if peer is not None}))


if __name__ == "__main__":
    main()
