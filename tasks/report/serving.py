"""What a real server counted, beside what the evaluation promised.

In: `ServingCheck`s, one for each method and temperature, made by the serving check. Out: `summary.json` of a
serving artifact ({"checks": [...]}), and back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3core.acceptance import AcceptanceSummary, Agreement
from tasks.evaluation import rate_from_dict, summary_from_dict, without_nan

SUMMARY = "summary.json"


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


def serving_to_dict(checks: Sequence[ServingCheck]) -> dict[str, Any]:
    """The content of `summary.json`."""
    return without_nan({"checks": [asdict(check) for check in checks]})


def read_serving(folder: Path) -> tuple[ServingCheck, ...]:
    """From a serving artifact's folder."""
    stored = json.loads((folder / SUMMARY).read_text())
    return tuple(ServingCheck.from_dict(values) for values in stored["checks"])
