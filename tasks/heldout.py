"""Which conversations are held out, and which others must go because they would give an evaluation prompt away.

In: the sources' samples, the evaluation sets and a recipe. Out: a `Split`, by conversation id.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from storage.schemas import ConversationRow, Message
from tasks.decontaminate import Overlap, find_overlaps, turns_on_disk, turns_table
from tasks.evaluation_sets import HeldoutSets
from tasks.intake import first_prompt
from tasks.recipe import Recipe, Source
from tasks.selection import Sample, key_of, squeezed
from tasks.sources import read_source
from tasks.sources.shapes import ShapeError, conversation_of


class ConversationsError(ValueError):
    """The sources cannot give what the recipe asks for; one line says why."""


@dataclass(frozen=True)
class Split:
    """Ids held out, and what of the training rows met them or an evaluation prompt."""

    heldout: frozenset[str]
    overlaps: Mapping[str, Overlap]


def split_rows(recipe: Recipe, samples: Sequence[Sample], sets: HeldoutSets, folder: Path) -> Split:
    """Choose the held-out conversations, and find the rows that would give an evaluation prompt away. `folder` takes
    what is looked through.

    What holds a prompt of a set goes first, so that no prompt is measured twice. Sets, held-out rows and
    data.exclude are looked for one after the other: a prompt that all three hold is not boilerplate.
    """
    everything = turns_on_disk(((row.id, row.messages) for row in all_rows(samples)), folder / "turns.parquet")
    overlaps: dict[str, Overlap] = {}

    def leave_out(evaluation: pa.Table, beside: frozenset[str] = frozenset()) -> None:
        passed = pa.array([*beside, *overlaps], pa.string())
        training = everything.filter(~pc.field("id").isin(passed))
        overlaps.update((each.training_id, each) for each in find_overlaps(training, evaluation))

    leave_out(turns_table((each.key, _users(each.turns)) for each in sets.prompts))
    heldout = _choose_heldout(recipe, samples, overlaps)
    held_rows = ((row.id, row.messages) for row in all_rows(samples) if row.id in heldout)
    leave_out(turns_table(held_rows, first_only=True), beside=heldout)
    leave_out(_excluded_prompts(recipe), beside=heldout)
    return Split(heldout, overlaps)


def _choose_heldout(
    recipe: Recipe, samples: Sequence[Sample], overlaps: Mapping[str, Overlap]
) -> frozenset[str]:
    """data.heldout ids, by key; none of a row in `overlaps`, no two of one prompt."""
    prompts: dict[str, int] = {}
    by_prompt: Counter[int] = Counter()
    for row in all_rows(samples):
        if row.id in overlaps:
            continue
        prompts[row.id] = key_of(*(squeezed(message.content) for message in first_prompt(row.messages)[-1:]))
        by_prompt[prompts[row.id]] += 1
    wanted = recipe.data.heldout
    if len(by_prompt) <= wanted:
        raise ConversationsError(
            f"{len(prompts)} conversations with {len(by_prompt)} different first prompts cannot give "
            f"{wanted} held out "
            "and some to train on: lower data.heldout, or raise the sources' limit"
        )
    # A prompt that stands once costs no training row; of the others only one conversation each may be held
    # out.
    order = sorted(
        prompts, key=lambda name: (by_prompt[prompts[name]], key_of("heldout", str(recipe.data.seed), name))
    )
    chosen: dict[int, str] = {}
    for name in order:
        if len(chosen) < wanted:
            chosen.setdefault(prompts[name], name)
    return frozenset(chosen.values())


def _users(turns: Iterable[str]) -> list[Message]:
    return [Message("user", text) for text in turns]


def _excluded_prompts(recipe: Recipe) -> pa.Table:
    """(id, text) of every turn in data.exclude."""

    def prompts() -> Iterator[tuple[str, Iterable[Message]]]:
        for uri in recipe.data.exclude:
            for row in read_source(prompts_of(uri)):
                try:
                    raw = conversation_of("prompts", row.value)
                except ShapeError:
                    continue
                yield (
                    f"{uri}:{raw.id or row.place}",
                    _users(str(turn.content) for turn in raw.turns if turn.role == "user"),
                )

    return turns_table(prompts())


def prompts_of(uri: str) -> Source:
    """An entry of data.exclude as a source."""
    return Source(kind="prompts", uri=uri)


def all_rows(samples: Iterable[Sample]) -> Iterator[ConversationRow]:
    """The samples' rows, source by source."""
    for sample in samples:
        yield from sample.rows()
