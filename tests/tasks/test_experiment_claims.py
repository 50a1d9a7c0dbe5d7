"""Claims: the rule, held against arms whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest

from tasks.experiment.claims import Claim, claims_of, decide
from tasks.experiment.contrast import Contrasts, Term, student
from tasks.experiment.measures import Cell, Measured, MeasureError, Quantity
from tasks.experiment.settings import ABLATE, COMPARE, SCALE
from tests.tasks.experiment_samples import K, make_measured, make_rows

LOW, MIDDLE, HIGH = [0.3] * K, [0.42] * K, [0.55] * K
ARMS = ("worst", "middle", "best")


def verdicts(kind, arms, figures):
    contrasts = Contrasts(figures, 300)
    return {verdict.claim.says: verdict for verdict in (decide(claim, contrasts) for claim in claims_of(kind, arms, figures))}


def test_an_order_that_is_there_is_found_in_chains_and_trees():
    figures = make_measured(dict(zip(map(Cell, ARMS), (LOW, MIDDLE, HIGH), strict=True)), tree_gain=0.1)
    found = verdicts(ABLATE, ARMS, figures)
    for shape in ("chain", "tree"):
        for worse, better in (("worst", "middle"), ("middle", "best"), ("worst", "best")):
            assert found[f"{better} accepts more than {worse} ({shape}, T = 0)"].outcome == "found"
    assert found["best's tree accepts more than its chain (T = 0)"].outcome == "found"


def test_an_order_that_is_the_other_way_round_is_not_found():
    figures = make_measured(dict(zip(map(Cell, ARMS), (HIGH, MIDDLE, LOW), strict=True)))
    assert verdicts(ABLATE, ARMS, figures)["best accepts more than worst (chain, T = 0)"].outcome == "not found"


def test_arms_that_are_alike_are_within_noise_and_the_sentence_has_the_figures():
    figures = make_measured({Cell("one"): LOW, Cell("two"): LOW}, seed=4)
    verdict = verdicts(COMPARE, ("one", "two"), figures)["two accepts more than one (chain, T = 0)"]
    assert verdict.outcome == "within noise"
    assert verdict.contrast.low < 0 < verdict.contrast.high
    for number in (verdict.contrast.value, verdict.contrast.low, verdict.contrast.high):
        assert f"{number:+.3f}" in verdict.sentence


def test_one_training_seed_decides_nothing():
    figures = make_measured({Cell("one"): LOW, Cell("two"): HIGH}, seeds=1)
    verdict = verdicts(COMPARE, ("one", "two"), figures)["two accepts more than one (chain, T = 0)"]
    assert verdict.contrast.low > 0
    assert verdict.outcome == "within noise"
    assert "one training seed" in verdict.sentence


@pytest.mark.parametrize(
    ("last", "outcome"), [([0.55, 0.54, 0.53, 0.53, 0.53], "found"), ([0.7, 0.6, 0.5, 0.45, 0.4], "not found")]
)
def test_figure_7_is_decided_by_the_fall_from_the_first_position_to_the_fifth(last, outcome):
    arms = {Cell("EAGLE"): [0.7, 0.6, 0.5, 0.45, 0.4], Cell("EAGLE-3"): last}
    figures = make_measured(arms, rounds=400, spread=0.002)
    found = verdicts(ABLATE, ("EAGLE", "EAGLE-3"), figures)
    assert found["EAGLE-3's conditional rate falls by less than 0.08 from position 1 to 5"].outcome == outcome
    falls_more = found["EAGLE's conditional rate falls by more than EAGLE-3's from position 1 to 5"]
    assert falls_more.outcome == ("found" if outcome == "found" else "within noise")


@pytest.mark.parametrize(
    ("steps", "twice", "more"),
    [((0.005, 0.06), "found", "found"), ((0.045, 0.06), "not found", "found"), ((0.06, 0.045), "not found", "not found")],
)
def test_scaling_compares_gains_and_not_levels(steps, twice, more):
    shares = (0.125, 0.25, 0.5, 1.0)
    arms = {
        Cell(name, share): [0.3 + step * doubling] * K
        for name, step in zip(("EAGLE", "EAGLE-3"), steps, strict=True)
        for doubling, share in enumerate(shares)
    }
    found = verdicts(SCALE, ("EAGLE", "EAGLE-3"), make_measured(arms, rounds=60, spread=0.002))
    assert found["EAGLE-3 gains at least 2 times what EAGLE gains from 1x to 8x the data"].outcome == twice
    assert found["EAGLE-3 gains more than EAGLE gains from 1x to 8x the data"].outcome == more
    assert found["EAGLE-3's tau rises from 1x to 8x the data (chain, T = 0)"].outcome == "found"


@pytest.mark.parametrize(
    ("spread", "rounds", "times", "least", "most"),
    [
        (0.08, 20, 300, 0.025, 0.08),  # luck in training moves the arms: the rule errs as often as it says
        (0.02, 8, 100, 0.0, 0.05),  # the text does: it errs less often
    ],
)
def test_equal_arms_are_told_apart_in_at_most_one_experiment_of_twenty(spread, rounds, times, least, most):
    claim = Claim("", "", (Term(1.0, Cell("b"), Quantity()), Term(-1.0, Cell("a"), Quantity())))
    outcomes = []
    for seed in range(times):
        arms = {Cell("a"): [0.4, 0.4], Cell("b"): [0.4, 0.4]}
        figures = make_measured(arms, seed=seed, spread=spread, prompts=12, rounds=rounds)
        outcomes.append(decide(claim, Contrasts(figures, 60)).outcome)
    wrong = sum(outcome != "within noise" for outcome in outcomes) / len(outcomes)
    assert least <= wrong <= most
    assert outcomes.count("found") / len(outcomes) < 0.05


def test_luck_in_training_alone_is_not_taken_for_a_difference():
    """Resampling prompts alone would call these two apart: the seeds differ more than the prompts do."""
    claim = Claim("", "", (Term(1.0, Cell("b"), Quantity()), Term(-1.0, Cell("a"), Quantity())))
    apart = by_prompts = 0
    for seed in range(60):
        figures = make_measured({Cell("a"): [0.4] * 2, Cell("b"): [0.4] * 2}, seed=seed, spread=0.06, rounds=40)
        verdict = decide(claim, Contrasts(figures, 60))
        apart += verdict.outcome != "within noise"
        by_prompts += abs(verdict.contrast.value) > 1.96 * verdict.contrast.prompts
    assert by_prompts > 24
    assert apart < 9


def test_pairing_takes_out_what_the_prompts_have_in_common():
    figures = make_measured({Cell("a"): LOW, Cell("b"): LOW}, rounds=200)
    contrasts = Contrasts(figures, 400)
    alone = contrasts.of([Term(1.0, Cell("a"), Quantity())])
    apart = contrasts.of([Term(1.0, Cell("b"), Quantity()), Term(-1.0, Cell("a"), Quantity())])
    assert apart.prompts < 0.6 * alone.prompts


def test_a_figure_is_the_mean_over_seeds_of_tokens_over_rounds():
    rng = np.random.default_rng(0)
    tables = [make_rows(LOW, rng) for _ in range(2)]
    figures = Measured(K)
    for seed, table in enumerate(tables):
        figures.add(Cell("a"), seed, table)
    taus = [sum(table["accepted"].to_pylist()) / len(table) + 1 for table in tables]
    assert Contrasts(figures, 50).of([Term(1.0, Cell("a"), Quantity())]).value == pytest.approx(sum(taus) / 2)
    reached = [(row["accepted"] >= 1, row["accepted"] >= 2) for row in tables[0].to_pylist()]
    second = figures.seeds(Cell("a"), Quantity("conditional", 2))[0]
    assert second.value == pytest.approx(sum(both for _, both in reached) / sum(first for first, _ in reached))


def test_drafts_of_other_prompts_are_refused():
    rng = np.random.default_rng(0)
    figures = Measured(K)
    figures.add(Cell("a"), 0, make_rows(LOW, rng))
    with pytest.raises(MeasureError, match="b, seed 0: measured on 20 prompts"):
        figures.add(Cell("b"), 0, make_rows(LOW, rng, prompts=20))


def test_what_was_not_measured_is_said():
    figures = make_measured({Cell("a"): LOW, Cell("b"): LOW})
    with pytest.raises(MeasureError, match="a: no tree was measured at temperature 0"):
        Contrasts(figures, 10).of([Term(1.0, Cell("a"), Quantity(shape="tree"))])


def test_anchor_rows_are_no_served_rounds():
    rng = np.random.default_rng(0)
    figures = Measured(K)
    figures.add(Cell("a"), 0, pa.concat_tables([make_rows(LOW, rng), make_rows(HIGH, rng, mode="anchor")]))
    assert figures.rounds == {(Cell("a"), 0, "chain", 0.0): 600}


@pytest.mark.parametrize(("degrees", "t"), [(1, 12.706), (2, 4.303), (4, 2.776), (10, 2.228), (39, 2.0227)])
def test_students_t_is_the_tables(degrees: int, t: float):
    assert student(float(degrees)) == pytest.approx(t, abs=0.003)
    assert math.isclose(student(1e6), 1.96, abs_tol=1e-3)
