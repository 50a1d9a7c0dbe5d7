"""The three tensors of the target that a draft needs: embedding, head, final norm.

In: the target's Hugging Face folder (one safetensors file, or shards with an index). Out: `TargetWeights`;
nothing else of the model is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from eagle3core.drafters.interface import TargetParts

EMBEDDING, NORM, HEAD = "embed_tokens.weight", "norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class TargetWeights:
    """embedding: [V, H] fp32. head: [V, H] fp32, the embedding itself where the two are tied. norm: [H]
    fp32.
    """

    embedding: Tensor
    head: Tensor
    norm: Tensor

    def parts(self, config: Mapping[str, Any]) -> TargetParts:
        """With the target's HF config beside them, as the drafters take them."""
        return TargetParts(config.get("text_config", config), self.embedding, self.head, self.norm)


def read_target_weights(folder: Path) -> TargetWeights:
    """Raises ValueError naming the tensor that is not there."""
    files = _tensor_files(folder)
    found = sorted((name for name in files if name.endswith(EMBEDDING)), key=len)
    if not found:
        raise ValueError(
            f"{folder}: no tensor named ...{EMBEDDING}: not a decoder that a draft can be made for"
        )
    # The language model's own prefix: "model.", or deeper in models that also see.
    prefix = found[0].removesuffix(EMBEDDING)
    if prefix + NORM not in files:
        raise ValueError(
            f"{folder}: no tensor named {prefix + NORM}: the draft starts from the target's final norm"
        )
    heads = [name for name in files if name.endswith(HEAD)]
    embedding = _read(folder, files, found[0])
    head = _read(folder, files, heads[0]) if heads else embedding
    return TargetWeights(embedding, head, _read(folder, files, prefix + NORM))


def _tensor_files(folder: Path) -> dict[str, str]:
    """Which file holds each tensor."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return json.loads(index.read_text())["weight_map"]
    names = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update({name: path.name for name in file.keys()})  # noqa: SIM118 (not a dict)
    return names


def _read(folder: Path, files: dict[str, str], name: str) -> Tensor:
    with safe_open(folder / files[name], framework="pt") as file:
        return file.get_tensor(name).to(torch.float32)
