"""Every drafter of the registry over one tiny target: an untrained draft, its documents, and what drafts behind them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle3core.batch import Document, HiddenTeacher
from eagle3core.drafters import DRAFTERS, drafter
from eagle3core.drafters.interface import TargetParts
from eagle3core.teacher import TargetHead
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

# Small shapes for those whose shape is not the target's.
OPTIONS: dict[str, dict[str, Any]] = {
    "sps": {"layers": 2, "width": 16, "heads": 2},
    "dflash": {"block": 5, "layers": 2, "mask_token_id": 3},
}


def parts(target: LlamaForCausalLM) -> TargetParts:
    head, norm = target.lm_head.weight.detach(), target.model.norm.weight.detach()
    return TargetParts(target.config.to_dict(), target.model.embed_tokens.weight.detach(), head, norm)


def make(name: str, target: LlamaForCausalLM, seed: int = 0, **options: Any) -> Any:
    """An untrained draft whose norms and vocabulary are not trivial."""
    line = DRAFTERS[name]
    generator = torch.Generator().manual_seed(seed)
    vocabulary = torch.randperm(tiny.VOCAB, generator=generator)[:48].sort().values
    section = {"drafter": name, "fc_norm": False, "norm_output": False, "start_from_target": True}
    settings = line.settings({**section, "options": {**OPTIONS.get(name, {}), **options}})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = line.layer_ids(target.config.num_hidden_layers)
        draft = drafter(name).build(parts(target), vocabulary, layers, settings)
        with torch.no_grad():
            for parameter in draft.parameters():
                if parameter.requires_grad and parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5)
    return draft


def decoder(target: LlamaForCausalLM, draft: Any) -> HuggingFaceTarget:
    return HuggingFaceTarget(target, draft.config.layer_ids)


@torch.no_grad()
def document(target: LlamaForCausalLM, draft: Any, text: Tensor, start: int) -> Document:
    """Tokens from `start` on are the target's; the states that this draft reads, and the exact teacher."""
    last = target.config.num_hidden_layers
    source = HuggingFaceTarget(target, (last,))
    (hidden,) = source.capture([text], (last,))
    (features,) = source.capture([text], draft.config.layer_ids)
    supervised = torch.arange(len(text)) >= start
    return Document("toy", text, supervised, features, HiddenTeacher(hidden))


def head(target: LlamaForCausalLM, draft: Any) -> TargetHead:
    which = parts(target)
    return TargetHead.build(which.head, which.norm, target.config.rms_norm_eps, draft.target_ids)
