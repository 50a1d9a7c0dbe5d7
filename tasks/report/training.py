"""The course of a training run, for its charts.

In: the trainer's `metrics.jsonl`. Out: a `TrainingCurve`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

METRICS = "training/metrics.jsonl"  # inside a draft artifact
MOST_POINTS = 300


@dataclass(frozen=True)
class StepPoint:
    """A value at one optimizer step."""

    step: int
    value: float


@dataclass(frozen=True)
class TrainingCurve:
    """steps: optimizer steps made. loss: thinned to what a chart can show. validation: tau at each evaluation."""

    steps: int
    loss: tuple[StepPoint, ...]
    validation: tuple[StepPoint, ...]


def read_training(path: Path) -> TrainingCurve:
    """From the trainer's metrics, one JSON object a line."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    loss = [StepPoint(event["step"], event["loss"]) for event in events if event["kind"] == "step"]
    validation = [StepPoint(event["step"], event["tau"]) for event in events if event["kind"] == "evaluation"]
    return TrainingCurve(loss[-1].step if loss else 0, thin(loss), tuple(validation))


def thin(points: list[StepPoint], most: int = MOST_POINTS) -> tuple[StepPoint, ...]:
    """Means of equal runs of neighbouring points, at most `most` of them."""
    width = -(-len(points) // most) or 1
    runs = [points[start : start + width] for start in range(0, len(points), width)]
    return tuple(StepPoint(run[-1].step, sum(point.value for point in run) / len(run)) for run in runs)
