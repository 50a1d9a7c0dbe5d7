"""The teacher from captured states: the target's final norm and head, applied to its last residual stream.

In: states before the final norm [rows, H]. Out: log-probabilities of the k likeliest tokens and the log of
the probability outside them. Only two tensors of the target are read, with safetensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# Rows of logits formed at once: 64 x 128,256 fp32 are 33 MB.
CHUNK_ROWS = 64
# Config keys of architectures whose head is more than RMSNorm and a matrix.
UNSUPPORTED = ("final_logit_softcapping", "logits_scaling", "logit_scale")


class TeacherError(ValueError):
    """A target whose head is not understood; the message says what to choose instead."""


@dataclass(frozen=True)
class TopK:
    """ids int32[rows, k] by falling probability, log_probs float32[rows, k], rest float32[rows]."""

    ids: Tensor
    log_probs: Tensor
    rest: Tensor


@dataclass(frozen=True)
class TargetHead:
    """norm [H] and head [V, H], fp32, on the device that computes."""

    norm: Tensor
    head: Tensor
    eps: float

    @classmethod
    def load(cls, folder: Path, device: str) -> TargetHead:
        """Read the final norm and the head (or tied embedding) from a Hugging Face folder's safetensors."""
        config = json.loads((folder / "config.json").read_text())
        if found := [key for key in UNSUPPORTED if config.get(key)]:
            raise TeacherError(f"{folder}: {found[0]} changes the logits; set features.teacher to hidden")
        names = _tensor_files(folder)
        head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
        if head not in names or "model.norm.weight" not in names:
            raise TeacherError(f"{folder}: no {head} or model.norm.weight; set features.teacher to hidden")
        return cls(
            norm=_read(names["model.norm.weight"], "model.norm.weight").to(device, torch.float32),
            head=_read(names[head], head).to(device, torch.float32),
            eps=float(config["rms_norm_eps"]),
        )

    def top_k(self, hidden: Tensor, k: int) -> TopK:
        """[rows, H] states before the final norm, any float type -> the teacher, on the CPU."""
        chunks = [self._chunk(rows, k) for rows in hidden.split(CHUNK_ROWS)]
        ids, log_probs, rest = (torch.cat(column) for column in zip(*chunks, strict=True))
        return TopK(ids, log_probs, rest)

    def _chunk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        states = hidden.to(self.head.device, torch.float32)
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps) * self.norm
        logits = states @ self.head.T
        values, ids = logits.topk(k, dim=-1)
        # What is outside is summed by itself: 1 - sum(inside) would cancel where the target is sure. The whole follows
        # from both, without a second pass over the vocabulary.
        rest = logits.scatter_(-1, ids, float("-inf")).logsumexp(-1)
        total = torch.logaddexp(values.logsumexp(-1), rest)
        return ids.int().cpu(), (values - total[:, None]).cpu(), (rest - total).cpu()


def _tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> the file that holds it."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    file = folder / "model.safetensors"
    if not file.is_file():
        raise TeacherError(f"{folder}: no safetensors weights")
    with safe_open(file, "pt") as tensors:
        return {name: file for name in tensors.keys()}  # noqa: SIM118  (safe_open is not a mapping)


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)
