"""The weights that come with the package, and the checksums of their files."""

from __future__ import annotations

from pathlib import Path

from minidl.errors import DamagedError

FOLDER = Path(__file__).parent / "weights"
SUMS = "SHA256SUMS"  # in the format of sha256sum


def check(path: Path, sha256: str) -> None:
    """Raise DamagedError if a file of this package does not match its checksum; other files are not checked."""
    if path.parent != FOLDER:
        return
    try:
        checksums = {name: digest for digest, name in map(str.split, (FOLDER / SUMS).read_text().splitlines())}
    except (OSError, ValueError):
        checksums = {}
    if checksums.get(path.name) != sha256:
        raise DamagedError(f"{path} is damaged (it does not match its checksum in {SUMS}); install minidl again")
