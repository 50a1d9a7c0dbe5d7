"""Feature samples of random bits, for the tests of the feature store."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.features import FeatureSample, FeatureSpec, FeatureWriter

HIDDEN = 16


def make_spec(dtype: str = "bfloat16", teacher: str = "topk", **changes) -> FeatureSpec:
    values = {
        "hidden_size": HIDDEN,
        "layer_ids": (2, 15, 27),
        "dtype": dtype,
        "teacher": teacher,
        "teacher_k": 4,
        "target_fingerprint": "target",
        "tokenizer_fingerprint": "tokenizer",
    }
    return FeatureSpec(**values | changes)


def make_sample(number: int, spec: FeatureSpec, tokens: int | None = None) -> FeatureSample:
    random = np.random.default_rng(number)
    tokens = tokens or int(random.integers(2, 60))
    rows, raw = tokens - 1, spec.numpy_dtype

    def bits(*shape: int, dtype: np.dtype = raw) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return random.integers(0, 256, size, dtype=np.uint8).view(dtype).reshape(shape)

    topk = spec.teacher == "topk"
    return FeatureSample(
        id=f"sample-{number}",
        conversation_id=f"conversation-{number // 2}",
        source="sharegpt",
        split="heldout" if number % 5 == 0 else "train",
        category="writing é" if number % 2 else "",
        temperature=0.7,
        token_ids=random.integers(0, 49152, tokens, dtype=np.int32),
        spans=[(0, 1), (1, tokens)] if number % 3 else [],
        finish_reason="stop",
        features=bits(rows, 3 * spec.hidden_size),
        teacher_ids=bits(rows, spec.teacher_k, dtype=np.dtype("<i4")) if topk else None,
        teacher_log_probs=bits(rows, spec.teacher_k, dtype=np.dtype("<f2")) if topk else None,
        teacher_rest=bits(rows, dtype=np.dtype("<f4")) if topk else None,
        teacher_hidden=None if topk else bits(rows, spec.hidden_size, dtype=spec.teacher_dtype),
        feature_scales=bits(rows, 3, dtype=np.dtype("<f4")) if raw.itemsize == 1 else None,
    )


def write_features(
    store: ArtifactStore, spec: FeatureSpec, samples: list[FeatureSample], per_part: int = 8, name: str = "aa"
) -> ArtifactRef:
    with store.writer("features", name, stage="extract", stage_version=1, parameters={}) as writer:
        features = FeatureWriter(writer, spec)
        done = features.finished()
        for number, start in enumerate(range(0, len(samples), per_part)):
            if number not in done:
                features.write_part(number, samples[start : start + per_part])
        return writer.commit(features.finish())


def same(left: FeatureSample, right: FeatureSample) -> bool:
    """Equal to the bit, types and shapes included."""
    for name, value in vars(left).items():
        other = getattr(right, name)
        if isinstance(value, np.ndarray):
            if value.dtype != other.dtype or value.shape != other.shape or value.tobytes() != other.tobytes():
                return False
        elif value != other:
            return False
    return True


def wide_file(folder: Path, number: int = 0) -> Path:
    return folder / f"part-{number:05}.parquet"
