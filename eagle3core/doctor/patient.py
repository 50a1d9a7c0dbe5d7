"""What the doctor is shown, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eagle3core.batch import Document
from eagle3core.decoding.drafter import Drafter
from eagle3core.draft import Eagle3Draft
from eagle3core.teacher import TargetHead

# Features of texts [T] at three layer ids, one [T-1, 3H] each, with all texts in one batch.
Capture = Callable[[Sequence[Tensor], tuple[int, int, int]], list[Tensor]]


@dataclass(frozen=True)
class Patient:
    """What is examined. `target_config`: the target's HF config. `temperature`: of the documents' text.

    before_answer: the token ids that the chat template puts right before every answer; None where unknown.
    drafter: how drafting is done; the package's own unless another decoder is examined.
    """

    draft: Eagle3Draft
    documents: Sequence[Document]
    capture: Capture
    target_config: Mapping[str, Any]
    temperature: float = 0.0
    target_head: TargetHead | None = None
    before_answer: Tensor | None = None
    drafter: Callable[[Eagle3Draft, int, int], Drafter] = Drafter


@dataclass(frozen=True)
class Finding:
    """name: the fault, one of a fixed set. text: the evidence. remedy: what to do."""

    name: str
    text: str
    remedy: str
