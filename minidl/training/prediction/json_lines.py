"""Answers of a classification as lines of JSON; of many, by several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from minidl.data.parsing import encoded
from minidl.data.workers import Message, Workers

_TOGETHER = 4096  # rows that a worker gets at a time


def best(shares: np.ndarray, top: int) -> Iterator[list[tuple[int, float]]]:
    """The `top` most probable classes of each row of probabilities [N, C], with these to six digits."""
    order = np.argsort(-shares, axis=1, kind="stable")[:, :top]
    values = np.take_along_axis(shares, order, axis=1).astype(np.float64)
    for places, numbers in zip(order.tolist(), values.tolist(), strict=True):
        yield [(i, round(number, 6)) for i, number in zip(places, numbers, strict=True)]


def lines(shares: np.ndarray, known: np.ndarray, labels: Sequence[str], top: int) -> str:
    """A line for each row of probabilities float32 [N, C]: label, probability, the `top` best and its known terms."""
    begun = [f'"label": {encoded(label)}, "probability": ' for label in labels]
    found = []
    for ranked, count in zip(best(shares, top), known.tolist(), strict=True):
        texts = [f"{begun[i]}{number!r}" for i, number in ranked]
        found.append(f'{{{texts[0]}, "top": [{{{"}, {".join(texts)}}}], "known_terms": {count}}}\n')
    return "".join(found)


def nothing(message: Message) -> Message:
    """A worker's job, after which it has imported this module, and numpy: a tenth of a second."""
    return Message({})


def made(message: Message) -> Message:
    """A worker's job: `lines`."""
    values = message.values
    known = np.frombuffer(message.buffers[1], dtype=np.int64)
    shares = np.frombuffer(message.buffers[0], dtype=np.float32).reshape(len(known), -1)
    return Message({}, [lines(shares, known, values["labels"], values["top"]).encode()])


def by_workers(
    shares: np.ndarray, known: np.ndarray, labels: Sequence[str], top: int, workers: Workers
) -> Iterator[str]:
    """`lines` in parts, in order."""
    values = {"labels": list(labels), "top": top}
    if len(shares) <= _TOGETHER or workers.count == 1:
        yield lines(shares, known, labels, top)
        return
    parts = (slice(start, start + _TOGETHER) for start in range(0, len(shares), _TOGETHER))
    asked = (Message(values, [np.ascontiguousarray(shares[part]), known[part]]) for part in parts)
    for answer in workers.map(made, asked):
        yield str(answer.buffers[0], "utf-8")
