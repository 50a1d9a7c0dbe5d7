"""Documents -> one flat run of rows in which only what can reach the loss is there.

In: `Document`s, the draft vocabulary, the number of TTT steps. Out: a `PackedBatch`. No padding; a row never
sees, and is never trained on, another document's tokens. Time indices: algorithms, section 3.

One index serves everything. Packed row r of a document stands for its position t: token t+1, features t,
teacher t. So the chain that begins at row r reads, at TTT step i, the token, position and angle of row r+i,
and its label is row r+i+1's teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from eagle3core.batch import Document, HiddenTeacher, Teacher, TopKTeacher
from eagle3core.teacher import OUTSIDE, PackedTeacher, TargetHead, pack_teacher, teacher_labels
from eagle3core.windows import Windows, find_windows


class Chains(Enum):
    """Which chains a batch follows."""

    TRAINED = "trained"  # a label anywhere in the chain is supervised and the target's argmax is in D
    SERVED = "served"  # a round can start here; followed for as long as the target's text goes on


@dataclass(frozen=True)
class PackedStep:
    """One TTT step: the first `alive` chains take part.

    windows: which keys their queries see. scored: [n] int64, places in the first `alive` chains whose label
    counts at this step.
    """

    alive: int
    windows: Windows
    scored: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """R rows of several documents and the C chains that begin at some of them.

    tokens, positions: [R] int64. features: [R, 3H]. teacher: R rows. document: [R] int64, which document a
    row is of. chains: [C] int64, the row each begins at, longest-lived first, so that the chains alive at a
    step are a prefix. counts: [N] float64, labels per step before anchor sampling: what losses are divided
    by. anchor_share: share of chains that went past step 0; steps >= 1 weigh 1 / anchor_share.
    seed: of whatever else is drawn for this batch.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor
    teacher: PackedTeacher
    document: Tensor
    chains: Tensor
    steps: tuple[PackedStep, ...]
    counts: Tensor
    anchor_share: float = 1.0
    seed: int = 0

    def input_rows(self, step: int) -> Tensor:
        """Row whose token and position each alive chain reads at `step`, [alive]."""
        return self.chains[: self.steps[step].alive] + step

    def label_rows(self, step: int) -> Tensor:
        """Row whose teacher (and whose token, the text itself) each scored chain is to predict at `step`,
        [n].
        """
        return self.chains[self.steps[step].scored] + step + 1

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on `device`; the counts stay on the CPU."""
        device = torch.device(device)
        move = lambda tensor: tensor.to(device, non_blocking=True)
        steps = tuple(replace(s, windows=s.windows.to(device), scored=move(s.scored)) for s in self.steps)
        tensors = {
            name: move(getattr(self, name))
            for name in ("tokens", "positions", "features", "document", "chains")
        }
        return replace(self, **tensors, teacher=self.teacher.to(device), steps=steps)


def draft_id_table(t2d: Tensor) -> Tensor:
    """t2d bool[V] -> int64[V]: draft id of every target id, OUTSIDE for those the draft vocabulary lacks."""
    return torch.where(t2d, t2d.cumsum(0) - 1, OUTSIDE)


def pack(
    documents: Sequence[Document],
    draft_ids: Tensor,
    steps: int,
    *,
    follow: Chains = Chains.TRAINED,
    anchor_share: float = 1.0,
    generator: torch.Generator | None = None,
    target_head: TargetHead | None = None,
) -> PackedBatch | None:
    """Pack documents for `steps` TTT steps; None where none of them has a chain to follow.

    `draft_ids` int64[V] is `draft_id_table`'s. With `anchor_share` < 1 a random share of the chains, drawn
    from `generator`, goes past step 0. Rows behind a document's last chain, which nobody attends to, stay
    only as far as its labels need them.
    """
    parts: list[_Rows] = []
    counts = torch.zeros(steps, dtype=torch.float64)
    for document in documents:
        labels = teacher_labels(document.teacher, draft_ids, target_head)
        scored = _scored(document, labels, steps, follow)
        counts += scored.sum(1)
        if anchor_share < 1:
            scored[1:] &= torch.rand(scored.shape[1], generator=generator) < anchor_share
        if scored.any():
            parts.append(_Rows(document, labels, scored))
    if not parts:
        return None
    return _assemble(parts, draft_ids, steps, counts, anchor_share, target_head)


@dataclass(frozen=True)
class _Rows:
    """The rows kept of one document, their labels [T-1], and scored bool[N, T-2]: chain t has a label that
    counts at step i.
    """

    document: Document
    labels: Tensor
    scored: Tensor

    @property
    def count(self) -> int:
        last = int(self.scored.any(0).nonzero()[-1])
        return min(last + len(self.scored) + 1, len(self.document.features))


def _scored(document: Document, labels: Tensor, steps: int, follow: Chains) -> Tensor:
    """bool[N, T-2]: the chain at t is scored at step i, whose label is token t+2+i, distributed as the
    teacher's row t+1+i.
    """
    supervised = document.supervised
    rows = max(len(supervised) - 2, 0)
    counts = labels[1:] != OUTSIDE if follow is Chains.TRAINED else True
    good = supervised[2:] & counts
    padded = torch.cat([good, good.new_zeros(steps)])
    scored = torch.stack([padded[step : step + rows] for step in range(steps)])
    if follow is Chains.SERVED:
        scored &= supervised[1 : rows + 1]  # the round's first token comes from the target
        scored = scored.cumprod(0).bool()
    return scored


def _assemble(
    parts: Sequence[_Rows],
    draft_ids: Tensor,
    steps: int,
    counts: Tensor,
    anchor_share: float,
    target_head: TargetHead | None,
) -> PackedBatch:
    lengths = [part.count for part in parts]
    starts = torch.tensor([0, *lengths]).cumsum(0)
    scored = torch.zeros(steps, int(starts[-1]), dtype=torch.bool)
    for part, start, length in zip(parts, starts[:-1].tolist(), lengths, strict=True):
        width = min(length, part.scored.shape[1])
        scored[:, start : start + width] = part.scored[:, :width]
    # A chain lives until its last scored step; sorted by that, those alive at any step are a prefix.
    life = (scored * torch.arange(1, steps + 1)[:, None]).amax(0)
    chains = life.argsort(descending=True, stable=True)[: int((life > 0).sum())]
    document = torch.repeat_interleave(torch.arange(len(parts)), torch.tensor(lengths))
    packed_steps = []
    for step in range(steps):
        alive = int((life > step).sum())
        windows = find_windows(chains[:alive], starts, document)
        packed_steps.append(PackedStep(alive, windows, scored[step, chains[:alive]].nonzero().flatten()))
    labels = torch.cat([part.labels[:length] for part, length in zip(parts, lengths, strict=True)])
    pairs = [(part.document, length) for part, length in zip(parts, lengths, strict=True)]
    return PackedBatch(
        tokens=torch.cat([d.token_ids[1 : n + 1] for d, n in pairs]).long(),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        features=torch.cat([d.features[:n] for d, n in pairs]),
        teacher=pack_teacher([_first_rows(d.teacher, n) for d, n in pairs], labels, draft_ids, target_head),
        document=document,
        chains=chains,
        steps=tuple(packed_steps),
        counts=counts,
        anchor_share=anchor_share,
    )


def _first_rows(teacher: Teacher, rows: int) -> Teacher:
    if isinstance(teacher, HiddenTeacher):
        return HiddenTeacher(teacher.hidden[:rows])
    return TopKTeacher(teacher.ids[:rows], teacher.log_probs[:rows], teacher.rest[:rows])
