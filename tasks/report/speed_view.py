"""Speed-up as the page shows it: by kind of prompt, by way to draft, and beside the tree figures of the paper.

In: an `Evaluation`. Out: rows, chart series and sentences. A chain's and a tree's tau never share a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eagle3core.acceptance import AcceptanceSummary
from eagle3core.costs import Costs
from eagle3core.decoding.propose import Chain, DynamicTree, Proposer
from eagle3core.intervals import Rate
from tasks.evaluation import Evaluation, TemperatureFigures
from tasks.report.charts import Axis, Point, Series, line_chart
from tasks.report.reference import Published
from tasks.speed import Prediction, speed_up

# The paper's names of its tasks, by our names of the sets.
PAPER_TASKS = {
    "mt-bench": "MT-bench",
    "humaneval": "HumanEval",
    "gsm8k": "GSM8K",
    "alpaca": "Alpaca",
    "cnn-dailymail": "CNN/DM",
}


@dataclass(frozen=True)
class WayCell:
    """One way to draft on one kind of prompt. predicted: by the cost model; measured: by the decoder's clock."""

    tau: Rate | None
    prompts: int
    predicted: float | None
    measured: float | None


@dataclass(frozen=True)
class TaskRow:
    """One kind of prompt at one temperature."""

    category: str
    temperature: float
    chain: WayCell
    tree: WayCell


@dataclass(frozen=True)
class PaperRow:
    """A published figure beside ours, both of a tree of the same depth. ours: None where the set was not measured."""

    published: Published
    ours: Rate | None


def task_rows(evaluation: Evaluation) -> list[TaskRow]:
    """Every category at every temperature, then the whole set."""
    rows = []
    for figures in evaluation.figures:
        names = sorted(figures.categories)
        rows += [_task(evaluation, figures, name) for name in names if len(names) > 1]
        rows.append(_task(evaluation, figures, None))
    return rows


def _task(evaluation: Evaluation, figures: TemperatureFigures, category: str | None) -> TaskRow:
    chain = figures.walk if category is None else figures.categories.get(category)
    tree = figures.tree if category is None else figures.tree_categories.get(category)
    chains, trees = Chain(evaluation.chain_length), DynamicTree(**evaluation.tree.model_dump())
    return TaskRow(
        category or "all",
        figures.temperature,
        _cell(evaluation, figures.temperature, category, "chain", chain, chains),
        _cell(evaluation, figures.temperature, category, "tree", tree, trees),
    )


def _cell(
    evaluation: Evaluation,
    temperature: float,
    category: str | None,
    way: Literal["chain", "tree"],
    summary: AcceptanceSummary | None,
    proposer: Proposer,
) -> WayCell:
    speed = evaluation.speed
    costs = speed.costs_at(temperature) if speed else None
    tau = summary.tau_micro if summary else None
    return WayCell(
        tau=tau,
        prompts=summary.prompts if summary else 0,
        predicted=costs.speed_up(proposer, tau.value) if costs and tau else None,
        measured=speed_up(speed.of(way, temperature), speed.of("none", temperature), category) if speed else None,
    )


def paper_rows(evaluation: Evaluation, published: Sequence[Published]) -> list[PaperRow]:
    """`published`: figures of this very target with this very tree."""
    rows = []
    for figure in published:
        figures = evaluation.at(figure.temperature)
        name = next((ours for ours, theirs in PAPER_TASKS.items() if theirs == figure.task), "")
        summary = figures.tree_sets.get(name) if figures else None
        rows.append(PaperRow(figure, summary.tau_micro if summary else None))
    return rows


def speed_chart(evaluation: Evaluation) -> str:
    """Predicted speed-up by chain length, the measured one as points of their own."""
    length = Axis("chain length", 1, evaluation.chain_length, range(1, evaluation.chain_length + 1))
    return line_chart(
        speed_series(evaluation), length, Axis("speed-up over no draft", 0), title="speed-up by chain length"
    )


def pass_chart(evaluation: Evaluation) -> str:
    """What a longer draft costs the target."""
    title = "one pass of the target by the tokens it verifies"
    return line_chart(_pass_series(evaluation), Axis("tokens verified", 0), Axis("milliseconds", 0), title=title)


def speed_series(evaluation: Evaluation) -> list[Series]:
    """For each temperature the predicted line and the measured point."""
    return [*_predicted_series(evaluation), *_measured_series(evaluation)]


def _predicted_series(evaluation: Evaluation) -> list[Series]:
    """Predicted speed-up of chains by their length, a line for each temperature."""
    series = []
    for index, temperature in enumerate(_temperatures(evaluation)):
        points = [
            Point(each.size, each.speed_up, note=f"chain of {each.size}: {each.speed_up:.2f} predicted")
            for each in _predictions(evaluation, temperature)
            if each.drafting == "chain"
        ]
        series.append(Series(f"T = {temperature:g}, predicted", points, index % 6 + 1))
    return series


def _measured_series(evaluation: Evaluation) -> list[Series]:
    """What the decoder's clock said of the chain that it ran, one point for each temperature."""
    series = []
    for index, temperature in enumerate(_temperatures(evaluation)):
        points = [
            Point(each.size, each.measured, note=f"chain of {each.size}: {each.measured:.2f} measured")
            for each in _predictions(evaluation, temperature)
            if each.drafting == "chain" and each.measured is not None
        ]
        series.append(Series(f"T = {temperature:g}, measured", points, index % 6 + 1, dashed=True))
    return series


def _pass_series(evaluation: Evaluation) -> list[Series]:
    """Milliseconds of one pass of the target by the tokens it verifies."""
    costs = _costs(evaluation)
    if costs is None:
        return []
    pairs = zip(costs.target.sizes, costs.target.seconds, strict=True)
    points = [Point(size, 1e3 * seconds, note=f"{size} tokens: {1e3 * seconds:.1f} ms") for size, seconds in pairs]
    return [Series("one pass of the target", points)]


def best_lines(evaluation: Evaluation) -> list[str]:
    """What pays here, in sentences."""
    lines = []
    for temperature in _temperatures(evaluation):
        best = next((each for each in _predictions(evaluation, temperature) if each.best), None)
        if best is not None:
            gain = "nothing is gained by a draft" if best.drafting == "none" else f"{best.speed_up:.2f} times as fast"
            lines.append(f"At temperature {temperature:g} the best choice on this device is {named(best)}: {gain}.")
    decoded = evaluation.speed.decoded if evaluation.speed else ()
    answers = [each for run in decoded if run.acceptance and not run.temperature for each in run.answers]
    if answers:
        same = sum(bool(each.identical) for each in answers)
        lines.append(f"{same} of {len(answers)} greedy texts are token for token those of the loop without a draft.")
    return lines


def named(choice: Prediction) -> str:
    """In words."""
    if choice.drafting == "none":
        return "not to speculate"
    if choice.drafting == "chain":
        return f"a chain of {choice.size}"
    return f"a tree of {choice.size} nodes, {choice.depth} deep"


def prediction_rows(evaluation: Evaluation) -> list[Prediction]:
    """Every way to draft that was predicted, by temperature."""
    return list(evaluation.speed.predictions) if evaluation.speed else []


def _predictions(evaluation: Evaluation, temperature: float) -> list[Prediction]:
    return [each for each in prediction_rows(evaluation) if each.temperature == temperature]


def _temperatures(evaluation: Evaluation) -> list[float]:
    return [each.temperature for each in evaluation.speed.costs] if evaluation.speed else []


def _costs(evaluation: Evaluation) -> Costs | None:
    return evaluation.speed.costs[0].costs if evaluation.speed and evaluation.speed.costs else None
