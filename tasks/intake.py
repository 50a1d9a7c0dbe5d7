"""One source's rows, from raw to sampled: read, shaped, normalised, doubles and long prompts refused, all
counted.

In: a `Source`. Out: a filled `Sample`, `QuarantineRow`s, and an `IntakeReport` whose figures add up to the
rows read.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from storage.schemas import ConversationRow, Message, QuarantineRow
from tasks.normalise import Clean, Refused, normalise
from tasks.recipe import Data, Source
from tasks.residue import printable
from tasks.selection import Doubles, Sample, key_of
from tasks.sources import RawRow, read_source
from tasks.sources.rows import CUT_OFF
from tasks.sources.shapes import RawConversation, ShapeError, conversation_of

log = logging.getLogger(__name__)

LONGEST_TOKEN = 48  # characters of a prompt per allowed token beyond which nobody counts its tokens
LOOKED_AT = 6  # characters per allowed token that are looked at first: of a long prompt they say enough
SEAM = 8  # tokens by which the first part of a text may seem longer than it is, cut where it is
SECONDS_BETWEEN_WORDS = 10.0


@dataclass
class IntakeReport:
    """Counts for one source. rows = clean + mended + the normaliser's refusals; every refusal is under its
    reason.

    cut_off counts broken tails, which are no rows. not_sampled: good rows that the limit left out.
    """

    source: str
    rows: int = 0
    clean: int = 0
    mended: int = 0
    not_sampled: int = 0
    sampled: int = 0
    cut_off: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)

    def to_dict(self) -> dict[str, Any]:
        return {
            **vars(self),
            "kinds": dict(sorted(self.kinds.items())),
            "refused": dict(sorted(self.refused.items())),
        }


@dataclass
class Intake:
    """Takes the rows of one source. `prompt_tokens` counts a first prompt's tokens, or raises TemplateError.
    """

    source: Source
    label: str
    data: Data
    doubles: Doubles
    sample: Sample
    prompt_tokens: Callable[[tuple[Message, ...]], int]
    quarantine: list[QuarantineRow]
    report: IntakeReport = field(init=False)

    def __post_init__(self) -> None:
        self.report = IntakeReport(self.label)

    def run(self) -> IntakeReport:
        """Read the whole source. Raises SourceError where it cannot be read at all."""
        spoken = time.monotonic()
        for row in read_source(self.source):
            self._row(row)
            if time.monotonic() - spoken > SECONDS_BETWEEN_WORDS:
                spoken = time.monotonic()
                log.info(
                    "%s: %d rows read, %d refused", self.label, self.report.rows, self.report.refused.total()
                )
        self.report.sampled = len(self.sample)
        self.report.not_sampled = self.report.rows - self.report.sampled - self.report.refused.total()
        return self.report

    def _row(self, row: RawRow) -> None:
        if row.problem == CUT_OFF:
            self.report.cut_off += 1
            self.quarantine.append(QuarantineRow(row.place, self.label, CUT_OFF, printable(row.detail)))
            log.warning("%s ends before its data does: %s", self.label, row.detail)
            return
        self.report.rows += 1
        if row.problem:
            self._refuse(row.place, row.problem, row.detail)
            return
        try:
            raw = conversation_of(self.source.kind, row.value)
        except ShapeError as error:
            self._refuse(row.place, "wrong_shape", str(error))
            return
        if self.source.system == "drop":
            raw = RawConversation(
                raw.id, raw.category, tuple(turn for turn in raw.turns if turn.role != "system")
            )
        self._conversation(raw, row.place)

    def _conversation(self, raw: RawConversation, place: str) -> None:
        result = normalise(raw)
        kinds = set(result.kinds)
        if self.doubles.id_reused(raw):
            kinds.add("same_id_different_content")
        double = self.doubles.raw_double(raw)
        if double:
            kinds.add("exact_duplicate_content_different_id")
        self.report.kinds.update(kinds)
        name = printable(raw.id) or place
        if isinstance(result, Refused):
            self._refuse(name, result.reason, result.detail)
            return
        if result.mended:
            self.report.mended += 1
        else:
            self.report.clean += 1
        if double or self.doubles.clean_double(result.messages):
            self._refuse(name, "duplicate", "the same turns as an earlier row")
            return
        self._offer(raw, result, name)

    def _offer(self, raw: RawConversation, clean: Clean, name: str) -> None:
        messages = first_turns(clean.messages, self.data.max_turns)
        key = key_of(str(self.data.seed), *(message.content for message in clean.messages))
        identity = self.doubles.unique_id(printable(raw.id) or f"{key:016x}")
        if not self.sample.wants(key):
            return
        prompt = first_prompt(messages)
        if sum(len(message.content) for message in prompt) > LONGEST_TOKEN * self.data.max_prompt_tokens:
            self._refuse(name, "prompt_too_long", f"{len(prompt[-1].content)} characters")
            return
        try:
            tokens = self._tokens(prompt)
        except ValueError as error:
            self._refuse(name, "template_refused", str(error))
            return
        if tokens > self.data.max_prompt_tokens:
            self._refuse(
                name,
                "prompt_too_long",
                f"{tokens} tokens or more, data.max_prompt_tokens is {self.data.max_prompt_tokens}",
            )
            return
        category = printable(raw.category) or self.label
        self.sample.add(key, ConversationRow(identity, self.label, "train", category, messages))

    def _tokens(self, prompt: tuple[Message, ...]) -> int:
        """The prompt's tokens; of one that is too long, those of its beginning, where they are too many already."""
        limit = self.data.max_prompt_tokens
        question = prompt[-1].content
        if len(question) > LOOKED_AT * limit:
            begun = Message(prompt[-1].role, question[: LOOKED_AT * limit])
            tokens = self.prompt_tokens((*prompt[:-1], begun))
            if tokens > limit + SEAM:
                return tokens
        return self.prompt_tokens(prompt)

    def _refuse(self, name: str, reason: str, detail: str) -> None:
        self.report.refused[reason] += 1
        self.quarantine.append(QuarantineRow(name, self.label, reason, printable(detail)))


def first_prompt(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The system turn, if any, and the first user turn."""
    return messages[:2] if messages[0].role == "system" else messages[:1]


def first_turns(messages: tuple[Message, ...], user_turns: int) -> tuple[Message, ...]:
    """The messages up to the answer to user turn number `user_turns`."""
    users = [i for i, message in enumerate(messages) if message.role == "user"]
    return messages[: users[user_turns]] if len(users) > user_turns else messages
