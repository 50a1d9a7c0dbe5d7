"""What an experiment came to, as one value: figures of every arm with their intervals, verdicts on every claim.

In: the artifacts of its drafts. Out: an `ExperimentResult`, drawn by tasks/report/experiment.py, and as a table for
documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.evaluation import ROWS, Evaluation, suspicion
from tasks.experiment.claims import Verdict, claims_of, decide
from tasks.experiment.contrast import Contrast, Contrasts, Term
from tasks.experiment.measures import CHAIN, TREE, Cell, Measured, Quantity


@dataclass(frozen=True)
class MeasuredDraft:
    """One trained draft of an experiment. trees: None where only chains were measured."""

    cell: Cell
    seed: int
    draft: ArtifactRef
    acceptance: ArtifactRef
    trees: ArtifactRef | None


@dataclass(frozen=True)
class ArmRow:
    """One arm on one share of the data. seconds: of training, the mean over its drafts. costs: of the tree's measuring
    stage (None without one): ms a drafted token of the chain, ms a round of the tree, the tree's nodes and depth.
    """

    cell: Cell
    seeds: tuple[int, ...]
    parameters: int
    documents: int
    steps: float
    seconds: float
    figures: dict[Quantity, Contrast]
    chain_ms: float | None
    tree_ms: float | None
    tree: tuple[int, int] | None

    @property
    def name(self) -> str:
        return self.cell.arm


@dataclass(frozen=True)
class DraftRow:
    """One draft, for the list at the page's end."""

    measured: MeasuredDraft
    taus: dict[Quantity, float]
    warning: str | None


@dataclass(frozen=True)
class ExperimentResult:
    """rows: by share, then in the arms' order. quantities: those whose tau the table shows, in its order."""

    kind: str
    name: str
    target: str
    arms: tuple[str, ...]
    chain_length: int
    prompts: int
    resamples: int
    quantities: tuple[Quantity, ...]
    rows: tuple[ArmRow, ...]
    verdicts: tuple[Verdict, ...]
    drafts: tuple[DraftRow, ...]

    def to_summary(self) -> dict[str, Any]:
        """For a manifest: the claims, and every arm's taus."""
        claims = [
            {
                "says": verdict.claim.says,
                "outcome": verdict.outcome,
                "value": verdict.contrast.value,
                "low": verdict.contrast.low,
                "high": verdict.contrast.high,
            }
            for verdict in self.verdicts
        ]
        taus = [
            {
                "arm": row.cell.arm,
                "share": row.cell.share,
                "shape": quantity.shape,
                "temperature": quantity.temperature,
                "tau": row.figures[quantity].value,
                "low": row.figures[quantity].low,
                "high": row.figures[quantity].high,
            }
            for row in self.rows
            for quantity in self.quantities
            if quantity in row.figures
        ]
        return {"claims": claims, "taus": taus, "prompts": self.prompts}


def gather(
    store: ArtifactStore, kind: str, name: str, arms: Sequence[str], drafts: Sequence[MeasuredDraft], resamples: int
) -> ExperimentResult:
    """Read the drafts' artifacts and decide every claim. Raises MeasureError where the drafts do not compare."""
    evaluations = [Evaluation.read(store.local(each.acceptance)) for each in drafts]
    measured = _measured(store, drafts, evaluations[0].chain_length)
    contrasts = Contrasts(measured, resamples)
    shown = [Quantity(shape=shape, temperature=t) for shape in (CHAIN, TREE) for t in measured.temperatures(shape)]
    cells = sorted(measured.cells, key=lambda cell: (cell.share, list(arms).index(cell.arm)))
    return ExperimentResult(
        kind=kind,
        name=name,
        target=evaluations[0].target,
        arms=tuple(arms),
        chain_length=measured.chain_length,
        prompts=len(measured.prompts),
        resamples=resamples,
        quantities=tuple(shown),
        rows=tuple(_row(store, cell, [each for each in drafts if each.cell == cell], measured, contrasts) for cell in cells),
        verdicts=tuple(decide(claim, contrasts) for claim in claims_of(kind, arms, measured)),
        drafts=tuple(
            _draft_row(each, evaluation, measured, shown) for each, evaluation in zip(drafts, evaluations, strict=True)
        ),
    )


def _measured(store: ArtifactStore, drafts: Sequence[MeasuredDraft], chain_length: int) -> Measured:
    measured = Measured(chain_length)
    for each in drafts:
        measured.add(each.cell, each.seed, pq.read_table(store.local(each.acceptance) / ROWS))
        if each.trees:
            measured.add(each.cell, each.seed, pq.read_table(store.local(each.trees) / ROWS), TREE)
    return measured


def _row(
    store: ArtifactStore, cell: Cell, drafts: Sequence[MeasuredDraft], measured: Measured, contrasts: Contrasts
) -> ArmRow:
    made = [store.manifest(each.draft).summary for each in drafts]
    costs = [store.manifest(each.trees).summary for each in drafts if each.trees]
    known = [quantity for quantity in measured.sums if measured.has(cell, quantity)]
    mean = lambda name: fmean(each[name] for each in costs) if costs else None
    return ArmRow(
        cell=cell,
        seeds=tuple(each.seed for each in drafts),
        parameters=made[0]["parameters"],
        documents=made[0]["documents"],
        steps=fmean(each["steps"] for each in made),
        seconds=fmean(each["seconds"] for each in made),
        figures={quantity: contrasts.of([Term(1.0, cell, quantity)]) for quantity in known},
        chain_ms=mean("chain_ms_per_token"),
        tree_ms=mean("tree_ms_per_round"),
        tree=(costs[0]["nodes"], costs[0]["depth"]) if costs else None,
    )


def _draft_row(
    each: MeasuredDraft, evaluation: Evaluation, measured: Measured, shown: Sequence[Quantity]
) -> DraftRow:
    taus = {
        quantity: measured.seeds(each.cell, quantity)[each.seed].value
        for quantity in shown
        if measured.has(each.cell, quantity)
    }
    return DraftRow(each, taus, suspicion(evaluation))
