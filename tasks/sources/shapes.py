"""From a row of a named data set to turns: who holds the dialogue, the system prompt, the category, where.

In: a parsed row and the source's kind. Out: `RawConversation`, still unclean. Shapes as published; see each
function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


class ShapeError(ValueError):
    """The row is not of the kind's shape."""


@dataclass(frozen=True)
class RawTurn:
    """One turn as found: neither the role nor the content need be text. calls: it calls tools."""

    role: Any
    content: Any
    calls: bool = False


@dataclass(frozen=True)
class RawConversation:
    """A dialogue as found. `id` and `category` are "" where the row has none."""

    id: str
    category: str
    turns: tuple[RawTurn, ...]


def conversation_of(kind: str, row: Any) -> RawConversation:
    """The dialogue in a row of a source of `kind`. Raises ShapeError with what is missing."""
    if kind == "prompts" and isinstance(row, str):
        return RawConversation("", "", (RawTurn("user", row),))
    if not isinstance(row, Mapping):
        raise ShapeError(f"a row is an object, this is {type(row).__name__}")
    return SHAPES[kind](row)


def _sharegpt(row: Mapping[str, Any]) -> RawConversation:
    """{"id", "conversations": [{"from", "value"}]}; older dumps say "items"."""
    turns = _first(row, "conversations", "items")
    return _made(row, _from_value(turns))


def _ultrachat(row: Mapping[str, Any]) -> RawConversation:
    """{"prompt", "prompt_id", "messages"} (sft and gen), or the old {"id", "data": [user, assistant, ...]}.
    """
    if "messages" in row:
        return _made(row, _role_content(row["messages"]))
    data = _first(row, "data")
    if not isinstance(data, list):
        raise ShapeError("data is not a list")
    return _made(
        row, tuple(RawTurn("user" if i % 2 == 0 else "assistant", text) for i, text in enumerate(data))
    )


def _openthoughts(row: Mapping[str, Any]) -> RawConversation:
    """Default: {"system", "conversations"}; metadata: {"problem", "deepseek_reasoning", "deepseek_solution",
    ...}.
    """
    if "conversations" in row:
        return _made(row, (*_system(row), *_from_value(row["conversations"])))
    problem = _first(row, "problem")
    reasoning, solution = row.get("deepseek_reasoning"), row.get("deepseek_solution")
    turns = [RawTurn("user", problem)]
    if isinstance(reasoning, str) and isinstance(solution, str):
        turns.append(RawTurn("assistant", f"<think>\n{reasoning.strip()}\n</think>\n\n{solution.strip()}"))
    return _made(row, tuple(turns))


def _openthoughts_math(row: Mapping[str, Any]) -> RawConversation:
    """{"problem", "solution", "messages", "system", "conversations"}.

    `messages` holds the short gold solution, not the reasoning: it is never read. The dialogue is in
    `conversations`.
    """
    if row.get("conversations"):
        return _made(row, (*_system(row), *_from_value(row["conversations"])))
    return _made(row, (*_system(row), RawTurn("user", _first(row, "problem"))))


def _messages(row: Mapping[str, Any]) -> RawConversation:
    """OpenAI style: {"messages": [{"role", "content"}]}; content may be a list of text parts."""
    return _made(row, _role_content(_first(row, "messages")))


def _prompts(row: Mapping[str, Any]) -> RawConversation:
    """A prompt under any of the usual names; "turns" is several user turns, to be answered one after the
    other.

    Between the turns of "turns" stand assistant turns without content (None): the data holds no answer.
    """
    turns = row.get("turns")
    if isinstance(turns, list) and turns:
        between = [each for text in turns for each in (RawTurn("user", text), RawTurn("assistant", None))]
        return _made(row, tuple(between[:-1]))
    if isinstance(row.get("instruction"), str):
        given = [row["instruction"], row.get("input") or ""]
        return _made(row, (RawTurn("user", "\n\n".join(part for part in given if part)),))
    return _made(row, (RawTurn("user", _first(row, "prompt", "question", "problem", "text")),))


SHAPES: Mapping[str, Callable[[Mapping[str, Any]], RawConversation]] = {
    "sharegpt": _sharegpt,
    "ultrachat": _ultrachat,
    "openthoughts": _openthoughts,
    "openthoughts-math": _openthoughts_math,
    "messages": _messages,
    "prompts": _prompts,
}


def _made(row: Mapping[str, Any], turns: tuple[RawTurn, ...]) -> RawConversation:
    identity = next(
        (row[key] for key in ("id", "prompt_id", "question_id", "task_id", "unique_id") if key in row), ""
    )
    category = next((row[key] for key in ("category", "domain", "subject") if row.get(key)), "")
    return RawConversation(str(identity), str(category), turns)


def _first(row: Mapping[str, Any], *keys: str) -> Any:
    for key in keys:
        if key in row:
            return row[key]
    raise ShapeError(
        f"no {' or '.join(keys)} in the row (it has {', '.join(map(str, list(row)[:8])) or 'nothing'})"
    )


def _system(row: Mapping[str, Any]) -> tuple[RawTurn, ...]:
    return (RawTurn("system", row["system"]),) if row.get("system") else ()


def _from_value(turns: Any) -> tuple[RawTurn, ...]:
    return _pairs(turns, "from", "value")


def _role_content(turns: Any) -> tuple[RawTurn, ...]:
    return _pairs(turns, "role", "content")


def _pairs(turns: Any, role: str, content: str) -> tuple[RawTurn, ...]:
    """Turns under the data set's own key names; the other common pair of names is taken too."""
    if not isinstance(turns, list):
        raise ShapeError(f"the turns are {type(turns).__name__}, not a list")
    other = {"from": "role", "role": "from", "value": "content", "content": "value"}
    found = []
    for turn in turns:
        if not isinstance(turn, Mapping):
            raise ShapeError(f"a turn is {type(turn).__name__}, not an object")
        calls = bool(turn.get("tool_calls") or turn.get("function_call"))
        found.append(
            RawTurn(turn.get(role, turn.get(other[role])), turn.get(content, turn.get(other[content])), calls)
        )
    return tuple(found)
