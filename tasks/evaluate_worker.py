"""The evaluation itself, in a process of its own: how often the held-out answers would have been accepted.

In: `spec.json` (an `EvaluationSpec`). Out: in the spec's folder `rows.parquet` (one row an anchor and one a
walked round), `summary.json` (an `Evaluation`), `examples.json`. Started by `tasks.evaluate_draft`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from eagle3core.acceptance import Response, Rounds, summarise
from eagle3core.drafters import load_draft
from eagle3core.drafters.interface import Draft
from eagle3core.estimate import Estimate, Proposal, estimate
from eagle3core.groups import by_category, by_context, by_output
from eagle3core.teacher import TargetHead
from storage.features import FeatureReader
from storage.folder import PartFolder
from storage.schemas import ACCEPTANCE
from tasks.documents import HeldoutDocument, heldout_documents, heldout_temperatures
from tasks.evaluate_draft import EvaluationSpec
from tasks.evaluation import EXAMPLES, ROWS, SUMMARY, Coverage, Evaluation, TemperatureFigures
from tasks.prepare_target import TargetInfo
from tasks.processes import emit
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
    torch.set_num_threads(spec.threads or len(os.sched_getaffinity(0)))
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
    decode = _decoder(target)

    def estimated(heldout: Sequence[HeldoutDocument], proposal: Proposal) -> Estimate:
        responses = [Response(item.prompt_id, item.category, item.temperature) for item in heldout]
        documents = [item.document for item in heldout]
        return estimate(draft, documents, responses, spec.chain_length, proposal=proposal, target_head=head)

    figures, tables, examples = [], [], []
    documents: list[HeldoutDocument] = []
    for temperature in temperatures:
        started = time.monotonic()
        heldout = heldout_documents(reader, temperature, draft.config.layer_ids)
        greedy = estimated(heldout, Proposal.GREEDY)
        sampled = estimated(heldout, Proposal.SAMPLED) if temperature > 0 else None
        figures.append(_figures(temperature, heldout, greedy, sampled, spec.bootstrap))
        tau = figures[-1].walk.tau_micro.value
        tables += [rounds_table(greedy.anchor), rounds_table(greedy.walk)]
        examples += _examples(heldout, tau, lambda items: estimated(items, Proposal.GREEDY).walk, decode)
        documents += heldout
        emit({"event": "temperature", "temperature": temperature, "tau": tau, "answers": len(heldout)})
        log.info("T = %g: %d answers in %.1f s", temperature, len(heldout), time.monotonic() - started)
    evaluation = Evaluation(
        target.model, spec.chain_length, tuple(figures), tuple(coverage(documents, draft))
    )
    out = PartFolder(Path(spec.folder))
    out.write_table(ROWS, pa.concat_tables(tables))
    out.write_json(SUMMARY, evaluation.to_dict())
    out.write_text(EXAMPLES, examples_json(examples))
    return evaluation


def _figures(
    temperature: float,
    heldout: Sequence[HeldoutDocument],
    greedy: Estimate,
    sampled: Estimate | None,
    resamples: int,
) -> TemperatureFigures:
    def groups(split: Callable[[Rounds], Mapping[str, Rounds]]) -> dict[str, Any]:
        return {name: summarise(part, resamples=resamples) for name, part in split(greedy.walk).items()}

    return TemperatureFigures(
        temperature=temperature,
        anchor=summarise(greedy.anchor, resamples=resamples),
        walk=summarise(greedy.walk, resamples=resamples),
        # The stored top-k bounds p where the text lies outside it; the lower end is what can be promised.
        sampled=summarise(sampled.anchor, resamples=resamples) if sampled else None,
        categories=groups(by_category),
        contexts=groups(by_context),
        outputs=groups(by_output),
        responses=len(heldout),
        looping=sum(loops(item.document.token_ids[item.document.supervised].tolist()) for item in heldout),
    )


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


def _decoder(target: TargetInfo) -> Callable[[Sequence[int]], str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=target.trust_remote_code)
    return lambda tokens: tokenizer.decode(
        tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def _examples(
    heldout: Sequence[HeldoutDocument],
    tau: float,
    walk: Callable[[Sequence[HeldoutDocument]], Rounds],
    decode: Callable[[Sequence[int]], str],
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
                decode,
                category=item.category,
                temperature=item.temperature,
            )
        )
    return sorted(examples, key=lambda example: abs(example.tau - tau))[:EXAMPLES_EACH]


if __name__ == "__main__":
    main(sys.argv[1])
