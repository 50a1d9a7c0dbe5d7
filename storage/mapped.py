"""Reading wide values of a Parquet part in place.

In: a file that storage/pages.py wrote (or that another tool wrote anew). Out: a value's bytes by column and
row, mapped where the layout allows it, decoded by pyarrow where it does not.
"""

from __future__ import annotations

import mmap
import struct
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import thrift
from storage.errors import DamagedPart
from storage.pages import LENGTH_BYTES, MAGIC, OtherLayout

# Smaller values come in with the kernel's own read-ahead.
READ_AHEAD_BYTES = 128 << 10

_LENGTH = struct.Struct("<I")
_BINARY, _REQUIRED, _UNCOMPRESSED = 6, 0, 0


@dataclass(frozen=True)
class Layout:
    """What is known of a part once its footer was read: its size, and for each column where every row's
    page ends in the file, [rows] int64. There the page's one value ends too.
    """

    bytes: int
    ends: list[np.ndarray]


class MappedFile:
    """Values as views of the mapped file. A view keeps the mapping alive; nothing is copied.

    Raises OtherLayout where values cannot be found in place, ValueError where the file is no whole Parquet
    file.
    """

    def __init__(
        self, path: Path, columns: Sequence[str], metadata: Mapping[str, str], layout: Layout | None
    ) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self.layout = layout or self._read_layout(columns, metadata)
        if self.layout.bytes != len(self._view):
            raise ValueError("its size changed while it was in use")

    def _read_layout(self, columns: Sequence[str], metadata: Mapping[str, str]) -> Layout:
        try:
            footer = read_footer(self._view)
            _require({pair[1].decode(): pair[2].decode() for pair in footer.get(5, [])}, metadata)
            return Layout(len(self._view), [_page_ends(self._view, footer, name) for name in columns])
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            # What an altered footer that still decodes may lead to.
            raise ValueError(f"its footer makes no sense ({error!r})") from None

    def values(self, row: int, sizes: Sequence[int], ahead: bool) -> list[memoryview]:
        """The row's bytes of every column, read-only. Raises ValueError unless exactly `sizes` are stored
        there.

        `ahead`: have large values read in at once, rather than page by page as they are touched.
        """
        views = []
        for ends, size in zip(self.layout.ends, sizes, strict=True):
            end = int(ends[row])
            start = end - size
            inside = start >= LENGTH_BYTES and end <= self.layout.bytes
            if not inside or _LENGTH.unpack_from(self._view, start - LENGTH_BYTES)[0] != size:
                raise ValueError(f"row {row} does not hold {size:,} bytes where they should be")
            if ahead and size >= READ_AHEAD_BYTES:
                first = start // mmap.PAGESIZE * mmap.PAGESIZE
                self._map.madvise(mmap.MADV_WILLNEED, first, end - first)
            views.append(self._view[start:end])
        return views


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
        self.layout = Layout(path.stat().st_size, [])
        self._first_rows = np.cumsum(
            [0] + [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        )
        self._group: tuple[int, pa.Table] | None = None

    def values(self, row: int, sizes: Sequence[int], ahead: bool) -> list[memoryview]:
        """As MappedFile's; nothing is read ahead."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        if self._group is None or self._group[0] != number:
            self._group = number, self._file.read_row_group(number, columns=self._columns)
        at = row - int(self._first_rows[number])
        buffers = [self._group[1][column][at].as_buffer() for column in self._columns]
        if [buffer and buffer.size for buffer in buffers] != list(sizes):
            raise ValueError(f"row {row} holds values of other sizes than its index says")
        return [memoryview(buffer) for buffer in buffers]


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
            with self._lock:
                file, reopened = self._file(path, sum(sizes))
                return file.values(row, sizes, ahead=first or reopened)
        except FileNotFoundError:
            raise DamagedPart(path, "it is missing") from None
        except (OSError, ValueError, LookupError, pa.ArrowException) as error:
            raise DamagedPart(path, " ".join(str(error).split())) from None

    def _file(self, path: Path, size: int) -> tuple[MappedFile | DecodedFile, bool]:
        """The open file, and whether it had been let go: what does not fit may have left the page cache
        too.
        """
        file, reopened = self._open.get(path), False
        if file is None:
            reopened = path in self._layouts
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
        return file, reopened

    def _opened(self, path: Path) -> MappedFile | DecodedFile:
        try:
            return MappedFile(path, self._columns, self._metadata, self._layouts.get(path))
        except OtherLayout:
            return DecodedFile(path, self._columns, self._metadata)


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
    ends: list[int] = []
    for group in footer[4]:
        chunk = group[1][position]
        if chunk[3][4] != _UNCOMPRESSED or 11 in chunk[3] or 4 not in chunk:
            raise OtherLayout("compressed, with a dictionary, or without a page index")
        pages = thrift.decode(data[chunk[4] : chunk[4] + chunk[5]])[1]
        if len(pages) != group[3] or any(page[3] != row for row, page in enumerate(pages)):
            raise OtherLayout("a page holds more than one row")
        ends += (page[1] + page[2] for page in pages)
    return np.array(ends, np.int64)
