"""One draft's report as a self-contained HTML page.

In: a `DraftReport`. Out: HTML that fetches nothing: styles, charts and text are all inside.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eagle3core.acceptance import AcceptanceSummary
from eagle3core.intervals import Rate
from tasks.evaluation import Coverage, Evaluation, TemperatureFigures
from tasks.report.charts import Axis, Point, Series, key, line_chart, percent
from tasks.report.data import DraftReport
from tasks.report.plots import drawn
from tasks.report.reference import beside
from tasks.report.serving_view import serving_lines, serving_rows, speed_rows
from tasks.report.speed_view import (
    best_lines,
    named,
    paper_rows,
    pass_chart,
    prediction_rows,
    speed_chart,
    speed_series,
    task_rows,
)
from tasks.report.training import StepPoint, TrainingCurve
from tasks.stage_task import duration

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Tile:
    """One headline figure: what it is, its value, how sure it is."""

    what: str
    value: str
    how: str


@dataclass(frozen=True)
class PositionRow:
    """One line of the per-position table; `counted` says which rounds."""

    temperature: float
    counted: str
    rates: tuple[Rate, ...]
    rounds: float
    tau: Rate


@dataclass(frozen=True)
class CategoryRow:
    """One category; `cells` by temperature, None where it has no answers at that one."""

    category: str
    prompts: int
    cells: tuple[AcceptanceSummary | None, ...]
    coverage: Coverage | None


@dataclass(frozen=True)
class LengthRow:
    """One bucket of context or answer length; `cells` by temperature."""

    bucket: str
    counted: str
    cells: tuple[AcceptanceSummary | None, ...]


def environment() -> Environment:
    """The templates, with what they need to write numbers; everything is escaped, unknown names are
    errors.
    """
    env = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.globals.update(spoken=duration, size=size, millions=millions, counts=counts, fill=fill)
    return env


def render(report: DraftReport) -> str:
    """The page."""
    evaluation = report.evaluation
    return (
        environment()
        .get_template("draft.html.j2")
        .render(
            title=f"{report.name}: draft report",
            report=report,
            K=evaluation.chain_length,
            figures=evaluation.figures,
            tiles=tiles(evaluation),
            legend=Markup(key(position_series(evaluation, "survival"))),
            survival_chart=Markup(position_chart(evaluation, "survival")),
            conditional_chart=Markup(position_chart(evaluation, "conditional")),
            position_rows=position_rows(evaluation),
            category_rows=category_rows(evaluation),
            best_tau=max((f.walk.tau_micro.value for f in evaluation.figures), default=1.0) * 1.15,
            length_rows=length_rows(evaluation),
            serving_lines=serving_lines(report.serving),
            serving_rows=serving_rows(report.serving),
            speed_rows=speed_rows(report.serving),
            task_rows=task_rows(evaluation),
            best_lines=best_lines(evaluation),
            prediction_rows=prediction_rows(evaluation),
            named=named,
            speed_legend=Markup(key(speed_series(evaluation))),
            speed_chart=Markup(speed_chart(evaluation)),
            pass_chart=Markup(pass_chart(evaluation)),
            loss_legend=Markup(key(loss_series(report.training))),
            loss_chart=_over_steps(loss_series(report.training), "loss"),
            validation_chart=_over_steps([Series("τ", _points(report.training.validation), 3)], "τ"),
            papers=[
                beside(report.target, "chain", evaluation.chain_length),
                *([beside(report.target, "tree", evaluation.tree.depth)] if _has_tree(evaluation) else []),
            ],
            paper_rows=paper_rows(evaluation, beside(report.target, "tree", evaluation.tree.depth).beside)
            if _has_tree(evaluation)
            else [],
            recipe_text=json.dumps(report.recipe, indent=2, ensure_ascii=False),
        )
    )


def _has_tree(evaluation: Evaluation) -> bool:
    return any(figures.tree for figures in evaluation.figures)


def tiles(evaluation: Evaluation) -> list[Tile]:
    """Tau and position 1 for each temperature, chains; the tree's tau under its own name."""
    found = []
    for figures in evaluation.figures:
        walk, at = figures.walk, f"T = {figures.temperature:g}"
        rounds = f"{walk.rounds:,.0f} rounds, {walk.prompts} prompts"
        found.append(
            Tile(f"τ chain, {at}", _plain(walk.tau_micro, 2), f"{_interval(walk.tau_micro, 2)} · {rounds}")
        )
        first = walk.survival[0]
        found.append(Tile(f"position 1 accepted, {at}", _percent(first), _interval(first, 2)))
        if figures.tree is not None:
            tree, tau = evaluation.tree, figures.tree.tau_micro
            how = f"{_interval(tau, 2)} · {tree.nodes} nodes, {tree.depth} deep, {figures.tree.prompts} prompts"
            found.append(Tile(f"τ tree, {at}", _plain(tau, 2), how))
    return found


def position_series(evaluation: Evaluation, kind: str) -> list[Series]:
    """Survival or conditional rates: served rounds solid with their intervals, every position dashed
    without.
    """
    series = []
    for index, figures in enumerate(evaluation.figures):
        at, colour = f"T = {figures.temperature:g}", index % 6 + 1
        series.append(Series(f"{at}, served rounds", rate_points(getattr(figures.walk, kind)), colour))
        every = [replace(point, low=None, high=None) for point in rate_points(getattr(figures.anchor, kind))]
        series.append(Series(f"{at}, every position", every, colour, dashed=True))
    return series


def position_chart(evaluation: Evaluation, kind: str) -> str:
    """Survival or conditional rate by draft position."""
    label = "survival" if kind == "survival" else "conditional rate (n-α)"
    length = evaluation.chain_length
    positions = Axis("draft position", 1, length, range(1, length + 1))
    title = f"{label} by draft position"
    return line_chart(
        position_series(evaluation, kind), positions, Axis(label, 0, None, format=percent), title=title
    )


def rate_points(rates: tuple[Rate, ...]) -> list[Point]:
    """Chart points of per-position rates; positions where too little was counted are left out."""
    points = []
    for position, rate in drawn(rates):
        note = f"position {position}: {rate.value:.3f} ({counts(rate)})"
        low, high = (None, None) if math.isnan(rate.low) else (rate.low, rate.high)
        points.append(Point(position, rate.value, low, high, note))
    return points


def position_rows(evaluation: Evaluation) -> list[PositionRow]:
    """Survival of every way of counting."""
    rows = []
    for figures in evaluation.figures:
        ways = [
            ("served rounds", figures.walk),
            ("every position", figures.anchor),
            ("sampled drafts, served rounds", figures.sampled),
        ]
        rows += [
            PositionRow(figures.temperature, name, summary.survival, summary.rounds, summary.tau_micro)
            for name, summary in ways
            if summary is not None
        ]
    return rows


def category_rows(evaluation: Evaluation) -> list[CategoryRow]:
    """Categories by name, the whole set last."""
    coverage = {item.category: item for item in evaluation.coverage}
    rows = []
    for name in sorted({name for figures in evaluation.figures for name in figures.categories}):
        cells = tuple(figures.categories.get(name) for figures in evaluation.figures)
        prompts = max(cell.prompts for cell in cells if cell)
        rows.append(CategoryRow(name, prompts, cells, coverage.get(name)))
    whole = tuple(figures.walk for figures in evaluation.figures)
    total = Coverage(
        "all", sum(c.tokens for c in coverage.values()), sum(c.covered for c in coverage.values())
    )
    return [*rows, CategoryRow("all", max((cell.prompts for cell in whole), default=0), whole, total)]


def length_rows(evaluation: Evaluation) -> list[LengthRow]:
    """Buckets of the context at a round's start, then of the whole answer."""
    return [
        row
        for name, counted in (
            ("contexts", "context at the round's start"),
            ("outputs", "length of the answer"),
        )
        for row in _buckets(evaluation.figures, name, counted)
    ]


def _buckets(figures: tuple[TemperatureFigures, ...], name: str, counted: str) -> list[LengthRow]:
    groups = [getattr(each, name) for each in figures]
    buckets = sorted(
        {bucket for group in groups for bucket in group}, key=lambda bucket: int(bucket.split("-")[0])
    )
    return [LengthRow(bucket, counted, tuple(group.get(bucket) for group in groups)) for bucket in buckets]


def loss_series(curve: TrainingCurve) -> list[Series]:
    """One line for each TTT step that is shown."""
    return [
        Series(f"TTT step {loss.ttt_step}", _points(loss.points), index + 1)
        for index, loss in enumerate(curve.losses)
    ]


def _points(points: Sequence[StepPoint]) -> list[Point]:
    return [Point(point.step, point.value) for point in points]


def _over_steps(series: Sequence[Series], label: str) -> Markup:
    steps = Axis("optimizer step", format=lambda value: f"{value:,.0f}")
    return Markup(line_chart(series, steps, Axis(label), title=f"{label} by optimizer step"))


def counts(rate: Rate) -> str:
    return f"{rate.numerator:,.0f} of {rate.denominator:,.0f}"


def fill(tau: float, best: float) -> str:
    """Width of a bar for tau, from no gain (1) to the best on the page."""
    return f"{0 if math.isnan(tau) or best <= 1 else max(0.0, min(1.0, (tau - 1) / (best - 1))):.1%}"


def millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 1e5 else f"{count:,}"


def size(count: int) -> str:
    """Bytes for people: 12 kB, 3.4 MB, 1.2 GB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.3g} {unit}"
    return f"{count} B"


def _plain(rate: Rate, digits: int) -> str:
    return "–" if math.isnan(rate.value) else f"{rate.value:.{digits}f}"


def _percent(rate: Rate) -> str:
    return "–" if math.isnan(rate.value) else f"{100 * rate.value:.1f} %"


def _interval(rate: Rate, digits: int) -> str:
    return "no interval" if math.isnan(rate.low) else f"{rate.low:.{digits}f}–{rate.high:.{digits}f}"
