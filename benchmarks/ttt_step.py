"""One exact TTT training step on one CPU thread, beside its floor: counted FLOPs over the GEMM rate of the
same run.

In: shape S (SmolLM2-135M's), synthetic documents or the masks of real answers. Out: CPU seconds, peak memory,
growth with T, and what the optimizer, the loader and the checkpoint take. Every case runs in a process of its
own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it: it belongs to the imported process, not to the step
from safetensors import safe_open
from safetensors.torch import save_file

from benchmarks.harness import (
    Column,
    arguments,
    cpu_seconds,
    in_new_process,
    peak_bytes,
    print_table,
    resident_bytes,
    time_beside_gemm,
    write_results,
)
from eagle3core.batch import Document, TopKTeacher
from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft
from eagle3core.feed import StepBatches, fill_bins
from eagle3core.packing import PackedBatch, draft_id_table, pack
from eagle3core.trainer import Trainer, TrainingEvent
from eagle3core.training_config import TrainingConfig
from tasks.train_draft import ENVIRONMENT

STEPS = 7
VOCABULARY = 49152
# CPU seconds per step and peak GB that two public trainers took for shape S on this kind of machine; both
# compute every row.
PUBLIC = {8192: ("3.7 / 4.2", "1.5 to 1.6"), 32000: ("14.1 / 11.4", "2.3 to 2.5")}
BARS = {("full", 8192): 3.4, ("full", 32000): 9.0, ("real", 8192): 1.9, ("real", 32000): 4.5}
MEMORY_BARS = {512: 0.7, 4096: 1.6}  # GB over the imported process, D = 32000


def make_draft(draft_vocabulary: int, folder: Path) -> Eagle3Draft:
    """A random draft of shape S; its embedding is mapped from a file in `folder`, as a target's is."""
    config = DraftConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocabulary,
        rms_norm_eps=1e-5,
        rope_theta=100_000.0,
        max_position_embeddings=16384,
        layer_ids=(2, 15, 27),
    )
    draft = Eagle3Draft(config)
    file = folder / "embedding.safetensors"
    save_file({"weight": draft.embed_tokens.weight}, file)
    with safe_open(file, framework="pt") as tensors:
        draft.share_embedding(tensors.get_tensor("weight"))
    return draft


def make_document(supervised: torch.Tensor, draft_vocabulary: int, seed: int) -> Document:
    """Random content under a given mask [T]; the teacher's top 16 always lie in the draft vocabulary, so
    every label counts.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = len(supervised)
    log_probs = (
        (3 * torch.randn(tokens - 1, 17, generator=generator)).log_softmax(-1).sort(descending=True).values
    )
    ids = torch.randint(0, draft_vocabulary, (tokens - 1, 16), generator=generator)
    features = torch.randn(tokens - 1, 3 * 576, generator=generator)
    token_ids = torch.randint(0, VOCABULARY, (tokens,), generator=generator)
    return Document(
        f"synthetic-{seed}",
        token_ids,
        supervised,
        features,
        TopKTeacher(ids, log_probs[:, :16], log_probs[:, 16]),
    )


def real_masks(path: Path | None, count: int) -> list[torch.Tensor] | None:
    """Masks of `count` real answers (columns prompt_token_ids, response_token_ids), or None where there is no
    such file.
    """
    shared = (
        Path(__file__).resolve().parents[2] / "shared/data/regenerated/smollm2-135m_sharegpt_train.parquet"
    )
    path = path or shared
    if not path.exists():
        return None
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path, columns=["prompt_token_ids", "response_token_ids"])
    lengths = [(len(row["prompt_token_ids"]), len(row["response_token_ids"])) for row in table.to_pylist()]
    return [torch.arange(prompt + answer) >= prompt for prompt, answer in lengths if prompt + answer <= 512][
        :count
    ]


def synthetic_masks(count: int) -> list[torch.Tensor]:
    """Prompts and answers of the real ones' usual lengths, for a machine without the data."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(40, 260, (count, 2), generator=generator).clamp(max=300).tolist()
    return [torch.arange(prompt + min(answer, 160)) >= prompt for prompt, answer in lengths]


def step_flops(batch: PackedBatch, draft: Eagle3Draft) -> float:
    """Multiplications and additions of the step's matrix products, forward and backward, over the rows that
    this engine computes.

    A product costs 3 GEMMs where its input needs a gradient, 2 where it does not (fc reads stored features).
    Attention: 2 products forward, 5 backward, over the (query, key) pairs that are not masked.
    """
    c = draft.config
    rows, kv, q = len(batch.tokens), c.num_key_value_heads * c.head_dim, c.num_attention_heads * c.head_dim
    total = 2 * rows * c.hidden_size * (2 * c.feature_size + 3 * (q + 2 * kv) + 3 * 2 * kv)
    for number, step in enumerate(batch.steps):
        width = q if number == 0 else q + 2 * kv
        total += 3 * 2 * step.alive * c.hidden_size * (width + q + 3 * c.intermediate_size)
        total += 3 * 2 * len(step.scored) * c.hidden_size * c.draft_vocab_size
        pairs = int((batch.positions[batch.chains[: step.alive]] + 1).sum())
        total += 7 * 2 * pairs * q
    return float(total)


class OneDocumentEach(list):
    """Documents in memory as the trainer's source."""

    @property
    def lengths(self) -> list[int]:
        return [len(document.token_ids) for document in self]

    @property
    def supervised_counts(self) -> list[int]:
        return [int(document.supervised.sum()) for document in self]


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Time optimizer steps over the case's bins; the step includes AdamW."""
    torch.set_num_threads(1)
    before = resident_bytes()
    vocabulary = case["draft_vocabulary"]
    if case["masks"] == "full":
        masks = [torch.ones(case["tokens"], dtype=torch.bool)]
    else:
        masks = real_masks(case["path"] and Path(case["path"]), 400) or synthetic_masks(400)
    bins = fill_bins([len(mask) for mask in masks], range(len(masks)), case["tokens"])[: case["bins"]]
    documents = [make_document(masks[i], vocabulary, i) for group in bins for i in group]
    config = TrainingConfig(ttt_steps=STEPS, tokens_per_batch=case["tokens"], lr=1e-4, seed=1)
    with tempfile.TemporaryDirectory() as folder:
        draft = make_draft(vocabulary, Path(folder))
        trainer = Trainer(draft, config, OneDocumentEach(documents), [], Path(folder))
        table = draft_id_table(draft.t2d)
        batches, start = [], 0
        for group in bins:
            batches.append(pack(documents[start : start + len(group)], table, STEPS))
            start += len(group)
        del documents
        timings = [
            time_beside_gemm(
                lambda batch=batch: trainer.train_step(StepBatches(STEPS, (batch,)), 1, 10),
                case["repeats"],
                warm_up=int(number == 0 and case["tokens"] <= 1024),
            )
            for number, batch in enumerate(batches)
        ]
        peak = peak_bytes() - before
        optimizer = cpu_seconds(lambda: _optimizer_step(trainer), 3)
    mean = sum(timing.seconds for timing in timings) / len(timings)
    rate = sum(timing.gemm_rate for timing in timings) / len(timings)
    floor = sum(step_flops(batch, draft) for batch in batches) / len(batches) / rate
    tokens = sum(sum(len(masks[i]) for i in group) for group in bins) / len(bins)
    supervised = sum(sum(int(masks[i].sum()) for i in group) for group in bins) / len(bins)
    return {
        **case,
        "seconds": mean,
        "floor": floor,
        "ratio": mean / floor,
        "gflops": rate / 1e9,
        "peak_gb": peak / 1e9,
        "mean_tokens": tokens,
        "supervised_share": supervised / tokens,
        "us_per_row": 1e6 * mean / tokens,
        "optimizer_share": optimizer / mean,
    }


def _optimizer_step(trainer: Trainer) -> None:
    for parameter in trainer.draft.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    trainer.optimizer.step()


def run_loop(case: dict[str, Any]) -> dict[str, Any]:
    """The whole loop over real masks: the loader's wait and what a checkpoint takes."""
    torch.set_num_threads(1)
    masks = (real_masks(case["path"] and Path(case["path"]), 60) or synthetic_masks(60))[: case["documents"]]
    documents = OneDocumentEach(make_document(mask, 8192, i) for i, mask in enumerate(masks))
    events: list[TrainingEvent] = []
    config = TrainingConfig(ttt_steps=STEPS, tokens_per_batch=512, checkpoint_every=1000, evaluate_every=1000)
    with tempfile.TemporaryDirectory() as folder:
        draft = make_draft(8192, Path(folder))
        Trainer(draft, config, documents, [], Path(folder), on_event=events.append).run()
    steps = [event.metrics for event in events if event.kind == "step"][1:]
    wait, work = (sum(metrics[name] for metrics in steps) for name in ("wait_seconds", "seconds"))
    (written,) = (event.metrics["checkpoint_seconds"] for event in events if event.kind == "checkpoint")
    return {"loader_wait_share": wait / (wait + work), "checkpoint_seconds": written, "steps": len(steps) + 1}


def cases(quick: bool, path: Path | None) -> list[dict[str, Any]]:
    common = {"path": str(path) if path else None}
    full = lambda vocabulary, tokens, repeats: {
        **common,
        "masks": "full",
        "draft_vocabulary": vocabulary,
        "tokens": tokens,
        "bins": 1,
        "repeats": repeats,
    }
    real = lambda vocabulary: {
        **common,
        "masks": "real",
        "draft_vocabulary": vocabulary,
        "tokens": 512,
        "bins": 2 if quick else 6,
        "repeats": 1,
    }
    if quick:
        return [full(8192, 512, 1), full(32000, 512, 1), real(8192)]
    long = [full(32000, tokens, 1) for tokens in (1024, 2048, 4096, 8192)]
    return [full(8192, 512, 5), full(32000, 512, 5), real(8192), real(32000), *long]


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments("ttt_step", "CPU seconds and memory of one exact TTT training step")
    parser.add_argument(
        "--data", type=Path, help="a Parquet file of real answers; default: found next to the repository"
    )
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.case:
        case = json.loads(options.case)
        print(json.dumps(run_loop(case) if case["masks"] == "loop" else run_case(case)))
        return
    if real_masks(options.data, 1) is None:
        print("no file of real answers here: the rows named real use synthetic prompts and answers")
    rows = [
        in_new_process("benchmarks.ttt_step", case, env=ENVIRONMENT)
        for case in cases(options.quick, options.data)
    ]
    for row in rows:
        row["bar"] = BARS.get((row["masks"], row["draft_vocabulary"])) if row["tokens"] == 512 else None
        large = row["masks"] == "full" and row["draft_vocabulary"] == 32000
        row["memory_bar"] = MEMORY_BARS.get(row["tokens"]) if large else None
    loop = in_new_process(
        "benchmarks.ttt_step",
        {
            "masks": "loop",
            "path": str(options.data) if options.data else None,
            "documents": 8 if options.quick else 40,
        },
        env=ENVIRONMENT,
    )
    report(rows, loop)
    write_results("ttt_step", {"steps": rows, "loop": loop}, options)


def report(rows: list[dict[str, Any]], loop: dict[str, Any]) -> None:
    print(
        f"shape S, {STEPS} TTT steps, fp32, AdamW included, one thread; public trainers: "
        + "; ".join(f"D = {size}: {seconds} CPU s, {memory} GB" for size, (seconds, memory) in PUBLIC.items())
    )
    print_table(
        [
            Column("rows", "masks"),
            Column("D", "draft_vocabulary"),
            Column("T", "tokens"),
            Column("supervised", "supervised_share", "{:.2f}"),
            Column("floor s", "floor", "{:.2f}"),
            Column("CPU s", "seconds", "{:.2f}"),
            Column("ratio", "ratio", "{:.2f}"),
            Column("bar s", "bar", "{:.1f}"),
            Column("us/row", "us_per_row", "{:.0f}"),
            Column("peak GB", "peak_gb", "{:.2f}"),
            Column("bar GB", "memory_bar", "{:.1f}"),
            Column("GFLOP/s", "gflops", "{:.0f}"),
            Column("AdamW", "optimizer_share", "{:.1%}"),
        ],
        rows,
    )
    by_length = {
        row["tokens"]: row["us_per_row"]
        for row in rows
        if row["masks"] == "full" and row["draft_vocabulary"] == 32000
    }
    if 8192 in by_length:
        print(f"cost per row, T 512 to 8192: x{by_length[8192] / by_length[512]:.2f} (bar 1.6)")
    print(
        f"loader's wait {loop['loader_wait_share']:.1%} of the step (bar 3 %); "
        f"a checkpoint {loop['checkpoint_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
