"""What a report is drawn from: one draft's figures and where they came from, gathered from its artifacts.

In: a store and the references of a draft, its acceptance and (where there is one) its serving check. Out: a
`DraftReport`. Nothing is computed here that an artifact does not hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.manifest import Manifest
from tasks.evaluation import EXAMPLES, Evaluation, suspicion
from tasks.report.example import Example, read_examples
from tasks.report.made_of import notes
from tasks.report.serving import ServingReport, read_serving, serving_suspicion
from tasks.report.training import METRICS, TrainingCurve, read_training


@dataclass(frozen=True)
class LineageRow:
    """One artifact that the draft descends from. created: UTC, ISO 8601. seconds: None where it was not
    noted. notes: what became of the data there.
    """

    kind: str
    fingerprint: str
    stage: str
    created: str
    bytes: int
    rows: int
    seconds: float | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """What the draft was trained on."""

    documents: int
    supervised_tokens: int


@dataclass(frozen=True)
class DraftReport:
    """Everything on the page.

    parameters: trained ones. vocabulary: the vocabulary artifact's summary. recipe: each stage's parameters
    by kind. lineage: oldest first. warning: why the figures cannot be trusted, None where nothing speaks
    against them.
    """

    name: str
    target: str
    draft: ArtifactRef
    parameters: int
    evaluation: Evaluation
    training: TrainingCurve
    trained: Trained
    serving: ServingReport | None
    vocabulary: dict[str, Any]
    recipe: dict[str, Any]
    examples: tuple[Example, ...]
    lineage: tuple[LineageRow, ...]
    warning: str | None

    @property
    def seconds(self) -> float:
        """What all stages took together, cached ones as when they were made."""
        return sum(row.seconds or 0.0 for row in self.lineage)


def gather(
    store: ArtifactStore, draft: ArtifactRef, acceptance: ArtifactRef, serving: ArtifactRef | None = None
) -> DraftReport:
    """Read the artifacts. Raises StorageError where the draft or its acceptance is gone."""
    manifest = store.manifest(draft)
    family = list(_family(store, [acceptance, *([serving] if serving else [])]))
    evaluation = Evaluation.read(store.local(acceptance))
    served = read_serving(store.local(serving)) if serving else None
    vocabulary = next(each for each in family if each.kind == "vocabulary")
    summary = manifest.summary
    return DraftReport(
        name=summary["recipe"],
        target=evaluation.target,
        draft=draft,
        parameters=summary["parameters"],
        evaluation=evaluation,
        training=read_training(store.local(draft) / METRICS),
        trained=Trained(summary["documents"], summary["supervised_tokens"]),
        serving=served,
        vocabulary=dict(vocabulary.summary),
        recipe={each.kind: dict(each.parameters) for each in family},
        examples=read_examples(store.local(acceptance) / EXAMPLES),
        lineage=tuple(_lineage_row(each) for each in family),
        warning=suspicion(evaluation) or (serving_suspicion(served) if served else None),
    )


def _family(store: ArtifactStore, refs: Sequence[ArtifactRef]) -> Iterator[Manifest]:
    """Manifests of `refs` and of everything they descend from, inputs before what was made of them, each
    once.
    """
    seen: set[str] = set()

    def visit(ref: ArtifactRef) -> Iterator[Manifest]:
        # An input that was deleted to save room ends its branch; what was made of it is still there.
        if ref.fingerprint in seen or store.find(ref.kind, ref.fingerprint) is None:
            return
        seen.add(ref.fingerprint)
        manifest = store.manifest(ref)
        for parent in manifest.inputs:
            yield from visit(parent)
        yield manifest

    for ref in refs:
        yield from visit(ref)


def _lineage_row(manifest: Manifest) -> LineageRow:
    return LineageRow(
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        stage=manifest.stage,
        created=manifest.created,
        bytes=manifest.bytes,
        rows=manifest.rows,
        seconds=manifest.summary.get("seconds"),
        notes=notes(manifest),
    )
