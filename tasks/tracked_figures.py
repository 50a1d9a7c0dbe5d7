"""What a run of ours looks like as named numbers and texts, before anybody's tracker sees it.

In: recipes, plan parameters, manifests' summaries, acceptance artifacts. Out: flat parameters and `Figure`s,
secrets taken out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3core.acceptance import AcceptanceSummary
from tasks.evaluation import Evaluation

STEP_NAMES = ("step", "optimizer_step")
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_NAMED = re.compile(r"(?i)\b((?:api[_-]?key|access[_-]?key|token|secret|password|signature|sig)=)[^&\s,;]+")
_KNOWN = re.compile(r"\b(?:hf|sk|ghp|glpat|AKIA)[-_]?[A-Za-z0-9_-]{16,}")


@dataclass(frozen=True)
class Figure:
    """One number of a series: a draft position's (step = position), an optimizer step's, or a single one
    (step 0).
    """

    name: str
    value: float
    step: int = 0


def redacted(text: str) -> str:
    """`text` without user:password@ in addresses, without values of key=, token= and the like, without known
    keys.
    """
    for pattern, stand_in in ((_USER_INFO, "***"), (_NAMED, r"\1***"), (_KNOWN, "***")):
        text = pattern.sub(stand_in, text)
    return text


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys; lists and scalars as JSON text."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(flat(value, f"{name}."))
        else:
            found[name] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def numbers(values: Mapping[str, Any]) -> Iterator[Figure]:
    """Every finite number in a record, by dotted name; lists count from step 1 where the record has no step
    itself.

    A record with a `step` (one line of the trainer's metrics) gives single numbers at that step, and its
    lists one series per entry: accuracy.1, accuracy.2, ...
    """
    step = next((int(values[name]) for name in STEP_NAMES if isinstance(values.get(name), int)), None)
    for name, value in _walk(values, ""):
        if name in STEP_NAMES:
            continue
        if not isinstance(value, Sequence):
            yield from _finite(name, value, step or 0)
            continue
        for index, entry in enumerate(value, start=1):
            if step is None:
                yield from _finite(name, entry, index)
            else:
                yield from _finite(f"{name}.{index}", entry, step)


def acceptance_figures(folder: Path) -> list[Figure]:
    """An acceptance artifact's figures: per draft position with step = position, and tau, for each temperature; the
    tree's under names of their own; speed-ups, predicted with step = chain length or tree nodes.
    """
    evaluation = Evaluation.read(folder)
    figures: list[Figure] = []
    for at in evaluation.figures:
        label = f"t{at.temperature:g}"
        for mode, summary in (("walk", at.walk), ("anchor", at.anchor), ("sampled", at.sampled), ("tree", at.tree)):
            if summary is not None:
                figures += _summary_figures(f"{mode}_{label}", summary)
    for each in evaluation.speed.predictions if evaluation.speed else ():
        if each.drafting != "none":
            name = f"{each.drafting}_t{each.temperature:g}"
            figures += _finite(f"speed_up_predicted_{name}", each.speed_up, each.size)
            figures += _finite(f"speed_up_measured_{name}", each.measured, each.size)
    return figures


def _summary_figures(label: str, summary: AcceptanceSummary) -> Iterator[Figure]:
    yield from _finite(f"tau_{label}", summary.tau_micro.value, 0)
    if summary.flat is not None:
        yield from _finite(f"acceptance_rate_{label}", summary.flat.value, 0)
    for name, rates in (("survival", summary.survival), ("conditional", summary.conditional)):
        for position, rate in enumerate(rates, start=1):
            yield from _finite(f"{name}_{label}", rate.value, position)


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _walk(entry, f"{name}.{key}" if name else str(key))
    elif isinstance(value, bool) or value is None or isinstance(value, str):
        return
    else:
        yield name, value


def _finite(name: str, value: Any, step: int) -> Iterator[Figure]:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        # MLflow takes letters, digits and _ - . / : space in a name
        yield Figure(re.sub(r"[^\w\-./: ]", "_", name), float(value), step)
