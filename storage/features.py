"""The feature store: what the target computed on each sample, written once, read in place in any order.

In: samples as numpy arrays (bfloat16 travels as uint16 bits). Out: wide parts `part-00000.parquet` (one row
a sample) and a narrow `index.parquet` beside them; samples back as read-only views of the mapped parts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import DamagedPart, StorageError
from storage.feature_spec import INDEX_SCHEMA, FeatureSample, FeatureSpec, wide_columns
from storage.folder import PartFolder, why_damaged
from storage.manifest import MANIFEST, ArtifactRef, read_manifest
from storage.mapped import MappedParts
from storage.pages import Column, PageWriter, wide_digest
from storage.schemas import SPANS

__all__ = ["FeatureReader", "FeatureSample", "FeatureSpec", "FeatureWriter"]

INDEX = "index.parquet"
PARTS = "part-*.parquet"
# Large enough that other tools read few row groups, small enough that they need not hold a whole part.
ROW_GROUP_BYTES = 64 << 20
# A page's size is a signed 32-bit number in Parquet.
LARGEST_VALUE = (1 << 31) - 1024
# What a reader lets stay mapped: mapped pages count as its memory.
MAPPED_BYTES = 256 << 20
# What is read in and verified before its turn comes, in so many batches.
AHEAD_BYTES, BATCHES_AHEAD = 32 << 20, 4

_TEXT = ("id", "conversation_id", "source", "split", "category", "finish_reason")
_NARROW = [
    *(Column(name, "string") for name in _TEXT),
    Column("temperature", "double"),
    Column("n_tokens", "int32"),
    Column("n_supervised", "int32"),
    Column("spans", "binary"),
    Column("bytes", "int64"),
]
_CHECKSUM = Column("checksum", "int64", digest=True)


class FeatureWriter:
    """Writes the parts of one artifact. Several processes may write different parts of the same folder."""

    def __init__(self, folder: PartFolder, spec: FeatureSpec, row_group_bytes: int | None = None) -> None:
        """row_group_bytes: about how much a row group holds; ROW_GROUP_BYTES where not given."""
        self._folder = folder
        self._spec = spec
        self._row_group_bytes = row_group_bytes or ROW_GROUP_BYTES
        self._wide = wide_columns(spec)
        values = (Column(wide.name, "binary", wide=True) for wide in self._wide)
        self._columns = [*_NARROW, *values, _CHECKSUM]

    def finished(self) -> set[int]:
        """Numbers of the parts that are there, this run's and an earlier, killed one's."""
        return {_number(name) for name in self._folder.parts(PARTS)}

    def write_part(self, number: int, samples: Sequence[FeatureSample]) -> str:
        """Write one part and return its name. Raises StorageError where a sample does not fit the spec."""
        name = _part_name(number)
        values = [self._values(sample) for sample in samples]
        with self._folder.create(name) as file:
            writer = PageWriter(file, self._columns, self._spec.to_metadata())
            for start, end in self._groups([sum(each.nbytes for each in arrays) for arrays in values]):
                writer.row_group(self._row_group(samples[start:end], values[start:end]))
            writer.close()
        return name

    def finish(self) -> dict[str, Any]:
        """Write the index over every part that is there, and return the manifest's summary."""
        names = sorted(self._folder.parts(PARTS), key=_number)
        tables = [self._index_rows(name) for name in names]
        table = pa.concat_tables(tables) if tables else INDEX_SCHEMA.empty_table()
        _refuse_doubles(table["id"].to_pylist(), self._folder.folder)
        table = table.replace_schema_metadata(self._spec.to_metadata())
        self._folder.write_table(INDEX, table, row_group_size=1 << 16)
        tokens = sum(table["n_tokens"].to_pylist())
        size = sum((self._folder.folder / name).stat().st_size for name in names)
        return {
            "rows": len(table),
            "parts": len(names),
            "tokens": tokens,
            "supervised_tokens": sum(table["n_supervised"].to_pylist()),
            "bytes": size,
            "bytes_per_token": round(size / tokens, 1) if tokens else 0.0,
            "spec": asdict(self._spec),
        }

    def _values(self, sample: FeatureSample) -> list[np.ndarray]:
        tokens = len(sample.token_ids)
        if tokens < 2:
            raise StorageError(f"sample {sample.id}: {tokens} tokens; features need at least 2")
        if max(wide.size(tokens) for wide in self._wide) > LARGEST_VALUE:
            raise StorageError(f"sample {sample.id}: {tokens} tokens are more than a Parquet value can hold")
        if any(not 0 <= start < end <= tokens for start, end in sample.spans):
            raise StorageError(f"sample {sample.id}: spans {sample.spans} do not lie in its {tokens} tokens")
        arrays = []
        for wide in self._wide:
            array, shape = getattr(sample, wide.name), (tokens - wide.drop, *wide.shape)
            if array is None or array.dtype != wide.dtype or array.shape != shape:
                got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
                raise StorageError(f"sample {sample.id}: {wide.name} is {got}, not {wide.dtype}{list(shape)}")
            arrays.append(np.ascontiguousarray(array))
        return arrays

    def _groups(self, sizes: Sequence[int]) -> list[tuple[int, int]]:
        """[start, end) of runs of rows of `sizes` bytes that make a row group each."""
        groups, start, held = [], 0, 0
        for row, size in enumerate(sizes):
            held += size
            if held >= self._row_group_bytes or row == len(sizes) - 1:
                groups.append((start, row + 1))
                start, held = row + 1, 0
        return groups

    def _row_group(
        self, samples: Sequence[FeatureSample], values: Sequence[list[np.ndarray]]
    ) -> dict[str, Any]:
        columns: dict[str, Any] = {wide.name: [row[i] for row in values] for i, wide in enumerate(self._wide)}
        for name in (*_TEXT, "temperature"):
            columns[name] = [getattr(sample, name) for sample in samples]
        columns["n_tokens"] = [len(sample.token_ids) for sample in samples]
        columns["n_supervised"] = [sum(end - start for start, end in sample.spans) for sample in samples]
        columns["spans"] = [np.array(sample.spans, "<i4").tobytes() for sample in samples]
        columns["bytes"] = [sum(array.nbytes for array in row) for row in values]
        return columns

    def _index_rows(self, name: str) -> pa.Table:
        path = self._folder.folder / name
        try:
            file = pq.ParquetFile(path)
            table = file.read(columns=[column.name for column in (*_NARROW, _CHECKSUM)])
        except (OSError, pa.ArrowInvalid) as error:
            raise DamagedPart(path, str(error)) from None
        metadata = {key.decode(): value.decode() for key, value in (file.metadata.metadata or {}).items()}
        if FeatureSpec.from_metadata(metadata, path) != self._spec:
            raise StorageError(
                f"{path} was written under another feature spec: remove it and run the same command again"
            )
        columns = {column: table[column] for column in table.column_names}
        columns["spans"] = pa.array([_spans(value) for value in table["spans"].to_pylist()], SPANS)
        columns["part"] = pa.array(np.full(len(table), _number(name), np.int32))
        columns["row"] = pa.array(np.arange(len(table), dtype=np.int32))
        return pa.table([columns[name] for name in INDEX_SCHEMA.names], INDEX_SCHEMA)


class FeatureReader:
    """Random access to the samples of one artifact's folder. Threads may read at the same time.

    Every sample is verified against its checksum when it is first read; DamagedPart names the part where it
    is not what was written. The index is verified when the reader is made. About `mapped_bytes` of parts
    stay mapped.
    """

    def __init__(self, folder: Path, mapped_bytes: int = MAPPED_BYTES) -> None:
        self.folder = Path(folder)
        self.index, self.spec = _read_index(self.folder)
        self._wide = wide_columns(self.spec)
        self._parts = MappedParts([wide.name for wide in self._wide], self.spec.to_metadata(), mapped_bytes)
        columns = {name: self.index[name].combine_chunks() for name in self.index.column_names}
        self._text = {name: _listed(columns[name]) for name in (*_TEXT, "temperature")}
        self._tokens, self._part, self._row, self._bytes, self._checksums = (
            columns[name].to_numpy() for name in ("n_tokens", "part", "row", "bytes", "checksum")
        )
        self._paths = {part: self.folder / _part_name(part) for part in np.unique(self._part).tolist()}
        self._span_offsets = columns["spans"].offsets.to_numpy()
        self._span_bounds = [column.to_numpy() for column in columns["spans"].values.flatten()]
        self._verified = np.zeros(len(self.index), bool)

    def __len__(self) -> int:
        return len(self.index)

    def size(self, i: int) -> int:
        """Bytes of sample i's arrays."""
        return int(self._bytes[i])

    def read(self, i: int) -> FeatureSample:
        """Sample i, its arrays read-only views of the part. Raises DamagedPart, IndexError."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)}")
        place, first = self._place(i), not self._verified[i]
        values = self._parts.values(*place, first)
        if first:
            if wide_digest(values) != self._checksums[i]:
                raise DamagedPart(place[0], f"row {place[1]} does not agree with its checksum")
            self._verified[i] = True
        arrays = {
            wide.name: np.ndarray((len(value) // wide.row_bytes, *wide.shape), wide.dtype, value)
            for wide, value in zip(self._wide, values, strict=True)
        }
        text = {name: column[i] for name, column in self._text.items()}
        start, end = self._span_offsets[i : i + 2]
        spans = list(zip(*(bounds[start:end].tolist() for bounds in self._span_bounds), strict=True))
        return FeatureSample(**text, spans=spans, **arrays)

    def stream(self, rows: Iterable[int], ahead_bytes: int = AHEAD_BYTES) -> Iterator[FeatureSample]:
        """The samples `rows`, in their order; those that follow are read in and verified meanwhile, by a thread.

        At most `ahead_bytes`, and a few samples, are in flight. What was verified before costs no thread. Raises as `read`
        does, when the damaged sample's turn comes.
        """
        waiting: deque[tuple[list[int], Future[list[FeatureSample]] | None]] = deque()
        batches = self._batches(rows, ahead_bytes // BATCHES_AHEAD)
        pool = ThreadPoolExecutor(1, thread_name_prefix="features")
        try:
            for batch, following in pairwise(chain(batches, [[]])):
                fresh = not self._verified[batch].all()
                waiting.append((batch, pool.submit(self._read_ahead, batch, following) if fresh else None))
                if len(waiting) == BATCHES_AHEAD - 1:  # and one is on its way from the disk
                    yield from self._arrived(*waiting.popleft())
            while waiting:
                yield from self._arrived(*waiting.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _batches(self, rows: Iterable[int], size: int) -> Iterator[list[int]]:
        """Runs of `rows` that come to `size` bytes: a thread that hands over single samples waits more than it works."""
        batch: list[int] = []
        held = 0
        for i in rows:
            batch.append(i)
            held += self.size(i)
            if held >= size:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch

    def _read_ahead(self, rows: Sequence[int], following: Sequence[int]) -> list[FeatureSample]:
        """The samples `rows`, up to one that is damaged; the disk is asked for `following` before."""
        for i in following:
            if not self._verified[i]:
                self._parts.read_ahead(*self._place(i))
        samples: list[FeatureSample] = []
        with suppress(DamagedPart):
            samples.extend(map(self.read, rows))
        return samples

    def _arrived(self, rows: Sequence[int], coming: Future[list[FeatureSample]] | None) -> Iterator[FeatureSample]:
        samples = coming.result() if coming else []
        yield from samples
        yield from map(self.read, rows[len(samples) :])

    def _place(self, i: int) -> tuple[Path, int, list[int]]:
        """Sample i's part, its row there, and the size of each of its wide values."""
        tokens = int(self._tokens[i])
        return self._paths[self._part[i]], int(self._row[i]), [wide.size(tokens) for wide in self._wide]


def _read_index(folder: Path) -> tuple[pa.Table, FeatureSpec]:
    path = folder / INDEX
    manifest = folder / MANIFEST
    if manifest.is_file():
        # An index's own checksum is in the manifest; a folder still being written has none yet.
        ref = ArtifactRef(folder.parent.name, folder.name, str(folder))
        record = read_manifest(manifest.read_bytes(), ref).files.get(INDEX)
        if record and (reason := why_damaged(path, record)):
            raise DamagedPart(path, reason)
    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise StorageError(
            f"{path} is missing: the features were not finished; run their stage again"
        ) from None
    except (OSError, pa.ArrowInvalid) as error:
        raise DamagedPart(path, str(error)) from None
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return table, FeatureSpec.from_metadata(metadata, path)


def _listed(column: pa.Array) -> list[Any]:
    """A column as a list that is quick to index; values that are equal are one object."""
    encoded = column.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    return [values[code] for code in encoded.indices.to_numpy().tolist()]


def _part_name(number: int) -> str:
    return f"part-{number:05}.parquet"


def _number(name: str) -> int:
    return int(name.removeprefix("part-").removesuffix(".parquet"))


def _spans(raw: bytes) -> list[dict[str, int]]:
    return [{"start": start, "end": end} for start, end in np.frombuffer(raw, "<i4").reshape(-1, 2).tolist()]


def _refuse_doubles(ids: Sequence[str], folder: Path) -> None:
    seen: set[str] = set()
    doubled = {name for name in ids if name in seen or seen.add(name)}
    if doubled:
        raise StorageError(f"{folder}: {len(doubled)} samples are there twice, {min(doubled)} among them")
