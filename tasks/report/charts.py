"""Line charts as inline SVG, coloured by the page's own CSS variables so that they follow light and dark.

In: named series of points with optional intervals. Out: one `<svg>` string; nothing is fetched, nothing is
scripted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape


@dataclass(frozen=True)
class Point:
    """x, y, and where known the ends of y's interval; `note` shows when the pointer rests on the point."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One line. `colour` is 1..6, the page's --series-N; `dashed` marks a line that others measured or
    another mode.
    """

    name: str
    points: Sequence[Point]
    colour: int = 1
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """Label, range (None: from the data), ticks (None: about five round ones), and how a tick is written."""

    label: str
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None
    format: Callable[[float], str] = field(default=lambda value: f"{value:g}")


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def tick_step(low: float, high: float, about: int = 5) -> float:
    """1, 2 or 5 times a power of ten, so that about five steps cover low..high."""
    span = max(high - low, 1e-12)
    power = 10 ** math.floor(math.log10(span / about))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= about), power * 10)


def round_ticks(low: float, high: float) -> list[float]:
    """Multiples of `tick_step` that lie within low..high."""
    step = tick_step(low, high)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def key(series: Sequence[Series]) -> str:
    """The lines' names with a piece of each line, for charts that share their series."""
    items = []
    for line in series:
        dash = ' stroke-dasharray="5 4"' if line.dashed else ""
        items.append(
            '<span><svg width="26" height="8" aria-hidden="true">'
            '<line x1="1" x2="25" y1="4" y2="4" stroke-width="2.4" '
            f'style="stroke:var(--series-{line.colour})"{dash}/></svg>{escape(line.name)}</span>'
        )
    return f'<p class="legend">{"".join(items)}</p>'


@dataclass(frozen=True)
class _Frame:
    """Maps data to pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int
    x: tuple[float, float]
    y: tuple[float, float]

    def px(self, x: float) -> float:
        low, high = self.x
        return self.left + (x - low) / max(high - low, 1e-12) * (self.width - self.left - self.right)

    def py(self, y: float) -> float:
        low, high = self.y
        return (
            self.height
            - self.bottom
            - (y - low) / max(high - low, 1e-12) * (self.height - self.top - self.bottom)
        )


def line_chart(
    series: Sequence[Series],
    x: Axis,
    y: Axis,
    *,
    title: str,
    width: int = 480,
    height: int = 270,
) -> str:
    """The chart; `title` is for screen readers. The lines' names are the page's (`key`).

    Without a single point a sentence stands in its place.
    """
    series = [line for line in series if line.points]
    if not series:
        return f'<p class="empty">{escape(title)}: nothing was measured.</p>'
    points = [point for line in series for point in line.points]
    ys = [value for point in points for value in (point.y, point.low, point.high) if value is not None]
    x_low, x_high = _range(x, [point.x for point in points], whole_ticks=False)
    y_low, y_high = _range(y, ys, whole_ticks=True)
    frame = _Frame(width, height, 56, 16, 14, 42, (x_low, x_high), (y_low, y_high))
    parts = [
        f'<svg class="chart" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(title, quote=True)}">',
        *_axes(frame, x, y),
        *(_line(frame, line) for line in series),
    ]
    return "".join([*parts, "</svg>"])


def _range(axis: Axis, values: Sequence[float], whole_ticks: bool) -> tuple[float, float]:
    """The axis's own ends, else the data's, widened to whole ticks where that is wanted."""
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if high <= low:
        low, high = (low - 0.5, high + 0.5) if axis.low is None else (low, low + 1)
    if whole_ticks:
        step = tick_step(low, high)
        low = math.floor(low / step + 1e-9) * step if axis.low is None else low
        high = math.ceil(high / step - 1e-9) * step if axis.high is None else high
    return low, high


def _axes(frame: _Frame, x: Axis, y: Axis) -> list[str]:
    base = frame.height - frame.bottom
    end = frame.width - frame.right
    parts = []
    for tick in y.ticks if y.ticks is not None else round_ticks(*frame.y):
        at = frame.py(tick)
        parts.append(f'<line class="grid" x1="{frame.left}" x2="{end}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(_text("tick", frame.left - 8, at + 4, y.format(tick), anchor="end"))
    for tick in x.ticks if x.ticks is not None else round_ticks(*frame.x):
        at = frame.px(tick)
        parts.append(_text("tick", at, base + 18, x.format(tick)))
    parts.append(f'<line class="axis" x1="{frame.left}" x2="{end}" y1="{base}" y2="{base}"/>')
    middle = (frame.left + end) / 2
    parts.append(_text("label", middle, frame.height - 6, x.label))
    across = (frame.top + base) / 2
    parts.append(
        f'<text class="label" x="13" y="{across:.1f}" text-anchor="middle" '
        f'transform="rotate(-90 13 {across:.1f})">{escape(y.label)}</text>'
    )
    return parts


def _text(name: str, x: float, y: float, content: str, anchor: str = "middle") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _line(frame: _Frame, line: Series) -> str:
    colour = f"var(--series-{line.colour})"
    banded = [point for point in line.points if point.low is not None and point.high is not None]
    parts = []
    if len(banded) > 1:
        edge = [f"{frame.px(p.x):.1f},{frame.py(p.high):.1f}" for p in banded]
        edge += [f"{frame.px(p.x):.1f},{frame.py(p.low):.1f}" for p in reversed(banded)]
        parts.append(f'<polygon class="band" points="{" ".join(edge)}" style="fill:{colour}"/>')
    path = " ".join(f"{frame.px(p.x):.1f},{frame.py(p.y):.1f}" for p in line.points)
    dash = ' stroke-dasharray="5 4"' if line.dashed else ""
    parts.append(f'<polyline class="line" points="{path}" style="stroke:{colour}"{dash}/>')
    if len(line.points) <= 40:  # dots only where they can be told apart
        for p in line.points:
            note = p.note or f"{line.name}: {p.y:.3f}"
            parts.append(
                f'<circle class="dot" cx="{frame.px(p.x):.1f}" cy="{frame.py(p.y):.1f}" r="3.5" '
                f'style="fill:{colour}">'
                f"<title>{escape(note)}</title></circle>"
            )
    return "".join(parts)
