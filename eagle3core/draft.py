"""The EAGLE-3 draft model, in the parts that training, decoding and the oracles all call.

In: target features [rows, 3H] and token ids. Out: hidden states [rows, H] and logits [rows, D].
Tensor names are those that vLLM and SGLang load. Attention itself is not here: training merges a causal block
with diagonals (`unroll.py`), decoding reads a cache (`decoding/`); both use the same projections.
Source: EAGLE-3 (arXiv 2503.01840), section 3; the EAGLE-3.1 flags as vLLM loads them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3core.config import DraftConfig
from eagle3core.rotary import cos_sin, inverse_frequencies, rotate


class Eagle3Draft(nn.Module):
    """`embed_tokens` is the target's, frozen (`share_embedding`); everything else is trained.

    Buffers `d2t` int64[D] (offsets: target id = draft id + d2t[draft id]) and `t2d` bool[V] hold the vocabulary
    map. Where D = V the map is the identity and is left out on export.
    """

    drafter = "eagle3"

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        target_hidden = config.target_hidden_size or config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(nn.RMSNorm(target_hidden, config.rms_norm_eps) for _ in range(3))
        else:
            self.fc_norm = None
        self.midlayer = DraftLayer(config)
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size)
        self.register_buffer(
            "frequencies",
            inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling),
            persistent=False,
        )

    @torch.no_grad()
    def set_vocabulary(self, target_ids: Tensor) -> None:
        """Take `target_ids` [D] int64, strictly ascending, as the draft vocabulary (draft id i is target_ids[i])."""
        config = self.config
        if target_ids.shape != (config.draft_vocab_size,):
            raise ValueError(f"{tuple(target_ids.shape)} ids for a draft vocabulary of {config.draft_vocab_size}")
        if not bool((target_ids.diff() > 0).all()) or int(target_ids[-1]) >= config.vocab_size:
            raise ValueError("draft vocabulary ids must be strictly ascending and below the target's vocabulary size")
        self.d2t.copy_(target_ids - torch.arange(config.draft_vocab_size, device=target_ids.device))
        self.t2d.zero_()
        self.t2d[target_ids] = True

    def share_embedding(self, embedding: Tensor) -> None:
        """Take the target's embedding [V, H] itself, no copy: mapped from a file it costs the rows that are read."""
        if embedding.shape != self.embed_tokens.weight.shape:
            raise ValueError(
                f"an embedding {tuple(embedding.shape)} for a draft that wants {tuple(self.embed_tokens.weight.shape)}"
            )
        self.embed_tokens.weight = nn.Parameter(embedding.detach(), requires_grad=False)

    @torch.no_grad()
    def start_from_target(self, embedding: Tensor, head: Tensor, norm: Tensor) -> None:
        """Share the target's embedding [V, H]; copy the draft vocabulary's rows of its head [V, H] and its final norm [H].
        """
        self.share_embedding(embedding)
        self.lm_head.weight.copy_(head[self.target_ids])
        self.norm.weight.copy_(norm)

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, [D] int64."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [rows, 3H] -> first hidden state [rows, H]. Never applied to the draft's own output."""
        if self.fc_norm is not None:
            states = features.chunk(3, dim=-1)
            features = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states, strict=True)], dim=-1)
        return self.fc(features)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin for int64 positions [rows], each [rows, 1, head_dim / 2]."""
        return cos_sin(positions, self.frequencies, dtype)

    def feedback(self, output: Tensor) -> Tensor:
        """What the next step takes as its hidden state: the layer's output, normed in EAGLE-3.1 alone."""
        return self.norm(output) if self.config.norm_output else output

    def logits(self, output: Tensor) -> Tensor:
        """Layer output [rows, H] -> logits over the draft vocabulary [rows, D]."""
        return self.lm_head(self.norm(output))


class DraftLayer(nn.Module):
    """One Llama layer whose attention reads [embedding, hidden], 2H wide, and whose residual is the un-normed hidden."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.input_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.hidden_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def attention_input(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """[rows, H] embeddings of the input tokens and [rows, H] hidden states -> [rows, 2H]."""
        return torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)

    def finish(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """Attention's output [rows, heads, head_dim] and the residual [rows, H] -> the layer's un-normed output [rows, H]."""
        hidden = hidden + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DraftAttention(nn.Module):
    """The projections of grouped-query attention; who attends to whom is the caller's."""

    def __init__(self, config: DraftConfig, width: int | None = None) -> None:
        """width: of what the projections read; twice the hidden size where not given."""
        super().__init__()
        self.head_dim = config.head_dim
        width = width or 2 * config.hidden_size
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[rows, 2H] -> rotated queries [rows, heads, head_dim]."""
        return rotate(self.q_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """[rows, 2H] -> rotated keys and values, each [rows, kv_heads, head_dim]."""
        keys = rotate(self.k_proj(x).unflatten(-1, (-1, self.head_dim)), cos, sin)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
