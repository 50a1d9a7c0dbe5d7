"""A draft on disk as vLLM and SGLang load it: `model.safetensors` and `config.json`.

In: an `Eagle3Draft`. Out: a folder, and back. The target's embedding is not saved: servers share the target's
own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft

MAP_NAMES = ("d2t", "t2d")


def save_draft(draft: Eagle3Draft, folder: Path) -> None:
    """Write the draft's weights and config; each file is whole or absent. Where D = V the vocabulary map is
    left out.
    """
    tensors = trained_tensors(draft)
    if draft.config.draft_vocab_size < draft.config.vocab_size:
        tensors |= {name: getattr(draft, name) for name in MAP_NAMES}
    write_draft(folder, tensors, {**draft.config.to_dict(), "drafter": draft.drafter})


def trained_tensors(draft: nn.Module) -> dict[str, Tensor]:
    """Every parameter that is not the target's own."""
    return {name: value for name, value in draft.named_parameters() if value.requires_grad}


def write_draft(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """`model.safetensors` and `config.json`; each is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".model.safetensors"
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    save_file(whole, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    partial = folder / ".config.json"
    partial.write_text(json.dumps({**config, "torch_dtype": "float32"}, indent=2) + "\n")
    os.replace(partial, folder / "config.json")


def load_draft(folder: Path, embedding: Tensor, kind: type[Eagle3Draft] = Eagle3Draft) -> Eagle3Draft:
    """Read a saved draft; `embedding` [V, H] is the target's. Raises ValueError naming every tensor that is
    missing or not known.
    """
    config = DraftConfig.from_dict(json.loads((folder / "config.json").read_text()))
    draft = kind(config)
    tensors = load_file(folder / "model.safetensors")
    draft.share_embedding(embedding)
    if config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    load_tensors(draft, tensors, folder, targets_own={"embed_tokens.weight"})
    return draft


def load_tensors(
    draft: nn.Module, tensors: Mapping[str, Tensor], folder: Path, targets_own: Collection[str] = ()
) -> None:
    """Put `tensors` into the draft. targets_own: names that come from the target. Raises ValueError naming every
    tensor that is missing or not known.
    """
    absent, unknown = draft.load_state_dict(tensors, strict=False)
    missing = sorted(set(absent) - set(targets_own))
    if missing or unknown:
        raise ValueError(f"{folder / 'model.safetensors'}: missing {missing}, not known {sorted(unknown)}")
