"""What a drafter is to the rest of the pipeline: how it is made, what it learns from, how it drafts, how it is
exported.

A new drafter is a file beside this one with a `Draft` module and a subclass of `Drafter`, and a line in
`eagle3core.drafters.DRAFTERS`. The defaults here are EAGLE-3's training: rows of target features, soft targets
over the draft vocabulary, TTT steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eagle3core.batch import Document
from eagle3core.decoding.cached import DraftState
from eagle3core.decoding.propose import DynamicTree, Proposer
from eagle3core.training_config import TrainingConfig
from eagle3core.ttt import TrainingTimeTest
from eagle3core.unroll import Unrolling


@dataclass(frozen=True)
class TargetParts:
    """What a draft takes of its target. config: the target's HF config. embedding, head: [V, H]. norm: [H], final."""

    config: Mapping[str, Any]
    embedding: Tensor
    head: Tensor
    norm: Tensor


class Draft(Protocol):
    """What the pipeline asks of a draft module (an nn.Module), whatever drafter made it.

    drafter: its name in the registry. config: has vocab_size, draft_vocab_size and layer_ids, the captured states
    that its features are. d2t, t2d: the vocabulary map, as `Eagle3Draft` has it. norm, lm_head: what turns outputs
    [rows, H] into logits [rows, D].
    """

    drafter: str
    config: Any
    d2t: Tensor
    t2d: Tensor
    norm: nn.RMSNorm
    lm_head: nn.Linear

    @property
    def target_ids(self) -> Tensor: ...

    def logits(self, output: Tensor) -> Tensor: ...


class Drafter(ABC):
    """One way to draft; stateless."""

    @abstractmethod
    def build(self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]) -> Any:
        """An untrained draft over `vocabulary` [D] int64, ascending target ids. layer_ids: what the store captured.

        settings: the recipe's `draft` section, its options whole (`Line.settings`).
        """

    @abstractmethod
    def save(self, draft: Any, folder: Path) -> None:
        """Write the draft as servers load it; each file is whole or absent."""

    @abstractmethod
    def load(self, folder: Path, target: TargetParts) -> Any:
        """Read what `save` wrote. Raises ValueError naming every tensor that is missing or not known."""

    @abstractmethod
    def unroll(self, dtype: torch.dtype = torch.float32, *, compiled: bool = False, recompute: bool = False) -> Unrolling:
        """How its chains run over packed rows, with the text as input: training and estimates alike."""

    @abstractmethod
    def decoder(self, draft: Any, batch: int, slots: int) -> DraftState:
        """Its drafting behind `batch` texts, with a cache of `slots` rows each."""

    def view(self, document: Document) -> Document:
        """The document as the draft's rows hold it; one row a token less one, and as many more as tokens are added in
        front."""
        return document

    def settings(self, draft: Any, config: TrainingConfig) -> TrainingConfig:
        """The training configuration as this drafter takes it."""
        return config

    def trainee(self, draft: Any, config: TrainingConfig, unroll: Unrolling) -> nn.Module:
        """A module whose forward(batch, counts) is the training step's `StepResult`."""
        return TrainingTimeTest(draft, config.loss, config.step_decay, unroll)

    def tree(self) -> Proposer:
        """The tree that its paper drafts with."""
        return DynamicTree()
