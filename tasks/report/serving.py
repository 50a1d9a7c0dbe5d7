"""What a real server counted, beside what the evaluation promised.

In: a serving artifact's folder. Out: `ServingCheck`s, one for each method and temperature.
"""

from __future__ import annotations

from dataclasses import dataclass

from eagle3core.acceptance import AcceptanceSummary, Agreement


@dataclass(frozen=True)
class ServingCheck:
    """One method at one temperature in a server.

    identical: answers equal to those without speculation, of `prompts`; None where sampling makes them differ.
    agreement: position by position against the promise on the same prompts; empty for methods without one.
    """

    method: str
    temperature: float
    prompts: int
    identical: int | None
    served: AcceptanceSummary
    agreement: tuple[Agreement, ...]
