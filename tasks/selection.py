"""What is taken of a stream of clean conversations: no doubles, and a seeded sample, in memory that does not
grow with text.

In: conversations one by one. Out: which to refuse as doubles; the sample, read back from a spill file.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from storage.schemas import CONVERSATIONS, ConversationRow, Message, from_table, to_table
from tasks.keys import Keys
from tasks.sources.shapes import RawConversation

SPILL_ROWS = 512


def key_of(*parts: str) -> int:
    """64 bits that say which of two rows comes first, the same on every machine; lone surrogates are allowed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass"))
        digest.update(b"\0")
    return int.from_bytes(digest.digest(), "big")


def squeezed(text: str) -> str:
    """Text as far as two prompts are the same question: case and spacing set aside."""
    return " ".join(text.casefold().split())


@dataclass
class Doubles:
    """Contents and ids seen so far, as 64-bit keys."""

    _raw: Keys = field(default_factory=Keys)
    _clean: Keys = field(default_factory=Keys)
    _ids: Keys = field(default_factory=Keys)
    _firsts: Keys = field(default_factory=Keys)  # an id with the turns that it had first
    _taken: Keys = field(default_factory=Keys)
    _renamed: Keys = field(default_factory=Keys)

    def raw_double(self, raw: RawConversation) -> bool:
        """Whether the same turns, to the letter, have been seen, under this id or another."""
        if not raw.turns:
            return False
        return not self._raw.add(key_of(*(f"{turn.role}\0{turn.content}" for turn in raw.turns)))

    def clean_double(self, messages: tuple[Message, ...]) -> bool:
        """Whether the same messages have been seen once damage is mended."""
        return not self._clean.add(key_of(*(f"{m.role}\0{m.content}" for m in messages)))

    def id_reused(self, raw: RawConversation) -> bool:
        """True once per id: when it turns up with other turns than at first."""
        if not raw.id:
            return False
        name = key_of(raw.id)
        row = key_of(raw.id, *(f"{turn.role}\0{turn.content}" for turn in raw.turns))
        if self._ids.add(name):
            self._firsts.add(row)
        return row not in self._firsts and self._renamed.add(name)

    def unique_id(self, wanted: str) -> str:
        """The id itself, or with a number behind it where another conversation has it."""
        name, number = wanted, 1
        while not self._taken.add(key_of(name)):
            number += 1
            name = f"{wanted}.{number}"
        return name


class Sample:
    """The `limit` rows with the smallest keys (all where None): a seeded sample that no order of rows
    changes.

    Rows that could be in it go to a spill file; only keys stay in memory. A context manager; `folder` must be
    there.
    """

    def __init__(self, limit: int | None, folder: Path) -> None:
        self._limit = limit
        self._heap: list[tuple[int, int]] = []  # (-key, place in the spill): the largest key on top
        self._path = folder / "spill.parquet"
        self._spilled = 0
        self._waiting: list[ConversationRow] = []
        self._writer: pq.ParquetWriter | None = None

    def __enter__(self) -> Sample:
        self._writer = pq.ParquetWriter(self._path, CONVERSATIONS, compression="zstd")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer:
            self._writer.close()
        self._path.unlink(missing_ok=True)

    def __len__(self) -> int:
        return len(self._heap)

    def wants(self, key: int) -> bool:
        """Whether a row with this key would be in the sample as it stands; asked before anything dear is
        done.
        """
        return self._limit is None or len(self._heap) < self._limit or key < -self._heap[0][0]

    def add(self, key: int, row: ConversationRow) -> None:
        """Take a wanted row in; where the sample is full the row with the largest key leaves it."""
        entry = (-key, self._spilled)
        if self._limit is not None and len(self._heap) >= self._limit:
            heapq.heapreplace(self._heap, entry)
        else:
            heapq.heappush(self._heap, entry)
        self._spilled += 1
        self._waiting.append(row)
        if len(self._waiting) >= SPILL_ROWS:
            self._flush()

    def rows(self) -> Iterator[ConversationRow]:
        """The sample, in the order of the source. No row can be added afterwards."""
        self._flush()
        if self._writer:
            self._writer.close()
            self._writer = None
        chosen = {place for _, place in self._heap}
        place = 0
        # Buffering ahead would hold the whole file.
        for batch in pq.ParquetFile(self._path, pre_buffer=False).iter_batches(batch_size=SPILL_ROWS):
            wanted = [i for i in range(batch.num_rows) if place + i in chosen]
            place += batch.num_rows
            yield from from_table(ConversationRow, pa.Table.from_batches([batch]).take(wanted))
        pa.default_memory_pool().release_unused()  # what decompressing took: up to 100 MB that the system does not see free

    def _flush(self) -> None:
        if self._writer and self._waiting:
            self._writer.write_table(to_table(ConversationRow, self._waiting))
            self._waiting = []
