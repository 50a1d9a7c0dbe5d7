"""Several drafts side by side on one self-contained page.

In: `DraftReport`s measured in the same way. Out: HTML; ValueError where their figures do not compare.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from eagle3core.acceptance import require_comparable
from tasks.evaluation import TemperatureFigures
from tasks.report.charts import Axis, Series, key, line_chart, percent
from tasks.report.data import DraftReport
from tasks.report.page import environment, rate_points

MOST = 6  # colours that can be told apart


@dataclass(frozen=True)
class DraftRow:
    """One draft's line of the headline table; `figures` by the page's temperatures, None where it has
    none.
    """

    report: DraftReport
    colour: int
    figures: tuple[TemperatureFigures | None, ...]
    prompts: int
    training_seconds: float | None


@dataclass(frozen=True)
class TemperatureCharts:
    """Both charts of one temperature, as markup."""

    temperature: float
    survival: Markup
    conditional: Markup


@dataclass(frozen=True)
class Difference:
    """One parameter that not all drafts share; `values` by draft, "–" where one has no such parameter."""

    parameter: str
    values: tuple[str, ...]


def render_comparison(reports: Sequence[DraftReport]) -> str:
    """The page. Raises ValueError for fewer than two, more than six, or figures of different modes or
    lengths.
    """
    if not 2 <= len(reports) <= MOST:
        raise ValueError(f"a comparison takes 2 to {MOST} drafts, not {len(reports)}")
    evaluations = [report.evaluation for report in reports]
    require_comparable(figures.walk for evaluation in evaluations for figures in evaluation.figures)
    lengths = sorted({evaluation.chain_length for evaluation in evaluations})
    if len(lengths) > 1:
        raise ValueError(
            f"chains of {' and '.join(map(str, lengths))} drafts do not compare: evaluate them alike"
        )
    temperatures = sorted(
        {figures.temperature for evaluation in evaluations for figures in evaluation.figures}
    )
    rows = [_row(report, index + 1, temperatures) for index, report in enumerate(reports)]
    return (
        environment()
        .get_template("compare.html.j2")
        .render(
            title=f"{len(reports)} drafts side by side",
            reports=reports,
            targets=sorted({report.target for report in reports}),
            K=lengths[0],
            temperatures=temperatures,
            rows=rows,
            legend=Markup(key([Series(_name(row.report), (), row.colour) for row in rows])),
            charts=[
                _charts(rows, index, temperature, lengths[0])
                for index, temperature in enumerate(temperatures)
            ],
            differences=differences(reports),
        )
    )


def differences(reports: Sequence[DraftReport]) -> list[Difference]:
    """Every parameter, by its dotted name, in which the drafts are not all alike."""
    flat = [dict(_flatten(report.recipe)) for report in reports]
    names = sorted({name for values in flat for name in values})
    found = []
    for name in names:
        values = tuple(str(each[name]) if name in each else "–" for each in flat)
        if len(set(values)) > 1:
            found.append(Difference(name, values))
    return found


def _row(report: DraftReport, colour: int, temperatures: Sequence[float]) -> DraftRow:
    figures = tuple(report.evaluation.at(temperature) for temperature in temperatures)
    prompts = max((each.walk.prompts for each in figures if each), default=0)
    seconds = next((row.seconds for row in report.lineage if row.kind == "draft"), None)
    return DraftRow(report, colour, figures, prompts, seconds)


def _charts(rows: Sequence[DraftRow], index: int, temperature: float, length: int) -> TemperatureCharts:
    charts = {}
    for kind, label in (("survival", "survival"), ("conditional", "conditional rate (n-α)")):
        series = [
            Series(_name(row.report), rate_points(getattr(row.figures[index].walk, kind)), row.colour)
            for row in rows
            if row.figures[index]
        ]
        positions = Axis("draft position", 1, length, range(1, length + 1))
        title = f"{label} by draft position at temperature {temperature:g}"
        charts[kind] = Markup(
            line_chart(series, positions, Axis(label, 0, None, format=percent), title=title)
        )
    return TemperatureCharts(temperature, **charts)


def _name(report: DraftReport) -> str:
    return f"{report.name} {report.draft.fingerprint[:6]}"


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
