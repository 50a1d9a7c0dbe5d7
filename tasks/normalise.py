"""Unclean dialogues made clean: every kind of damage has one rule, every case is counted, nothing raises.

In: a `RawConversation`. Out: `Clean` (messages that start with an optional system turn, then user and
assistant in turn) or `Refused` with a reason; both carry the kinds of damage that were seen.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

from storage.schemas import Message
from tasks import residue
from tasks.sources.shapes import RawConversation, RawTurn

Action = Literal["kept", "mended", "turn dropped", "refused"]

# What is done about each kind. "kept": counted, and left as it is, since the target writes the answers anew.
RULES: Mapping[str, Action] = {
    "empty_conversations_list": "refused",
    "single_turn_gpt_only": "refused",
    "system_only": "refused",
    "no_user_turn": "refused",
    "unknown_role": "refused",
    "tool_call": "refused",
    "content_is_not_text": "refused",
    "starts_with_gpt": "turn dropped",
    "starts_with_system_share_banner": "turn dropped",
    "late_system_turn": "turn dropped",
    "empty_human_value": "turn dropped",
    "empty_gpt_value": "turn dropped",
    "gpt_value_only_zero_width_space": "turn dropped",
    "unclosed_thought": "turn dropped",
    "role_user": "mended",
    "role_chatgpt": "mended",
    "role_bing": "mended",
    "role_bard": "mended",
    "consecutive_human": "mended",
    "consecutive_gpt": "mended",
    "escaped_markdown_underscore": "mended",
    "share_prompt_residue": "mended",
    "ui_residue": "mended",
    "endoftext_literal_in_gpt": "mended",
    "special_token_text": "mended",
    "control_characters": "mended",
    "replacement_char_fffd": "mended",
    "lone_surrogate": "mended",
    "invisible_characters": "mended",
    "single_turn_human_only": "kept",
    "ends_with_human": "kept",
    "html_in_gpt": "kept",
    "bidi_or_zero_width": "kept",
    "unbalanced_code_fence_gpt": "kept",
    "last_gpt_cut_mid_sentence": "kept",
    "very_many_turns_ge_60": "kept",
    "highly_repetitive_turn": "kept",
    "cjk": "kept",
}

ROLES: Mapping[str, str] = {
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
}
# A dialogue with tools is none that a target could answer again: what its tools return is not in the data.
TOOLS = {"tool", "function", "observation", "ipython", "tool_call", "tool_response", "function_call", "function_response"}
# A share service's banner ("This conversation is shared from ...") stands where a system prompt would.
BANNERS = ("conversation is shared from", "conversation was shared from")
MANY_TURNS = 60
REPETITION = 20  # a turn that zlib makes this many times smaller says one thing over and over
REPETITION_FROM = 500  # characters


@dataclass(frozen=True)
class Clean:
    """messages: an optional system turn, then user and assistant in turn, user first; no content is blank,
    save that an assistant turn without an answer in the data is "". kinds: what was seen and dealt with by
    its rule.
    """

    messages: tuple[Message, ...]
    kinds: frozenset[str]

    @property
    def mended(self) -> bool:
        """Whether anything was changed."""
        return any(RULES[kind] != "kept" for kind in self.kinds)


@dataclass(frozen=True)
class Refused:
    """reason: one of the RULES' kinds. detail: for a person."""

    reason: str
    detail: str
    kinds: frozenset[str]


@dataclass(frozen=True)
class _Turn:
    """A turn with its role mapped and its content proved to be text; `unanswered`: the data holds no answer.
    """

    role: str
    content: str
    unanswered: bool = False


def normalise(raw: RawConversation) -> Clean | Refused:
    """Apply every rule to one dialogue. Never raises on data; the order of the rules is the order below."""
    kinds: set[str] = set()
    turns: list[_Turn] = []
    for number, turn in enumerate(raw.turns):
        known = _known(turn, number, kinds)
        if isinstance(known, Refused):
            return known
        turns.append(known)
    kinds |= _structure(turns)
    kinds |= _contents(turns)
    messages = _mend(turns, kinds)
    if any(message.role == "user" for message in messages):
        return Clean(tuple(messages), frozenset(kinds))
    refusals = [
        kind for kind in ("empty_conversations_list", "single_turn_gpt_only", "system_only") if kind in kinds
    ]
    reason = refusals[0] if refusals else "no_user_turn"
    return Refused(
        reason, f"{len(turns)} turns, none of them a user's with anything in it", frozenset({*kinds, reason})
    )


def _known(turn: RawTurn, number: int, kinds: set[str]) -> _Turn | Refused:
    """Role by name, content as text."""
    name = turn.role.strip().lower() if isinstance(turn.role, str) else turn.role
    role = ROLES.get(name) if isinstance(name, str) else None
    if turn.calls or (isinstance(name, str) and name in TOOLS):
        return Refused("tool_call", f"turn {number} calls a tool, or is one's answer", frozenset({*kinds, "tool_call"}))
    if role is None:
        detail = f"turn {number} is by {residue.printable(repr(turn.role))}"
        return Refused("unknown_role", detail, frozenset({*kinds, "unknown_role"}))
    if f"role_{name}" in RULES:
        kinds.add(f"role_{name}")
    content = _text(turn.content)
    if content is None:
        detail = f"turn {number} holds {type(turn.content).__name__}, not text"
        return Refused("content_is_not_text", detail, frozenset({*kinds, "content_is_not_text"}))
    return _Turn(role, content, unanswered=role == "assistant" and turn.content is None)


def _text(content: Any) -> str | None:
    """Text as it is, nothing as "", and a list of text parts (OpenAI's form) joined."""
    if content is None:
        return ""
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        return "".join(parts) if all(isinstance(part, str) for part in parts) else None
    return content if isinstance(content, str) else None


def _structure(turns: list[_Turn]) -> set[str]:
    """Kinds that show in the order of the turns."""
    roles = [turn.role for turn in turns]
    pairs = set(pairwise(roles))
    found = {
        "empty_conversations_list": not roles,
        "single_turn_gpt_only": roles == ["assistant"],
        "single_turn_human_only": roles == ["user"],
        "system_only": set(roles) == {"system"},
        "starts_with_gpt": roles[:1] == ["assistant"] and len(roles) > 1,
        "starts_with_system_share_banner": len(roles) > 1
        and roles[0] == "system"
        and _is_banner(turns[0].content),
        "late_system_turn": "system" in roles[1:] and set(roles) != {"system"},
        "consecutive_human": ("user", "user") in pairs,
        "consecutive_gpt": ("assistant", "assistant") in pairs,
        "ends_with_human": len(roles) > 1 and roles[-1] == "user",
        "very_many_turns_ge_60": len(roles) >= MANY_TURNS,
    }
    return {kind for kind, seen in found.items() if seen}


def _contents(turns: list[_Turn]) -> set[str]:
    """Kinds that show in the texts themselves."""
    kinds: set[str] = set()
    for turn in turns:
        if turn.unanswered:
            continue
        kinds |= residue.kinds_in(turn.content, turn.role)
        if _repeats(turn.content):
            kinds.add("highly_repetitive_turn")
    if turns and turns[-1].role == "assistant" and residue.cut_mid_sentence(turns[-1].content):
        kinds.add("last_gpt_cut_mid_sentence")
    if residue.mostly_cjk([turn.content for turn in turns if turn.role == "assistant"]):
        kinds.add("cjk")
    return kinds


def _mend(turns: list[_Turn], kinds: set[str]) -> list[Message]:
    """Clean texts, then clean order: banners, blanks and leading answers dropped, runs of one role joined."""
    messages: list[Message] = []
    for turn in turns:
        content = residue.mend(turn.content)
        if turn.role == "system" and (messages or not content or _is_banner(content)):
            continue
        if turn.role == "assistant" and (not messages or messages[-1].role == "system"):
            continue  # nobody asked
        if turn.role == "assistant" and residue.unclosed_thought(content):
            kinds.add("unclosed_thought")
            content = ""
        elif not content and not turn.unanswered:
            continue
        if messages and messages[-1].role == turn.role:
            content = "\n\n".join(part for part in (messages[-1].content, content) if part)
            messages.pop()
        messages.append(Message(turn.role, content))
    if messages and messages[-1].role == "assistant" and not messages[-1].content:
        messages.pop()
    return messages


def _is_banner(content: str) -> bool:
    return any(banner in content[:200].lower() for banner in BANNERS)


def _repeats(text: str) -> bool:
    if len(text) <= REPETITION_FROM:
        return False
    # A few letters from the middle of such a text stand elsewhere in it too; most texts fail that at once.
    middle = len(text) // 2
    probe = text[middle : middle + 24]
    if text.find(probe) == middle and text.find(probe, middle + 1) < 0:
        return False
    data = text.encode("utf-8", "replace")
    return len(zlib.compress(data)) * REPETITION < len(data)
