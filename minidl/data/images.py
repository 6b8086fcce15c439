"""Image classification data: scikit-learn's digits, MNIST and Fashion-MNIST.

MNIST: LeCun, Bottou, Bengio and Haffner, Proc. IEEE 86(11), 1998. Fashion-MNIST: Xiao, Rasul and Vollgraf, arXiv
1708.07747. digits: the test half of Alpaydin and Kaynak's optical digits (UCI, 1998), 8x8 pixels of 17 greys.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from minidl.common import import_lock
from minidl.data.download import Resource, fetch, gunzip
from minidl.data.records import Augment, DataError, ImageDataset, Images
from minidl.data.split import TEST, TRAIN, VALIDATION, digests, splits_of

DIGITS = [str(digit) for digit in range(10)]
CLOTHES = [
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
]  # fmt: skip
VALIDATION_SHARE = 1 / 12  # of MNIST's training half: about 5,000 pictures
_MAX_FILE = 64 * 2**20
_EXACT = 16  # pictures
_UNSIGNED_BYTES = 8  # in an IDX file
_COUNTS = {"train": 60_000, "t10k": 10_000}

MNIST_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "http://yann.lecun.com/exdb/mnist/",
)
FASHION_MIRRORS = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
)


def _unpack(raw: bytes) -> Mapping[str, bytes]:
    return {"content": gunzip(raw, _MAX_FILE)}


def _resources(folder: str, mirrors: Sequence[str], checksums: Mapping[str, str]) -> dict[str, Resource]:
    return {
        name: Resource(
            path=f"{folder}/{name}-ubyte.gz",
            mirrors=tuple(f"{mirror}{name}-ubyte.gz" for mirror in mirrors),
            unpack=_unpack,
            sha256=sha256,
            max_bytes=_MAX_FILE,
        )
        for name, sha256 in checksums.items()
    }


# Checksums of the content, because mirrors and distributions have recompressed the files.
MNIST = _resources(
    "mnist",
    MNIST_MIRRORS,
    {
        "train-images-idx3": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "train-labels-idx1": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "t10k-images-idx3": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "t10k-labels-idx1": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
)
FASHION = _resources(
    "fashion-mnist",
    FASHION_MIRRORS,
    {
        "train-images-idx3": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "train-labels-idx1": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "t10k-images-idx3": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "t10k-labels-idx1": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
)


def load_digits() -> ImageDataset:
    """Return scikit-learn's 1,797 digits of 8x8 pixels, with 17 greys scaled to 0 to 255; split 70, 10 and 20%."""
    rows = _digits()
    pixels = np.round(rows[:, :64].reshape(-1, 8, 8) * (255.0 / 16.0)).astype(np.uint8)[:, :, :, None]
    provenance = {
        "name": "digits",
        "about": "scikit-learn's digits, 8x8 pixels (UCI optical recognition of handwritten digits, test half)",
        "split": "by class and hash of the pixels: 10% validation, 20% test",
    }
    splits = _split(Images(pixels, rows[:, 64].astype(np.int64)), 0.1, 0.2)
    return dataset("digits", DIGITS, splits, Augment(1), provenance)


def _digits() -> np.ndarray:
    """Return float64 [1797, 65], pixels and class, from scikit-learn's file: its import takes a second."""
    package = find_spec("sklearn")
    for folder in package.submodule_search_locations or () if package is not None else ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    with import_lock.LOCK:
        from sklearn import datasets
    bunch = datasets.load_digits()
    return np.column_stack([bunch.data, bunch.target])


def load_mnist(
    name: str = "mnist", *, mirrors: Sequence[str] | None = None, cache: Path | None = None, progress: bool = True
) -> ImageDataset:
    """Return `mnist` or `fashion-mnist`; a twelfth of the published training half is the validation split.

    `mirrors` are addresses of folders with the four files. Raises DataError if a file is neither on the machine nor
    available from a mirror, or has other content.
    """
    resources, labels, about, augment = {
        "mnist": (MNIST, DIGITS, "MNIST, handwritten digits of 28x28 pixels", Augment(2)),
        "fashion-mnist": (FASHION, CLOTHES, "Fashion-MNIST, clothes of 28x28 pixels", Augment(2, flip=True)),
    }[name]
    arrays: dict[str, np.ndarray] = {}
    origin = ""
    for key, resource in resources.items():
        addresses = None if mirrors is None else [f"{mirror.rstrip('/')}/{key}-ubyte.gz" for mirror in mirrors]
        parts, origin = fetch(resource, mirrors=addresses, cache=cache, progress=progress)
        arrays[key] = parse_idx(parts["content"], int(key[-1]), origin)
    halves = {half: _half(arrays, half) for half in _COUNTS}
    provenance = {
        "name": name,
        "about": about,
        "origin": origin.rpartition("/")[0],
        "sha256": {key: resource.sha256 for key, resource in resources.items()},
        "split": "the published halves; a twelfth of the training half by class and hash is the validation split",
    }
    train, validation, _ = _split(halves["train"], VALIDATION_SHARE, 0.0)
    return dataset(name, labels, (train, validation, halves["t10k"]), augment, provenance)


def parse_idx(content: bytes, dimensions: int, source: str) -> np.ndarray:
    """Return a uint8 array with this number of dimensions, from the IDX format of MNIST.

        bytes 0 and 1   0
        byte 2          type of the values: 8 for unsigned bytes, the only supported type
        byte 3          number of dimensions D
        4 D bytes       sizes, big-endian; then the values

    Source: LeCun, Cortes and Burges, The MNIST database of handwritten digits, "File formats".

    Raises DataError, naming `source`, for any other content.
    """
    head = 4 + 4 * dimensions
    if len(content) < head:
        raise DataError(f"{source} is truncated: it has {len(content)} bytes, an IDX header has {head}")
    zero, kind, rank = struct.unpack(">HBB", content[:4])
    if zero != 0 or kind != _UNSIGNED_BYTES or rank != dimensions:
        raise DataError(
            f"{source} is not an IDX file of unsigned bytes in {dimensions} dimensions: its magic number is "
            f"{content[:4].hex()}, expected {_UNSIGNED_BYTES << 8 | dimensions:08x}"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:head])
    expected = head + math.prod(shape)
    if len(content) != expected:
        fault = "is truncated" if len(content) < expected else "has more than its values"
        raise DataError(
            f"{source} {fault}: {' x '.join(map(str, shape))} bytes with the header are {expected}, it has "
            f"{len(content)}"
        )
    try:
        return np.frombuffer(content, dtype=np.uint8, offset=head).reshape(shape)
    except ValueError:  # sizes with a 0 whose other sizes overflow numpy
        raise DataError(f"{source} has sizes that no array can have: {' x '.join(map(str, shape))}") from None


def _half(arrays: Mapping[str, np.ndarray], half: str) -> Images:
    pixels, labels = arrays[f"{half}-images-idx3"], arrays[f"{half}-labels-idx1"]
    if len(pixels) != _COUNTS[half] or len(labels) != len(pixels) or labels.max() > 9:
        raise DataError(f"{half} has {len(pixels)} pictures and {len(labels)} labels, expected {_COUNTS[half]} of both")
    return Images(pixels[:, :, :, None], labels.astype(np.int64))


def _split(images: Images, validation: float, test: float) -> tuple[Images, Images, Images]:
    """Return (training, validation, test)."""
    split_of = splits_of(digests(_keys(images.pixels)), images.labels, validation, test)
    masks = (split_of == TRAIN, split_of == VALIDATION, split_of == TEST)
    train, validation_split, test_split = (Images(images.pixels[mask], images.labels[mask]) for mask in masks)
    return train, validation_split, test_split


def dataset(
    name: str, labels: list[str], splits: Sequence[Images], augment: Augment, provenance: dict[str, Any]
) -> ImageDataset:
    """Return the dataset of the training, validation and test split."""
    mean, std = _statistics(splits[0].pixels)
    height, width, channels = splits[0].pixels.shape[1:]
    provenance = {**provenance, "height": height, "width": width, "channels": channels}
    return ImageDataset(name, labels, splits[0], splits[1], splits[2], mean, std, augment, provenance)


def _keys(pixels: np.ndarray) -> list[str]:
    """Return a key per picture; equal pictures have equal keys."""
    return [hashlib.sha256(np.ascontiguousarray(picture).data).hexdigest() for picture in pixels]


def _statistics(pixels: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and deviation of each channel, from exact integer sums; a constant channel has deviation 1."""
    values = pixels[0].size
    sums = np.zeros((2, values))
    # Sums of squares are exact for 258 values in float32 and for all pictures in memory in float64. _EXACT pictures of
    # 64 x 64 fit in the cache: 7 us per picture, and 36 us with np.bincount.
    for start in range(0, len(pixels), _EXACT):
        part = pixels[start : start + _EXACT].reshape(-1, values).astype(np.float32)
        sums[0] += part.sum(axis=0)
        part *= part
        sums[1] += part.sum(axis=0)
    count = pixels.size // pixels.shape[-1]
    first, second = sums.reshape(2, -1, pixels.shape[-1]).sum(axis=1).tolist()
    mean = [total / count for total in first]
    square = [total / count for total in second]
    std = [max(0.0, s - m * m) ** 0.5 for m, s in zip(mean, square, strict=True)]
    return tuple(mean), tuple(s if s > 1e-3 else 1.0 for s in std)
