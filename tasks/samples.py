"""From conversations and responses to the engines' jobs, and from their samples to stored rows.

In: stored rows and a recipe. Out: jobs in parts of the recipe's size, always the same for the same input, so
that a part that is there after a kill is the part that would be made again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from storage.features import FeatureSample
from storage.schemas import ConversationRow, Message, QuarantineRow, ResponseRow, Span
from tasks.engines.dialogue import is_runaway, prompt_messages
from tasks.engines.requests import Job, Refused, Sample, job_seed
from tasks.recipe import Recipe
from tasks.templates import Template, TemplateError

HELDOUT = "heldout"


@dataclass(frozen=True)
class Planned:
    """One job and the conversation it comes from. `refused`: it cannot even be begun."""

    job: Job
    conversation: ConversationRow
    refused: Refused | None = None


def plan_jobs(recipe: Recipe, conversations: Iterable[ConversationRow], template: Template) -> list[Planned]:
    """Every sample that is to be made, in parts of `responses.part_size`.

    A training conversation is answered once, at the recipe's temperature or greedily (which, its id decides);
    a held-out one once per held-out temperature. With `responses.keep_answers` training conversations keep
    the data's own answers; held-out ones are answered all the same: acceptance is measured on the target's
    text or on nothing.
    """
    planned: list[Planned] = []
    for row in conversations:
        if row.split == HELDOUT:
            for temperature in recipe.responses.heldout_temperatures:
                name = f"{row.id}@{temperature:g}"
                most = recipe.responses.heldout_max_new_tokens
                planned.append(_answered(recipe, row, name, temperature, most))
        elif recipe.responses.keep_answers:
            planned += _given(recipe, row, template)
        else:
            draw = job_seed(recipe.responses.seed, row.id, "greedy") / 2**31
            temperature = 0.0 if draw < recipe.responses.greedy_share else recipe.responses.temperature
            planned.append(_answered(recipe, row, row.id, temperature, recipe.responses.max_new_tokens))
    size = recipe.responses.part_size
    return [replace(each, job=replace(each.job, part=i // size)) for i, each in enumerate(planned)]


def reading_job(row: ResponseRow, part: int) -> Job:
    """A stored response as a job that only reads it."""
    spans = [(span.start, span.end) for span in row.spans]
    return Job(id=row.id, part=part, token_ids=row.token_ids, spans=spans, temperature=row.temperature)


def response_row(planned: Planned, sample: Sample) -> ResponseRow:
    """A finished sample as it is stored. Text that existed keeps its own messages."""
    conversation, job = planned.conversation, planned.job
    messages = sample.messages or [{"role": m.role, "content": m.content} for m in conversation.messages]
    return ResponseRow(
        id=sample.id,
        conversation_id=conversation.id,
        source=conversation.source,
        split=conversation.split,
        category=conversation.category,
        messages=tuple(Message(message["role"], message["content"]) for message in messages),
        token_ids=tuple(sample.token_ids),
        spans=tuple(Span(start, end) for start, end in sample.spans),
        finish_reason=sample.finish_reason,
        temperature=job.temperature,
        seed=job.seed,
        truncated=sample.truncated,
    )


def feature_sample(row: ResponseRow, arrays: Mapping[str, np.ndarray]) -> FeatureSample:
    """A response and its arrays (features, teacher_*) as the feature store takes them."""
    return FeatureSample(
        id=row.id,
        conversation_id=row.conversation_id,
        source=row.source,
        split=row.split,
        category=row.category,
        temperature=row.temperature,
        token_ids=np.asarray(row.token_ids, np.int32),
        spans=[(span.start, span.end) for span in row.spans],
        finish_reason=row.finish_reason,
        **arrays,
    )


def quarantine_row(conversation: ConversationRow, refused: Refused) -> QuarantineRow:
    return QuarantineRow(refused.id, conversation.source, refused.reason, refused.detail)


@dataclass
class Tally:
    """Counts for the manifest's summary, over the rows that are stored."""

    splits: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    supervised: int = 0
    runaway: Counter[str] = field(default_factory=Counter)

    def add(self, row: ResponseRow) -> None:
        self.splits[row.split] += 1
        self.finish_reasons[row.finish_reason] += 1
        self.tokens += len(row.token_ids)
        self.supervised += sum(span.end - span.start for span in row.spans)
        last = row.spans[-1]
        if is_runaway(list(row.token_ids[last.start : last.end])):
            self.runaway[f"T={row.temperature:g}"] += 1

    def to_summary(self) -> dict[str, Any]:
        return {
            "samples": sum(self.splits.values()),
            "splits": dict(self.splits),
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "finish_reasons": dict(self.finish_reasons),
            "runaway": dict(self.runaway),
        }


def _answered(recipe: Recipe, row: ConversationRow, name: str, temperature: float, most: int) -> Planned:
    messages = prompt_messages(_plain(row.messages), recipe.data.max_turns)
    job = Job(
        id=name,
        part=0,
        messages=messages,
        temperature=temperature,
        max_new_tokens=most,
        seed=job_seed(recipe.responses.seed, name),
        every_turn=row.split != HELDOUT,  # acceptance is measured on one answer a prompt
    )
    return Planned(job, row)


def _given(recipe: Recipe, row: ConversationRow, template: Template) -> list[Planned]:
    """The data's own answers; those that a later prompt shows otherwise than written as samples of their own."""
    messages = prompt_messages(_plain(row.messages), recipe.data.max_turns)
    job = Job(id=row.id, part=0, messages=messages)
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not messages:
        return [Planned(job, row, Refused(row.id, "no answer", "the data has no assistant turn to keep"))]
    try:
        whole = template.conversation(messages)
        alone = [template.conversation(messages[: turn + 1]) for turn in whole.left_out]
    except TemplateError as error:
        return [Planned(job, row, Refused(row.id, "template", str(error)))]
    named = [(f"{row.id}#{i}", replace(each, spans=each.spans[-1:])) for i, each in enumerate(alone, 1)]
    planned = []
    for name, rendered in [*named, (row.id, whole)]:
        cut = rendered.cut(recipe.data.max_tokens)
        if cut is None:
            refused = Refused(name, "too long", "no answer begins within data.max_tokens")
            planned.append(Planned(replace(job, id=name), row, refused))
        else:
            planned.append(Planned(replace(job, id=name, token_ids=cut.token_ids, spans=cut.spans), row))
    return planned


def _plain(messages: Sequence[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]
