"""The draft vocabulary: which target tokens the draft can propose.

In: responses. Out: a vocabulary artifact, one row per draft id (target id, count, cumulative share). Counted
over the supervised response tokens of the train split alone, so that held-out text cannot leak into the map;
where they fill less than D ids, the prompts' tokens come next: on the embedded default that covers 1.2 %
more of the held-out answers than filling from the lowest id up.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.schemas import VOCABULARY
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task

log = logging.getLogger(__name__)

STAGE = Stage(name="build-vocabulary", kind="vocabulary", version=2)

TABLE = "vocabulary.parquet"
# Measured on one core of the 2-core machine: reading and counting Parquet lists of int32.
TOKENS_PER_SECOND = 20e6


@dataclass(frozen=True)
class DraftVocabulary:
    """The map between draft and target ids.

    target_ids: [D] int64, strictly ascending; draft id i stands for target_ids[i]. counts: [D] int64,
    supervised occurrences. cumulative_share: [D] float64, share of all supervised tokens that are this token
    or a more frequent one. distinct: how many different tokens were seen. filled: how many ids are in the map
    without having been seen.
    """

    target_ids: np.ndarray
    counts: np.ndarray
    cumulative_share: np.ndarray
    distinct: int
    filled: int

    @property
    def size(self) -> int:
        return len(self.target_ids)


def choose(
    counts: np.ndarray, size: int, always: Sequence[int] = (), prompts: np.ndarray | None = None
) -> DraftVocabulary:
    """The `size` most frequent ids of `counts` [V]; `always` first; ties, unseen ids among them, by their
    count in `prompts` [V], then by lower id.

    `size` at or above V keeps every id (the identity map). Raises ValueError where `always` does not fit.
    """
    vocab_size = len(counts)
    size = min(size, vocab_size)
    always = sorted({int(token) for token in always if 0 <= token < vocab_size})
    if len(always) > size:
        raise ValueError(
            f"{len(always)} special tokens do not fit into a draft vocabulary of {size}: "
            "raise vocabulary.size"
        )
    wanted = counts.astype(np.int64).copy()
    wanted[always] = np.iinfo(np.int64).max
    ties = np.zeros_like(wanted) if prompts is None else prompts
    ranked = np.lexsort((-ties, -wanted))  # stable: what still ties comes in ascending order of ids
    target_ids = np.sort(ranked[:size])

    by_count = np.argsort(-counts, kind="stable")
    share = np.empty(vocab_size)
    share[by_count] = np.cumsum(counts[by_count]) / max(1, int(counts.sum()))
    kept = counts[target_ids].astype(np.int64)
    return DraftVocabulary(
        target_ids=target_ids.astype(np.int64),
        counts=kept,
        cumulative_share=share[target_ids],
        distinct=int((counts > 0).sum()),
        filled=int((kept == 0).sum()),
    )


@dataclass(frozen=True)
class TokenCounts:
    """Occurrences of every token, [V] int64 each: `answers` inside response spans by split, `prompts` outside
    of them in the train split.
    """

    answers: dict[str, np.ndarray]
    prompts: np.ndarray


def count_tokens(folder: Path, vocab_size: int) -> TokenCounts:
    """Count a responses artifact. Raises ValueError for a token id outside the target's vocabulary."""
    counts = TokenCounts({}, np.zeros(vocab_size, dtype=np.int64))
    for split, tokens, supervised in _samples(folder):
        if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
            raise ValueError(
                f"{folder}: token id {tokens.max()} is outside the target's vocabulary of {vocab_size}; "
                "the responses were made with another tokenizer"
            )
        total = counts.answers.setdefault(split, np.zeros(vocab_size, dtype=np.int64))
        total += np.bincount(tokens[supervised], minlength=vocab_size)
        if split == "train":
            counts.prompts[:] += np.bincount(tokens[~supervised], minlength=vocab_size)
    return counts


def _samples(folder: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(split, token ids, which of them are supervised) of every sample, one row group in memory at a time."""
    for part in sorted(folder.glob("part-*.parquet")):
        file = pq.ParquetFile(part)
        for group in range(file.num_row_groups):
            table = file.read_row_group(group, columns=["split", "token_ids", "spans"])
            for split, token_ids, spans in zip(
                *(table[name] for name in ("split", "token_ids", "spans")), strict=True
            ):
                tokens = np.asarray(token_ids.values.to_numpy(zero_copy_only=False), dtype=np.int64)
                supervised = np.zeros(len(tokens), dtype=bool)
                for span in spans.as_py():
                    supervised[span["start"] : span["end"]] = True
                yield split.as_py(), tokens, supervised


def special_tokens(target: TargetInfo) -> list[int]:
    """Ids that end or frame a turn: the target's end-of-sequence ids and its tokenizer's named special
    tokens.
    """
    from transformers import AutoTokenizer  # seconds to import, and only this stage's run needs it

    tokenizer = AutoTokenizer.from_pretrained(target.path)
    return sorted({*target.eos_token_ids, *tokenizer.all_special_ids})


def coverage(counts: np.ndarray, target_ids: np.ndarray) -> float:
    """Share of the occurrences in `counts` [V] whose token is in the draft vocabulary."""
    return float(counts[target_ids].sum() / max(1, counts.sum()))


def read_vocabulary(folder: Path) -> np.ndarray:
    """Target ids of a vocabulary artifact, [D] int64, ascending."""
    return pq.read_table(folder / TABLE, columns=["target_id"])["target_id"].to_numpy().astype(np.int64)


def plan(recipe: Recipe, target: TargetInfo, responses: ArtifactRef) -> Plan:
    parameters = {
        "size": min(recipe.vocabulary.size, target.vocab_size),
        "vocab_size": target.vocab_size,
        "tokenizer": target.tokenizer_fingerprint,
        "eos_token_ids": list(target.eos_token_ids),
    }
    return Plan(STAGE, parameters, (responses,))


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> float:
    """Seconds: five for the tokenizer, the rest by the bytes of the responses (4 a token)."""
    return 5 + store.manifest(responses).bytes / 4 / TOKENS_PER_SECOND


def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef) -> ArtifactRef:
    work = plan(recipe, target, responses)
    return run_plan(work, store, lambda writer: _build(writer, work, target, store.local(responses)))


def _build(writer: ArtifactWriter, work: Plan, target: TargetInfo, responses: Path) -> dict[str, Any]:
    counts = count_tokens(responses, target.vocab_size)
    train = counts.answers.get("train")
    if train is None or not train.any():
        raise ValueError(
            "the responses hold no supervised token in the train split: nothing to build a vocabulary from"
        )
    vocabulary = choose(train, work.parameters["size"], special_tokens(target), counts.prompts)
    table = pa.table(
        {
            "draft_id": np.arange(vocabulary.size, dtype=np.int32),
            "target_id": vocabulary.target_ids.astype(np.int32),
            "count": vocabulary.counts,
            "cumulative_share": vocabulary.cumulative_share,
        },
        schema=VOCABULARY,
    )
    writer.write_table(TABLE, table)
    heldout = counts.answers.get("heldout")
    summary = {
        "size": vocabulary.size,
        "target_size": target.vocab_size,
        "distinct": vocabulary.distinct,
        "filled": vocabulary.filled,
        "supervised_tokens": int(train.sum()),
        "coverage_train": coverage(train, vocabulary.target_ids),
        "coverage_heldout": None if heldout is None else coverage(heldout, vocabulary.target_ids),
    }
    log.info(
        "draft vocabulary: %d of %d ids, %d distinct tokens seen in %d, "
        "%.2f %% of train and %s of held-out tokens covered",
        vocabulary.size,
        target.vocab_size,
        vocabulary.distinct,
        summary["supervised_tokens"],
        100 * summary["coverage_train"],
        "none" if heldout is None else f"{100 * summary['coverage_heldout']:.2f} %",
    )
    if vocabulary.filled:
        log.info(
            "%d ids stand in no training answer: the prompts' tokens fill the map, then the lowest ids",
            vocabulary.filled,
        )
    return summary


build_vocabulary = stage_task(STAGE, plan, run, estimate)
