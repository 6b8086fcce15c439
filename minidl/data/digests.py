"""Digests of texts and other keys, which decide the splits. Workers import this module, so it does not import numpy."""

from __future__ import annotations

import hashlib

SIZE = 32  # bytes


def content_digest(key: str, seed: int = 0) -> bytes:
    """Return the SHA-256 of the seed and the key."""
    return hashlib.sha256(f"{seed}\n{key}".encode()).digest()


def content_hash(key: str, seed: int = 0) -> int:
    """Return the first 64 bits of the digest."""
    return int.from_bytes(content_digest(key, seed)[:8], "big")
