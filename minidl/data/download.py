"""Get public data sets from MINIDL_DATA, a system package, the cache, or the first mirror with the right content.

Checksums refer to the unpacked content, because mirrors recompress the same files. A download is written to a temporary
file, which is renamed after the check of its content.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import sys
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from minidl.common import console, read_files, write_files
from minidl.data.records import DataError

TIMEOUT_SECONDS = 30
SYSTEM = Path("/usr/share/datasets")  # the folder of Debian packages such as dataset-fashion-mnist
_CHUNK = 1 << 16
_OTHER_CACHE = "set XDG_CACHE_HOME to a folder that can be written, or MINIDL_DATA to one that holds the data"


@dataclass(frozen=True)
class Resource:
    """A public file: its path below MINIDL_DATA and the cache, its mirrors, and its content.

    `unpack` turns the file's bytes into named parts, or raises DataError; `sha256` refers to the parts concatenated in
    order of name; `max_bytes` limits the download.
    """

    path: str
    mirrors: Sequence[str]
    unpack: Callable[[bytes], Mapping[str, bytes]]
    sha256: str
    max_bytes: int


def cache_folder() -> Path:
    """Return the folder of downloads: the platform's cache folder. Raises DataError for a user without a home."""
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("minidl", appauthor=False))
    except RuntimeError:
        raise DataError(f"this user has no home folder for downloads: {_OTHER_CACHE}") from None


def fetch(
    resource: Resource,
    *,
    mirrors: Sequence[str] | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> tuple[Mapping[str, bytes], str]:
    """Return the checked, unpacked parts of a resource, and their origin (a path or an address).

    It searches the folder of the environment variable MINIDL_DATA, SYSTEM, `cache` (default `cache_folder()`) and each
    mirror. Raises DataError if a file in MINIDL_DATA has the wrong content, if the cache cannot be used, and if no
    mirror delivers, with every address and its error.
    """
    data_folder = os.environ.get("MINIDL_DATA")
    if data_folder:
        path = Path(data_folder) / resource.path
        if path.exists():
            return _check(resource, _read(path), str(path)), str(path)
    stored = (cache_folder() if cache is None else Path(cache)) / resource.path
    for path in (SYSTEM / resource.path, stored):
        try:
            is_stored = path.exists()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}; {_OTHER_CACHE}") from None
        if is_stored:
            # A damaged cache entry is fetched again and replaced.
            with contextlib.suppress(DataError):
                return _check(resource, _read(path), str(path)), str(path)
    addresses = list(resource.mirrors if mirrors is None else mirrors)
    answers = []
    for address in addresses:
        try:
            raw = _get(address, resource.max_bytes, progress)
            parts = _check(resource, raw, address)
        except (OSError, http.client.HTTPException, ValueError) as error:  # DataError is a ValueError
            answers.append(f"  {address}: {error}")
            continue
        try:
            stored.parent.mkdir(parents=True, exist_ok=True)
            write_files.write_bytes(stored, raw)
        except OSError as error:
            raise DataError(
                f"the download cannot be stored as {stored}: {error.strerror or error}; {_OTHER_CACHE}"
            ) from None
        return parts, address
    missing = (
        f"MINIDL_DATA is set to {data_folder}, which has no {resource.path}"
        if data_folder
        else "MINIDL_DATA is not set"
    )
    raise DataError(
        f"{resource.path} is not on this machine and no mirror delivered it:\n" + "\n".join(answers) + "\n"
        f"Download it from one of these addresses to {stored}, or set MINIDL_DATA to a folder that holds "
        f"{resource.path} ({missing})."
    )


def gunzip(raw: bytes, most: int) -> bytes:
    """Return the content of gzipped bytes. Raises DataError for other or truncated bytes, or more than `most`."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(raw)) as stream:
            content = stream.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"not a complete gzip file ({error})") from None
    if len(content) > most:
        raise DataError(f"it unpacks to more than {most} bytes")
    return content


def _check(resource: Resource, raw: bytes, origin: str) -> Mapping[str, bytes]:
    try:
        parts = resource.unpack(raw)
    except DataError as error:
        raise DataError(f"{origin} is damaged: {error}; delete it or replace it by the original") from None
    digest = hashlib.sha256()
    for name in sorted(parts):
        digest.update(parts[name])
    if digest.hexdigest() != resource.sha256:
        raise DataError(
            f"{origin} does not hold the original data: the sha256 of its content is {digest.hexdigest()}, "
            f"expected {resource.sha256}; delete it or replace it by the original"
        )
    return parts


def _read(path: Path) -> bytes:
    try:
        return read_files.read_bytes(path, read_files.memory())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None


def _get(address: str, max_bytes: int, progress: bool) -> bytes:
    """Return the bytes at an address. Raises OSError, HTTPException or ValueError if the download fails.

    Shows a progress bar on standard error if it is a terminal, else one line with the address.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    has_bar = progress and sys.stderr.isatty()
    if progress and not has_bar:
        console.echo(f"downloading {address}", error=True)
    columns = (TextColumn("downloading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    # Addresses come from this package or the caller; the check of the content makes file: as safe as http:.
    request = urllib.request.Request(address, headers={"User-Agent": "minidl"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
        length = answer.headers.get("Content-Length", "")
        total = int(length) if length.isdigit() else None
        chunks: list[bytes] = []
        received = 0
        with Progress(*columns, console=console.rich_console(stderr=True), disable=not has_bar) as display:
            task = display.add_task(address, total=total)
            while chunk := answer.read(_CHUNK):
                received += len(chunk)
                if received > max_bytes:
                    raise ValueError(f"sent more than the expected {max_bytes} bytes")
                chunks.append(chunk)
                display.advance(task, len(chunk))
    if total is not None and received != total:
        raise ValueError(f"sent {received} of {total} bytes")
    return b"".join(chunks)
