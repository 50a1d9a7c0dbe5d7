"""The serving check as the page and the card show it: sentences, a table by position, a table by method.

In: a `ServingReport`, or None where the server was left out. Out: lines and rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle3core.intervals import Rate
from tasks.report.serving import ServingReport

PLAIN = "none"  # the serving check's name for no speculation


@dataclass(frozen=True)
class ServingRow:
    """One position at one temperature: promised, counted, and whether the two agree."""

    temperature: float
    position: int
    ours: Rate
    theirs: Rate
    agrees: bool


@dataclass(frozen=True)
class SpeedRow:
    """One method in the server. first: position 1, None where nothing drafts. ratio: to no speculation."""

    method: str
    temperature: float
    first: Rate | None
    tau: float
    tokens_per_second: float
    ratio: float


def serving_lines(serving: ServingReport | None) -> list[str]:
    """What the check found, in sentences."""
    lines = []
    for check in serving.checks if serving else ():
        if not check.agreement:
            continue
        at, positions = f"At temperature {check.temperature:g},", len(check.agreement)
        if check.identical is not None:
            same = f"{at} {check.identical} of {check.prompts} answers are token for token those"
            lines.append(f"{same} that the server gives without speculation.")
        if check.temperature == 0:
            inside = sum(row.inside for row in check.agreement)
            found = f"the server's own counters lie inside our interval at {inside} of {positions} positions"
        else:
            agree = sum(row.explained for row in check.agreement)
            found = f"server and evaluation, each on its own text, agree at {agree} of {positions} positions"
        lines.append(f"{at} {found}.")
    known = [gap for gap in serving.gaps if not math.isnan(gap)] if serving else []
    if known:
        lines.append(
            f"Where greedy answers part, the target's best token led the next by at most {max(known):.3f} "
            "(log-probability)."
        )
    return lines


def serving_rows(serving: ServingReport | None) -> list[ServingRow]:
    """Promise and counters, position by position. At T > 0 both sides sampled, so both intervals count."""
    return [
        ServingRow(
            check.temperature,
            row.position,
            row.ours,
            row.theirs,
            row.explained if check.temperature else row.inside,
        )
        for check in (serving.checks if serving else ())
        for row in check.agreement
    ]


def speed_rows(serving: ServingReport | None) -> list[SpeedRow]:
    """Every method beside the server without speculation, by temperature."""
    if serving is None:
        return []
    plain = {each.temperature: each.tokens_per_second for each in serving.speeds if each.method == PLAIN}
    first = {(check.method, check.temperature): check.served.survival[0] for check in serving.checks}
    return [
        SpeedRow(
            method=each.method if each.method != PLAIN else "no speculation",
            temperature=each.temperature,
            first=first.get((each.method, each.temperature)),
            tau=each.tau,
            tokens_per_second=each.tokens_per_second,
            ratio=each.tokens_per_second / plain[each.temperature]
            if plain.get(each.temperature)
            else math.nan,
        )
        for each in sorted(
            serving.speeds, key=lambda each: (each.temperature, each.method != PLAIN, each.method)
        )
    ]
