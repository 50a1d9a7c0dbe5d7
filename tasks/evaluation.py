"""What an evaluation found, as typed values that travel as JSON: written by the evaluator, read by report and
card.

In: `AcceptanceSummary`s by temperature, category and length. Out: `summary.json` of an acceptance artifact,
and back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3core.acceptance import AcceptanceSummary
from eagle3core.intervals import Rate
from tasks.recipe import Tree
from tasks.speed import SpeedFigures

SUMMARY, ROWS, ROUNDS, EXAMPLES = "summary.json", "rows.parquet", "rounds.parquet", "examples.json"
TOO_GOOD = 0.995  # survival at every position above this: no head predicts sampled text that well
TOO_BAD = 0.01  # survival at position 1 below this: less than always guessing a frequent token


@dataclass(frozen=True)
class TemperatureFigures:
    """Acceptance on the held-out answers of one temperature, greedy drafts of the evaluation's length.

    anchor: every row of a response that could begin a chain counts alike. walk: only the rounds that a server
    would really run. sampled: the walk where drafts are sampled from the draft's own distribution instead; None at
    temperature 0. sampled_unknown: share of its chances of which only the lower bound is known and counted.
    categories, contexts, outputs: the walk, split by the prompt's category, the tokens known at the round's start,
    the length of the answer. sets: the walk by evaluation set, which published figures are told by. tree and its
    parts: the rounds of the evaluation's tree over the first answers, None where it was not asked for; never to be put
    beside a chain's without both names. responses and looping: answers,
    and those that repeat themselves without end.
    """

    temperature: float
    anchor: AcceptanceSummary
    walk: AcceptanceSummary
    sampled: AcceptanceSummary | None
    sampled_unknown: float
    categories: dict[str, AcceptanceSummary]
    contexts: dict[str, AcceptanceSummary]
    outputs: dict[str, AcceptanceSummary]
    sets: dict[str, AcceptanceSummary]
    tree: AcceptanceSummary | None
    tree_categories: dict[str, AcceptanceSummary]
    tree_sets: dict[str, AcceptanceSummary]
    responses: int
    looping: int


@dataclass(frozen=True)
class Coverage:
    """How many supervised held-out tokens of one category the draft vocabulary holds."""

    category: str
    tokens: int
    covered: int

    @property
    def share(self) -> float:
        return self.covered / self.tokens if self.tokens else math.nan


@dataclass(frozen=True)
class Evaluation:
    """One draft's acceptance; `figures` by rising temperature. speed: None where nothing was decoded."""

    target: str
    chain_length: int
    tree: Tree
    figures: tuple[TemperatureFigures, ...]
    coverage: tuple[Coverage, ...]
    speed: SpeedFigures | None

    def at(self, temperature: float) -> TemperatureFigures | None:
        return next(
            (figures for figures in self.figures if math.isclose(figures.temperature, temperature)), None
        )

    def to_dict(self) -> dict[str, Any]:
        return without_nan({**asdict(self), "tree": self.tree.model_dump()})

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Evaluation:
        return cls(
            target=values["target"],
            chain_length=values["chain_length"],
            tree=Tree(**values["tree"]),
            figures=tuple(_figures(item) for item in values["figures"]),
            coverage=tuple(Coverage(**item) for item in values["coverage"]),
            speed=SpeedFigures.from_dict(values["speed"], summary_from_dict) if values["speed"] else None,
        )

    @classmethod
    def read(cls, folder: Path) -> Evaluation:
        """From an acceptance artifact's folder. Raises ValueError for one that an older program wrote."""
        try:
            return cls.from_dict(json.loads((folder / SUMMARY).read_text()))
        except KeyError as missing:
            reason = f"{folder / SUMMARY} lacks {missing}: an older program wrote it; evaluate the draft again"
            raise ValueError(reason) from None


def suspicion(evaluation: Evaluation) -> str | None:
    """Why the figures cannot be those of an honest, working draft; None where they can.

    A head that the server fell back from, a leak of the label, or a wrong mask gives acceptance 1.0
    everywhere; a layer id or RoPE base lost on the way gives next to nothing.
    """
    for figures in evaluation.figures:
        survival = [rate.value for rate in figures.walk.survival if rate.denominator]
        where = f"at temperature {figures.temperature:g}"
        if not survival:
            return f"not one round could be walked {where}: the held-out answers are empty or too short"
        if min(survival) > TOO_GOOD:
            return (
                f"acceptance is {min(survival):.3f} or more at every position {where}: "
                "the label leaks into the draft"
            )
        if survival[0] < TOO_BAD:
            return (
                f"position 1 is accepted {survival[0]:.2%} of the time {where}: "
                "layer ids, RoPE or vocabulary map are wrong"
            )
    return None


def summary_from_dict(values: Mapping[str, Any]) -> AcceptanceSummary:
    """The inverse of `AcceptanceSummary.to_dict`."""
    rates = {name: rate_from_dict(values[name]) for name in ("flat", "tau_micro", "tau_macro")}
    positions = {
        name: tuple(rate_from_dict(item) for item in values[name]) for name in ("survival", "conditional")
    }
    return AcceptanceSummary(**{**values, **rates, **positions})


def rate_from_dict(values: Mapping[str, Any] | None) -> Rate | None:
    """A stored rate; null stands for nan inside, and for no rate at all outside."""
    if values is None:
        return None
    return Rate(**{key: math.nan if value is None else value for key, value in values.items()})


def _figures(values: Mapping[str, Any]) -> TemperatureFigures:
    groups = {
        name: {key: summary_from_dict(item) for key, item in values[name].items()}
        for name in ("categories", "contexts", "outputs", "sets", "tree_categories", "tree_sets")
    }
    optional = {
        name: None if values[name] is None else summary_from_dict(values[name]) for name in ("sampled", "tree")
    }
    return TemperatureFigures(
        **{
            **values,
            **groups,
            **optional,
            "anchor": summary_from_dict(values["anchor"]),
            "walk": summary_from_dict(values["walk"]),
        }
    )


def without_nan(value: Any) -> Any:
    """JSON has no nan: null stands for "nothing was counted"."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
