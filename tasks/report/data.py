"""What a report is drawn from: one draft's figures and where they came from, gathered from its artifacts.

In: a store and the references of a draft, its acceptance and (where there is one) its serving check. Out: a
`DraftReport`. Nothing is computed here that an artifact does not hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.manifest import Manifest
from tasks.evaluation import EXAMPLES, Evaluation, suspicion
from tasks.report.serving import ServingCheck
from tasks.report.training import TrainingCurve


@dataclass(frozen=True)
class ExampleRound:
    """Text that one walked round committed: the draft's accepted tokens, then the one token of the target itself."""

    accepted: str
    own: str


@dataclass(frozen=True)
class Example:
    """A held-out answer, round by round. tau: committed tokens over rounds of this answer."""

    prompt: str
    category: str
    temperature: float
    tau: float
    rounds: tuple[ExampleRound, ...]


@dataclass(frozen=True)
class LineageRow:
    """One artifact that the draft descends from."""

    kind: str
    fingerprint: str
    stage: str
    created: str
    bytes: int
    rows: int
    seconds: float | None


@dataclass(frozen=True)
class DraftReport:
    """Everything on the page. `warning`: why the figures cannot be trusted, None where nothing speaks against them."""

    name: str
    target: str
    draft: ArtifactRef
    parameters: int
    evaluation: Evaluation
    training: TrainingCurve
    serving: tuple[ServingCheck, ...]
    vocabulary: dict[str, Any]
    recipe: dict[str, Any]
    examples: tuple[Example, ...]
    lineage: tuple[LineageRow, ...]
    warning: str | None

    @property
    def seconds(self) -> float:
        """What all stages took together, cached ones as when they were made."""
        return sum(row.seconds or 0.0 for row in self.lineage)
