"""From a row of a published evaluation set to what the target is asked, in words that the field uses.

In: a parsed row and the set's kind. Out: the user turns, the row's own id ("" where it has none), its category.
Every kind takes two shapes: the one in which EAGLE, MT-bench and Spec-Bench keep questions ({"question_id",
"category", "turns"}; their turns carry their wording and are asked as they are), and the set's own columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.sources.shapes import ShapeError, conversation_of


class EvaluationSetError(ValueError):
    """An evaluation set cannot be used; one line says which, where, and what to do."""


@dataclass(frozen=True)
class SetKind:
    """How a set is published. field: the own shape's column that holds the prompt. wording: what is asked, "{}"
    standing for that column. category: the kind of task; None where every row names its own. size: prompts,
    for estimates. split: the hub's split that is measured on.
    """

    field: str
    wording: str
    category: str | None
    split: str
    size: int


KINDS: Mapping[str, SetKind] = {
    # The hub's copies hold both turns as a list under "prompt".
    # Its own categories (writing, roleplay, reasoning, ...): they differ most in what can be foretold.
    "mt-bench": SetKind("prompt", "{}", None, "train", 80),
    # EAGLE's wording, with the line break that its file lacks before some of the functions.
    "humaneval": SetKind("prompt", "Complete the code I provided.\n\n{}", "code", "test", 164),
    # Asked as it is: an instruct model explains its steps unasked, and EAGLE and Spec-Bench add nothing.
    "gsm8k": SetKind("question", "{}", "grade-school math", "test", 1319),
    # "instruction", and "input" below it where the row has one.
    "alpaca": SetKind("instruction", "{}", "instruction", "train", 52002),
    # Spec-Bench's and EAGLE's wording.
    "cnn-dailymail": SetKind("article", "Summarize: {}", "summarization", "test", 11490),
    # As it is: how the answer is to be boxed matters to a grader, not to acceptance.
    "math-500": SetKind("problem", "{}", "competition math", "test", 500),
    "prompts": SetKind("prompt", "{}", None, "train", 80),
    "starter": SetKind("prompt", "{}", None, "train", 84),
}


OUR_SHAPE = ("prompts", "starter")  # kinds whose rows come in no shape of their own


@dataclass(frozen=True)
class Asked:
    """One row: `turns` in the order they are asked; `id` and `category` are "" where the row has none."""

    id: str
    category: str
    turns: tuple[str, ...]


def asked_of(kind: str, row: Any) -> Asked:
    """What a row of a set of `kind` asks. Raises ShapeError with what is missing or not text."""
    shape = KINDS[kind]
    if kind not in OUR_SHAPE:
        if not isinstance(row, Mapping):
            raise ShapeError(f"a row is an object, this is {type(row).__name__}")
        if not row.get("turns"):
            row = _own(shape, row)
    raw = conversation_of("prompts", row)
    turns = tuple(turn.content for turn in raw.turns if turn.role == "user")
    for turn in turns:
        if not isinstance(turn, str) or not turn.strip():
            raise ShapeError(f"a turn is {'blank' if isinstance(turn, str) else type(turn).__name__}, not text")
    return Asked(raw.id, shape.category or raw.category, tuple(turn.strip() for turn in turns))


def _own(shape: SetKind, row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The set's own columns, as the shape that holds turns; Alpaca's need nothing done."""
    if shape.field not in row:
        has = ", ".join(map(str, list(row)[:8])) or "nothing"
        raise ShapeError(f"neither turns nor {shape.field} in the row (it has {has})")
    value = row[shape.field]
    if shape.field == "instruction":
        return row
    if isinstance(value, str):
        # A blank prompt must stay one: wording around nothing would pass for a question.
        value = [shape.wording.format(value.strip("\n")) if value.strip() else ""]
    if not isinstance(value, list) or not value:
        raise ShapeError(f"{shape.field} is {type(value).__name__}, not text")
    return {**row, "turns": value}
