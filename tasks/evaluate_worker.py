"""The evaluation itself, in a process of its own: how often the held-out answers would have been accepted.

In: `spec.json` (an `EvaluationSpec`). Out: in the spec's folder `rows.parquet` (one row an anchor, a walked round, a
tree's round), `rounds.parquet` (the reference decoder's), `summary.json` (an `Evaluation`), `examples.json`. Started
by `tasks.evaluate_draft`.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from eagle3core.acceptance import Mode, Rounds, summarise
from eagle3core.decoding.propose import Chain, DynamicTree, Proposer
from eagle3core.decoding.replay import replay
from eagle3core.drafters import load_draft
from eagle3core.drafters.interface import Draft
from eagle3core.estimate import Estimate, Proposal, estimate
from eagle3core.groups import by_category, by_context, by_output, by_set
from eagle3core.teacher import TargetHead
from storage.features import FeatureReader
from storage.folder import PartFolder
from storage.schemas import ACCEPTANCE, DecodedRow, to_table
from tasks.documents import HeldoutDocument, heldout_documents, heldout_temperatures, with_responses
from tasks.evaluate_draft import EvaluationSpec
from tasks.evaluate_speed import Measured, SpeedBench, SpeedRun
from tasks.evaluation import EXAMPLES, ROUNDS, ROWS, SUMMARY, Coverage, Evaluation, TemperatureFigures
from tasks.prepare_target import TargetInfo
from tasks.processes import cores, emit
from tasks.recipe import Tree
from tasks.report.example import Example, examples_json, make_example
from tasks.target_weights import read_target_weights

log = logging.getLogger(__name__)

EXAMPLES_EACH = 2  # answers shown of each temperature
EXAMPLE_CANDIDATES = 12
EXAMPLE_TOKENS = 24  # shorter answers show too few rounds
LOOP_LONGEST = 32  # tokens of the longest repeated phrase that counts as a loop
LOOP_REPEATS = 4


def main(path: str) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    spec = EvaluationSpec(**json.loads(Path(path).read_text()))
    torch.set_num_threads(spec.threads or cores())
    evaluate(spec)


def evaluate(spec: EvaluationSpec) -> Evaluation:
    """Evaluate and write everything. Raises ValueError where there is no held-out answer."""
    target = TargetInfo.from_dict(spec.target)
    weights = read_target_weights(Path(target.path))
    draft = load_draft(Path(spec.draft), weights.parts(target.config)).eval()
    head = TargetHead.build(weights.head, weights.norm, target.config["rms_norm_eps"], draft.target_ids)
    reader = FeatureReader(Path(spec.features))
    temperatures = heldout_temperatures(reader)
    if not temperatures:
        raise ValueError("the features hold no held-out answer: raise data.heldout")
    read = _Reader.of(target)

    def estimated(heldout: Sequence[HeldoutDocument], proposal: Proposal) -> Estimate:
        return estimate(draft, *with_responses(heldout), spec.chain_length, proposal=proposal, target_head=head)

    tree = DynamicTree(**spec.tree)
    figures, tables, examples = [], [], []
    measured: dict[float, Measured] = {}
    documents: list[HeldoutDocument] = []
    asked: list[HeldoutDocument] = []
    for temperature in temperatures:
        started = time.monotonic()
        heldout = heldout_documents(reader, temperature, draft.config.layer_ids)
        greedy = estimated(heldout, Proposal.GREEDY)
        sampled = estimated(heldout, Proposal.SAMPLED) if temperature > 0 else None
        asked = asked or in_turn(heldout)[: spec.decode_prompts]
        trees = tree_rounds(draft, in_turn(heldout)[: spec.tree_prompts], tree)
        figures.append(_figures(temperature, heldout, greedy, sampled, trees.get(tree), spec.bootstrap))
        tau = figures[-1].walk.tau_micro.value
        measured[temperature] = Measured(
            tuple(rate.value if rate.denominator else 0.0 for rate in figures[-1].walk.survival),
            {shape: summarise(rounds, resamples=2).tau_micro.value for shape, rounds in trees.items()},
        )
        tables += [rounds_table(rounds) for rounds in (greedy.anchor, greedy.walk, trees.get(tree)) if rounds]
        examples += _examples(heldout, tau, lambda items: estimated(items, Proposal.GREEDY).walk, read)
        documents += heldout
        emit({"event": "temperature", "temperature": temperature, "tau": tau, "answers": len(heldout)})
        log.info("T = %g: %d answers in %.1f s", temperature, len(heldout), time.monotonic() - started)
    speed = _speed(spec, target, draft, asked, measured)
    evaluation = Evaluation(
        target=target.model,
        chain_length=spec.chain_length,
        tree=Tree(**spec.tree),
        figures=tuple(figures),
        coverage=tuple(coverage(documents, draft)),
        speed=speed and speed.figures,
    )
    out = PartFolder(Path(spec.folder))
    out.write_table(ROWS, pa.concat_tables(tables))
    out.write_table(ROUNDS, to_table(DecodedRow, speed.rows if speed else ()))
    out.write_json(SUMMARY, evaluation.to_dict())
    out.write_text(EXAMPLES, examples_json(examples))
    return evaluation


def _figures(
    temperature: float,
    heldout: Sequence[HeldoutDocument],
    greedy: Estimate,
    sampled: Estimate | None,
    tree: Rounds | None,
    resamples: int,
) -> TemperatureFigures:
    def groups(split: Callable[[Rounds], Mapping[str, Rounds]], rounds: Rounds = greedy.walk) -> dict[str, Any]:
        return {name: summarise(part, resamples=resamples) for name, part in split(rounds).items()}

    return TemperatureFigures(
        temperature=temperature,
        anchor=summarise(greedy.anchor, resamples=resamples),
        walk=summarise(greedy.walk, resamples=resamples),
        # The rounds that a server runs. Where p is only bounded (text outside a stored top-k) the lower end is what
        # can be promised.
        sampled=summarise(sampled.walk, resamples=resamples) if sampled else None,
        sampled_unknown=sampled.unknown if sampled else 0.0,
        categories=groups(by_category),
        contexts=groups(by_context),
        outputs=groups(by_output),
        sets=groups(by_set),
        tree=summarise(tree, resamples=resamples) if tree else None,
        tree_categories=groups(by_category, tree) if tree else {},
        tree_sets=groups(by_set, tree) if tree else {},
        responses=len(heldout),
        looping=sum(loops(item.document.token_ids[item.document.supervised].tolist()) for item in heldout),
    )


def in_turn(heldout: Sequence[HeldoutDocument]) -> list[HeldoutDocument]:
    """The first answer of every category, then the second, and so on: every beginning holds all of them alike."""
    taken: dict[str, int] = {}
    ranked = []
    for item in heldout:
        taken[item.category] = taken.get(item.category, 0) + 1
        ranked.append((taken[item.category], item.category, item))
    return [item for *_, item in sorted(ranked, key=lambda each: each[:2])]


def tree_rounds(
    draft: Draft, heldout: Sequence[HeldoutDocument], tree: DynamicTree
) -> dict[DynamicTree, Rounds]:
    """The tree's rounds over the stored answers, and those of two smaller ones that a device may prefer."""
    if not heldout:
        return {}
    smaller = [
        DynamicTree(max(2, tree.nodes // by), max(1, tree.depth * left // 4), max(1, tree.top_k // by))
        for by, left in ((2, 3), (4, 2))
    ]
    return {shape: replayed(draft, heldout, shape, "tree") for shape in (tree, *smaller)}


def replayed(draft: Draft, heldout: Sequence[HeldoutDocument], proposer: Proposer, mode: Mode) -> Rounds:
    """Rounds of `proposer` over stored answers, no target needed."""
    return replay(draft, *with_responses(heldout), proposer, mode)


def _speed(
    spec: EvaluationSpec,
    target: TargetInfo,
    draft: Draft,
    asked: Sequence[HeldoutDocument],
    measured: Mapping[float, Measured],
) -> SpeedRun | None:
    """The reference decoder on the prompts of `asked`; None where the recipe wants none."""
    if not asked:
        return None
    started = time.monotonic()
    bench = SpeedBench(
        target, draft, asked, Chain(spec.chain_length), DynamicTree(**spec.tree), spec.decode_tokens
    )
    run = bench.run(measured)
    log.info("decoded %d prompts in every way in %.1f s", len(asked), time.monotonic() - started)
    return run


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text ends in a phrase of at most LOOP_LONGEST tokens that comes LOOP_REPEATS times in a
    row.
    """
    for period in range(1, LOOP_LONGEST + 1):
        # A short phrase must fill as many tokens as a long one: "ha ha ha ha" alone is no runaway.
        needed = max(period * LOOP_REPEATS, LOOP_LONGEST)
        tail = tokens[-needed:]
        if len(tail) == needed and tail[period:] == tail[:-period]:
            return True
    return False


def rounds_table(rounds: Rounds) -> pa.Table:
    """Rounds as rows of the acceptance schema; `anchor` is the feature row that a round started from."""
    owners = rounds.response.tolist()
    prompts = [response.prompt_id for response in rounds.responses]
    categories = [response.category for response in rounds.responses]
    temperatures = np.array([response.temperature for response in rounds.responses], dtype=np.float32)
    return pa.table(
        {
            "mode": [rounds.mode] * len(rounds),
            "prompt_id": [prompts[owner] for owner in owners],
            "category": [categories[owner] for owner in owners],
            "temperature": temperatures[rounds.response.numpy()],
            # A round at row t knows token t+1: t+2 tokens of context.
            "anchor": (rounds.context - 2).numpy().astype(np.int32),
            "drafted": rounds.drafted.numpy().astype(np.int32),
            "accepted": rounds.accepted.round().numpy().astype(np.int32),
            "turn": np.array([response.turn for response in rounds.responses], dtype=np.int32)[owners],
        },
        schema=ACCEPTANCE,
    )


def coverage(heldout: Sequence[HeldoutDocument], draft: Draft) -> list[Coverage]:
    """Supervised held-out tokens that the draft vocabulary holds, by category."""
    tokens: dict[str, int] = {}
    covered: dict[str, int] = {}
    for item in heldout:
        written = item.document.token_ids[item.document.supervised]
        tokens[item.category] = tokens.get(item.category, 0) + len(written)
        covered[item.category] = covered.get(item.category, 0) + int(draft.t2d[written].sum())
    return [Coverage(category, tokens[category], covered[category]) for category in sorted(tokens)]


@dataclass(frozen=True)
class _Reader:
    """How tokens read: special ones are written by their names, and `special` are their ids."""

    decode: Callable[[Sequence[int]], str]
    special: frozenset[int]

    @classmethod
    def of(cls, target: TargetInfo) -> _Reader:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=target.trust_remote_code)
        decode = lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cls(decode, frozenset(tokenizer.all_special_ids))


def _examples(
    heldout: Sequence[HeldoutDocument],
    tau: float,
    walk: Callable[[Sequence[HeldoutDocument]], Rounds],
    read: _Reader,
) -> list[Example]:
    """Of some answers those whose own tau lies nearest the set's: what is shown is typical and not the
    best.
    """
    examples = []
    for item in heldout[:EXAMPLE_CANDIDATES]:
        supervised = item.document.supervised
        if int(supervised.sum()) < EXAMPLE_TOKENS:
            continue
        rounds = walk([item])
        # Of several turns the last: its rounds come last, and its first token was prefill's.
        mine = rounds.response == rounds.response.max()
        examples.append(
            make_example(
                item.document.token_ids.tolist(),
                int(rounds.context[mine][0]) - 1,
                rounds.accepted[mine].round().int().tolist(),
                read.decode,
                special=read.special,
                category=item.category,
                temperature=item.temperature,
            )
        )
    return sorted(examples, key=lambda example: abs(example.tau - tau))[:EXAMPLES_EACH]


if __name__ == "__main__":
    main(sys.argv[1])
