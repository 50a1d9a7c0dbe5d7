"""What a real server counted, beside what the evaluation promised.

In: `ServingCheck`s, one for each method and temperature, made by the serving check. Out: `summary.json` of a
serving artifact ({"checks": [...]}), and back.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3core.acceptance import AcceptanceSummary, Agreement
from tasks.evaluation import rate_from_dict, summary_from_dict, without_nan

SUMMARY = "summary.json"
# Log-probability by which the best token leads the next, within which kernels of another batch shape may
# choose differently: bfloat16's rounding of logits near 20.
TIE = 0.25


@dataclass(frozen=True)
class ServingCheck:
    """One method at one temperature in a server.

    identical: answers equal to those without speculation, of `prompts`; None where sampling makes them
    differ. agreement: position by position against the promise on the same prompts; empty for methods without
    one.
    """

    method: str
    temperature: float
    prompts: int
    identical: int | None
    served: AcceptanceSummary
    agreement: tuple[Agreement, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServingCheck:
        agreement = tuple(
            Agreement(**{**row, "ours": rate_from_dict(row["ours"]), "theirs": rate_from_dict(row["theirs"])})
            for row in values["agreement"]
        )
        return cls(**{**values, "served": summary_from_dict(values["served"]), "agreement": agreement})


@dataclass(frozen=True)
class ServingSpeed:
    """How fast one method was at one temperature; `method` "none" is the server without speculation.

    tau: tokens over decoding rounds, those without a draft included.
    """

    method: str
    temperature: float
    tokens_per_second: float
    tau: float


@dataclass(frozen=True)
class ServingReport:
    """A serving check's findings.

    gaps: for each greedy answer that speculation changed, how far the target preferred its own token over the
    runner-up (log-probability; nan where that is not known). Next to nothing is a tie that batch shapes
    break.
    """

    checks: tuple[ServingCheck, ...]
    speeds: tuple[ServingSpeed, ...]
    gaps: tuple[float, ...]


def serving_to_dict(checks: Sequence[ServingCheck]) -> dict[str, Any]:
    """The checks as `summary.json` holds them."""
    return without_nan({"checks": [asdict(check) for check in checks]})


def read_serving(folder: Path) -> ServingReport:
    """From a serving artifact's folder."""
    stored = json.loads((folder / SUMMARY).read_text())
    checks = tuple(ServingCheck.from_dict(values) for values in stored["checks"])
    promised = {f"{check.method} T={check.temperature:g}" for check in checks if check.agreement}
    return ServingReport(
        checks=checks,
        speeds=tuple(
            ServingSpeed(each["method"], each["temperature"], each["tokens_per_second"], number(each["tau"]))
            for each in stored["methods"]
        ),
        gaps=tuple(
            number(each["gap"])
            for name, those in stored["divergences"].items()
            if name in promised
            for each in those
        ),
    )


def number(value: float | None) -> float:
    """JSON's null is a figure that is not known."""
    return math.nan if value is None else value


def serving_suspicion(serving: ServingReport) -> str | None:
    """What the server did that the evaluation did not promise; None where it kept the promise."""
    apart = [gap for gap in serving.gaps if not gap <= TIE]
    if apart:
        return (
            f"{len(apart)} greedy answers differ with speculation where the target has no tie: "
            "the server's output is not the target's"
        )
    for check in serving.checks:
        outside = [str(row.position) for row in check.agreement if not row.explained]
        if outside:
            return (
                f"at temperature {check.temperature:g} the server's counters at position "
                f"{', '.join(outside)} lie outside what was promised"
            )
    return None
