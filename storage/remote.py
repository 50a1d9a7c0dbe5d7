"""An object store behind the artifact store: the few calls it needs, through fsspec.

In: a URI such as s3://bucket/prefix. Out: objects by key, read, written, listed and deleted. A network fault
that lasts is one StorageError.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec

from storage.errors import StorageError


def is_remote(uri: str) -> bool:
    """Whether a store's URI names anything but a local folder."""
    return "://" in uri and not uri.startswith("file://")


class Remote:
    """Objects under one prefix, by keys relative to it."""

    def __init__(self, uri: str) -> None:
        self.uri = uri.rstrip("/")
        try:
            self._system, self._base = fsspec.core.url_to_fs(self.uri, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise StorageError(f"cannot open the store {uri}: {error}") from None

    def default_cache(self) -> Path:
        """Where this machine keeps what it fetched from this store."""
        return Path.home() / ".cache" / "draftline" / hashlib.sha256(self.uri.encode()).hexdigest()[:12]

    def exists(self, key: str) -> bool:
        with self._faults(key):
            return self._system.exists(self._key(key))

    def read(self, key: str) -> bytes:
        """Raises FileNotFoundError where there is no such object."""
        with self._faults(key):
            return self._system.cat_file(self._key(key))

    def write(self, key: str, data: bytes) -> None:
        with self._faults(key):
            self._system.pipe_file(self._key(key), data)

    def send(self, folder: Path, names: Sequence[str], key: str) -> None:
        """Copy files of a folder to `key`/name."""
        with self._faults(key):
            for name in names:
                self._system.put_file(str(folder / name), self._key(f"{key}/{name}"))

    def fetch(self, key: str, names: Sequence[str], folder: Path) -> None:
        """Copy objects `key`/name into a folder."""
        with self._faults(key):
            for name in names:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                self._system.get_file(self._key(f"{key}/{name}"), str(target))

    def artifacts(self, kind: str | None) -> list[tuple[str, str]]:
        """(kind, fingerprint) of every prefix two levels down that holds a manifest."""
        with self._faults(kind or ""):
            found = self._system.glob(f"{self._base}/{kind or '*'}/*/manifest.json")
        return [(parts[-3], parts[-2]) for parts in (path.split("/") for path in found)]

    def delete(self, key: str, first: str) -> None:
        """Remove everything under `key`, the object `first` before all others."""
        with self._faults(key):
            if self._system.exists(self._key(f"{key}/{first}")):
                self._system.rm_file(self._key(f"{key}/{first}"))
            if self._system.exists(self._key(key)):
                self._system.rm(self._key(key), recursive=True)

    def _key(self, key: str) -> str:
        return f"{self._base}/{key}"

    @contextmanager
    def _faults(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each driver has exceptions of its own
            raise StorageError(
                f"{self.uri}/{key}: {type(error).__name__}: {' '.join(str(error).split())}"
            ) from error
