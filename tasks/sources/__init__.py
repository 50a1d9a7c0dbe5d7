"""Prompts and dialogues from wherever they lie, row by row, in bounded memory.

In: a recipe's `Source`. Out: an iterator of `RawRow`, damaged rows and broken tails among them, never an
exception for one bad row.
"""

from tasks.sources.read import read_source, source_bytes, source_identity
from tasks.sources.rows import RawRow, SourceError

__all__ = ["RawRow", "SourceError", "read_source", "source_bytes", "source_identity"]
