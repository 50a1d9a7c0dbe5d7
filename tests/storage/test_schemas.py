"""Rows as dataclasses, tables of exactly the schema, and back."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.errors import StorageError
from storage.schemas import (
    RESPONSES,
    SCHEMAS,
    AcceptanceRow,
    ConversationRow,
    DecodedRow,
    Message,
    QuarantineRow,
    ResponseRow,
    ServingRow,
    Span,
    VocabularyRow,
    from_table,
    read_rows,
    to_table,
)

MESSAGES = (Message("user", "hé\u200b"), Message("assistant", ""))
ROWS = [
    ConversationRow("c1", "sharegpt", "train", "writing", MESSAGES),
    QuarantineRow("q1", "sharegpt", "empty", "no turns"),
    ResponseRow(
        "c1-0", "c1", "sharegpt", "heldout", "", MESSAGES, (1, 2, 49151), (Span(1, 3),), "stop", 0.5, 7, False
    ),
    VocabularyRow(0, 17, 1 << 40, 0.25),
    AcceptanceRow("walk", "c1", "math", 1.0, 12, 5, 3, 1),
    DecodedRow("tree", "c1", "math", 1.0, 0, 8, 2, (5, 6, 7)),
    ServingRow("eagle3", 0.0, 1, 672, 672, 629),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: type(row).__name__)
def test_rows_survive_parquet(row, tmp_path: Path):
    table = to_table(type(row), [row, row])
    assert table.schema.equals(SCHEMAS[type(row)], check_metadata=True)
    pq.write_table(table, tmp_path / "part-00000.parquet")
    pq.write_table(to_table(type(row), []), tmp_path / "part-00001.parquet")
    assert list(read_rows(type(row), tmp_path)) == [row, row]


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: kind.__name__)
def test_every_field_has_its_column(kind: type):
    assert [field.name for field in fields(kind)] == SCHEMAS[kind].names


def test_a_null_is_refused():
    row = QuarantineRow("q", "s", "empty", None)
    with pytest.raises(pa.ArrowInvalid):
        to_table(QuarantineRow, [row]).validate(full=True)
        pq.write_table(to_table(QuarantineRow, [row]), pa.BufferOutputStream())


def test_a_table_of_another_kind_is_refused():
    with pytest.raises(StorageError, match=r"columns conversation_id, .* are missing"):
        list(from_table(ResponseRow, to_table(ConversationRow, [])))


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "part-00000.parquet").write_bytes(b"PAR1nothing")
    with pytest.raises(StorageError, match=r"part-00000\.parquet cannot be read"):
        list(read_rows(ResponseRow, tmp_path))


def test_files_say_what_they_are():
    assert RESPONSES.metadata[b"draftline.kind"] == b"responses"
