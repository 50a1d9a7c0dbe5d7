"""Checksums that are cheap on files of many gigabytes.

In: a path. Out: 20 hex digits over the file's size and evenly spaced chunks.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

CHUNK = 1 << 16
CHUNKS = 64  # 4 MiB a file: other weights, or another version of a data set, differ in nearly every chunk


def sampled_checksum(path: Path) -> str:
    """Sampled, not full: it tells versions of a file apart, it does not find one flipped bit."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for k in range(CHUNKS):
            file.seek(max(0, size - CHUNK) * k // (CHUNKS - 1))
            digest.update(file.read(CHUNK))
            if size <= CHUNK:
                break
    return digest.hexdigest()[:20]
