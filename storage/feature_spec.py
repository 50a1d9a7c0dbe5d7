"""What the feature store holds: the meaning of its numbers, one sample, and the columns that both become.

In: a recipe's choices as a `FeatureSpec`. Out: `FeatureSample`, the wide columns with their sizes, the
index's schema.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from storage.errors import StorageError
from storage.schemas import SPANS

SCHEMA_VERSION = 1

_SPEC_KEY = "draftline.features"
_FLOATS = {"bfloat16": np.dtype("<u2"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4")}
# One byte a number, and a scale for every token and layer beside them.
_QUANTISED = {"fp8_e4m3": np.dtype("u1"), "int8": np.dtype("i1")}
_DTYPES = _FLOATS | _QUANTISED

INDEX_SCHEMA = pa.schema(
    [
        pa.field(name, type_, nullable=False)
        for name, type_ in {
            "id": pa.string(),
            "conversation_id": pa.string(),
            "source": pa.string(),
            "split": pa.string(),
            "category": pa.string(),
            "finish_reason": pa.string(),
            "temperature": pa.float64(),
            "n_tokens": pa.int32(),
            "n_supervised": pa.int32(),
            "spans": SPANS,
            "part": pa.int32(),
            "row": pa.int32(),
            "bytes": pa.int64(),
            "checksum": pa.int64(),
        }.items()
    ]
)


@dataclass(frozen=True)
class FeatureSpec:
    """What the numbers in a store mean: written into every file, and equal in all of one artifact.

    `layer_ids` index Hugging Face's `hidden_states` (0 is the embedding). `teacher` "topk":
    log-probabilities of the `teacher_k` likeliest tokens and the log of the remaining mass; "hidden": the
    last state before the final norm. A state of dtype "fp8_e4m3" or "int8" is its code times the scale of its
    token and layer; a hidden teacher is bfloat16 then.
    """

    hidden_size: int
    layer_ids: tuple[int, ...]
    dtype: Literal["bfloat16", "float16", "float32", "fp8_e4m3", "int8"]
    teacher: Literal["topk", "hidden"]
    teacher_k: int
    target_fingerprint: str
    tokenizer_fingerprint: str
    layer_id_convention: str = "hf-hidden-states"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_ids", tuple(self.layer_ids))
        if self.dtype not in _DTYPES:
            raise StorageError(f"features cannot be stored as {self.dtype!r}: one of {', '.join(_DTYPES)}")

    @property
    def numpy_dtype(self) -> np.dtype:
        """The type captured states travel in: uint16 holds bfloat16's bits, uint8 e4m3's."""
        return _DTYPES[self.dtype]

    @property
    def teacher_dtype(self) -> np.dtype:
        """The type a hidden teacher travels in: it is never quantised, as the loss is made from it."""
        return _FLOATS.get(self.dtype, _FLOATS["bfloat16"])

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token of a sample costs."""
        return sum(wide.row_bytes for wide in wide_columns(self))

    def to_metadata(self) -> dict[str, str]:
        return {_SPEC_KEY: json.dumps({"schema_version": SCHEMA_VERSION} | asdict(self))}

    @classmethod
    def from_metadata(cls, metadata: dict[str, str], path: Path) -> FeatureSpec:
        """Raises StorageError where the file at `path` is none of the feature store's, or of another
        version.
        """
        if _SPEC_KEY not in metadata:
            raise StorageError(f"{path} is no file of the feature store: it has no {_SPEC_KEY} metadata")
        values = json.loads(metadata[_SPEC_KEY])
        version = values.pop("schema_version")
        if version != SCHEMA_VERSION:
            raise StorageError(f"{path} has feature schema {version}, this program reads {SCHEMA_VERSION}")
        return cls(**values)


@dataclass(frozen=True)
class WideColumn:
    """One wide value of a sample: [T - drop, *shape] of `dtype`, stored as its bytes."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    drop: int

    @cached_property
    def row_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    def size(self, tokens: int) -> int:
        return (tokens - self.drop) * self.row_bytes


def wide_columns(spec: FeatureSpec) -> list[WideColumn]:
    """The wide columns of a store, in the order they are stored and checksummed."""
    raw, layers = spec.numpy_dtype, len(spec.layer_ids)
    columns = [
        WideColumn("token_ids", np.dtype("<i4"), (), 0),
        WideColumn("features", raw, (layers * spec.hidden_size,), 1),
    ]
    if spec.dtype in _QUANTISED:
        columns.append(WideColumn("feature_scales", np.dtype("<f4"), (layers,), 1))
    if spec.teacher == "hidden":
        return [*columns, WideColumn("teacher_hidden", spec.teacher_dtype, (spec.hidden_size,), 1)]
    return [
        *columns,
        WideColumn("teacher_ids", np.dtype("<i4"), (spec.teacher_k,), 1),
        WideColumn("teacher_log_probs", np.dtype("<f2"), (spec.teacher_k,), 1),
        WideColumn("teacher_rest", np.dtype("<f4"), (), 1),
    ]


@dataclass(frozen=True, eq=False)
class FeatureSample:
    """One sample of T tokens. Row t of every [T-1, ...] array belongs to token t (of the teacher: to token
    t+1's distribution).

    spans: [start, end) of tokens that the target wrote. features: [T-1, 3H] raw; feature_scales: [T-1, 3] float32
    where they are quantised. The teacher is either ids [T-1, k] int32, log_probs [T-1, k] float16 and rest [T-1]
    float32, or hidden [T-1, H] raw. What a store has not is None.
    """

    id: str
    conversation_id: str
    source: str
    split: str
    category: str
    temperature: float
    token_ids: np.ndarray
    spans: list[tuple[int, int]]
    finish_reason: str
    features: np.ndarray
    teacher_ids: np.ndarray | None = None
    teacher_log_probs: np.ndarray | None = None
    teacher_rest: np.ndarray | None = None
    teacher_hidden: np.ndarray | None = None
    feature_scales: np.ndarray | None = None
