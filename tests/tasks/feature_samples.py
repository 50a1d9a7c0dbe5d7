"""Made-up responses and features on a tiny random target, for tests of the stages that follow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.features import FeatureSample, FeatureSpec, FeatureWriter
from storage.schemas import Message, ResponseRow, Span, to_table
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe
from tests.tiny_target import make_tiny_target

HIDDEN, VOCAB, END = 32, 300, 1
K = 8


def make_recipe(folder: Path, **overrides: Any) -> Recipe:
    """A recipe whose target and store lie in `folder`; the target is made the first time."""
    target = folder / "tiny-target"
    if not target.exists():
        make_tiny_target(target, hidden=HIDDEN, layers=4, heads=2, kv_heads=1, head_dim=16, vocab=VOCAB)
    raw = {
        "name": "tiny",
        "target": {"model": str(target), "dtype": "float32", "max_model_len": 256},
        "data": {
            "sources": [{"kind": "messages", "uri": "nowhere.jsonl"}],
            "heldout": 4,
            "max_prompt_tokens": 64,
            "max_tokens": 128,
        },
        "vocabulary": {"size": 64},
        "draft": {"fc_norm": True, "norm_output": True},
        "training": {
            "ttt_steps": 3, "epochs": 16, "tokens_per_batch": 128, "lr": 1e-2, "schedule": "constant",
            "checkpoint_every": 8, "evaluate_every": 32, "threads": 1,
        },
        "evaluation": {"chain_length": 3, "bootstrap": 50},
        "store": {"uri": str(folder / "store")},
    }  # fmt: skip
    return build_recipe(raw, overrides)


def make_target(recipe: Recipe) -> TargetInfo:
    return prepare_target(recipe)


def make_tokens(
    rng: np.random.Generator, prompt: int = 6, answer: int = 24
) -> tuple[list[int], list[tuple[int, int]]]:
    """A prompt of noise and an answer that counts up by one, which a draft can learn; token ids and spans."""
    start = int(rng.integers(10, 30))
    tokens = [*rng.integers(3, VOCAB, prompt).tolist(), *range(start, start + answer - 1), END]
    return tokens, [(prompt, prompt + answer)]


def make_responses(store: ArtifactStore, samples: list[FeatureSample]) -> ArtifactRef:
    rows = [
        ResponseRow(
            s.id, s.conversation_id, s.source, s.split, s.category, (Message("user", "?"),),
            tuple(s.token_ids.tolist()),
            tuple(Span(*span) for span in s.spans), s.finish_reason, s.temperature, 0, False,
        )
        for s in samples
    ]  # fmt: skip
    with store.writer(
        "responses", "r" * 20, stage="make-responses", stage_version=1, parameters={}
    ) as writer:
        for number in range(2):
            writer.write_table(f"part-{number:05d}.parquet", to_table(ResponseRow, rows[number::2]))
        return writer.commit({"rows": len(rows)})


def make_features(
    store: ArtifactStore,
    target: TargetInfo,
    samples: list[FeatureSample],
    responses: ArtifactRef,
    **spec: Any,
) -> ArtifactRef:
    values = {
        "hidden_size": HIDDEN, "layer_ids": (1, 2, 3), "dtype": "float32", "teacher": "topk", "teacher_k": K,
        "target_fingerprint": target.fingerprint, "tokenizer_fingerprint": target.tokenizer_fingerprint,
    }  # fmt: skip
    features = FeatureSpec(**{**values, **spec})
    parameters = {"dtype": features.dtype}
    with store.writer(
        "features",
        "f" * 20,
        stage="extract-features",
        stage_version=1,
        parameters=parameters,
        inputs=[responses],
    ) as folder:
        writer = FeatureWriter(folder, features)
        for number in range(2):
            writer.write_part(number, samples[number::2])
        return folder.commit(writer.finish())


def make_samples(
    train: int = 24, heldout: int = 4, seed: int = 0, dtype: str = "float32"
) -> list[FeatureSample]:
    """Train answers at temperature 1, and each held-out prompt at temperatures 0 and 1."""
    rng = np.random.default_rng(seed)
    samples = [_sample(rng, f"t{i}", f"t{i}", "train", 1.0, dtype) for i in range(train)]
    for i in range(heldout):
        samples += [_sample(rng, f"h{i}-{t:g}", f"h{i}", "heldout", t, dtype) for t in (0.0, 1.0)]
    return samples


def _sample(
    rng: np.random.Generator, name: str, conversation: str, split: str, temperature: float, dtype: str
) -> FeatureSample:
    tokens, spans = make_tokens(rng)
    rows = len(tokens) - 1
    features = rng.normal(size=(rows, 3 * HIDDEN)).astype(np.float32)
    # The target likes the text itself best, then its neighbours: log-probabilities of a sharp distribution.
    ids = (np.array(tokens[1:])[:, None] + np.arange(K)) % VOCAB
    log_probs = np.log(np.full(K, 0.02))
    log_probs[0] = np.log(0.8)
    rest = np.log(1 - np.exp(log_probs).sum())
    if dtype == "bfloat16":
        features = (features.view(np.uint32) >> 16).astype(np.uint16)
    return FeatureSample(
        name, conversation, "made-up", split, "counting" if split == "heldout" else "", temperature,
        np.array(tokens, np.int32), spans, "stop", features,
        ids.astype(np.int32), np.tile(log_probs, (rows, 1)).astype(np.float16),
        np.full(rows, rest, np.float32),
    )  # fmt: skip
