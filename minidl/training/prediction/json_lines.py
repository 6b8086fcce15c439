"""Format the answers of a classification as lines of JSON, many of them in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from minidl.data.parsing import encoded
from minidl.data.workers import Message, Workers

_CHUNK = 4096  # rows of a worker's job


def best(shares: np.ndarray, top: int) -> Iterator[list[tuple[int, float]]]:
    """Yield the `top` most probable classes of each row of probabilities [N, C], each with its rounded probability."""
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    values = np.take_along_axis(shares, order, axis=1).astype(np.float64)
    for classes, numbers in zip(order.tolist(), values.tolist(), strict=True):
        yield [(i, round(number, 6)) for i, number in zip(classes, numbers, strict=True)]


def lines(shares: np.ndarray, known_terms: np.ndarray, labels: Sequence[str], top: int, reject: float) -> str:
    """Return a line per row of probabilities float32 [N, C]: label, probability, `top` best labels, known terms.

    Below the probability `reject` the label is null.
    """
    prefixes = [f'"label": {encoded(label)}, "probability": ' for label in labels]
    rows = []
    for ranked, count in zip(best(shares, top), known_terms.tolist(), strict=True):
        texts = [f"{prefixes[i]}{number!r}" for i, number in ranked]
        label = texts[0] if ranked[0][1] >= reject else f'"label": null, "probability": {ranked[0][1]!r}'
        rows.append(f'{{{label}, "top": [{{{"}, {".join(texts)}}}], "known_terms": {count}}}\n')
    return "".join(rows)


def import_module(message: Message) -> Message:
    """Do nothing, as a worker's first job: this imports the module, and numpy, in a tenth of a second."""
    return Message({})


def lines_of_message(message: Message) -> Message:
    """Return `lines`, as a worker's job."""
    values = message.values
    known_terms = np.frombuffer(message.buffers[1], dtype=np.int64)
    shares = np.frombuffer(message.buffers[0], dtype=np.float32).reshape(len(known_terms), -1)
    return Message({}, [lines(shares, known_terms, values["labels"], values["top"], values["reject"]).encode()])


def by_workers(
    shares: np.ndarray, known_terms: np.ndarray, labels: Sequence[str], top: int, reject: float, workers: Workers
) -> Iterator[str]:
    """Yield `lines` in parts, in order."""
    values = {"labels": list(labels), "top": top, "reject": reject}
    if len(shares) <= _CHUNK or workers.count == 1:
        yield lines(shares, known_terms, labels, top, reject)
        return
    parts = (slice(start, start + _CHUNK) for start in range(0, len(shares), _CHUNK))
    messages = (Message(values, [np.ascontiguousarray(shares[part]), known_terms[part]]) for part in parts)
    for answer in workers.map(lines_of_message, messages):
        yield str(answer.buffers[0], "utf-8")
