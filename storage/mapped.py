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
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage import thrift
from storage.errors import DamagedPart
from storage.pages import LENGTH_BYTES, MAGIC, OtherLayout

_BINARY, _REQUIRED, _UNCOMPRESSED = 6, 0, 0
# What a reader may trip over in a footer whose bytes were altered.
_UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    struct.error,
    pa.ArrowException,
)


class MappedFile:
    """Values as views of the mapped file. A view keeps the mapping alive; nothing is copied.

    Raises OtherLayout where values cannot be found in place, ValueError where the file is no whole Parquet
    file.
    """

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        self.bytes = len(self._view)
        footer = read_footer(self._view)
        self.metadata = {pair[1].decode(): pair[2].decode() for pair in footer.get(5, [])}
        self.rows: int = footer[3]
        self._ends = {name: _page_ends(self._view, footer, name) for name in columns}

    def value(self, column: str, row: int, size: int) -> memoryview:
        """The value's bytes, read-only. Raises ValueError unless exactly `size` bytes are stored there."""
        end = int(self._ends[column][row])
        start = end - size
        inside = start >= LENGTH_BYTES and end <= self.bytes
        if not inside or struct.unpack_from("<I", self._view, start - LENGTH_BYTES)[0] != size:
            raise ValueError(f"column {column} row {row} does not hold {size:,} bytes")
        return self._view[start:end]

    def want(self, column: str, row: int, size: int) -> None:
        """Ask the kernel to read a value ahead, all of it at once rather than page by page."""
        start = (int(self._ends[column][row]) - size) // mmap.PAGESIZE * mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, max(start, 0), size + mmap.PAGESIZE)


class DecodedFile:
    """The same values through pyarrow, a row group at a time: any Parquet file with these columns."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        self._file = pq.ParquetFile(path)
        self.bytes = path.stat().st_size
        self._columns = list(columns)
        metadata = self._file.metadata
        self.metadata = {key.decode(): value.decode() for key, value in (metadata.metadata or {}).items()}
        self.rows: int = metadata.num_rows
        self._first_rows = np.cumsum(
            [0] + [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
        )
        self._group: tuple[int, pa.Table] | None = None

    def value(self, column: str, row: int, size: int) -> memoryview:
        """The value's bytes, read-only. Raises ValueError unless exactly `size` bytes are stored there."""
        number = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        if self._group is None or self._group[0] != number:
            self._group = number, self._file.read_row_group(number, columns=self._columns)
        value = self._group[1][column][row - int(self._first_rows[number])].as_buffer()
        if value.size != size:
            raise ValueError(f"column {column} row {row} does not hold {size:,} bytes")
        return memoryview(value)

    def want(self, column: str, row: int, size: int) -> None:
        """Nothing to ask for ahead of time."""


class MappedParts:
    """Files kept open, those least recently used let go once about `limit` bytes of them were touched.

    Pages that a mapping has touched count as the process's memory; views that are still in use keep their
    mapping. Every file must carry `metadata`.
    """

    def __init__(self, columns: Sequence[str], metadata: Mapping[str, str], limit: int) -> None:
        self._columns = list(columns)
        self._metadata = dict(metadata)
        self._limit = limit
        self._open: OrderedDict[Path, MappedFile | DecodedFile] = OrderedDict()
        self._touched: dict[Path, int] = {}
        self._total = 0
        self._lock = threading.Lock()

    def values(self, path: Path, row: int, sizes: Sequence[int]) -> list[memoryview]:
        """The values of one row, of the sizes they must have. Raises DamagedPart where the file does not
        hold them.
        """
        try:
            with self._lock:
                file = self._file(path, sum(sizes))
                for column, size in zip(self._columns, sizes, strict=True):
                    file.want(column, row, size)
                return [
                    file.value(column, row, size) for column, size in zip(self._columns, sizes, strict=True)
                ]
        except FileNotFoundError:
            raise DamagedPart(path, "it is missing") from None
        except _UNREADABLE as error:
            raise DamagedPart(path, " ".join(str(error).split())) from None

    def _file(self, path: Path, size: int) -> MappedFile | DecodedFile:
        if path not in self._open:
            self._open[path] = self._checked(path)
            self._touched[path] = 0
        self._open.move_to_end(path)
        # Rows that are read again are counted again, up to the file's size: the limit errs on the small side.
        more = min(size, self._open[path].bytes - self._touched[path])
        self._touched[path] += more
        self._total += more
        while self._total > self._limit and len(self._open) > 1:
            oldest, _ = self._open.popitem(last=False)
            self._total -= self._touched.pop(oldest)
        return self._open[path]

    def _checked(self, path: Path) -> MappedFile | DecodedFile:
        try:
            file: MappedFile | DecodedFile = MappedFile(path, self._columns)
        except OtherLayout:
            file = DecodedFile(path, self._columns)
        if {key: file.metadata.get(key) for key in self._metadata} != self._metadata:
            raise ValueError("it was written under another spec than its index")
        return file


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
