"""What is known of every sample before its features exist, and a reader over what of them is there.

In: responses. Out: a table of rows (`rows.parquet` in the features artifact), which of them are kept, the rows
themselves, and a `SampleReader` over the kept samples and one fill of the window.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from eagle3core.batch import Document
from storage.errors import StorageError
from storage.features import FeatureReader, FeatureSample
from storage.schemas import ResponseRow, from_table
from tasks.documents import split_train
from tasks.samples import HELDOUT

ROWS = "rows.parquet"
# As in the feature store's index; `part` is the part of the responses.
SCHEMA = pa.schema(
    [
        pa.field(name, type_, nullable=False)
        for name, type_ in {
            "id": pa.string(),
            "conversation_id": pa.string(),
            "split": pa.string(),
            "n_tokens": pa.int32(),
            "n_supervised": pa.int32(),
            "part": pa.int32(),
        }.items()
    ]
)


def rows_of(responses: Path) -> pa.Table:
    """A row for every response, of SCHEMA, in the order of the parts."""
    tables = [_rows_of_part(path) for path in sorted(responses.glob("part-*.parquet"))]
    return pa.concat_tables(tables) if tables else SCHEMA.empty_table()


def kept_rows(rows: pa.Table) -> list[int]:
    """Row numbers of what is needed to the end: held-out answers, and those that choose the checkpoint."""
    heldout = [i for i, split in enumerate(rows["split"].to_pylist()) if split == HELDOUT]
    return sorted({*heldout, *split_train(rows).validation})


def read_responses(responses: Path, wanted: Mapping[int, Collection[str]]) -> dict[str, ResponseRow]:
    """The responses of the ids in `wanted`, which are listed by part, by id."""
    found = {}
    for number, ids in sorted(wanted.items()):
        table = pq.read_table(responses / part_name(number))
        chosen = table.filter(pc.is_in(table["id"], pa.array(sorted(ids), pa.string())))
        found |= {row.id: row for row in from_table(ResponseRow, chosen)}
    return found


def part_name(number: int) -> str:
    return f"part-{number:05d}.parquet"


def part_number(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


@dataclass(frozen=True)
class Promised:
    """A `DocumentSource` by name only: from lengths alone follows the order in which documents are needed."""

    lengths: list[int]
    supervised_counts: list[int]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Document:
        raise LookupError(f"document {i} is not extracted yet")


class StreamedReader:
    """All rows by number, of which those can be read that are kept or in the window now."""

    def __init__(self, kept: Path, window: Path) -> None:
        """`kept`: the features artifact. `window`: a fill's folder. Raises StorageError, DamagedPart."""
        self._window = window
        self.index = pq.read_table(kept / ROWS)
        self._ids: list[str] = self.index["id"].to_pylist()
        readers = [FeatureReader(kept), FeatureReader(window)]
        self.spec = readers[0].spec
        self._places = {name: (reader, i) for reader in readers for i, name in enumerate(reader.index["id"].to_pylist())}

    def read(self, i: int) -> FeatureSample:
        """Sample i. Raises StorageError where it is not there now."""
        if (place := self._places.get(self._ids[i])) is None:
            raise StorageError(f"sample {self._ids[i]} is not in {self._window}: training is not where the window is")
        reader, row = place
        return reader.read(row)


def _rows_of_part(path: Path) -> pa.Table:
    names = ["id", "conversation_id", "split", "token_ids", "spans"]
    table = pq.read_table(path, columns=names).combine_chunks()
    columns = {name: table[name] for name in names[:3]}
    columns["n_tokens"] = pc.list_value_length(table["token_ids"])
    spans = table["spans"].combine_chunks()
    starts, ends = (column.to_numpy().astype(np.int64) for column in spans.flatten().flatten())
    written = np.concatenate([[0], np.cumsum(ends - starts)])
    offsets = np.concatenate([[0], np.cumsum(pc.list_value_length(spans).to_numpy())])
    columns["n_supervised"] = pa.array((written[offsets[1:]] - written[offsets[:-1]]).astype(np.int32))
    columns["part"] = pa.array(np.full(len(table), part_number(path), np.int32))
    return pa.table([columns[name] for name in SCHEMA.names], SCHEMA)
