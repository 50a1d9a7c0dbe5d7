"""A whole Llama layer, for drafts that are small language models (SpS) or blocks (DFlash); who attends to whom is the
caller's.

In: hidden states [rows, H]. Out: queries, keys and values [rows, heads, d], and the layer's output [rows, H].
"""

from __future__ import annotations

from torch import Tensor, nn

from eagle3core.config import DraftConfig
from eagle3core.draft import DraftAttention, DraftMLP
from eagle3core.rotary import rotate


class NormedAttention(DraftAttention):
    """Qwen3's: each head's queries and keys are normed before they are turned."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__(config, width)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        keys = rotate(self.k_norm(self.k_proj(x).unflatten(-1, (-1, self.head_dim))), cos, sin)
        return keys, self.v_proj(x).unflatten(-1, (-1, self.head_dim))


class PlainLayer(nn.Module):
    def __init__(self, config: DraftConfig, attention: type[DraftAttention] = DraftAttention) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = attention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the layer's input [rows, H]."""
        normed = self.input_layernorm(x)
        return self.self_attn.queries(normed, cos, sin), *self.self_attn.keys_values(normed, cos, sin)

    def finish(self, attended: Tensor, x: Tensor) -> Tensor:
        """Attention's output [rows, heads, d] and the layer's input [rows, H] -> its output [rows, H]."""
        x = x + self.self_attn.o_proj(attended.flatten(1))
        return x + self.mlp(self.post_attention_layernorm(x))
