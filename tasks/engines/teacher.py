"""The teacher from captured states: the target's final norm and head, applied to its last residual stream.

In: states before the final norm [rows, H]. Out: log-probabilities of the k likeliest tokens and the log of
the probability outside them. Only two tensors of the target are read, with safetensors.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

# Rows of logits formed at once: a CPU's matrix product comes to its full rate with some 400. Their bytes have a limit.
CHUNK_ROWS, CHUNK_BYTES = 384, 128 << 20
# Fewer rows go through another kernel of the BLAS, whose last bits differ: a row would depend on what is beside it.
LEAST_ROWS = 32
# Neighbours in the vocabulary whose largest logit stands for all of them while the k likeliest tokens are looked for.
BLOCK = 64
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


@dataclass
class TargetHead:
    """norm [H] and head [V, H], fp32, on the device that computes. One thread at a time: the logits' memory is kept."""

    norm: Tensor
    head: Tensor
    eps: float
    _memory: Tensor | None = field(default=None, init=False, repr=False)

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
        """[rows, H] states before the final norm, any float type -> the teacher, on the CPU.

        A row's figures do not depend on the rows beside it, to the bit.
        """
        chunks = [self._chunk(rows, k) for rows in hidden.split(self.chunk_rows)]
        ids, log_probs, rest = (torch.cat(column) for column in zip(*chunks, strict=True))
        return TopK(ids, log_probs, rest)

    @property
    def chunk_rows(self) -> int:
        """Rows that are best given at once, or a multiple of them."""
        return max(LEAST_ROWS, min(CHUNK_ROWS, CHUNK_BYTES // (4 * self._columns)))

    @property
    def _columns(self) -> int:
        return math.ceil(len(self.head) / BLOCK) * BLOCK

    def _chunk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        states = hidden.to(self.head.device, torch.float32)
        states = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.eps) * self.norm
        logits = self._logits(F.pad(states, (0, 0, 0, max(0, LEAST_ROWS - len(states)))))[: len(hidden)]
        values, ids = likeliest(logits, k)
        # What is outside is summed by itself: 1 - sum(inside) would cancel where the target is sure. The whole follows
        # from both, without a second pass over the vocabulary.
        most = values[:, :1]
        outside = logits.scatter_(-1, ids, float("-inf")).sub_(most).exp_().sum(-1)
        rest = outside.log() + most[:, 0]
        total = torch.logaddexp(values.logsumexp(-1), rest)
        return ids.int().cpu(), (values - total[:, None]).cpu(), (rest - total).cpu()

    def _logits(self, states: Tensor) -> Tensor:
        """[rows, V filled up to whole blocks with -inf], in memory that the next call uses again."""
        if self._memory is None:
            self._memory = states.new_full((self.chunk_rows, self._columns), float("-inf"))
        whole, size = self._memory[: len(states)], len(self.head)
        torch.mm(states, self.head.T, out=whole[:, :size])
        whole[:, size:] = float("-inf")
        return whole


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of every row [rows, n], n a multiple of BLOCK, by falling value: values, ids [rows, k].

    They lie in the k blocks whose largest values are largest, so that most of a row is read once and never sorted.
    """
    blocks = logits.unflatten(-1, (-1, BLOCK))
    best = blocks.amax(-1).topk(min(k, blocks.shape[1]), dim=-1, sorted=False).indices
    values, places = blocks.gather(1, best[..., None].expand(-1, -1, BLOCK)).flatten(1).topk(k, dim=-1)
    return values, best.gather(1, places // BLOCK) * BLOCK + places % BLOCK


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
