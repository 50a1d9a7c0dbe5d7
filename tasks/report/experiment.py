"""An experiment's report: a self-contained page, and the same figures as Markdown for documents.

In: an `ExperimentResult`. Out: HTML that fetches nothing; a Markdown table with a sentence per claim.
"""

from __future__ import annotations

import math

from markupsafe import Markup

from tasks.experiment.contrast import Contrast
from tasks.experiment.measures import CHAIN, Quantity
from tasks.experiment.result import ArmRow, ExperimentResult
from tasks.experiment.settings import ABLATE, COMPARE, SCALE
from tasks.report.charts import Axis, Point, Series, key, line_chart, percent
from tasks.report.page import environment

TITLES = {
    COMPARE: "Drafters compared",
    ABLATE: "The draft taken apart",
    SCALE: "What more data buys",
}
COLOURS = 6
BADGES = {"found": "good", "not found": "bad", "within noise": "soft"}


def render_experiment(result: ExperimentResult) -> str:
    """The page."""
    scaling = result.kind == SCALE
    return (
        environment()
        .get_template("experiment.html.j2")
        .render(
            title=f"{TITLES[result.kind]}: {result.name}",
            heading=TITLES[result.kind],
            result=result,
            K=result.chain_length,
            badges=BADGES,
            colour=lambda row: colour_of(result, row.cell.arm),
            heads=[tau_head(quantity) for quantity in result.quantities],
            first=Quantity("survival", 1),
            rounded=rounded,
            legend=Markup(key(_lines(result, {}))),
            scale_chart=Markup(scale_chart(result)) if scaling else None,
            charts=[] if scaling else [Markup(position_chart(result, name)) for name in ("survival", "conditional")],
            replicated=any(row.figures and next(iter(row.figures.values())).replicated for row in result.rows),
        )
    )


def markdown(result: ExperimentResult) -> str:
    """The table and the sentences, for docs/reproduction.md."""
    heads = [tau_head(quantity) for quantity in result.quantities]
    scaling = result.kind == SCALE
    cost = "" if scaling else " drafting, ms a token |"
    lines = [
        f"| arm |{' data |' if scaling else ''} seeds | steps | training | {' | '.join(heads)} | position 1 |{cost}",
        "|" + "---|" * (6 + len(heads)),
    ]
    for row in result.rows:
        taus = [rounded(row.figures.get(quantity), 3) for quantity in result.quantities]
        share = f" {_times(result, row)} |" if scaling else ""
        first = rounded(row.figures.get(Quantity("survival", 1)), 3)
        made = f"{len(row.seeds)} | {row.steps:,.0f} | {row.seconds:,.0f} s"
        cost = "" if scaling else f" {'–' if row.chain_ms is None else f'{row.chain_ms:.2f}'} |"
        lines.append(f"| {row.name} |{share} {made} | {' | '.join(taus)} | {first} |{cost}")
    return "\n".join([*lines, "", *(f"- {verdict.sentence}" for verdict in result.verdicts), ""])


def tau_head(quantity: Quantity) -> str:
    return f"τ {quantity.shape}, T = {quantity.temperature:g}"


def rounded(figure: Contrast | None, digits: int) -> str:
    """A figure with its interval, as text."""
    if figure is None or math.isnan(figure.value):
        return "–"
    ends = "" if math.isnan(figure.low) else f" ({figure.low:.{digits}f}–{figure.high:.{digits}f})"
    return f"{figure.value:.{digits}f}{ends}"


def colour_of(result: ExperimentResult, arm: str) -> int:
    return result.arms.index(arm) % COLOURS + 1


def position_chart(result: ExperimentResult, name: str) -> str:
    """Survival or conditional rate of every arm's chains by draft position, at temperature 0."""
    label = "survival" if name == "survival" else "conditional rate (n-α)"
    points = {row.name: _positions(row, name, result.chain_length) for row in result.rows}
    positions = Axis("draft position", 1, result.chain_length, range(1, result.chain_length + 1))
    title = f"{label} by draft position at temperature 0"
    return line_chart(_lines(result, points), positions, Axis(label, 0, None, format=percent), title=title)


def scale_chart(result: ExperimentResult) -> str:
    """Tau of chains at temperature 0 by share of the data, each doubling one step to the right."""
    smallest = min(row.cell.share for row in result.rows)
    points: dict[str, list[Point]] = {arm: [] for arm in result.arms}
    for row in result.rows:
        figure = row.figures[Quantity()]
        note = f"{row.name}, {_times(result, row)}: {rounded(figure, 3)}"
        points[row.name].append(_point(math.log2(row.cell.share / smallest), figure, note))
    ticks = sorted({math.log2(row.cell.share / smallest) for row in result.rows})
    axis = Axis("training data", ticks[0], ticks[-1], ticks, format=lambda value: f"{2**value:g}x")
    height = Axis("τ", format=lambda value: f"{value:.2f}")
    return line_chart(_lines(result, points), axis, height, title="tau by data", width=880, height=330)


def _times(result: ExperimentResult, row: ArmRow) -> str:
    return f"{row.cell.share / min(each.cell.share for each in result.rows):g}x"


def _lines(result: ExperimentResult, points: dict[str, list[Point]]) -> list[Series]:
    """One line an arm; beyond six arms the colours come again, dashed."""
    return [
        Series(arm, points.get(arm, []), colour_of(result, arm), dashed=index >= COLOURS)
        for index, arm in enumerate(result.arms)
    ]


def _positions(row: ArmRow, name: str, length: int) -> list[Point]:
    found = [(k, row.figures.get(Quantity(name, k, CHAIN))) for k in range(1, length + 1)]
    return [
        _point(k, figure, f"{row.name}, position {k}: {rounded(figure, 3)}")
        for k, figure in found
        if figure is not None and not math.isnan(figure.value)
    ]


def _point(x: float, figure: Contrast, note: str) -> Point:
    known = not math.isnan(figure.low)
    # A share of rounds cannot leave 0..1, whatever a symmetric interval says; nobody draws below 0.
    return Point(x, figure.value, max(0.0, figure.low) if known else None, figure.high if known else None, note)

