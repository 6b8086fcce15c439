"""Terms of texts, and how often each text has them, counted in chunks that workers share."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from minidl.data.analyzers import Analyzer
from minidl.data.records import DataError
from minidl.data.workers import Message, Workers

if TYPE_CHECKING:
    import numpy as np

_DIGEST = 16  # bytes: among a billion terms two have the same with a probability of 1e-21
_CHUNK = 2**19  # characters of texts that a worker gets at a time: 60 ms of work


@dataclass(frozen=True)
class Counted:
    """Counts of terms: text i has `sizes[i]` different terms, and with those of the texts before it they are `ids` into
    `terms`, which occur `counts` times. The terms of a text are in no order."""

    terms: list[str]
    sizes: np.ndarray  # int32 [texts]
    ids: np.ndarray  # int32 [entries]
    counts: np.ndarray  # uint16 [entries], int32 where that is too short

    def __len__(self) -> int:
        return len(self.sizes)

    def parts(self, size: int) -> Iterator[Counted]:
        """The texts, `size` at a time, at least one part; they share memory with the whole."""
        import numpy as np

        starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        for first in range(0, max(1, len(self)), size):
            last = min(first + size, len(self))
            own = slice(starts[first], starts[last])
            yield Counted(self.terms, self.sizes[first:last], self.ids[own], self.counts[own])

    def select(self, rows: np.ndarray) -> Counted:
        """Return the texts with these indices."""
        import numpy as np
        from scipy.sparse import csr_matrix

        starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        whole = csr_matrix((self.counts, self.ids, starts), shape=(len(self), max(1, len(self.terms))), copy=False)
        part = whole[rows]
        return Counted(self.terms, np.diff(part.indptr).astype(np.int32), part.indices, part.data)


class TermCounter:
    """Counts texts one after another. Terms get the next number when they first occur; with a `vocabulary` they have
    its numbers, and others are left out."""

    def __init__(self, analyzer: Analyzer, vocabulary: dict[str, int] | None = None) -> None:
        self._terms_of, self._fixed = analyzer.function(), vocabulary
        self._numbers: Any = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self._sizes, self._ids, self._counts = array("i"), array("i"), array("i")

    def add(self, text: str) -> None:
        """Count the terms of one more text."""
        if self._fixed is None:
            found = Counter(map(self._numbers.__getitem__, self._terms_of(text)))
        else:
            found = Counter(map(self._fixed.get, self._terms_of(text)))
            del found[None]
        self._sizes.append(len(found))
        self._ids.extend(found.keys())
        self._counts.extend(found.values())

    def message(self, **values: Any) -> Message:
        """The counts in three buffers; in three more its terms, without a vocabulary: lengths, digests and UTF-8."""
        raw = [term.encode("utf-8", "surrogatepass") for term in self._numbers]
        digests = b"".join(hashlib.blake2b(term, digest_size=_DIGEST).digest() for term in raw)
        counts = [self._sizes, self._ids, self._counts]
        return Message(values, [*counts, array("q", map(len, raw)), digests, b"".join(raw)])


def count_texts(
    texts: Iterable[str],
    analyzer: Analyzer,
    vocabulary: dict[str, int] | None = None,
    workers: Workers | None = None,
) -> Counted:
    """The terms of texts, of a vocabulary if there is one, counted by the workers where there are enough texts.

    Raises DataError for anything but texts.
    """
    texts = _checked(texts)
    if workers is None or sum(map(len, texts)) < _CHUNK:
        counter = TermCounter(analyzer, vocabulary)
        for text in texts:
            counter.add(text)
        return merged([counter.message()], vocabulary)
    values = {"analyzer": asdict(analyzer), "vocabulary": None if vocabulary is None else list(vocabulary)}
    return merged(workers.map(count, (_packed(chunk, values) for chunk in _chunks(texts))), vocabulary)


def _checked(texts: Iterable[str]) -> list[str]:
    """The texts. Raises DataError for one text alone, whose characters would be texts, and for what is no text."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"texts is a {type(texts).__name__}, expected a list of texts; write one text as [text]")
    listed = list(texts)
    for place, text in enumerate(listed):
        if not isinstance(text, str):
            raise DataError(
                f"text {place} is a {type(text).__name__}, expected a str; leave missing texts out, decode bytes"
            )
    return listed


def count(asked: Message) -> Message:
    """A worker's job: the counts of the texts in a message of `count_texts`."""
    sizes, raw = array("q", bytes(asked.buffers[0])), memoryview(asked.buffers[1])
    names = asked.values["vocabulary"]
    vocabulary = None if names is None else {term: number for number, term in enumerate(names)}
    counter = TermCounter(Analyzer(**asked.values["analyzer"]), vocabulary)
    start = 0
    for size in sizes:
        counter.add(str(raw[start : start + size], "utf-8", "surrogatepass"))
        start += size
    return counter.message()


def merged(messages: Iterable[Message], vocabulary: dict[str, int] | None = None) -> Counted:
    """The counts in the messages of `TermCounter`, one after another, with one numbering of all terms."""
    import numpy as np

    columns: list[list[np.ndarray]] = [[np.zeros(0, dtype=kind)] for kind in (np.int32, np.int32, np.uint16)]
    own = []
    for message in messages:
        sizes, ids, counts = (np.frombuffer(part, dtype=np.int32) for part in message.buffers[:3])
        short = counts.max(initial=0) < 2**16
        for column, part in zip(columns, (sizes, ids, counts.astype(np.uint16) if short else counts), strict=True):
            column.append(part)
        own.append(message.buffers[3:6])
    names, numbers = (list(vocabulary), None) if vocabulary is not None else _numbered(own)
    done = 0
    for place, (lengths, _, _) in enumerate(own, start=1):
        if numbers is not None:
            count = memoryview(lengths).nbytes // 8
            columns[1][place], done = numbers[done : done + count][columns[1][place]], done + count
    return Counted(names, *(_joined(column) for column in columns))


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    """The parts one after another; they are gone then: of millions of texts they take as much memory as the whole."""
    import numpy as np

    whole = np.concatenate(parts)
    parts.clear()
    return whole


def _numbered(own: Sequence[Sequence[Any]]) -> tuple[list[str], np.ndarray]:
    """The different ones of the terms in messages, in the order in which they first occur, and the number int32 of each
    term.

    By digests: sorting them takes a tenth of the time of looking texts up, and leaves Python's lock to other threads.
    """
    import numpy as np

    lengths = np.concatenate([np.zeros(0, np.int64), *(np.frombuffer(part[0], dtype=np.int64) for part in own)])
    digests = np.frombuffer(b"".join(bytes(part[1]) for part in own), dtype=np.uint64).reshape(-1, 2)
    text = b"".join(bytes(part[2]) for part in own)
    _, first, same = np.unique(digests[:, 0], return_index=True, return_inverse=True)
    if (digests[first, 1][same] != digests[:, 1]).any():
        # Never seen: one half of the digests of different terms is the same, the other is not.
        _, first, same = np.unique(digests, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(first)
    numbers = np.empty(len(order), dtype=np.int32)
    numbers[order] = np.arange(len(order), dtype=np.int32)
    ends = np.cumsum(lengths)[first[order]]
    starts = ends - lengths[first[order]]
    names = [
        str(text[start:end], "utf-8", "surrogatepass")
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]
    return names, numbers[same.reshape(-1)]


def _chunks(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in runs of about _CHUNK characters."""
    start = total = 0
    for place, text in enumerate(texts):
        total += len(text)
        if total >= _CHUNK:
            yield texts[start : place + 1]
            start, total = place + 1, 0
    if start < len(texts):
        yield texts[start:]


def _packed(texts: Sequence[str], values: dict[str, Any]) -> Message:
    """The message with texts for `count`; Python's texts may have halves of surrogate pairs."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    return Message(values, [array("q", map(len, raw)), b"".join(raw)])
