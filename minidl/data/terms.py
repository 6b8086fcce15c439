"""Count the terms of texts, in chunks that workers share."""

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
_CHUNK = 2**19  # characters of texts in a request to a worker: 60 ms of work


@dataclass(frozen=True)
class Counted:
    """Counts of terms: text i has `sizes[i]` different terms, and an entry for each of them, after the entries of the
    texts before it: an index into `terms`, in `ids`, and a count. The entries of a text are in no order."""

    terms: list[str]
    sizes: np.ndarray  # int32 [texts]
    ids: np.ndarray  # int32 [entries]
    counts: np.ndarray  # uint16 [entries], int32 if a count does not fit

    def __len__(self) -> int:
        return len(self.sizes)

    def parts(self, size: int) -> Iterator[Counted]:
        """Return at least one part, of `size` texts each; the parts share the memory of `self`."""
        import numpy as np

        starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        for first in range(0, max(1, len(self)), size):
            last = min(first + size, len(self))
            entries = slice(starts[first], starts[last])
            yield Counted(self.terms, self.sizes[first:last], self.ids[entries], self.counts[entries])

    def select(self, rows: np.ndarray) -> Counted:
        """Return the texts with these indices."""
        import numpy as np
        from scipy.sparse import csr_matrix

        starts = np.concatenate([[0], np.cumsum(self.sizes, dtype=np.int64)])
        matrix = csr_matrix((self.counts, self.ids, starts), shape=(len(self), max(1, len(self.terms))), copy=False)
        part = matrix[rows]
        return Counted(self.terms, np.diff(part.indptr).astype(np.int32), part.indices, part.data)


class TermCounter:
    """Counts the terms of texts. A new term gets the next number; with a `vocabulary`, terms have its numbers, and
    other terms are ignored."""

    def __init__(self, analyzer: Analyzer, vocabulary: dict[str, int] | None = None) -> None:
        self._terms_of, self._vocabulary = analyzer.function(), vocabulary
        self._numbers: Any = defaultdict()
        self._numbers.default_factory = self._numbers.__len__
        self._sizes, self._ids, self._counts = array("i"), array("i"), array("i")

    def add(self, text: str) -> None:
        """Count the terms of one more text."""
        if self._vocabulary is None:
            counts = Counter(map(self._numbers.__getitem__, self._terms_of(text)))
        else:
            counts = Counter(map(self._vocabulary.get, self._terms_of(text)))
            del counts[None]
        self._sizes.append(len(counts))
        self._ids.extend(counts.keys())
        self._counts.extend(counts.values())

    def message(self, **values: Any) -> Message:
        """Return three buffers of counts and three of the terms that no vocabulary has: lengths, digests, UTF-8."""
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
    """Return the counts of the terms of texts, or of those in a vocabulary. Many texts are counted by the workers.

    Raises DataError for values that are not texts.
    """
    texts = _checked_texts(texts)
    if workers is None or sum(map(len, texts)) < _CHUNK:
        counter = TermCounter(analyzer, vocabulary)
        for text in texts:
            counter.add(text)
        return merge([counter.message()], vocabulary)
    values = {"analyzer": asdict(analyzer), "vocabulary": None if vocabulary is None else list(vocabulary)}
    return merge(workers.map(count, (_packed(chunk, values) for chunk in _chunks(texts))), vocabulary)


def _checked_texts(texts: Iterable[str]) -> list[str]:
    """Return the texts. Raises DataError for a single text, whose characters would be texts, and for other types."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise DataError(f"texts is a {type(texts).__name__}, expected a list of texts; write one text as [text]")
    result = list(texts)
    for i, text in enumerate(result):
        if not isinstance(text, str):
            raise DataError(
                f"text {i} is a {type(text).__name__}, expected a str; leave missing texts out, decode bytes"
            )
    return result


def count(request: Message) -> Message:
    """Return the counts of the texts in a message of `count_texts`. A worker's job."""
    sizes, raw = array("q", bytes(request.buffers[0])), memoryview(request.buffers[1])
    names = request.values["vocabulary"]
    vocabulary = None if names is None else {term: number for number, term in enumerate(names)}
    counter = TermCounter(Analyzer(**request.values["analyzer"]), vocabulary)
    start = 0
    for size in sizes:
        counter.add(str(raw[start : start + size], "utf-8", "surrogatepass"))
        start += size
    return counter.message()


def merge(messages: Iterable[Message], vocabulary: dict[str, int] | None = None) -> Counted:
    """Return the counts in the messages of `TermCounter`, one after another, with one numbering of all terms."""
    import numpy as np

    columns: list[list[np.ndarray]] = [[np.zeros(0, dtype=kind)] for kind in (np.int32, np.int32, np.uint16)]
    vocabularies = []
    for message in messages:
        sizes, ids, counts = (np.frombuffer(part, dtype=np.int32) for part in message.buffers[:3])
        short = counts.max(initial=0) < 2**16
        for column, part in zip(columns, (sizes, ids, counts.astype(np.uint16) if short else counts), strict=True):
            column.append(part)
        vocabularies.append(message.buffers[3:6])
    names, numbers = (list(vocabulary), None) if vocabulary is not None else _number_terms(vocabularies)
    start = 0
    for i, (lengths, _, _) in enumerate(vocabularies, start=1):
        if numbers is not None:
            count = memoryview(lengths).nbytes // 8
            columns[1][i], start = numbers[start : start + count][columns[1][i]], start + count
    return Counted(names, *(_concatenate(column) for column in columns))


def _concatenate(parts: list[np.ndarray]) -> np.ndarray:
    """Return the concatenated parts and clear the list: for millions of texts, the memory would be needed twice."""
    import numpy as np

    result = np.concatenate(parts)
    parts.clear()
    return result


def _number_terms(vocabularies: Sequence[Sequence[Any]]) -> tuple[list[str], np.ndarray]:
    """Return the different terms of messages by first occurrence, and the number int32 of each term of each message.

    Sorting digests takes a tenth of the time of looking terms up, and leaves Python's lock to other threads.
    """
    import numpy as np

    lengths = np.concatenate(
        [np.zeros(0, np.int64), *(np.frombuffer(part[0], dtype=np.int64) for part in vocabularies)]
    )
    digests = np.frombuffer(b"".join(bytes(part[1]) for part in vocabularies), dtype=np.uint64).reshape(-1, 2)
    text = b"".join(bytes(part[2]) for part in vocabularies)
    _, first, same = np.unique(digests[:, 0], return_index=True, return_inverse=True)
    if (digests[first, 1][same] != digests[:, 1]).any():
        # Never observed: different terms whose digests share the first half.
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
    """Return the texts in chunks of about _CHUNK characters."""
    start = total = 0
    for i, text in enumerate(texts, 1):
        total += len(text)
        if total >= _CHUNK:
            yield texts[start:i]
            start, total = i, 0
    if start < len(texts):
        yield texts[start:]


def _packed(texts: Sequence[str], values: dict[str, Any]) -> Message:
    """Return the request for `count` with these texts, which may contain halves of surrogate pairs."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    return Message(values, [array("q", map(len, raw)), b"".join(raw)])
