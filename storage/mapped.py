"""Reading wide values of a Parquet part in place.

In: a file that storage/pages.py wrote (or that another tool wrote anew). Out: a value's bytes by column and
row, mapped where the layout allows it, decoded by pyarrow where it does not.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import thrift
from storage.errors import DamagedPart
from storage.kernel import populate, read_ahead
from storage.page_index import decode_pages
from storage.pages import LENGTH_BYTES, MAGIC, OtherLayout

_LENGTH = struct.Struct("<I")
_BINARY, _REQUIRED, _UNCOMPRESSED = 6, 0, 0


@dataclass(frozen=True)
class Layout:
    """What is known of a part once its footer was read.

    identity: size, inode and time of change; a part that was let go and is mapped again must have kept them.
    ends: int64[rows, columns], where each row's page ends in the file; there the page's one value ends too.
    """

    identity: tuple[int, int, int]
    ends: np.ndarray

    @property
    def bytes(self) -> int:
        return self.identity[0]


class MappedFile:
    """Values as views of the mapped file. A view keeps the mapping alive; nothing is copied.

    Raises OtherLayout where values cannot be found in place, ValueError where the file is no whole Parquet
    file, or not the one that `layout` was read from.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], metadata: Mapping[str, str], layout: Layout | None
    ) -> None:
        with path.open("rb") as file:
            identity = _identity(file.fileno())
            if layout and layout.identity != identity:
                raise ValueError("it was changed while it was in use")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view, self._memory = memoryview(self._map), np.frombuffer(self._map, np.uint8)
        self.layout = layout or Layout(identity, self._read_ends(columns, metadata))

    def _read_ends(self, columns: Sequence[str], metadata: Mapping[str, str]) -> np.ndarray:
        try:
            footer = read_footer(self._view)
            _require({pair[1].decode(): pair[2].decode() for pair in footer.get(5, [])}, metadata)
            return np.stack([_page_ends(self._view, footer, name) for name in columns], 1)
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # What an altered footer that still decodes may lead to.
            raise ValueError(f"its footer makes no sense ({error!r})") from None

    def values(self, row: int, sizes: Sequence[int], first: bool) -> list[memoryview]:
        """The row's bytes of every column, read-only. Raises ValueError unless exactly `sizes` are stored there.

        `first`: nobody has looked at this row yet. Its pages are read in at once, which a bad disk answers with an error
        and not with the end of this process. (Nothing helps a caller that touches a view of a file that was cut after
        that, nor of a disk that goes bad between: the kernel ends the process with SIGBUS.)
        """
        if self._map.size() != self.layout.bytes:
            raise ValueError("its size changed while it was in use")
        places = [(end - size, end) for end, size in zip(self.layout.ends[row].tolist(), sizes, strict=True)]
        if first:
            for start, end in places:
                self._check(row, start, end)
        return [self._view[start:end] for start, end in places]

    def read_ahead(self, row: int, sizes: Sequence[int]) -> None:
        """Have the row's pages come into the page cache; returns at once, and never fails."""
        for end, size in zip(self.layout.ends[row].tolist(), sizes, strict=True):
            if 0 < end <= self.layout.bytes:
                read_ahead(self._memory, max(0, end - size), end)

    def _check(self, row: int, start: int, end: int) -> None:
        if start >= LENGTH_BYTES and end <= self.layout.bytes:
            populate(self._memory, start - LENGTH_BYTES, end)
            if _LENGTH.unpack_from(self._view, start - LENGTH_BYTES)[0] == end - start:
                return
        raise ValueError(f"row {row} does not hold {end - start:,} bytes where they should be")


class DecodedFile:
    """The same values through pyarrow, a row group at a time: any Parquet file with these columns."""

    def __init__(self, path: Path, columns: Sequence[str], metadata: Mapping[str, str]) -> None:
        self._file = pq.ParquetFile(path)
        self._columns = list(columns)
        footer = self._file.metadata
        _require({key.decode(): value.decode() for key, value in (footer.metadata or {}).items()}, metadata)
        schema = self._file.schema_arrow
        if not all(pa.types.is_binary(schema.field(name).type) for name in columns):
            raise ValueError(f"not all of {', '.join(columns)} are binary")
        with path.open("rb") as file:
            self.layout = Layout(_identity(file.fileno()), np.empty((0, 0), np.int64))
        self._first_rows = np.cumsum(
            [0] + [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        )
        self._group: tuple[int, pa.Table] | None = None
        self._lock = threading.Lock()

    def values(self, row: int, sizes: Sequence[int], first: bool) -> list[memoryview]:
        """As MappedFile's."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        with self._lock:
            if self._group is None or self._group[0] != number:
                self._group = number, self._file.read_row_group(number, columns=self._columns)
            table = self._group[1]
        at = row - int(self._first_rows[number])
        buffers = [table[column][at].as_buffer() for column in self._columns]
        if [buffer and buffer.size for buffer in buffers] != list(sizes):
            raise ValueError(f"row {row} holds values of other sizes than its index says")
        return [memoryview(buffer) for buffer in buffers]

    def read_ahead(self, row: int, sizes: Sequence[int]) -> None:
        """Nothing is read ahead."""


class MappedParts:
    """Files kept open, those least recently used let go once about `limit` bytes of them were touched.

    Pages that a mapping has touched count as the process's memory; views that are still in use keep their
    mapping. Every file must carry `metadata`.
    """

    def __init__(self, columns: Sequence[str], metadata: Mapping[str, str], limit: int) -> None:
        self._columns = list(columns)
        self._metadata = dict(metadata)
        self._limit = limit
        self._layouts: dict[Path, Layout] = {}
        self._open: OrderedDict[Path, MappedFile | DecodedFile] = OrderedDict()
        self._touched: dict[Path, int] = {}
        self._total = 0
        self._lock = threading.Lock()

    def values(self, path: Path, row: int, sizes: Sequence[int], first: bool) -> list[memoryview]:
        """The values of one row, of the sizes they must have; `first`: this row was not read before.

        Raises DamagedPart where the file does not hold them.
        """
        try:
            return self._file(path, sum(sizes)).values(row, sizes, first)
        except FileNotFoundError:
            raise DamagedPart(path, "it is missing") from None
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            raise DamagedPart(path, " ".join(str(error).split())) from None

    def read_ahead(self, path: Path, row: int, sizes: Sequence[int]) -> None:
        """Have a row that will be asked for come into the page cache; a file that cannot be read says so when it is asked."""
        with suppress(OSError, ValueError, LookupError, pa.ArrowException):
            self._file(path, 0).read_ahead(row, sizes)

    def _file(self, path: Path, size: int) -> MappedFile | DecodedFile:
        """The open file, `size` more bytes of which are about to be touched."""
        with self._lock:
            file = self._open.get(path)
            if file is None:
                file = self._open[path] = self._opened(path)
                self._layouts[path] = file.layout
                self._touched[path] = 0
            self._open.move_to_end(path)
            # Rows that are read again are counted again, up to the file's size: the limit errs on the small side.
            more = min(size, file.layout.bytes - self._touched[path])
            self._touched[path] += more
            self._total += more
            while self._total > self._limit:
                oldest, _ = self._open.popitem(last=False)
                self._total -= self._touched.pop(oldest)
            return file

    def _opened(self, path: Path) -> MappedFile | DecodedFile:
        try:
            return MappedFile(path, self._columns, self._metadata, self._layouts.get(path))
        except OtherLayout:
            return DecodedFile(path, self._columns, self._metadata)


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_ino, status.st_mtime_ns


def _require(found: Mapping[str, str], metadata: Mapping[str, str]) -> None:
    if {key: found.get(key) for key in metadata} != dict(metadata):
        raise ValueError("it was written under another spec than its index")


def read_footer(data: memoryview) -> dict[int, Any]:
    """Parquet's FileMetaData by field id. Raises ValueError where the file is cut off or not Parquet."""
    tail = len(MAGIC) + 4
    if len(data) < 2 * tail or data[:4] != MAGIC or data[-4:] != MAGIC:
        raise ValueError("it is not whole Parquet: a magic number is missing")
    size = struct.unpack_from("<I", data, len(data) - tail)[0]
    if size > len(data) - 2 * tail + 4:
        raise ValueError("its footer is cut off")
    return thrift.decode(data[len(data) - tail - size : len(data) - tail])


def _page_ends(data: memoryview, footer: dict[int, Any], name: str) -> np.ndarray:
    """[rows] int64 from the page indexes of every row group."""
    names = [element[4].decode() for element in footer[2] if 5 not in element]
    if name not in names:
        raise ValueError(f"it has no column {name}")
    position = names.index(name)
    element = [element for element in footer[2] if 5 not in element][position]
    if element.get(3) != _REQUIRED or element.get(1) != _BINARY:
        raise OtherLayout("values may be null, or are not binary")
    ends: list[np.ndarray] = []
    for group in footer[4]:
        chunk = group[1][position]
        if chunk[3][4] != _UNCOMPRESSED or 11 in chunk[3] or 4 not in chunk:
            raise OtherLayout("compressed, with a dictionary, or without a page index")
        pages = decode_pages(data[chunk[4] : chunk[4] + chunk[5]])
        if len(pages) != group[3] or (pages[:, 2] != np.arange(len(pages))).any():
            raise OtherLayout("a page holds more than one row")
        ends.append(pages[:, 0] + pages[:, 1])
    return np.concatenate(ends) if ends else np.empty(0, np.int64)
