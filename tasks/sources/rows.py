"""Rows out of one stream of bytes: a JSON array, JSON lines, Parquet, plain lines. Memory is one row's, not
the file's.

In: a binary stream. Out: `RawRow`s. A row that cannot be read is yielded with its problem; a file that was
cut off gives every whole row and then one `RawRow` that says so.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq

BLOCK = 1 << 20  # characters read at a time
LARGEST_ROW = 1 << 25  # characters; a longer one is damage, not a conversation
INVALID = "invalid_json"
CUT_OFF = "cut_off"


class SourceError(RuntimeError):
    """A source cannot be read at all; one line says what, where, and what to do."""


@dataclass(frozen=True)
class RawRow:
    """One row as it lies in its file: `value` as parsed, or what the `problem` with it is.

    place: file and row number, for messages. problem: "" | "invalid_json" | "cut_off" (the file ends inside
    this row).
    """

    place: str
    value: Any = None
    problem: str = ""
    detail: str = ""


class _Text:
    """A window over a text stream: `text[at:]` is what has not been consumed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.text = ""
        self.at = 0

    @property
    def left(self) -> int:
        return len(self.text) - self.at

    def more(self) -> bool:
        """Read on; twice as much each time a row does not end, so a long row is not parsed over and over."""
        block = self._stream.read(max(BLOCK, self.left))
        self.text, self.at = self.text[self.at :] + block, 0
        return bool(block)


def text_of(stream: BinaryIO) -> TextIO:
    """UTF-8 with or without a mark; bytes that are none become lone surrogates, which normalising mends and
    counts.
    """
    return io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")


def json_rows(stream: BinaryIO, name: str) -> Iterator[RawRow]:
    """Rows of a JSON array or of JSON lines; the first character tells which."""
    text = text_of(stream)
    window = _Text(text)
    while not window.text.strip() and window.more():
        pass
    if window.text.lstrip()[:1] == "[":
        window.at = window.text.index("[") + 1
        yield from _array(window, name)
    else:
        yield from _lines(window, name)


def _array(window: _Text, name: str) -> Iterator[RawRow]:
    decoder = json.JSONDecoder(strict=False)
    spaces = re.compile(r"[\s,]*")
    first_key: str | None = None
    number = 0
    while True:
        window.at = spaces.match(window.text, window.at).end()  # type: ignore[union-attr]
        if not window.left:
            if window.more():
                continue
            yield RawRow(f"{name}#{number}", None, CUT_OFF, f"the array is not closed after {number} rows")
            return
        if window.text[window.at] == "]":
            return
        try:
            value, end = decoder.raw_decode(window.text, window.at)
        except RecursionError:
            value, end, error = None, 0, json.JSONDecodeError("nested too deeply", window.text, window.at + 1)
        except json.JSONDecodeError as caught:
            error = caught
            if _may_go_on(error) and window.left < LARGEST_ROW and window.more():
                continue
        else:
            if end == len(window.text) and window.more():
                continue  # a bare number or word may go on in the next block
            yield RawRow(f"{name}#{number}", value)
            number += 1
            window.at = end
            if first_key is None and isinstance(value, dict) and value:
                first_key = next(iter(value))
            continue
        found = _next_row(window, error, first_key)
        problem = INVALID if found else CUT_OFF
        yield RawRow(
            f"{name}#{number}", None, problem, f"row {number}: {error.msg} after {error.pos} characters"
        )
        if not found:
            return
        number += 1


def _may_go_on(error: json.JSONDecodeError) -> bool:
    """Whether the text simply ends too soon, so that reading on may help."""
    return error.msg.startswith("Unterminated string") or error.pos >= len(error.doc) - 16


def _next_row(window: _Text, error: json.JSONDecodeError, first_key: str | None) -> bool:
    """Move to the next place behind the damage where a row seems to begin: an object with the first row's
    first key.
    """
    start = re.compile(r"\{\s*" + re.escape(json.dumps(first_key, ensure_ascii=False))) if first_key else None
    window.at += 1
    while start is not None:
        if found := start.search(window.text, window.at):
            window.at = found.start()
            return True
        window.at = max(window.at, len(window.text) - 64 - len(first_key or ""))
        if not window.more():
            break
    return False


def _lines(window: _Text, name: str) -> Iterator[RawRow]:
    number = 0
    skipping = False  # inside a line that is too long to be a row
    while True:
        end = window.text.find("\n", window.at)
        if end < 0:
            if window.left >= LARGEST_ROW:
                skipping = True
                window.at = len(window.text)
            if window.more():
                continue
            end = len(window.text)
        line = window.text[window.at : end]
        last = end == len(window.text)
        window.at = end + 1
        if skipping:
            yield RawRow(
                f"{name}#{number}", None, INVALID, f"line {number} is longer than {LARGEST_ROW} characters"
            )
            number, skipping = number + 1, False
        elif line.strip():
            yield _line(line, f"{name}#{number}", last)
            number += 1
        if last:
            return


def _line(line: str, place: str, last: bool) -> RawRow:
    try:
        return RawRow(place, json.loads(line, strict=False))
    except RecursionError:
        return RawRow(place, None, INVALID, "nested too deeply")
    except ValueError as error:
        # Only a last line without its newline can be the mark of a broken download.
        return RawRow(place, None, CUT_OFF if last else INVALID, str(error))


def plain_rows(stream: BinaryIO, name: str) -> Iterator[RawRow]:
    """One prompt a line."""
    for number, line in enumerate(text_of(stream)):
        if line.strip():
            yield RawRow(f"{name}#{number}", line.strip())


def parquet_rows(stream: BinaryIO, name: str) -> Iterator[RawRow]:
    """Rows of a Parquet file, some hundred at a time. Raises SourceError where the file is not whole."""
    number = 0
    try:
        for batch in pq.ParquetFile(stream).iter_batches(batch_size=256):
            for value in batch.to_pylist():
                yield RawRow(f"{name}#{number}", value)
                number += 1
    except (pa.ArrowInvalid, OSError) as error:
        if not number:
            raise SourceError(f"{name}: not a whole Parquet file ({error}); fetch it again") from None
        yield RawRow(f"{name}#{number}", None, CUT_OFF, str(error))
