"""A draft that is right by construction: it proposes what the target's head says of the last token alone.

In: a tiny target made with `context` near 0, whose next token depends on the last one almost alone. Out: a
draft artifact as `train_draft` leaves it. Nothing is trained, so a test of serving needs no luck and no
minutes.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft
from eagle3core.export import save_draft
from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.prepare_target import TargetInfo
from tasks.target_weights import read_target_weights
from tasks.train_draft import DRAFT_FOLDER

# Attention looks where the score is highest: a token matches itself by this much, others by chance.
SHARPNESS = 2.0


def bigram_draft(target: TargetInfo) -> Eagle3Draft:
    """Attention copies the input token's normed embedding, everything else adds nothing."""
    weights = read_target_weights(Path(target.path))
    draft = Eagle3Draft(DraftConfig.from_target(target.config, target.vocab_size))
    config, attention = draft.config, draft.midlayer.self_attn
    hidden, size = config.hidden_size, config.head_dim
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    assert hidden == kv_heads * size
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
        for norm in (draft.norm, draft.midlayer.input_layernorm, draft.midlayer.hidden_norm):
            norm.weight.fill_(1)
        draft.midlayer.post_attention_layernorm.weight.fill_(1)
        draft.start_from_target(weights.embedding, weights.head, weights.norm)
        copy = torch.eye(hidden)
        attention.v_proj.weight[:, :hidden] = copy
        attention.k_proj.weight[:, :hidden] = SHARPNESS * copy
        group = heads // kv_heads
        for head in range(heads):
            first = head // group * size
            rows, source = slice(head * size, (head + 1) * size), slice(first, first + size)
            attention.q_proj.weight[rows, :hidden] = SHARPNESS * copy[source]
            attention.o_proj.weight[source, rows] = torch.eye(size) / group
    return draft


def store_draft(target: TargetInfo, store: ArtifactStore) -> ArtifactRef:
    with store.writer("draft", "d0", stage="test", stage_version=1, parameters={}) as writer:
        save_draft(bigram_draft(target), writer.folder / DRAFT_FOLDER)
        return writer.commit({})
