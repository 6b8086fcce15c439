"""Read Reuters-21578 (Distribution 1.0) from its SGML files, with the ModApte split.

R52 has the documents with exactly one topic, for the 52 topics with such a document in both halves; R8 has eight of
these topics. The counts are published figures; any other count is an error.

The newswire texts belong to Reuters Ltd and may be used for research.
"""

from __future__ import annotations

import html
import io
import re
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidl.common.console import cut
from minidl.data.download import Resource, fetch, gunzip
from minidl.data.records import DataError, TextDataset, Texts

R8_TOPICS = ("acq", "crude", "earn", "grain", "interest", "money-fx", "ship", "trade")
COUNTS = {"reuters-r8": (5485, 2189), "reuters-r52": (6532, 2568)}
DOCUMENTS = 21578
VALIDATION_SHARE = 0.1

_MAX_ARCHIVE = 32 * 2**20
_MAX_UNPACKED = 64 * 2**20  # the original is 28 MB

_DOCUMENT = re.compile(r"<REUTERS\b([^>]*)>(.*?)</REUTERS>", re.DOTALL)
_ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')
_TOPICS = re.compile(r"<TOPICS>(.*?)</TOPICS>", re.DOTALL)
_ITEM = re.compile(r"<D>(.*?)</D>", re.DOTALL)
_TEXT = re.compile(r"<TEXT\b([^>]*)>(.*?)</TEXT>", re.DOTALL)
_TITLE = re.compile(r"<TITLE>(.*?)</TITLE>", re.DOTALL)
_BODY = re.compile(r"<BODY>(.*?)</BODY>", re.DOTALL)
_TAG = re.compile(r"</?[A-Z]+[^>]*>")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True)
class Document:
    """A newswire text: `half` is "train", "test" or "unused" in the ModApte split; `text` has title and body."""

    half: str
    topics: tuple[str, ...]
    text: str


def unpack(archive: bytes) -> Mapping[str, bytes]:
    """Return the SGML files of the gzipped tar archive by name. Raises DataError for other or oversized content."""
    tar_bytes = gunzip(archive, _MAX_UNPACKED)
    parts = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(tar_bytes), mode="r:") as tar:
            for member in tar:
                is_sgml = member.isfile() and member.name.endswith(".sgm")
                # The archive contains only part of a sparse member's size.
                if is_sgml and (member.issparse() or member.size > len(tar_bytes)):
                    raise DataError(f"its member {cut(member.name, 60)!r} says that it is {member.size} bytes")
                file = tar.extractfile(member) if is_sgml else None
                if file is not None:
                    parts[member.name.rpartition("/")[2]] = file.read()
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"not a complete tar archive ({error})") from None
    return parts


RESOURCE = Resource(
    path="reuters21578/reuters21578.tar.gz",
    mirrors=(
        "https://kdd.ics.uci.edu/databases/reuters21578/reuters21578.tar.gz",
        "https://archive.ics.uci.edu/ml/machine-learning-databases/reuters21578-mld/reuters21578.tar.gz",
        "http://www.daviddlewis.com/resources/testcollections/reuters21578/reuters21578.tar.gz",
    ),
    unpack=unpack,
    sha256="b9f3dfa9691a57bfac8d55c0fde314e12cdb6a2ad66bebf3f61c9b8883ad2be3",
    max_bytes=_MAX_ARCHIVE,
)


def load_reuters(
    name: str,
    *,
    mirrors: Sequence[str] | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> TextDataset:
    """Return `reuters-r8` or `reuters-r52`; a tenth of the published training half is the validation split.

    Raises DataError if the archive is neither on the machine nor available from a mirror, or is not the original.
    """
    parts, origin = fetch(RESOURCE, mirrors=mirrors, cache=cache, progress=progress)
    documents = [document for file in sorted(parts) for document in parse_sgml(parts[file].decode("latin-1"))]
    if len(documents) != DOCUMENTS:
        raise DataError(f"{origin} holds {len(documents)} documents, expected {DOCUMENTS}")
    return single_topic_dataset(name, documents, origin)


def parse_sgml(sgml: str) -> list[Document]:
    """Return the documents of an SGML file, with entities resolved and control characters replaced by spaces.

    Texts of type UNPROC have no title and body, so that all of the text is used; texts of type BRIEF have only a title.
    """
    documents = []
    for attributes_text, content in _DOCUMENT.findall(sgml):
        attributes = dict(_ATTRIBUTE.findall(attributes_text))
        half = {"TRAIN": "train", "TEST": "test"}.get(attributes.get("LEWISSPLIT", ""), "unused")
        if attributes.get("TOPICS") != "YES":
            half = "unused"
        topics = _TOPICS.search(content)
        documents.append(
            Document(half, tuple(_ITEM.findall(topics.group(1))) if topics else (), _title_and_body(content))
        )
    return documents


def single_topic_dataset(name: str, documents: Sequence[Document], origin: str) -> TextDataset:
    """Return R8 or R52. Raises DataError unless both halves have the published number of documents."""
    single = [document for document in documents if document.half != "unused" and len(document.topics) == 1]
    halves = {half: [document for document in single if document.half == half] for half in ("train", "test")}
    topics = {half: {document.topics[0] for document in part} for half, part in halves.items()}
    labels = sorted(topics["train"] & topics["test"])
    if name == "reuters-r8":
        labels = [label for label in labels if label in R8_TOPICS]
    index = {label: i for i, label in enumerate(labels)}

    from minidl.data.split import TRAIN, VALIDATION, stratified_split

    def texts_of(documents: Sequence[Document]) -> Texts:
        return Texts([document.text for document in documents], [index[document.topics[0]] for document in documents])

    train = [document for document in halves["train"] if document.topics[0] in index]
    test = [document for document in halves["test"] if document.topics[0] in index]
    if (len(train), len(test)) != COUNTS[name]:
        raise DataError(
            f"{name} from {origin} has {len(train)} training and {len(test)} test documents, "
            f"expected {COUNTS[name][0]} and {COUNTS[name][1]}"
        )
    texts = texts_of(train)
    splits = stratified_split(texts.texts, texts.labels, validation=VALIDATION_SHARE, test=0.0)
    provenance = {
        "name": name,
        "about": "Reuters-21578 Distribution 1.0, ModApte split, documents with one topic",
        "origin": origin,
        "sha256": RESOURCE.sha256,
        "training_documents": len(train),
        "test_documents": len(test),
        "split": "the published halves; a tenth of the training half by hash of the text is the validation split",
    }
    return TextDataset(
        name,
        labels,
        texts_of([document for document, split in zip(train, splits, strict=True) if split == TRAIN]),
        texts_of([document for document, split in zip(train, splits, strict=True) if split == VALIDATION]),
        texts_of(test),
        provenance,
    )


def _title_and_body(sgml: str) -> str:
    match = _TEXT.search(sgml)
    if match is None:
        return ""
    attributes, content = match.groups()
    if "UNPROC" in attributes:
        pieces = [_TAG.sub(" ", content)]
    else:
        pieces = [part.group(1) for part in (_TITLE.search(content), _BODY.search(content)) if part]
    text = html.unescape("\n".join(pieces))
    return _CONTROL.sub(" ", text).strip()
