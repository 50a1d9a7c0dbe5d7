"""An evaluation set read whole: unlike training data it may not lose a row, or two figures would not compare.

In: a recipe's `EvaluationSet`. Out: its prompts, keyed by (set, id), in an order whose every beginning holds all
categories alike; what identifies its content. Bytes are read as every source's are (tasks/sources).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.evaluation_sets.shapes import KINDS, Asked, EvaluationSetError, asked_of
from tasks.recipe import EvaluationSet, Source
from tasks.selection import key_of
from tasks.sources import read_source, source_identity
from tasks.sources.shapes import ShapeError

STARTER = Path(__file__).with_name("starter.jsonl")


@dataclass(frozen=True)
class EvaluationPrompt:
    """One prompt of a set; (set, id) is its key. category: the kind of task. turns: asked one after the other."""

    set: str
    id: str
    category: str
    turns: tuple[str, ...]

    @property
    def key(self) -> str:
        """The key as one word, for tables: "set/id"."""
        return f"{self.set}/{self.id}"


@dataclass(frozen=True)
class LoadedSet:
    """What was taken of a set of `rows` prompts. `prompts`: the first of every category, the second, and so on."""

    name: str
    rows: int
    prompts: tuple[EvaluationPrompt, ...]


def load_set(chosen: EvaluationSet) -> LoadedSet:
    """Read one set.

    Raises SourceError where it is not there; EvaluationSetError where a row is damaged or not of the kind's
    shape, where an id stands twice, or where there is no row.
    """
    found: dict[str, EvaluationPrompt] = {}
    for number, (place, asked) in enumerate(_asked(chosen)):
        # Sets without ids of their own (GSM8K, Alpaca) are keyed by the row's number.
        prompt = EvaluationPrompt(
            chosen.name, asked.id or str(number), asked.category or chosen.name, asked.turns
        )
        if prompt.id in found:
            raise EvaluationSetError(f"evaluation set {chosen.name}, {place}: id {prompt.id!r} stands twice")
        found[prompt.id] = prompt
    if not found:
        raise EvaluationSetError(f"evaluation set {chosen.name} is empty: {_source(chosen).uri} has no row")
    return LoadedSet(chosen.name, len(found), tuple(_mixed(list(found.values()))[: chosen.limit]))


def set_identity(chosen: EvaluationSet) -> dict[str, object]:
    """What tells this set from another, for fingerprints: all but where it lies. Raises SourceError as loading
    does where it is not there.
    """
    return {**chosen.model_dump(exclude={"uri"}), "content": source_identity(_source(chosen))}


def _source(chosen: EvaluationSet) -> Source:
    split = chosen.split or KINDS[chosen.kind].split
    return Source(kind="prompts", uri=chosen.uri or str(STARTER), split=split)


def _asked(chosen: EvaluationSet) -> Iterator[tuple[str, Asked]]:
    for row in read_source(_source(chosen)):
        where = f"evaluation set {chosen.name}, {row.place}"
        if row.problem:
            raise EvaluationSetError(f"{where}: {row.problem} ({row.detail}): fetch the file again")
        try:
            yield row.place, asked_of(chosen.kind, row.value)
        except ShapeError as error:
            raise EvaluationSetError(f"{where}: {error}: is {chosen.kind} its kind?") from None


def _mixed(prompts: list[EvaluationPrompt]) -> list[EvaluationPrompt]:
    """The categories in turn, each in an order drawn from its keys: a limit takes all of them alike, and the same
    ones whatever the order of the file.
    """
    taken: Counter[str] = Counter()
    ranked = []
    for prompt in sorted(prompts, key=lambda each: key_of(each.key)):
        ranked.append((taken[prompt.category], prompt.category, prompt))
        taken[prompt.category] += 1
    return [prompt for *_, prompt in sorted(ranked, key=lambda each: each[:2])]
