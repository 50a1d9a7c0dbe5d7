"""Made-up but consistent figures of a draft, for tests of the report, the card and the comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from eagle3core.acceptance import Response, Rounds, ServerCounters, compare, from_counters, summarise
from eagle3core.costs import Costs, Curve
from eagle3core.groups import by_category, by_context, by_output
from storage.artifacts import ArtifactRef
from tasks.evaluation import Coverage, Evaluation, TemperatureFigures
from tasks.recipe import Tree
from tasks.report.data import DraftReport, LineageRow, Trained
from tasks.report.example import Example, ExampleRound, PromptPart
from tasks.report.serving import ServingCheck, ServingReport, ServingSpeed, serving_to_dict
from tasks.report.training import StepLoss, StepPoint, TrainingCurve
from tasks.speed import Decoded, DecodedAnswer, MeasuredCosts, Prediction, SpeedFigures

K = 5
CATEGORIES = ("coding", "reasoning", "writing")


def make_rounds(mode: str, hit: float, temperature: float, prompts: int = 24, rounds: int = 30) -> Rounds:
    """Chains whose every position is right with probability `hit`, whatever came before."""
    generator = torch.Generator().manual_seed(int(1000 * hit) + int(10 * temperature))
    responses = [Response(f"p{i}", CATEGORIES[i % 3], temperature, 40 + 9 * i) for i in range(prompts)]
    owner = torch.arange(prompts).repeat_interleave(rounds)
    right = torch.rand(len(owner), K, generator=generator, dtype=torch.float64) < hit
    accepted = right.long().cumprod(1).sum(1)
    drafted = torch.full_like(accepted, K)
    context = torch.arange(len(owner)) % 300 + 20
    return Rounds.counted(mode, responses, owner, context, drafted, accepted, K)


def make_figures(hit: float, temperature: float) -> TemperatureFigures:
    walk = make_rounds("walk", hit, temperature)
    groups = [
        {name: summarise(part, resamples=50) for name, part in split(walk).items()}
        for split in (by_category, by_context, by_output)
    ]
    anchor = summarise(make_rounds("anchor", hit - 0.02, temperature), resamples=50)
    sampled = summarise(make_rounds("walk", hit - 0.05, temperature), resamples=50) if temperature else None
    tree = make_rounds("tree", hit + 0.2, temperature)
    trees = {name: summarise(part, resamples=50) for name, part in by_category(tree).items()}
    return TemperatureFigures(
        temperature,
        anchor,
        summarise(walk, resamples=50),
        sampled,
        0.04 if temperature else 0.0,
        *groups,
        groups[0],
        summarise(tree, resamples=50),
        trees,
        trees,
        24,
        3,
    )


def make_speed() -> SpeedFigures:
    """A device where one more token costs half of a pass: the chain breaks even and the tree does not."""
    sizes = (1, 2, 4, 8, 16, 32, 48, 64)
    target = Curve(sizes, tuple(0.05 + 0.01 * (size - 1) for size in sizes))
    small = Curve((1, 10), (0.004, 0.01))
    costs = Costs(160, 1, target, small, small, Curve(sizes, tuple(0.001 * size for size in sizes)))
    decoded, predictions = [], []
    for temperature in (0.0, 1.0):
        for drafting, seconds in (("none", 2.0), ("chain", 1.6), ("tree", 4.0)):
            answers = tuple(
                DecodedAnswer(f"p{i}", CATEGORIES[i], 31, 31 if drafting == "none" else 15, seconds, temperature == 0 or None)
                for i in range(2)
            )
            mode = None if drafting == "none" else summarise(make_rounds(drafting, 0.5, temperature, 2), resamples=50)
            decoded.append(Decoded(drafting, temperature, answers, mode))
        predictions += [
            Prediction(temperature, "none", 0, 0, 1.0, 0.051, 1.0, None, False),
            *(
                Prediction(temperature, "chain", k, k, 1 + 0.3 * k, 0.05 + 0.02 * k, 1.4 - 0.1 * k, measured, k == 1)
                for k, measured in ((1, None), (2, None), (3, None), (4, None), (K, 1.25))
            ),
            Prediction(temperature, "tree", 15, 4, 2.1, 0.22, 0.6, None, False),
            Prediction(temperature, "tree", 60, 8, 2.9, 0.75, 0.2, 0.5, False),
        ]
    costs_by_temperature = tuple(MeasuredCosts(temperature, costs) for temperature in (0.0, 1.0))
    return SpeedFigures("2 CPU threads (made up)", costs_by_temperature, tuple(decoded), tuple(predictions))


def make_evaluation(hit: float = 0.5, target: str = "SmolLM2-135M-Instruct") -> Evaluation:
    coverage = tuple(Coverage(name, 1000, 1000 - 7 * i) for i, name in enumerate(CATEGORIES))
    figures = (make_figures(hit, 0.0), make_figures(hit - 0.12, 1.0))
    return Evaluation(target, K, Tree(), figures, coverage, make_speed())


def make_serving(evaluation: Evaluation) -> ServingReport:
    """Counters of a server that kept the promise, and of a baseline that promised nothing."""
    checks = []
    for figures in evaluation.figures:
        drafts = 700
        accepted = tuple(round(drafts * rate.value) for rate in figures.walk.survival)
        served = from_counters(ServerCounters(drafts, drafts * K, accepted))
        identical = 32 if figures.temperature == 0 else None
        checks.append(
            ServingCheck(
                "eagle3", figures.temperature, 32, identical, served, tuple(compare(figures.walk, served))
            )
        )
    baseline = from_counters(ServerCounters(500, 2100, (90, 60, 50, 40, 35)))
    checks.append(ServingCheck("ngram", 0.0, 32, 32, baseline, ()))
    speeds = [
        ServingSpeed(method, figures.temperature, speed, tau)
        for figures in evaluation.figures
        for method, speed, tau in (("none", 60.0, 1.0), ("eagle3", 41.0, 1.9), ("ngram", 48.0, 1.2))
    ]
    return ServingReport(tuple(checks), tuple(speeds), ())


def serving_summary(serving: ServingReport, gaps: Sequence[float | None] = ()) -> dict[str, Any]:
    """The summary.json that the serving check writes."""
    return {
        **serving_to_dict(serving.checks),
        "methods": [dataclasses.asdict(speed) for speed in serving.speeds],
        "divergences": {"eagle3 T=0": [{"prompt_id": "p", "position": 3, "gap": gap} for gap in gaps]},
    }


def make_report(name: str = "smollm2-135m", hit: float = 0.5, **changes: object) -> DraftReport:
    evaluation = make_evaluation(hit)
    words = [
        "To",
        "sort",
        "a",
        "list",
        "in",
        "Python",
        "you",
        "call",
        "its",
        "sort",
        "method,",
        "or",
        "sorted",
        "for",
        "a",
        "copy",
        "of",
        "it.",
    ]
    rounds = tuple(
        ExampleRound(" ".join(["", *words[i : i + n]]) if n else "", f" {words[i + n]}")
        for i, n in ((0, 2), (3, 0), (4, 3), (8, 1), (10, 4))
    )
    kinds = ("conversations", "responses", "features", "vocabulary", "draft", "acceptance", "serving")
    report = DraftReport(
        name=name,
        target=evaluation.target,
        draft=ArtifactRef("draft", f"{name[:1]}0123456789abcdef012"[:20], "store/draft/0123456789abcdef0123"),
        parameters=9_600_000,
        evaluation=evaluation,
        training=TrainingCurve(
            400,
            tuple(
                StepLoss(ttt, tuple(StepPoint(i, 6 * 0.99**i + ttt) for i in range(30 * ttt, 400, 4)))
                for ttt in (1, 3, 5)
            ),
            tuple(StepPoint(i, 1.5 - 0.5 * 0.99**i) for i in range(50, 401, 50)),
        ),
        trained=Trained(412, 31_000),
        serving=make_serving(evaluation),
        vocabulary={
            "size": 8192,
            "target_size": 49152,
            "filled": 12,
            "coverage_train": 0.999,
            "coverage_heldout": 0.993,
        },
        recipe={"training": {"lr": 5e-4, "ttt_steps": 5}},
        examples=(
            Example(
                (PromptPart("user", True), PromptPart("How do I sort a list?", False)), "coding", 0.0, 2.2, rounds, False
            ),
        ),
        lineage=tuple(
            LineageRow(
                kind,
                f"{i}" * 20,
                f"make-{kind}",
                "2026-01-02T03:04:05.000+00:00",
                10 ** (4 + i),
                100 * i,
                60.0 * i,
            )
            for i, kind in enumerate(kinds)
        ),
        warning=None,
    )
    return dataclasses.replace(report, **changes)
