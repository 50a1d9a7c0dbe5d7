"""The columns of every kind of Parquet file, and the dataclass that one row of it is.

In: rows as dataclasses. Out: Arrow tables of exactly the schema, and rows back. `features` has a file of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from storage.errors import StorageError

SCHEMA_VERSION = 1

MESSAGES = pa.list_(
    pa.struct([pa.field("role", pa.string(), False), pa.field("content", pa.string(), False)])
)
SPANS = pa.list_(pa.struct([pa.field("start", pa.int32(), False), pa.field("end", pa.int32(), False)]))


def _schema(kind: str, **columns: pa.DataType) -> pa.Schema:
    metadata = {"draftline.kind": kind, "draftline.schema_version": str(SCHEMA_VERSION)}
    return pa.schema([pa.field(name, type_, nullable=False) for name, type_ in columns.items()], metadata)


CONVERSATIONS = _schema(
    "conversations",
    id=pa.string(),
    source=pa.string(),
    split=pa.string(),
    category=pa.string(),
    messages=MESSAGES,
)
QUARANTINE = _schema("quarantine", id=pa.string(), source=pa.string(), reason=pa.string(), detail=pa.string())
RESPONSES = _schema(
    "responses",
    id=pa.string(),
    conversation_id=pa.string(),
    source=pa.string(),
    split=pa.string(),
    category=pa.string(),
    messages=MESSAGES,
    token_ids=pa.list_(pa.int32()),
    spans=SPANS,
    finish_reason=pa.string(),
    temperature=pa.float64(),
    seed=pa.int64(),
    truncated=pa.bool_(),
)
VOCABULARY = _schema(
    "vocabulary", draft_id=pa.int32(), target_id=pa.int32(), count=pa.int64(), cumulative_share=pa.float64()
)
ACCEPTANCE = _schema(
    "acceptance",
    mode=pa.string(),
    prompt_id=pa.string(),
    category=pa.string(),
    temperature=pa.float64(),
    anchor=pa.int32(),
    drafted=pa.int32(),
    accepted=pa.int32(),
    turn=pa.int32(),
)
DECODED = _schema(
    "decoded",
    mode=pa.string(),
    prompt_id=pa.string(),
    category=pa.string(),
    temperature=pa.float64(),
    round=pa.int32(),
    drafted=pa.int32(),
    accepted=pa.int32(),
    tokens=pa.list_(pa.int32()),
)
SERVING = _schema(
    "serving",
    method=pa.string(),
    temperature=pa.float64(),
    position=pa.int32(),
    drafts=pa.int64(),
    drafted=pa.int64(),
    accepted=pa.int64(),
)


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user or assistant."""

    role: str
    content: str


@dataclass(frozen=True)
class Span:
    """Tokens start..end-1 of a sample were written by the target (its end-of-turn token included)."""

    start: int
    end: int


@dataclass(frozen=True)
class ConversationRow:
    """One conversation; `split` is "train" or "heldout", `category` the source's own word ("" where it has
    none).
    """

    id: str
    source: str
    split: str
    category: str
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class QuarantineRow:
    """One refused row: `reason` is one of a few words to count by, `detail` says more."""

    id: str
    source: str
    reason: str
    detail: str


@dataclass(frozen=True)
class ResponseRow:
    """One training sample: the tokens of the last prompt and of the answer, spans where the target wrote.

    `truncated`: cut on the right to the recipe's length. `temperature` 0 is greedy; `seed` is the engine's.
    """

    id: str
    conversation_id: str
    source: str
    split: str
    category: str
    messages: tuple[Message, ...]
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    finish_reason: str
    temperature: float
    seed: int
    truncated: bool


@dataclass(frozen=True)
class VocabularyRow:
    """Draft id `draft_id` stands for `target_id`, seen `count` times; shares are cumulative by falling
    count.
    """

    draft_id: int
    target_id: int
    count: int
    cumulative_share: float


@dataclass(frozen=True)
class AcceptanceRow:
    """One chain anchor or one decoding round: of `drafted` tokens `accepted` came through.

    `mode` is anchor, walk, chain or tree; `anchor` is the feature row it started from. `turn` counts the answers of a
    dialogue from 0; `prompt_id` is "set/id" for a prompt of an evaluation set.
    """

    mode: str
    prompt_id: str
    category: str
    temperature: float
    anchor: int
    drafted: int
    accepted: int
    turn: int = 0


@dataclass(frozen=True)
class DecodedRow:
    """One round of the reference decoder: of `drafted` tokens `accepted` came through, and it added `tokens`.

    `mode` is chain or tree; `round` counts from 0 within one answer.
    """

    mode: str
    prompt_id: str
    category: str
    temperature: float
    round: int
    drafted: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class ServingRow:
    """A server's own counters for one draft position of one method at one temperature."""

    method: str
    temperature: float
    position: int
    drafts: int
    drafted: int
    accepted: int


Row = TypeVar(
    "Row", ConversationRow, QuarantineRow, ResponseRow, VocabularyRow, AcceptanceRow, DecodedRow, ServingRow
)

SCHEMAS: Mapping[type, pa.Schema] = {
    ConversationRow: CONVERSATIONS,
    QuarantineRow: QUARANTINE,
    ResponseRow: RESPONSES,
    VocabularyRow: VOCABULARY,
    AcceptanceRow: ACCEPTANCE,
    DecodedRow: DECODED,
    ServingRow: SERVING,
}


def to_table(kind: type[Row], rows: Iterable[Row]) -> pa.Table:
    """Rows of one type as a table of its schema; no rows give an empty table."""
    return pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMAS[kind])


def from_table(kind: type[Row], table: pa.Table) -> Iterator[Row]:
    """The rows of a table. Raises StorageError where it lacks a column of the type's schema."""
    names = [each.name for each in fields(kind)]
    if missing := [name for name in names if name not in table.column_names]:
        raise StorageError(f"not a table of {kind.__name__}: columns {', '.join(missing)} are missing")
    nested = {"messages": lambda value: tuple(Message(**each) for each in value)}
    nested["spans"] = lambda value: tuple(Span(**each) for each in value)
    nested["token_ids"] = nested["tokens"] = tuple
    for batch in table.select(names).to_batches(max_chunksize=1024):
        for values in batch.to_pylist():
            yield kind(**{name: nested.get(name, _same)(value) for name, value in values.items()})


def read_rows(kind: type[Row], folder: Path, pattern: str = "part-*.parquet") -> Iterator[Row]:
    """Every row of the files of a folder that match `pattern`, in the order of their names."""
    for path in sorted(Path(folder).glob(pattern)):
        try:
            table = pq.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise StorageError(f"{path} cannot be read as Parquet: {error}") from None
        yield from from_table(kind, table)


def _same(value: Any) -> Any:
    return value
