"""Latent vectors: from seeds, interpolated between two vectors, and from files.

    seed s       z = `minidl.randn(latent, seed=s)`: standard normal numbers that depend on the seed alone
    truncation   T shortens a longer latent to the length T sqrt(n), where sqrt(n) is the typical length of n normal
                 numbers: z' = z min(1, T sqrt(n) / |z|). The truncation trick (Brock, Donahue and Simonyan, Large
                 Scale GAN Training for High Fidelity Natural Image Synthesis, ICLR 2019, arXiv 1809.11096) limits
                 each number instead. With T below 1 that gives far shorter latents than any in training: at 0.5
                 every digit of the built-in generator dissolves.
    slerp        z(t) = sin((1-t) w) / sin w  a + sin(t w) / sin w  b,   w the angle between a and b
                 (Shoemake, SIGGRAPH 1985; for latents White, Sampling Generative Networks, arXiv 1609.04468):
                 the length in between stays typical of normal numbers.

Latents are inputs: they are computed on the host in float64 and rounded to float32 once. Sums use `math.fsum`, so no
row depends on its position or its neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from minidl.common import read_files
from minidl.data.records import DataError
from minidl.kernels import random
from minidl.tensors import default_device

_SUFFIXES = (".txt", ".npy")
MAX_BYTES = 2**32


def from_seeds(seeds: Sequence[int], latent: int, truncation: float | None = None) -> np.ndarray:
    """Return float32 [N, latent]: row i depends only on seeds[i] (and truncation).

    Raises ValueError for a seed outside [0, 2^63) and a truncation that is not above 0.
    """
    rows = random.normal_rows(seeds, latent, default_device()).cpu().numpy()
    return rows if truncation is None else shorten(rows, truncation)


def shorten(z: np.ndarray, limit: float) -> np.ndarray:
    """Scale each row of float32 [N, n] that is longer than limit * sqrt(n) to this length.

    Raises ValueError unless limit is above 0.
    """
    if not limit > 0:
        raise ValueError(f"truncation is {limit}, expected a number above 0")
    wide = z.astype(np.float64)
    lengths = np.sqrt(np.array([math.fsum(row * row) for row in wide]))[:, None]
    longest = limit * math.sqrt(z.shape[1])
    return (wide * (longest / np.maximum(lengths, longest))).astype(np.float32)


def slerp(first: np.ndarray, last: np.ndarray, steps: int) -> np.ndarray:
    """Return float32 [steps, latent] from the first vector [latent] to the last along the sphere, both included.

    Between parallel or opposite vectors, or zeros, the line is straight. Raises ValueError for fewer than two steps.
    """
    if steps < 2:
        raise ValueError(f"an interpolation has {steps} steps, expected at least 2")
    a, b = first.astype(np.float64), last.astype(np.float64)
    lengths = math.sqrt(math.fsum(a * a)) * math.sqrt(math.fsum(b * b))
    angle = math.acos(max(-1.0, min(1.0, math.fsum(a * b) / lengths))) if lengths > 0 else 0.0
    straight = math.sin(angle) < 1e-6
    rows = []
    for step in range(steps):
        t = step / (steps - 1)
        if straight:
            left, right = 1 - t, t
        else:
            left, right = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
        rows.append(left * a + right * b)
    rows[0], rows[-1] = a, b
    return np.stack(rows).astype(np.float32)


def read(path: Path, latent: int) -> np.ndarray:
    """Return float32 [N, latent] from a file of latents.

    Text (.txt): numbers separated by white space, `latent` for each picture, one picture after another; line breaks do
    not matter. NumPy (.npy): a floating or integer array [N, latent] or [latent].

    Raises DataError, with the file and the expected shape, for a file that cannot be read, another number of values,
    and values that are not finite in float32.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise DataError(
            f"{path} is not a file of latents that minidl reads: give a .txt or .npy file, {_expected(latent)}"
        )
    try:
        values = _read_text(path, latent) if path.suffix.lower() == ".txt" else _read_npy(path, latent)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    with np.errstate(over="ignore", invalid="ignore"):  # converting an infinity of 128 bits is invalid
        z = np.ascontiguousarray(values, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(z))
    if len(bad):
        row, column = bad[0].tolist()
        raise DataError(
            f"{path}: value {column + 1} of latent {row + 1} is {values[row, column]}, expected finite numbers"
        )
    return z


def _read_text(path: Path, latent: int) -> np.ndarray:
    raw = read_files.read_bytes(path, MAX_BYTES)
    try:
        words = raw.decode("utf-8-sig").split()
    except UnicodeDecodeError:
        raise DataError(f"{path} is not text: expected {_expected(latent)}") from None
    if not words:
        raise DataError(f"{path} is empty: expected {_expected(latent)}")
    values = np.empty(len(words))
    for index, word in enumerate(words):
        try:
            values[index] = float(word)
        except ValueError:
            raise DataError(
                f"{path}: {word[:40]!r} (value {index + 1}) is not a number: expected {_expected(latent)}"
            ) from None
    if len(values) % latent:
        raise DataError(
            f"{path} has {len(values)} numbers, which is not a multiple of {latent}: expected {_expected(latent)}"
        )
    return values.reshape(-1, latent)


def _read_npy(path: Path, latent: int) -> np.ndarray:
    try:
        # Not np.load, which also reads archives and pickles.
        with read_files.opened(path, MAX_BYTES) as file:
            _check_size(file, path)
            values = np.lib.format.read_array(file, allow_pickle=False)
    except (OSError, DataError):
        raise
    except Exception as error:  # noqa: BLE001  (NumPy's header reader raises any error of Python's tokenizer)
        why = "its header cannot be read" if "<" in str(error) else str(error)[:120]  # some show an object's repr
        raise DataError(f"{path} is not a NumPy array file: {why}") from None
    if values.dtype.kind not in "fiu":
        raise DataError(f"{path} has values of type {values.dtype}, expected {_expected(latent)}")
    if values.ndim == 1 and len(values) == latent:
        values = values[None]
    if values.ndim == 4 and values.shape[2:] == (1, 1):
        values = values[:, :, 0, 0]
    if values.ndim != 2 or values.shape[1] != latent or len(values) == 0:
        raise DataError(f"{path} has shape {list(values.shape)}, expected {_expected(latent)}")
    return values


def _check_size(file: BinaryIO, path: Path) -> None:
    """Raise DataError for a file shorter than its header says: NumPy allocates memory before it checks."""
    version = np.lib.format.read_magic(file)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read_header(file)
    expected, actual = math.prod(shape) * dtype.itemsize, path.stat().st_size - file.tell()
    if expected > actual:
        raise DataError(
            f"{path} is truncated: its header has shape {list(shape)}, {expected:,} bytes, and it has {actual:,}"
        )
    file.seek(0)


def _expected(latent: int) -> str:
    return f"{latent} numbers for each picture (shape [N, {latent}])"
