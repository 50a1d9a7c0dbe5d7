"""EAGLE-2 without the feature constraint: EAGLE-3's layer and training over the target's last state alone.

In: the state before the target's final norm [rows, H]; the draft norms it with the target's own weights, as a server
hands it over. The middle row of Table 2 (arXiv 2503.01840).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3core.config import DraftConfig
from eagle3core.decoding.propose import DynamicTree
from eagle3core.draft import Eagle3Draft
from eagle3core.drafters.eagle3 import Eagle3
from eagle3core.drafters.interface import TargetParts

EAGLE2_DEPTH = 6


class LastStateDraft(Eagle3Draft):
    """No `fc`: there is nothing to fuse. `target_norm` [H] is the target's final norm, frozen and not saved."""

    drafter = "eagle2-ttt"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.fc = None
        self.register_buffer("target_norm", torch.ones(config.hidden_size), persistent=False)

    def fuse(self, features: Tensor) -> Tensor:
        """The state before the target's final norm [rows, H] -> the first hidden state, as the target's head reads it."""
        return F.rms_norm(features, self.target_norm.shape, self.target_norm, self.config.rms_norm_eps)


class Eagle2Ttt(Eagle3):
    kind = LastStateDraft

    def build(
        self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]
    ) -> LastStateDraft:
        draft = super().build(target, vocabulary, layer_ids, settings)
        draft.target_norm.copy_(target.norm)
        return draft

    def load(self, folder: Path, target: TargetParts) -> LastStateDraft:
        draft = super().load(folder, target)
        draft.target_norm.copy_(target.norm)
        return draft

    def tree(self) -> DynamicTree:
        return DynamicTree(depth=EAGLE2_DEPTH)
