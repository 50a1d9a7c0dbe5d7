"""Where a source's bytes are, and how they are opened: package, file, folder in hub layout, object store, hub
id.

In: a recipe's `Source`. Out: its rows; its identity (for fingerprints) and size (for estimates).
"""

from __future__ import annotations

import gzip
import hashlib
import io
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import fsspec
import zstandard

from tasks.checksums import sampled_checksum
from tasks.packages import PREFIX, PackageError, package_file
from tasks.recipe import Source
from tasks.sources.rows import CUT_OFF, RawRow, SourceError, json_rows, parquet_rows, plain_rows

READERS = {
    ".json": json_rows,
    ".jsonl": json_rows,
    ".ndjson": json_rows,
    ".parquet": parquet_rows,
    ".txt": plain_rows,
}
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class _File:
    """One data file; `url` is a local path or an object-store URL."""

    url: str
    local: bool

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def ending(self) -> str:
        """The ending that names the format, compression set aside."""
        path = PurePosixPath(self.url)
        return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


class _Decompressed(io.RawIOBase):
    """A decompressed stream that ends, and remembers it, where the compressed file was cut off."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.damage = ""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except (EOFError, OSError, zlib.error, lzma.LZMAError, zstandard.ZstdError) as error:
            self.damage, data = str(error), b""
        buffer[: len(data)] = data
        return len(data)


def read_source(source: Source) -> Iterator[RawRow]:
    """Every row of a source. Raises SourceError where it is not there or of no known format."""
    files = _files(source)
    if files is None:
        yield from _stream_from_hub(source)
        return
    for file in files:
        yield from _read_file(file)


def source_identity(source: Source) -> list[str]:
    """What tells this source's content from another's, cheaply: names and sampled checksums. Checks that it
    is there.

    Raises SourceError as `read_source` does.
    """
    files = _files(source)
    if files is None:
        return [source.uri]
    return [f"{file.name}:{_checksum(file)}" for file in files]


def source_bytes(source: Source) -> int | None:
    """Bytes of the source's files as they lie, or None where they are not known (a hub id that streams)."""
    files = _files(source)
    if files is None:
        return None
    return sum(
        Path(f.url).stat().st_size if f.local else fsspec.core.url_to_fs(f.url)[0].size(f.url) for f in files
    )


def _files(source: Source) -> list[_File] | None:
    """The source's files in a stable order; None for a hub id that has to be streamed."""
    uri = source.uri
    if uri.startswith(PREFIX):
        try:
            return [_File(str(package_file(uri.removeprefix(PREFIX), (".json", ".jsonl", ".parquet"))), True)]
        except PackageError as error:
            raise SourceError(str(error)) from None
    if "://" in uri:
        return _remote_files(source)
    path = Path(uri).expanduser()
    if path.is_file():
        return _known([_File(str(path), True)], source)
    if path.is_dir():
        found = [_File(str(each), True) for each in sorted(path.rglob("*")) if each.is_file()]
        return _of_split(found, source)
    if uri.count("/") in (1, 2) and not uri.startswith((".", "~", "/")):
        hub_id, config = _hub_id(uri)
        cached = _cached_folder(hub_id)
        if cached is None:
            return None
        # On the hub a configuration's files lie in a folder of its name.
        where = cached / config if config else cached
        return _of_split(
            [_File(str(each), True) for each in sorted(where.rglob("*")) if each.is_file()], source
        )
    raise SourceError(
        f"data source {uri!r}: no such file or folder, and neither a hub id, package:NAME nor a URL"
    )


def _remote_files(source: Source) -> list[_File]:
    try:
        fs, path = fsspec.core.url_to_fs(source.uri)
        if fs.isfile(path):
            return _known([_File(source.uri, False)], source)
        names = sorted(fs.find(path))
    except (OSError, ValueError, ImportError) as error:
        raise SourceError(f"data source {source.uri}: {' '.join(str(error).split())}") from None
    return _of_split([_File(fs.unstrip_protocol(name), False) for name in names], source)


def _known(files: list[_File], source: Source) -> list[_File]:
    known = [file for file in files if file.ending in READERS]
    if not known:
        raise SourceError(
            f"data source {source.uri}: no file of a known format ({', '.join(READERS)}, each also .gz "
            f"or .zst)"
        )
    return known


def _of_split(files: list[_File], source: Source) -> list[_File]:
    """A folder's data files; with a split named, those whose file or folder name carries it (the hub's
    layout).
    """
    files = [
        file for file in files if file.ending in READERS and not file.name.startswith((".", "dataset_info"))
    ]
    if source.split is None:
        return _known(files, source)
    wanted = source.split
    chosen = [
        f
        for f in files
        if f.name.startswith((f"{wanted}-", f"{wanted}.")) or PurePosixPath(f.url).parent.name == wanted
    ]
    if not chosen:
        seen = ", ".join(sorted({file.name for file in files})[:8]) or "no data file"
        raise SourceError(f"data source {source.uri} has no split {wanted!r} (found {seen})")
    return chosen


def _hub_id(uri: str) -> tuple[str, str | None]:
    """owner/name and the configuration, if any, of owner/name[/configuration]."""
    owner, name, *config = uri.split("/")
    return f"{owner}/{name}", config[0] if config else None


def _cached_folder(hub_id: str) -> Path | None:
    """The data set's snapshot in the hub's cache, or None."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", local_files_only=True))
    except (OSError, ValueError):  # not in the cache
        return None


def _stream_from_hub(source: Source) -> Iterator[RawRow]:
    import datasets

    hub_id, config = _hub_id(source.uri)
    try:
        stream = datasets.load_dataset(hub_id, config, split=source.split or "train", streaming=True)
        rows = iter(stream)
        first = next(rows, None)
    except Exception as error:
        # The hub's client raises a dozen kinds; to a user they are one thing.
        raise SourceError(
            f"data set {source.uri} is not on this machine and cannot be streamed "
            f"({' '.join(str(error).split())[:200]}): "
            f"fetch it with `hf download --repo-type dataset {hub_id}`, or name a local file as uri"
        ) from error
    number = 0
    while first is not None:
        yield RawRow(f"{source.uri}#{number}", first)
        first = next(rows, None)
        number += 1


def _read_file(file: _File) -> Iterator[RawRow]:
    with _open(file) as stream:
        layer = _decompress(file, stream)
        rows = READERS[file.ending](io.BufferedReader(layer, 1 << 20) if layer else stream, file.name)
        count, problem = 0, ""
        for row in rows:
            yield row
            count, problem = count + 1, row.problem
        if layer and layer.damage and problem != CUT_OFF:
            yield RawRow(f"{file.name}#{count}", None, CUT_OFF, layer.damage)


def _open(file: _File) -> BinaryIO:
    try:
        return fsspec.open(file.url, "rb").open()
    except OSError as error:
        raise SourceError(f"{file.url}: {error.strerror or error}") from None


def _decompress(file: _File, stream: BinaryIO) -> _Decompressed | None:
    if file.url.endswith(".gz"):
        return _Decompressed(gzip.GzipFile(fileobj=stream))
    if file.url.endswith(".zst"):
        return _Decompressed(zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True))
    return None


def _checksum(file: _File) -> str:
    if file.local:
        return sampled_checksum(Path(file.url))
    fs, path = fsspec.core.url_to_fs(file.url)
    info = fs.info(path)
    told = str(info.get("ETag") or info.get("LastModified") or info.get("mtime") or "")
    return hashlib.sha256(f"{info['size']} {told}".encode()).hexdigest()[:20]
