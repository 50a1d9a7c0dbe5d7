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
class StepLoss:
    """Mean loss per label of one TTT step (1 is the first), over optimizer steps."""

    ttt_step: int
    points: tuple[StepPoint, ...]


@dataclass(frozen=True)
class TrainingCurve:
    """The course of a run.

    steps: optimizer steps made. losses: of the first, a middle and the last TTT step, thinned to what a chart
    can show. validation: tau at each evaluation.
    """

    steps: int
    losses: tuple[StepLoss, ...]
    validation: tuple[StepPoint, ...]


def read_training(path: Path) -> TrainingCurve:
    """From the trainer's metrics, one JSON object a line."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    made = [event for event in events if event["kind"] == "step"]
    longest = max((len(event["step_loss"]) for event in made), default=0)
    losses = []
    for ttt_step in sorted({1, (longest + 1) // 2, longest} - {0}):
        # A ramp trains fewer TTT steps at first: a later one's line begins where it came in.
        reached = [event for event in made if len(event["step_loss"]) >= ttt_step]
        points = [StepPoint(event["step"], event["step_loss"][ttt_step - 1]) for event in reached]
        losses.append(StepLoss(ttt_step, thin(points)))
    validation = [StepPoint(event["step"], event["tau"]) for event in events if event["kind"] == "evaluation"]
    return TrainingCurve(made[-1]["step"] if made else 0, tuple(losses), tuple(validation))


def thin(points: list[StepPoint], most: int = MOST_POINTS) -> tuple[StepPoint, ...]:
    """Means of equal runs of neighbouring points, at most `most` of them."""
    width = -(-len(points) // most) or 1
    runs = [points[start : start + width] for start in range(0, len(points), width)]
    return tuple(StepPoint(run[-1].step, sum(point.value for point in run) / len(run)) for run in runs)
