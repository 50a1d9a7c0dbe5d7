"""The target's side of the loss: what the packed rows remember of the target's distributions, over the draft
vocabulary.

In: a document's `TopKTeacher` or `HiddenTeacher` and the vocabulary map. Out: a `PackedTeacher` whose
`at(rows)` gives the target distributions of a chunk of rows, sparse or dense. It depends on the row alone, so
it is made once per row, never per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3core.batch import HiddenTeacher, Teacher, TopKTeacher

OUTSIDE = -1  # draft id of a token that the draft vocabulary lacks
LOGITS_BYTES = 64 << 20  # one block of full-vocabulary logits


@dataclass(frozen=True)
class TargetHead:
    """The target's final norm and head, for documents that store hidden states.

    weight: [V, H]; norm: [H]; draft_weight: [D, H], the head's rows of the draft vocabulary.
    """

    weight: Tensor
    norm: Tensor
    eps: float
    draft_weight: Tensor

    @classmethod
    def build(cls, weight: Tensor, norm: Tensor, eps: float, target_ids: Tensor) -> TargetHead:
        """From the target's head [V, H] and final norm [H]; `target_ids` [D] is the draft vocabulary,
        ascending.
        """
        whole = len(target_ids) == len(weight)
        return cls(weight, norm, eps, weight if whole else weight[target_ids])

    def normed(self, hidden: Tensor) -> Tensor:
        """Hidden states before the final norm [rows, H] -> the head's input."""
        return F.rms_norm(hidden.to(self.weight), self.norm.shape, self.norm, self.eps)

    def argmax(self, hidden: Tensor) -> Tensor:
        """The target's likeliest token over the whole V, [rows] int64, a block of rows at a time."""
        block = max(1, LOGITS_BYTES // (4 * len(self.weight)))
        return torch.cat([(self.normed(part) @ self.weight.T).argmax(-1) for part in hidden.split(block)])

    def to(self, device: torch.device) -> TargetHead:
        return replace(
            self,
            weight=self.weight.to(device),
            norm=self.norm.to(device),
            draft_weight=self.draft_weight.to(device),
        )


@dataclass(frozen=True)
class SparseTarget:
    """Target distributions of some rows on k draft ids each: ids [rows, k] int64, probs [rows, k] fp32,
    summing to 1.

    An unused entry has probability 0.
    """

    ids: Tensor
    probs: Tensor

    def gather(self, values: Tensor) -> Tensor:
        """[rows, D] -> its entries on the support, [rows, k]."""
        return values.gather(1, self.ids)

    def add_(self, values: Tensor, delta: Tensor) -> None:
        """Add `delta` [rows, k] to the support's entries of `values` [rows, D], in place."""
        values.scatter_add_(1, self.ids, delta)


@dataclass(frozen=True)
class DenseTarget:
    """Target distributions of some rows over the whole draft vocabulary: probs [rows, D] fp32; the support is
    D itself.
    """

    probs: Tensor

    def gather(self, values: Tensor) -> Tensor:
        return values

    def add_(self, values: Tensor, delta: Tensor) -> None:
        values.add_(delta)


@dataclass(frozen=True)
class PackedTopK:
    """Per row: `labels` [rows] int64, draft id of the target's argmax (OUTSIDE where D lacks it), and its
    sparse distribution.
    """

    labels: Tensor
    target: SparseTarget

    def at(self, rows: Tensor) -> SparseTarget:
        return SparseTarget(self.target.ids[rows], self.target.probs[rows])

    def to(self, device: torch.device) -> PackedTopK:
        move = lambda tensor: tensor.to(device, non_blocking=True)
        return PackedTopK(move(self.labels), SparseTarget(move(self.target.ids), move(self.target.probs)))


@dataclass(frozen=True)
class PackedHidden:
    """Per row: `labels` as in PackedTopK and the target's hidden state [rows, H]; distributions are made
    where asked for.
    """

    labels: Tensor
    hidden: Tensor
    head: TargetHead

    def at(self, rows: Tensor) -> DenseTarget:
        """`rows` ascend, so that rows which several steps share are computed once."""
        distinct, place = rows.unique_consecutive(return_inverse=True)
        logits = self.head.normed(self.hidden[distinct]) @ self.head.draft_weight.T
        return DenseTarget(logits.float().softmax(-1)[place])

    def to(self, device: torch.device) -> PackedHidden:
        move = lambda tensor: tensor.to(device, non_blocking=True)
        return PackedHidden(move(self.labels), move(self.hidden), self.head.to(device))


PackedTeacher = PackedTopK | PackedHidden


def teacher_labels(teacher: Teacher, draft_ids: Tensor, head: TargetHead | None) -> Tensor:
    """Draft id of the target's likeliest token after each row, [T-1] int64, OUTSIDE where D lacks it.

    `draft_ids` int64[V]: draft id of every target id, or OUTSIDE. Raises ValueError where hidden states come
    without a head.
    """
    if isinstance(teacher, TopKTeacher):
        return draft_ids[teacher.ids[:, 0].long()]
    if head is None:
        raise ValueError(
            "documents store the target's hidden states; training needs the target's head beside them"
        )
    return draft_ids[head.argmax(teacher.hidden).to(draft_ids.device)]


def pack_teacher(
    parts: Sequence[Teacher], labels: Tensor, draft_ids: Tensor, head: TargetHead | None
) -> PackedTeacher:
    """Documents' teachers, cut to their packed rows, and those rows' labels -> one teacher for the batch.

    Top-k probabilities are restricted to D and renormalised there (softmax over the D kept logits, the
    unstored tail left out). Raises ValueError where the documents mix teachers.
    """
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        raise ValueError(
            "a batch mixes documents with top-k and hidden-state teachers; extract features one way"
        )
    if kinds == {HiddenTeacher}:
        return PackedHidden(labels, torch.cat([part.hidden for part in parts]), head)
    ids = draft_ids[torch.cat([part.ids for part in parts]).long()]
    probs = torch.cat([part.log_probs for part in parts]).float().exp().masked_fill_(ids == OUTSIDE, 0)
    probs /= probs.sum(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    return PackedTopK(labels, SparseTarget(ids.clamp_min(0), probs))
