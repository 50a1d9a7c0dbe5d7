"""What speculation costs and gains on one device, as typed values that travel as JSON.

In: the reference decoder's timed answers and the cost model's measurements (`tasks.evaluate_speed`). Out: the
`speed` of an evaluation's `summary.json`, and back; speed-ups by kind of prompt for the report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle3core.acceptance import AcceptanceSummary
from eagle3core.costs import Costs, Curve

Drafting = Literal["none", "chain", "tree"]


@dataclass(frozen=True)
class DecodedAnswer:
    """One prompt answered by the reference decoder, alone in its batch.

    tokens: written behind the first one, which the prompt's own pass gives. seconds: wall time of those, the
    prompt's pass left out. identical: the text is plain decoding's; None where sampling makes it another.
    """

    prompt_id: str
    category: str
    tokens: int
    rounds: int
    seconds: float
    identical: bool | None


@dataclass(frozen=True)
class Decoded:
    """One way to draft over the decoded prompts. acceptance: None for "none"."""

    drafting: Drafting
    temperature: float
    answers: tuple[DecodedAnswer, ...]
    acceptance: AcceptanceSummary | None

    def tokens_per_second(self, category: str | None = None) -> float | None:
        """Over the answers of one category, or all; None where there are none."""
        mine = [each for each in self.answers if category in (None, each.category)]
        seconds = sum(each.seconds for each in mine)
        return sum(each.tokens for each in mine) / seconds if seconds else None


@dataclass(frozen=True)
class Prediction:
    """What the cost model says of one way to draft. size: the chain's tokens, or the tree's nodes.

    measured: the decoder's own speed-up, None where that was not decoded. best: the fastest at this temperature;
    drafting "none" is best where no draft pays.
    """

    temperature: float
    drafting: Drafting
    size: int
    depth: int
    tau: float
    round_seconds: float
    speed_up: float
    measured: float | None
    best: bool


@dataclass(frozen=True)
class MeasuredCosts:
    """Seconds of the parts of a round at one temperature."""

    temperature: float
    costs: Costs


@dataclass(frozen=True)
class SpeedFigures:
    """device: what it was measured on, in words."""

    device: str
    costs: tuple[MeasuredCosts, ...]
    decoded: tuple[Decoded, ...]
    predictions: tuple[Prediction, ...]

    def of(self, drafting: Drafting, temperature: float) -> Decoded | None:
        """The decoder's run; None where there was none."""
        found = (each for each in self.decoded if (each.drafting, each.temperature) == (drafting, temperature))
        return next(found, None)

    def costs_at(self, temperature: float) -> Costs | None:
        return next((each.costs for each in self.costs if each.temperature == temperature), None)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], summary: Any) -> SpeedFigures:
        """`summary` turns a stored summary back into an `AcceptanceSummary`."""
        return cls(
            device=values["device"],
            costs=tuple(MeasuredCosts(each["temperature"], _costs(each["costs"])) for each in values["costs"]),
            decoded=tuple(
                Decoded(
                    drafting=each["drafting"],
                    temperature=each["temperature"],
                    answers=tuple(DecodedAnswer(**answer) for answer in each["answers"]),
                    acceptance=None if each["acceptance"] is None else summary(each["acceptance"]),
                )
                for each in values["decoded"]
            ),
            predictions=tuple(Prediction(**each) for each in values["predictions"]),
        )


def speed_up(run: Decoded | None, plain: Decoded | None, category: str | None = None) -> float | None:
    """Measured tokens per second over those without speculation, on the same prompts; None where not decoded."""
    if run is None or plain is None:
        return None
    mine, base = run.tokens_per_second(category), plain.tokens_per_second(category)
    return mine / base if mine and base else None


def _costs(values: Mapping[str, Any]) -> Costs:
    curves = {name: _curve(values[name]) for name in ("target", "step", "commit", "choose")}
    return Costs(context=values["context"], batch=values["batch"], **curves)


def _curve(values: Mapping[str, Sequence[float]]) -> Curve:
    return Curve(tuple(int(size) for size in values["sizes"]), tuple(values["seconds"]))
