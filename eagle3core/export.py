"""A draft on disk as vLLM and SGLang load it: `model.safetensors` and `config.json`.

In: an `Eagle3Draft`. Out: a folder, and back. The target's embedding is not saved: servers share the target's
own.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft

MAP_NAMES = ("d2t", "t2d")


def save_draft(draft: Eagle3Draft, folder: Path) -> None:
    """Write the draft's weights and config; each file is whole or absent. Where D = V the vocabulary map is
    left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = draft.config
    named = {name: value for name, value in draft.named_parameters() if name != "embed_tokens.weight"}
    if config.draft_vocab_size < config.vocab_size:
        named |= {name: getattr(draft, name) for name in MAP_NAMES}
    tensors = {name: value.detach().cpu().contiguous() for name, value in named.items()}
    partial = folder / ".model.safetensors"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    partial = folder / ".config.json"
    partial.write_text(json.dumps({**config.to_dict(), "torch_dtype": "float32"}, indent=2) + "\n")
    os.replace(partial, folder / "config.json")


def load_draft(folder: Path, embedding: Tensor) -> Eagle3Draft:
    """Read a saved draft; `embedding` [V, H] is the target's. Raises ValueError naming every tensor that is
    missing or not known.
    """
    config = DraftConfig.from_dict(json.loads((folder / "config.json").read_text()))
    draft = Eagle3Draft(config)
    tensors = load_file(folder / "model.safetensors")
    draft.share_embedding(embedding)
    if config.draft_vocab_size == config.vocab_size:
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    absent, unknown = draft.load_state_dict(tensors, strict=False)
    missing = sorted(set(absent) - {"embed_tokens.weight"})
    if missing or unknown:
        raise ValueError(f"{folder / 'model.safetensors'}: missing {missing}, not known {sorted(unknown)}")
    return draft
