"""Acceptance without decoding beside its floor, the decoder that it replaces; and which draft pays here.

In: a target's Hugging Face folder, prompts (the evaluation sets where they are there), a draft (default:
one made here by overfitting the very texts, so that there is acceptance to count; its tau is no figure of
quality). Out: CPU seconds of decoding and of estimating the same rounds, token equality with plain decoding
per evaluation set, and the cost model's predictions beside measured speed-ups.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Column, arguments, print_table, write_results
from eagle3core.acceptance import Response, Rounds, summarise
from eagle3core.batch import Document
from eagle3core.config import DraftConfig
from eagle3core.costs import Choice, Costs, best_choice, chain_choices, measure_costs, tree_choices
from eagle3core.decoding.propose import Chain, DynamicTree, Nothing, Proposer
from eagle3core.decoding.speculate import Decoding, Generation, rounds_of, speculate
from eagle3core.decoding.target import TargetModel
from eagle3core.draft import Eagle3Draft
from eagle3core.estimate import Estimate, estimate
from eagle3core.export import load_draft
from eagle3core.packing import Chains, draft_id_table, pack
from eagle3core.ttt import TrainingTimeTest
from tasks.engines.hf_target import HuggingFaceTarget

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "eval"
SETS = {
    "mt-bench": "mt_bench.jsonl",
    "humaneval": "humaneval80.eagle.jsonl",
    "gsm8k": "gsm8k80.eagle.jsonl",
    "alpaca": "alpaca80.eagle.jsonl",
    "cnn/dm": "cnndm_sum80.eagle.jsonl",
    "math-500": "math500.jsonl",
}
OWN = {"own": ["Why is the sky blue?", "Name three rivers.", "Write a haiku.", "What is 12 times 7?"]}
LONGEST_PROMPT = 96  # tokens; longer ones keep their end, where the question is
CHAIN = Chain(5)
PAPER_TREE, SMALL_TREE = DynamicTree(), DynamicTree(nodes=20, depth=5, top_k=5)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Prompt:
    set: str
    token_ids: Tensor


@dataclass(frozen=True)
class Timed(Generic[Result]):
    result: Result
    cpu: float
    wall: float


def timed(work: Callable[[], Result]) -> Timed[Result]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return Timed(result, time.process_time() - cpu, time.perf_counter() - wall)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("acceptance", __doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--draft", type=Path, help="a draft's folder; default: one overfitted here")
    parser.add_argument("--tokens", type=int, help="new tokens a prompt; default 16, quick 12")
    parser.add_argument("--paper-tree", action="store_true", help="60 nodes, depth 8: an hour on one core")
    options = parser.parse_args(argv)
    tokens = options.tokens or (12 if options.quick else 16)
    tree = PAPER_TREE if options.paper_tree else SMALL_TREE
    model = AutoModelForCausalLM.from_pretrained(options.target, dtype=torch.float32)
    prompts = read_prompts(options.target, per_set=1 if options.quick else 11)
    embedding = model.get_input_embeddings().weight.detach()
    draft = load_draft(options.draft, embedding) if options.draft else fresh_draft(model)
    target = HuggingFaceTarget(model, draft.config.layer_ids)
    decoding = Decoding(tokens, eos_token_ids=end_ids(model))

    runs = {"none": timed(lambda: decode(target, None, prompts, Nothing(), decoding))}
    features = timed(lambda: [capture(target, generation) for generation in runs["none"].result])
    documents = features.result
    if options.draft is None:
        overfit(draft, documents, updates=3 if options.quick else 8)
    runs["chain"] = timed(lambda: decode(target, draft, prompts, CHAIN, decoding))
    runs["tree"] = timed(lambda: decode(target, draft, prompts, tree, decoding))
    responses = [Response(str(index), prompt.set) for index, prompt in enumerate(prompts)]
    estimated = timed(lambda: estimate(draft, documents, responses, CHAIN.length))
    figures = {
        "draft": options.draft.name if options.draft else "overfitted to these texts",
        "prompts": len(prompts),
        "new_tokens": tokens,
        "identity": identity(prompts, runs),
        "estimate": speed(runs["chain"], features, estimated, responses),
        "costs": costs(target, draft, runs, responses, tree, quick=options.quick),
    }
    write_results("acceptance", figures, options)


def read_prompts(folder: Path, per_set: int) -> list[Prompt]:
    """The first questions of every set, through the target's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = OWN
    if DATA.is_dir():
        questions = {name: read_set(DATA / file)[:per_set] for name, file in SETS.items()}
    prompts = []
    for name, texts in questions.items():
        for text in texts:
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
            )
            prompts.append(Prompt(name, torch.tensor(ids[-LONGEST_PROMPT:])))
    return prompts


def read_set(file: Path) -> list[str]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [row["turns"][0] if "turns" in row else row["problem"] for row in rows]


def end_ids(model: Any) -> tuple[int, ...]:
    ids = model.generation_config.eos_token_id
    return tuple(ids) if isinstance(ids, list) else (ids,)


def fresh_draft(model: Any) -> Eagle3Draft:
    """Untrained, EAGLE-3.1's norms, a draft vocabulary of the first 8,192 ids (merges come by frequency)."""
    config = DraftConfig.from_target(model.config.to_dict(), min(8192, model.config.vocab_size), fc_norm=True)
    torch.manual_seed(0)
    draft = Eagle3Draft(config)
    draft.set_vocabulary(torch.arange(config.draft_vocab_size))
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    draft.start_from_target(embedding, head, model.base_model.norm.weight)
    return draft


def overfit(draft: Eagle3Draft, documents: Sequence[Document], updates: int) -> None:
    batch = pack(documents, draft_id_table(draft.t2d), 3, follow=Chains.TRAINED)
    module = TrainingTimeTest(draft)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(updates):
        optimizer.zero_grad()
        module(batch).loss.backward()
        optimizer.step()


def decode(
    target: TargetModel,
    draft: Eagle3Draft | None,
    prompts: Sequence[Prompt],
    proposer: Proposer,
    how: Decoding,
) -> list[Generation]:
    """Prompts of like lengths together, eight at a time."""
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
    done: dict[int, Generation] = {}
    for start in range(0, len(order), 8):
        part = order[start : start + 8]
        found = speculate(target, draft, [prompts[index].token_ids for index in part], proposer, how)
        done.update(zip(part, found, strict=True))
    return [done[index] for index in range(len(prompts))]


def capture(target: HuggingFaceTarget, generation: Generation) -> Document:
    return target.document(generation.prompt, torch.tensor(generation.token_ids), "text")


def identity(prompts: Sequence[Prompt], runs: dict[str, Timed[list[Generation]]]) -> list[dict[str, Any]]:
    plain = runs["none"].result
    rows = []
    for name in dict.fromkeys(prompt.set for prompt in prompts):
        mine = [index for index, prompt in enumerate(prompts) if prompt.set == name]
        row: dict[str, Any] = {"set": name, "prompts": len(mine)}
        for kind in ("chain", "tree"):
            found = runs[kind].result
            row[kind] = sum(found[index].token_ids == plain[index].token_ids for index in mine)
        rows.append(row)
    print("\nGreedy texts equal to plain decoding, fp32")
    print_table([Column(name, name) for name in ("set", "prompts", "chain", "tree")], rows)
    return rows


def speed(
    chain: Timed[list[Generation]],
    features: Timed[list[Document]],
    estimated: Timed[Estimate],
    responses: Sequence[Response],
) -> dict[str, Any]:
    decoded, walk = rounds_of(chain.result, responses, CHAIN, "chain"), estimated.result.walk
    same = torch.equal(decoded.context, walk.context) and torch.equal(decoded.survived, walk.survived)
    row = {
        "rounds": len(decoded),
        "same": "every one" if same else f"{agreeing(decoded, walk)} of {len(decoded)}",
        "tau": summarise(walk).tau_micro.value,
        "decoding": chain.cpu,
        "features": features.cpu,
        "estimate": estimated.cpu,
        "ratio": chain.cpu / estimated.cpu,
    }
    print("\nThe same rounds, decoded and estimated (CPU seconds; the bar is a ratio of 50)")
    columns = [
        Column("rounds", "rounds"),
        Column("same", "same"),
        Column("tau", "tau", "{:.2f}"),
        Column("decoding (floor)", "decoding", "{:.1f}"),
        Column("features, once", "features", "{:.1f}"),
        Column("estimate", "estimate", "{:.2f}"),
        Column("ratio", "ratio", "{:.0f}"),
    ]
    print_table(columns, [row])
    return row


def agreeing(decoded: Rounds, walk: Rounds) -> int:
    """Rounds that begin at the same place of the same text and keep as many tokens."""
    one, other = (
        set(zip(rounds.response.tolist(), rounds.context.tolist(), rounds.accepted.tolist(), strict=True))
        for rounds in (decoded, walk)
    )
    return len(one & other)


def costs(
    target: TargetModel,
    draft: Eagle3Draft,
    runs: dict[str, Timed[list[Generation]]],
    responses: Sequence[Response],
    tree: DynamicTree,
    quick: bool,
) -> dict[str, Any]:
    """Predicted from timings at one sequence, and measured over whole runs at eight."""
    options = {"target_sizes": (1, 6, 16), "repeats": 1} if quick else {"repeats": 2}
    alone = measure_costs(target, draft, context=LONGEST_PROMPT, **options)
    together = measure_costs(target, draft, context=LONGEST_PROMPT, batch=8, **options)
    chain = summarise(rounds_of(runs["chain"].result, responses, CHAIN, "chain"), resamples=2)
    wide = summarise(rounds_of(runs["tree"].result, responses, tree, "tree"), resamples=2)
    print("\nOne pass of the target, ms, by tokens verified")
    sizes = [str(size) for size in alone.target.sizes]
    lines = [
        {"batch": at.batch, **{s: 1e3 * t for s, t in zip(sizes, at.target.seconds, strict=True)}}
        for at in (alone, together)
    ]
    print_table([Column("sequences", "batch"), *(Column(size, size, "{:.0f}") for size in sizes)], lines)
    rows = []
    for measured_at in (alone, together):
        choices = [
            *chain_choices(measured_at, [rate.value for rate in chain.survival]),
            *tree_choices(measured_at, {tree: wide.tau_micro.value}),
        ]
        best = best_choice(measured_at, choices)
        rows += [row_of(measured_at, choice, best, runs) for choice in choices]
    print("\nSpeed-up over no draft: predicted, and measured over whole runs of eight sequences (wall time)")
    columns = [
        Column("draft", "draft"),
        Column("sequences", "batch"),
        Column("tau", "tau", "{:.2f}"),
        Column("predicted", "predicted", "{:.2f}"),
        Column("measured", "measured", "{:.2f}"),
        Column("best here", "best"),
    ]
    print_table(columns, rows)
    return {"target_milliseconds": lines, "choices": rows}


def row_of(
    at: Costs, choice: Choice, best: Choice, runs: dict[str, Timed[list[Generation]]]
) -> dict[str, Any]:
    proposer = choice.proposer
    run = "tree" if isinstance(proposer, DynamicTree) else "chain" if proposer == CHAIN else None
    measured = runs["none"].wall / runs[run].wall if run and at.batch > 1 else None
    name = f"tree of {proposer.nodes}" if run == "tree" else f"chain of {proposer.depth}"
    here = "yes" if best == choice else "no draft" if isinstance(best.proposer, Nothing) else ""
    return {
        "draft": name,
        "batch": at.batch,
        "tau": choice.tau,
        "predicted": choice.speed_up,
        "measured": measured,
        "best": here,
    }


if __name__ == "__main__":
    main()
