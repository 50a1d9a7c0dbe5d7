"""A held-out answer cut into the rounds in which a server would have committed it.

In: token ids and walked rounds. Out: `Example`s for the page, stored as JSON beside the figures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

MOST_PROMPT = 400  # characters of the prompt's end that are shown
ROLES = ("system", "user", "assistant", "tool", "ipython", "developer")  # what templates write behind a special token
MOST_ROUNDS = 60

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ExampleRound:
    """Text that one round committed: the draft's accepted tokens, then the one token of the target itself."""

    accepted: str
    own: str


@dataclass(frozen=True)
class PromptPart:
    """Text of a prompt. template: its special tokens and roles, which stand in no message."""

    text: str
    template: bool


@dataclass(frozen=True)
class Example:
    """A held-out answer, round by round. prompt: its end, as a person reads it, the template's own words apart.

    tau: committed tokens over rounds, of the whole answer even where its text is `cut`.
    """

    prompt: tuple[PromptPart, ...]
    category: str
    temperature: float
    tau: float
    rounds: tuple[ExampleRound, ...]
    cut: bool


def make_example(
    token_ids: Sequence[int],
    start: int,
    accepted: Sequence[int],
    decode: Decode,
    *,
    special: Collection[int],
    category: str,
    temperature: float,
) -> Example:
    """The answer that begins at token `start`, whose first token comes from prefill.

    `special`: ids of the tokenizer's special tokens, which are shown by their names.

    `accepted`: how many draft tokens each round kept, in order, at least one round; each adds one token of
    the target's own, except the last where the text ends with its draft.
    """
    pieces = [ExampleRound("", decode(token_ids[start : start + 1]))]
    at = start + 1
    for count in accepted:
        # Text of a prefix minus text of a shorter one: a character may be spread over tokens.
        texts = [decode(token_ids[start:end]) for end in (at, at + count, at + count + 1)]
        pieces.append(ExampleRound(_added(texts[0], texts[1]), _added(texts[1], texts[2])))
        at += count + 1
    committed = min(at, len(token_ids)) - start - 1
    tau = committed / len(accepted)
    prompt = prompt_parts(token_ids[:start], decode, special)
    return Example(prompt, category, temperature, tau, tuple(pieces[:MOST_ROUNDS]), len(pieces) > MOST_ROUNDS)


def prompt_parts(token_ids: Sequence[int], decode: Decode, special: Collection[int]) -> tuple[PromptPart, ...]:
    """The prompt's last MOST_PROMPT characters, told apart from what the chat template puts around messages."""
    parts: list[PromptPart] = []
    for template, run in groupby(token_ids, key=lambda token: token in special):
        text = decode(list(run))
        if not template and parts:
            # ChatML and Llama's headers: a role stands right behind a special token.
            role, rest = _role(text)
            parts += [PromptPart(role, True)] if role else []
            text = rest
        if text.strip():
            parts.append(PromptPart(text.strip("\n"), template))
    shown: list[PromptPart] = []
    room = MOST_PROMPT
    for part in reversed(parts):
        if room <= 0:
            break
        text = part.text if len(part.text) <= room else "…" + part.text[-room:]
        shown.insert(0, PromptPart(text, part.template))
        room -= len(text)
    return tuple(shown)


def _role(text: str) -> tuple[str, str]:
    """A leading role and what follows it; "" and the whole text where it begins with none."""
    first, _, rest = text.partition("\n")
    return (first.strip(), rest) if first.strip() in ROLES else ("", text)


def _added(before: str, after: str) -> str:
    """What a longer text adds; a half character at the end of the shorter one (U+FFFD) belongs to the
    longer.
    """
    return (
        after[len(before.rstrip("\ufffd")) :].rstrip("\ufffd")
        if after.startswith(before.rstrip("\ufffd"))
        else after
    )


def examples_json(examples: Sequence[Example]) -> str:
    return json.dumps([asdict(example) for example in examples], ensure_ascii=False, indent=1)


def read_examples(path: Path) -> tuple[Example, ...]:
    return tuple(
        Example(
            **{
                **item,
                "prompt": tuple(PromptPart(**each) for each in item["prompt"]),
                "rounds": tuple(ExampleRound(**each) for each in item["rounds"]),
            }
        )
        for item in json.loads(path.read_text())
    )
