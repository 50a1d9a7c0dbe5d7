"""The per-position curves as image files, for MLflow and for slides (the page draws its own).

In: an `Evaluation`. Out: SVG and PNG bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from eagle3core.intervals import Rate
from tasks.evaluation import Evaluation

COLOURS = ("#2563c9", "#d2620b", "#14804a", "#8a46c2", "#b3246b", "#6b7280")

LEAST_COUNT = 8  # a rate of fewer chances is a dot that jumps to 0 or 100 %; tables still hold it


def drawn(rates: Sequence[Rate]) -> list[tuple[int, Rate]]:
    """The positions, from 1, at which enough was counted to draw a point."""
    return [(position, rate) for position, rate in enumerate(rates, 1) if rate.denominator >= LEAST_COUNT]


def curves(evaluation: Evaluation) -> dict[str, bytes]:
    """{"curves.svg": ..., "curves.png": ...}: survival on the left, conditional rate on the right.

    Served rounds are solid with their 95 % intervals, every position dashed.
    """
    # Imported here: a second of start-up that only this function needs. The object interface keeps no global
    # state.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for panel, (kind, label) in zip(
        panels, (("survival", "survival"), ("conditional", "conditional rate (n-α)")), strict=True
    ):
        for index, figures in enumerate(evaluation.figures):
            colour = COLOURS[index % len(COLOURS)]
            _line(
                panel, getattr(figures.walk, kind), colour, f"T = {figures.temperature:g}, served rounds", "-"
            )
            _line(
                panel,
                getattr(figures.anchor, kind),
                colour,
                f"T = {figures.temperature:g}, every position",
                "--",
            )
        panel.set(xlabel="draft position", ylabel=label, xticks=range(1, evaluation.chain_length + 1))
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        panel.grid(axis="y", color="#e4e5e8")
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(length=0)
    panels[0].legend(frameon=False, fontsize=9)
    target = evaluation.target.removeprefix("package:")
    figure.suptitle(f"Acceptance per draft position: {target}", fontsize=11)
    images = {}
    # A fixed salt and no date: the same figures give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "draftline", "svg.fonttype": "none"}):
        for kind, options in (("svg", {"metadata": {"Date": None}}), ("png", {"dpi": 140})):
            buffer = io.BytesIO()
            figure.savefig(buffer, format=kind, **options)
            images[f"curves.{kind}"] = buffer.getvalue()
    return images


def _line(panel, rates, colour: str, label: str, style: str) -> None:
    known = drawn(rates)
    positions = [position for position, _ in known]
    panel.plot(
        positions,
        [rate.value for _, rate in known],
        style,
        color=colour,
        label=label,
        marker="o",
        markersize=4,
    )
    if style == "-" and known and not math.isnan(known[0][1].low):
        low, high = [rate.low for _, rate in known], [rate.high for _, rate in known]
        panel.fill_between(positions, low, high, color=colour, alpha=0.13, linewidth=0)
