"""The reference decoder over some held-out prompts, timed, and the cost model beside it.

In: a target's folder, a draft, held-out answers whose prompts are asked again, measured acceptance. Out:
`SpeedFigures`, and a row for every round. Each prompt is alone in its batch, as the papers measure; the loop
without speculation is the same loop with nothing drafted.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor, nn

from eagle3core.acceptance import AcceptanceSummary, Response, summarise
from eagle3core.costs import (
    Choice,
    Costs,
    best_choice,
    chain_choices,
    measure_costs,
    tree_choices,
    wait_for_device,
)
from eagle3core.decoding.propose import Chain, DynamicTree, Nothing, Proposer
from eagle3core.decoding.speculate import Decoding, Generation, rounds_of, speculate
from eagle3core.drafters.interface import Draft
from eagle3core.verify import Sampling
from storage.schemas import DecodedRow
from tasks.documents import HeldoutDocument
from tasks.engines.hf_target import HuggingFaceTarget
from tasks.prepare_target import TargetInfo
from tasks.speed import Decoded, DecodedAnswer, Drafting, MeasuredCosts, Prediction, SpeedFigures, speed_up

COST_REPEATS = 3


@dataclass(frozen=True)
class Measured:
    """Acceptance that predictions start from, at one temperature: survival of chains, tau of each tree."""

    survival: tuple[float, ...]
    trees: Mapping[DynamicTree, float]


@dataclass(frozen=True)
class SpeedRun:
    figures: SpeedFigures
    rows: tuple[DecodedRow, ...]


class SpeedBench:
    """A target that is loaded once. `prompts`: what is asked; `new_tokens`: the longest answer."""

    def __init__(
        self,
        target: TargetInfo,
        draft: Draft,
        prompts: Sequence[HeldoutDocument],
        chain: Chain,
        tree: DynamicTree,
        new_tokens: int,
    ) -> None:
        assert isinstance(draft, nn.Module)
        self._target = HuggingFaceTarget.load(
            Path(target.path), draft.config.layer_ids, getattr(torch, target.dtype)
        )
        self._draft = draft.to("cuda" if torch.cuda.is_available() else "cpu")
        self._eos = target.eos_token_ids
        self._asked = [(item, _prompt(item)) for item in prompts]
        self._new_tokens = new_tokens
        self._ways: dict[Drafting, Proposer] = {"none": Nothing(), "chain": chain, "tree": tree}

    def run(self, temperatures: Mapping[float, Measured]) -> SpeedRun:
        """Decode, time and predict at every temperature."""
        decoded: list[Decoded] = []
        rows: list[DecodedRow] = []
        costs, predictions = [], []
        context = round(median(len(prompt) for _, prompt in self._asked)) + self._new_tokens // 2
        for temperature, measured in temperatures.items():
            sampling = Sampling(temperature)
            at = measure_costs(
                self._target, self._draft, context=context, sampling=sampling, repeats=COST_REPEATS
            )
            costs.append(MeasuredCosts(temperature, at))
            here = self._decode(sampling, rows)
            decoded += here
            predictions += _predictions(at, measured, temperature, here, self._ways)
        figures = SpeedFigures(_device(), tuple(costs), tuple(decoded), tuple(predictions))
        return SpeedRun(figures, tuple(rows))

    def _decode(self, sampling: Sampling, rows: list[DecodedRow]) -> list[Decoded]:
        """Every way to draft on one prompt before the next, so that a busy machine slows them alike."""
        answers: dict[Drafting, list[DecodedAnswer]] = {way: [] for way in self._ways}
        generations: dict[Drafting, list[Generation]] = {way: [] for way in self._ways}
        for item, prompt in self._asked:
            for way, proposer in self._ways.items():
                generation, seconds = self._timed(prompt, proposer, sampling)
                generations[way].append(generation)
                plain = generations["none"][-1]
                same = generation.token_ids == plain.token_ids if sampling.temperature == 0 else None
                tokens, rounds = len(generation.token_ids) - 1, len(generation.rounds)
                answers[way].append(
                    DecodedAnswer(item.prompt_id, item.category, tokens, rounds, seconds, same)
                )
                if way != "none":
                    rows += _rows(way, item, sampling.temperature, generation)
        return [
            Decoded(way, sampling.temperature, tuple(answers[way]), self._summary(way, generations[way], sampling))
            for way in self._ways
        ]

    def _timed(self, prompt: Tensor, proposer: Proposer, sampling: Sampling) -> tuple[Generation, float]:
        """An answer, and the seconds of its rounds: the prompt's pass is timed alone and taken off."""
        draft = None if isinstance(proposer, Nothing) else self._draft
        taken = []
        for most in (1, self._new_tokens):
            wait_for_device()
            began = time.perf_counter()
            (generation,) = speculate(
                self._target, draft, [prompt], proposer, Decoding(most, sampling, self._eos)
            )
            wait_for_device()
            taken.append(time.perf_counter() - began)
        return generation, max(taken[1] - taken[0], 0.0)

    def _summary(
        self, way: Drafting, generations: Sequence[Generation], sampling: Sampling
    ) -> AcceptanceSummary | None:
        if way == "none" or not any(generation.rounds for generation in generations):
            return None
        responses = [
            Response(item.prompt_id, item.category, sampling.temperature, len(generation.token_ids))
            for (item, _), generation in zip(self._asked, generations, strict=True)
        ]
        return summarise(rounds_of(generations, responses, self._ways[way], way))


def _prompt(item: HeldoutDocument) -> Tensor:
    """Everything before the last answer: of several turns the earlier ones are context."""
    supervised = item.document.supervised
    starts = (supervised & ~supervised.roll(1)).nonzero().flatten()
    return item.document.token_ids[: int(starts[-1])].long()


def _rows(way: Drafting, item: HeldoutDocument, temperature: float, generation: Generation) -> list[DecodedRow]:
    return [
        DecodedRow(way, item.prompt_id, item.category, temperature, number, each.drafted, each.accepted, each.tokens)
        for number, each in enumerate(generation.rounds)
    ]


def _predictions(
    costs: Costs,
    measured: Measured,
    temperature: float,
    decoded: Sequence[Decoded],
    ways: Mapping[Drafting, Proposer],
) -> list[Prediction]:
    """Every chain up to the longest, every tree, and no draft at all, which may be the best."""
    choices = [*chain_choices(costs, measured.survival), *tree_choices(costs, measured.trees)]
    best = best_choice(costs, choices)
    by_way = {run.drafting: run for run in decoded}
    plain_seconds = costs.round_seconds(Nothing(), 1.0)
    found = []
    for choice in [Choice(Nothing(), 1.0, plain_seconds, 1.0), *choices]:
        way: Drafting = next((name for name, each in ways.items() if type(each) is type(choice.proposer)))
        run = by_way[way] if choice.proposer == ways[way] and way != "none" else None
        proposer = choice.proposer
        found.append(
            Prediction(
                temperature=temperature,
                drafting=way,
                size=proposer.nodes if way == "tree" else proposer.depth,
                depth=proposer.depth,
                tau=choice.tau,
                round_seconds=choice.round_seconds,
                speed_up=choice.speed_up,
                measured=speed_up(run, by_way["none"]),
                best=choice.proposer == best.proposer,
            )
        )
    return found


def _device() -> str:
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} CPU threads ({platform.machine()})"
