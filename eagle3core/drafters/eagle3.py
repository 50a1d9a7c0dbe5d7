"""EAGLE-3 and EAGLE-3.1: three fused layers, training-time test, a dynamic tree. The module is `eagle3core.draft`.

In: target features [rows, 3H]. Source: arXiv 2503.01840; the two flags of 3.1 as vLLM loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.config import DraftConfig
from eagle3core.decoding.drafter import Drafter as Eagle3Cache
from eagle3core.draft import Eagle3Draft
from eagle3core.drafters.interface import Drafter, TargetParts
from eagle3core.export import load_draft, save_draft
from eagle3core.unroll import Unroll


class Eagle3(Drafter):
    """kind: the module; a subclass of it is another drafter."""

    kind = Eagle3Draft

    def build(
        self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]
    ) -> Eagle3Draft:
        flags = {name: settings[name] for name in ("fc_norm", "norm_output")}
        draft = self.kind(DraftConfig.from_target(target.config, len(vocabulary), tuple(layer_ids), **flags))
        draft.set_vocabulary(vocabulary)
        if settings["start_from_target"]:
            draft.start_from_target(target.embedding, target.head, target.norm)
        else:
            draft.share_embedding(target.embedding)
        return draft

    def save(self, draft: Eagle3Draft, folder: Path) -> None:
        save_draft(draft, folder)

    def load(self, folder: Path, target: TargetParts) -> Eagle3Draft:
        return load_draft(folder, target.embedding, self.kind)

    def unroll(self, dtype: torch.dtype = torch.float32, *, compiled: bool = False, recompute: bool = False) -> Unroll:
        return (Unroll.compiled if compiled else Unroll)(dtype, recompute=recompute)

    def decoder(self, draft: Eagle3Draft, batch: int, slots: int) -> Eagle3Cache:
        return Eagle3Cache(draft, batch, slots)
