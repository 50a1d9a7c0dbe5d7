"""The draft's files and config beside the target's: what is lost on export, no server notices.

In: tensor names, configs, the vocabulary map. Out: `Finding`s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from eagle3core.config import DraftConfig
from eagle3core.doctor.patient import Finding


def tensor_findings(names: Sequence[str], config: DraftConfig) -> list[Finding]:
    """From the names of the tensors in a draft's file, before anything is loaded."""
    wanted = {"fc.weight", "norm.weight", "lm_head.weight"}
    if config.draft_vocab_size != config.vocab_size:
        wanted |= {"d2t", "t2d"}
    advice = {
        "lm_head.weight": "a server falls back to the target's head and reports acceptance near 1.0",
        "d2t": "draft ids would be taken for target ids",
    }
    return [
        Finding(
            f"missing-{name}",
            f"{name} is not in the file: {advice.get(name, 'a server cannot load it')}",
            "export again",
        )
        for name in sorted(wanted - set(names))
    ]


def config_findings(config: DraftConfig, target: Mapping[str, Any]) -> list[Finding]:
    """The draft's config beside the target's: what is lost on export is never noticed by a server."""
    own = DraftConfig.from_target(target, config.draft_vocab_size, layer_ids=config.layer_ids)
    found = []
    for name, trap in (
        ("rope_theta", "rope-theta"),
        ("rope_scaling", "rope-scaling"),
        ("vocab_size", "vocab-size"),
    ):
        mine, theirs = getattr(config, name), getattr(own, name)
        if mine != theirs:
            found.append(
                Finding(trap, f"{name} is {mine!r}, the target's is {theirs!r}", f"write {name} {theirs!r}")
            )
    if config.max_position_embeddings < own.max_position_embeddings:
        limit, needed = config.max_position_embeddings, own.max_position_embeddings
        found.append(
            Finding(
                "short-context",
                f"max_position_embeddings is {limit}, the target's is {needed}: nothing is drafted beyond",
                f"write max_position_embeddings {needed}",
            )
        )
    layers = target["num_hidden_layers"]
    if max(config.layer_ids) > layers or min(config.layer_ids) < 0:
        text = f"layer ids {config.layer_ids} leave the target's hidden states 0..{layers}"
        found.append(Finding("layer-ids", text, "number as HF's hidden_states: 0 is the embedding output"))
    return found


def map_findings(d2t: Tensor, t2d: Tensor) -> list[Finding]:
    """d2t holds offsets; t2d must say the same."""
    kept = t2d.nonzero().flatten()
    target_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if torch.equal(target_ids, kept):
        return []
    if torch.equal(d2t, kept):
        text = "d2t holds absolute target ids; servers add the draft id to it"
        return [Finding("d2t-absolute", text, "store target id minus draft id")]
    return [Finding("map-disagrees", "d2t and t2d name different tokens", "write both from one list of ids")]
