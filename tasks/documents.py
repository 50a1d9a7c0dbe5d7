"""From the feature store's rows to what the trainer and the evaluator are fed.

In: a `FeatureReader` (numpy, raw bytes). Out: `Document`s of torch tensors that share the reader's memory,
and a `DocumentSource` over a choice of rows. The only place where a stored bfloat16 becomes one of torch's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from eagle3core.acceptance import Response
from eagle3core.batch import Document, HiddenTeacher, Teacher, TopKTeacher
from storage.features import FeatureReader, FeatureSample, FeatureSpec
from tasks.quantised import dequantise

VALIDATION_SHARE = 0.03
VALIDATION_MOST = 24
VALIDATION_FROM = 16  # conversations; fewer are all needed for training


class SampleReader(Protocol):
    """Samples by number; spec: what their numbers mean. index: a row each, with id, conversation_id, split, n_tokens
    and n_supervised.
    """

    index: pa.Table
    spec: FeatureSpec

    def read(self, i: int) -> FeatureSample: ...


@dataclass(frozen=True)
class HeldoutDocument:
    """A held-out answer with what its acceptance is reported by. `prompt_id` is shared by answers to one
    prompt.
    """

    document: Document
    prompt_id: str
    category: str
    temperature: float


def with_responses(heldout: Sequence[HeldoutDocument]) -> tuple[list[Document], list[Response]]:
    """The texts, and whose answers they are."""
    responses = [Response(item.prompt_id, item.category, item.temperature) for item in heldout]
    return [item.document for item in heldout], responses


@dataclass(frozen=True)
class Split:
    """Row numbers of a reader: what is trained on, and what chooses the best checkpoint.

    `validation` is taken from the train split, whole conversations at a time, so that the held-out answers
    that the report is about have had no say in anything.
    """

    train: tuple[int, ...]
    validation: tuple[int, ...]


class FeatureDocuments:
    """The trainer's `DocumentSource` over some rows of a reader; lengths are known without reading a row.

    layer_ids: the captured states that a document holds, all of them where None.
    """

    def __init__(
        self, reader: FeatureReader, rows: Sequence[int], layer_ids: Sequence[int] | None = None
    ) -> None:
        self._reader = reader
        self._states = None if layer_ids is None else States.of(reader.spec, layer_ids)
        self._rows = list(rows)
        index = reader.index
        self.lengths: list[int] = index["n_tokens"].take(self._rows).to_pylist()
        self.supervised_counts: list[int] = index["n_supervised"].take(self._rows).to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> Document:
        return to_document(self._reader.read(self._rows[i]), self._states)


@dataclass(frozen=True)
class States:
    """Which of the stored states a draft reads. places: their order in the store, None for all as they lie."""

    places: tuple[int, ...] | None
    hidden_size: int

    @classmethod
    def of(cls, spec: FeatureSpec, layer_ids: Sequence[int]) -> States:
        """Raises ValueError naming the states that were not captured."""
        stored = tuple(spec.layer_ids)
        if tuple(layer_ids) == stored:
            return cls(None, spec.hidden_size)
        if missing := [layer for layer in layer_ids if layer not in stored]:
            raise ValueError(
                f"the draft reads hidden_states {missing}, the features hold {list(stored)}: extract again with "
                "features.layer_ids that have them all"
            )
        return cls(tuple(stored.index(layer) for layer in layer_ids), spec.hidden_size)

    def of_row(self, features: Tensor) -> Tensor:
        """[T-1, stored * H] -> [T-1, read * H]: the same memory where all are read, else a copy."""
        if self.places is None:
            return features
        parts = [features[:, place * self.hidden_size :][:, : self.hidden_size] for place in self.places]
        return torch.cat([features[:, :0], *parts], dim=1)  # a draft may read none at all


def to_document(sample: FeatureSample, states: States | None = None) -> Document:
    """Features and teacher share the sample's memory (quantised features become bfloat16); token ids become int64 and
    spans a mask, [T] each.
    """
    supervised = torch.zeros(len(sample.token_ids), dtype=torch.bool)
    for start, end in sample.spans:
        supervised[start:end] = True
    return Document(
        id=sample.id,
        token_ids=torch.from_numpy(sample.token_ids.astype(np.int64)),
        supervised=supervised,
        features=states.of_row(_features(sample)) if states else _features(sample),
        teacher=_teacher(sample),
    )


def as_tensor(raw: np.ndarray) -> Tensor:
    """A stored array as a tensor over the same memory; uint16 holds bfloat16 bits, for which numpy has no
    type.

    Stored rows are mapped read-only: nothing may write into the tensor. (DLPack takes such arrays without
    complaint.)
    """
    if raw.dtype == np.uint16:
        return torch.from_dlpack(raw.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(raw)


def _features(sample: FeatureSample) -> Tensor:
    features = as_tensor(sample.features)
    return features if sample.feature_scales is None else dequantise(features, as_tensor(sample.feature_scales))


def _teacher(sample: FeatureSample) -> Teacher:
    if sample.teacher_hidden is not None:
        return HiddenTeacher(as_tensor(sample.teacher_hidden))
    if sample.teacher_ids is None or sample.teacher_log_probs is None or sample.teacher_rest is None:
        raise ValueError(
            f"features of {sample.id} hold no teacher: neither top-k log-probabilities nor a hidden state"
        )
    return TopKTeacher(
        torch.from_numpy(sample.teacher_ids.astype(np.int64)),
        torch.from_numpy(sample.teacher_log_probs.astype(np.float32)),
        as_tensor(sample.teacher_rest),
    )


def split_train(index: pa.Table, share: float = 1.0) -> Split:
    """Train and validation rows by id: the same for the same data, whatever order its parts were written in.

    share: of the conversations that are left to train on; what a smaller share holds, every larger one holds as
    well, and validation is the same for all. Rows without a supervised token teach nothing and are left out.
    Raises ValueError where nothing is left.
    """
    columns = (index[name].to_pylist() for name in ("id", "split", "conversation_id", "n_supervised"))
    rows = sorted(
        (name, row, conversation)
        for row, (name, split, conversation, supervised) in enumerate(zip(*columns, strict=True))
        if split == "train" and supervised
    )
    if not rows:
        raise ValueError("the features hold no supervised row in the train split: nothing to train on")
    conversations = sorted({conversation for _, _, conversation in rows}, key=_shuffled)
    count = 0
    if len(conversations) >= VALIDATION_FROM:
        count = min(VALIDATION_MOST, max(1, round(VALIDATION_SHARE * len(conversations))))
    kept_back = set(conversations[:count])
    learnt = set(conversations[count : count + max(1, round(share * (len(conversations) - count)))])
    return Split(
        train=tuple(row for _, row, conversation in rows if conversation in learnt),
        validation=tuple(row for _, row, conversation in rows if conversation in kept_back),
    )


def _shuffled(conversation: str) -> str:
    return hashlib.sha256(conversation.encode()).hexdigest()


def heldout_temperatures(reader: FeatureReader) -> list[float]:
    """Temperatures of the held-out answers, rising."""
    index = reader.index
    pairs = zip(index["split"].to_pylist(), index["temperature"].to_pylist(), strict=True)
    return sorted({temperature for split, temperature in pairs if split == "heldout"})


def heldout_documents(
    reader: FeatureReader, temperature: float, layer_ids: Sequence[int] | None = None
) -> list[HeldoutDocument]:
    """Every held-out answer of one temperature, by id. layer_ids: see `FeatureDocuments`."""
    index = reader.index
    states = None if layer_ids is None else States.of(reader.spec, layer_ids)
    columns = (index[name].to_pylist() for name in ("id", "split", "temperature", "n_supervised"))
    rows = sorted(
        (name, row)
        for row, (name, split, value, supervised) in enumerate(zip(*columns, strict=True))
        if split == "heldout" and supervised and value == temperature
    )
    samples = reader.stream([row for _, row in rows])
    return [
        # Sets without categories of their own are told apart by their source.
        HeldoutDocument(
            to_document(sample, states), sample.conversation_id, sample.category or sample.source, temperature
        )
        for sample in samples
    ]
