"""A folder of whole files: each is written under a temporary name, flushed to disk, then renamed.

In: bytes, text, JSON, Arrow tables, or a stream. Out: files that are there whole or not at all, and a
journal of their checksums, so that a run that follows a kill trusts only what it can verify. Any process may
open the same folder.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path, PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.errors import StorageError, disk_errors
from storage.kernel import start_writing

logger = logging.getLogger(__name__)

JOURNAL = ".finished.jsonl"
TEMPORARY = ".tmp-"
READ_BYTES = 1 << 20
# What is hashed, perhaps twice, and then written, while it is in a core's cache.
PIECE_BYTES = 512 << 10
SMALL_BYTES = 16 << 10
WRITE_BEHIND_BYTES = 8 << 20


@dataclass(frozen=True)
class FileRecord:
    """One file as it should be: its size, its xxh3-128 checksum, and the row count of a Parquet file."""

    bytes: int
    xxh3: str
    rows: int | None = None


def checksum(path: Path) -> FileRecord:
    """Read a file once and describe it (rows left out)."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(READ_BYTES)
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
            size += count
    return FileRecord(size, digest.hexdigest())


def why_damaged(path: Path, record: FileRecord) -> str | None:
    """What is wrong with a file against its record, or None. Reads the whole file only where its size
    agrees.
    """
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return "it is missing"
    if size != record.bytes:
        return f"{size:,} bytes where {record.bytes:,} were written"
    return None if checksum(path).xxh3 == record.xxh3 else "its checksum does not agree"


class HashedFile:
    """A binary file that is checksummed as it is written.

    Large buffers are passed through without a copy, in pieces that stay in the core's cache between being hashed and
    being written; small ones are gathered. The kernel is told to write behind, so that the final flush finds little left.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self._size = self._started = 0
        self._gathered = bytearray()
        self.closed = False

    def write(self, data: Any, digest: Any = None) -> int:
        """Append all of a bytes-like object (contiguous arrays included), also to `digest`'s checksum where given."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), PIECE_BYTES):
            piece = view[start : start + PIECE_BYTES]
            if digest is not None:
                digest.update(piece)
            self._digest.update(piece)
            if len(piece) < SMALL_BYTES:
                self._gathered += piece
            else:
                self._put(piece)
        self._size += len(view)
        if len(self._gathered) >= PIECE_BYTES:
            self._put(b"")
        return len(view)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Hand everything to the kernel."""
        self._put(b"")

    def close(self) -> None:
        self.flush()
        self.closed = True

    def record(self) -> FileRecord:
        return FileRecord(self._size, self._digest.hexdigest())

    def _put(self, piece: Any) -> None:
        """Write what was gathered, then `piece`."""
        rest = [memoryview(self._gathered), memoryview(piece)]
        while rest := [buffer for buffer in rest if len(buffer)]:
            count = os.writev(self._file.fileno(), rest)  # may take less than it was given
            taken = min(count, len(rest[0]))
            rest = [rest[0][taken:], *(buffer[count - taken :] for buffer in rest[1:])]
        self._gathered = bytearray()
        written = self._file.tell()
        if written - self._started >= WRITE_BEHIND_BYTES:
            start_writing(self._file.fileno(), self._started, written - self._started)
            self._started = written


class PartFolder:
    """Atomic writes into one folder, and what an earlier run finished there."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.journal_path = self.folder / JOURNAL
        self._verified: dict[str, FileRecord] = {}

    def path(self, name: str) -> Path:
        """Where `name` lies, its parent folders made: for files that something else writes, such as
        checkpoints.
        """
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or parts[-1].startswith("."):
            raise StorageError(f"{name!r} cannot name a file of an artifact: relative, visible names only")
        path = self.folder.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def parts(self, pattern: str = "*.parquet") -> list[str]:
        """Names of whole files matching `pattern`, sorted. A file that no longer agrees with its checksum is
        removed.
        """
        journal = self._journal()
        names = []
        for path in sorted(self.folder.glob(pattern)):
            name = path.relative_to(self.folder).as_posix()
            if not path.is_file() or path.name.startswith("."):
                continue
            if name not in self._verified and name in journal:
                if reason := why_damaged(path, journal[name]):
                    logger.warning("%s: %s; it will be made again", path, reason)
                    path.unlink(missing_ok=True)
                    continue
                self._verified[name] = journal[name]
            names.append(name)
        return names

    @contextmanager
    def create(self, name: str) -> Iterator[HashedFile]:
        """A file to stream into; leaving the context in peace puts it under its name, an exception leaves
        nothing.
        """
        path = self.path(name)
        temporary = path.with_name(f"{TEMPORARY}{secrets.token_hex(4)}-{path.name}")
        with disk_errors(path):
            try:
                with temporary.open("xb", buffering=0) as raw:
                    file = HashedFile(raw)
                    yield file
                    file.flush()
                    os.fsync(raw.fileno())
                self._enter_journal(name, file.record())
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise

    def write_bytes(self, name: str, data: Any) -> Path:
        with self.create(name) as file:
            file.write(data)
        return self.folder / name

    def write_text(self, name: str, text: str) -> Path:
        return self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Any) -> Path:
        return self.write_text(name, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")

    def write_table(self, name: str, table: pa.Table, **parquet_options: Any) -> Path:
        """Write an Arrow table as Parquet; options go to pyarrow.parquet.write_table (zstd where none is
        given).
        """
        options = {"compression": "zstd"} | parquet_options
        with self.create(name) as file:
            pq.write_table(table, file, **options)
        return self.folder / name

    def clean(self) -> None:
        """Remove what a killed writer left half-written. Only for the one who holds the folder alone."""
        for path in self.folder.rglob(f"{TEMPORARY}*"):
            path.unlink(missing_ok=True)

    def records(self) -> dict[str, FileRecord]:
        """Every file of the folder by name, with size, checksum and rows. Raises StorageError where one has
        changed.
        """
        journal = self._journal()
        found = {}
        for path in sorted(self.folder.rglob("*")):
            if not path.is_file() or path.name.startswith("."):
                continue
            name = path.relative_to(self.folder).as_posix()
            record = self._verified.get(name)
            if record is None or path.stat().st_size != record.bytes:
                record = checksum(path)
            if name in journal and (record.bytes, record.xxh3) != (journal[name].bytes, journal[name].xxh3):
                path.unlink()
                raise StorageError(
                    f"{path} changed after it was written; it is removed: run the same command again"
                )
            found[name] = FileRecord(record.bytes, record.xxh3, _rows(path))
        return found

    def _enter_journal(self, name: str, record: FileRecord) -> None:
        # Before the rename: a file under its name always has its line. One small append is atomic between
        # processes; the leading newline keeps a line torn by a power cut from swallowing this one.
        line = f"\n{json.dumps({'name': name} | asdict(record))}\n".encode()
        descriptor = os.open(self.journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        self._verified[name] = record

    def _journal(self) -> dict[str, FileRecord]:
        entries = {}
        for line in self.journal_path.read_text().splitlines() if self.journal_path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            name = entry.pop("name")
            entries[name] = FileRecord(**entry)
        return entries


def _rows(path: Path) -> int | None:
    if path.suffix != ".parquet":
        return None
    try:
        return pq.read_metadata(path).num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(
            f"{path} is not whole Parquet ({error}): remove it and run the same command again"
        ) from None


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power cut. A part's own rename need not: a part that is gone is
    made again.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
