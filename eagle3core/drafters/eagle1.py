"""EAGLE-1: the next last state is regressed, and the target's own frozen head turns it into a token.

In: the state before the target's final norm [rows, H]. `fc` joins a token's embedding with the normed state, one Llama
layer without an input norm predicts the next one, which is fed back as it is. EAGLE-2 is the same weights under the
dynamic tree. Sources: arXiv 2401.15077 and 2406.16858; tensor names are those of vLLM's `eagle`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from eagle3core.config import ARCHITECTURE, DraftConfig
from eagle3core.decoding.cached import DraftCache, attend
from eagle3core.decoding.propose import DynamicTree, Proposer, StaticTree
from eagle3core.decoding.target import Block
from eagle3core.draft import DraftAttention, DraftMLP
from eagle3core.drafters.interface import Drafter, TargetParts
from eagle3core.export import load_tensors, trained_tensors, write_draft
from eagle3core.feature_loss import frozen_head_loss
from eagle3core.fused import fold_norm
from eagle3core.packing import PackedBatch
from eagle3core.rotary import cos_sin, inverse_frequencies, rotate
from eagle3core.training_config import TrainingConfig
from eagle3core.ttt import StepResult, no_batch
from eagle3core.unroll import LayerWeights, Unroll, Unrolling

NOISE_TOKENS = 512  # a document of so many tokens gets noise of the width that the option names
TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")


class Eagle1Layer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config, config.hidden_size)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)


class Eagle1Draft(nn.Module):
    """`embed_tokens`, `lm_head` and `target_norm` are the target's, frozen and not saved; the vocabulary is its own.

    noise: width of the uniform noise on input states. token_weight: of the cross-entropy beside the regression.
    """

    drafter = "eagle1"

    def __init__(self, config: DraftConfig, noise: float = 0.2, token_weight: float = 0.1) -> None:
        super().__init__()
        self.config, self.noise, self.token_weight = config, noise, token_weight
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)
        self.fc = nn.Linear(2 * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle1Layer(config)])
        self.register_buffer("target_norm", torch.ones(hidden), persistent=False)
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @torch.no_grad()
    def share(self, target: TargetParts) -> Eagle1Draft:
        """Take the target's embedding, head and final norm themselves."""
        self.embed_tokens.weight = nn.Parameter(target.embedding.detach(), requires_grad=False)
        self.lm_head.weight = nn.Parameter(target.head.detach(), requires_grad=False)
        self.target_norm.copy_(target.norm)
        return self

    @property
    def target_ids(self) -> Tensor:
        """Every id of the target, [V] int64."""
        return torch.arange(self.config.vocab_size, device=self.d2t.device)

    def fuse(self, features: Tensor) -> Tensor:
        """States before the target's final norm [rows, H] -> what its head reads, and what is predicted."""
        return F.rms_norm(features, self.target_norm.shape, self.target_norm, self.config.rms_norm_eps)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos_sin(positions, self.frequencies, dtype)

    def logits(self, output: Tensor) -> Tensor:
        """Predicted states [rows, H] -> the target's logits for them [rows, V]."""
        return self.lm_head(output)


class Eagle1Cell:
    """The layer over packed rows; noise [R, H] is added to the first states (training alone)."""

    def __init__(self, draft: Eagle1Draft, run: Unroll, noise: Tensor | None = None) -> None:
        self._draft, self._run, self._noise = draft, run, noise
        layer, hidden, dtype = draft.layers[0], draft.config.hidden_size, run.dtype
        attention, mlp = layer.self_attn, layer.mlp
        self._layer, self._heads = layer, (draft.config.num_attention_heads, draft.config.num_key_value_heads)
        norm = layer.post_attention_layernorm
        self._weights = LayerWeights(
            token=draft.fc.weight[:, :hidden].to(dtype),
            state=torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)]).to(dtype),
            out=attention.o_proj.weight.to(dtype),
            gate_up=torch.cat([fold_norm(part.weight, norm) for part in (mlp.gate_proj, mlp.up_proj)]).to(dtype),
            down=mlp.down_proj.weight.to(dtype),
        )
        self._hidden_weight = draft.fc.weight[:, hidden:].to(dtype)

    def tokens(self, token_ids: Tensor) -> Tensor:
        return F.linear(self._draft.embed_tokens(token_ids).to(self._run.dtype), self._weights.token)

    def start(self, features: Tensor) -> Tensor:
        hidden = self._draft.fuse(features.float())
        return hidden if self._noise is None else hidden + self._noise

    def enter(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        return (F.linear(hidden.to(self._run.dtype), self._hidden_weight) + tokens).float()

    def queries(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return self.all_three(state, tokens, cos, sin)[0]

    def keys_values(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return self.all_three(state, tokens, cos, sin)[1:]

    def all_three(self, state: Tensor, tokens: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self._heads
        joined = F.linear(state.to(self._run.dtype), self._weights.state).unflatten(1, (-1, self._draft.config.head_dim))
        queries, keys, values = joined.split([heads, kv_heads, kv_heads], dim=1)
        return rotate(queries, cos, sin), rotate(keys, cos, sin), values.contiguous()

    def finish(self, attended: Tensor, state: Tensor) -> Tensor:
        return self._run.finish(self._layer, self._weights, attended, state)

    def feedback(self, output: Tensor) -> Tensor:
        return output


class FeatureRegression(nn.Module):
    """EAGLE-1's training step: SmoothL1 to the next state + `token_weight` * soft cross-entropy through the frozen
    head, a mean over labels; no later steps."""

    def __init__(self, draft: Eagle1Draft, unroll: Unroll) -> None:
        super().__init__()
        self.draft, self.unroll = draft, unroll

    def forward(self, batch: PackedBatch | None, counts: Tensor | None = None) -> StepResult:
        """See `TrainingTimeTest.forward`."""
        if batch is None:
            return no_batch(self, len(counts))
        draft = self.draft
        unroll = replace(self.unroll, cell=partial(Eagle1Cell, noise=self._noise(batch)))
        predicted = unroll(draft, batch)[0][batch.steps[0].scored]
        wanted = draft.fuse(batch.features[batch.label_rows(0)].float())
        regression = F.smooth_l1_loss(predicted, wanted, reduction="none").mean(-1)
        tokens, hits, alpha = frozen_head_loss(predicted, wanted, draft.lm_head.weight, self.unroll.dtype)
        values = regression + draft.token_weight * tokens
        labels = (batch.counts if counts is None else counts)[:1].clamp_min(1)
        loss = values.sum() / float(labels)
        sums = (torch.ones_like(values), values.detach(), hits.float(), alpha)
        return StepResult(loss, *(column.sum()[None] for column in sums))

    def _noise(self, batch: PackedBatch) -> Tensor:
        """[R, H], uniform, drawn anew for every batch of a run and the same when it is run again."""
        generator = torch.Generator().manual_seed(batch.seed)
        shape = (len(batch.tokens), self.draft.config.hidden_size)
        drawn = (torch.rand(shape, generator=generator) - 0.5).to(batch.tokens.device)
        lengths = torch.bincount(batch.document)[batch.document]
        return drawn * (self.draft.noise * NOISE_TOKENS / lengths)[:, None]


class Eagle1Cache(DraftCache):
    def _start(self, features: Tensor) -> Tensor:
        return self._draft.fuse(features)

    def _next(self, outputs: Tensor) -> Tensor:
        return outputs

    def _run(self, hidden: Tensor, block: Block) -> Tensor:
        draft, device = self._draft, hidden.device
        layer = draft.layers[0]
        embeds = draft.embed_tokens(block.token_ids.flatten().to(device))
        x = draft.fc(torch.cat([embeds, hidden.flatten(0, 1)], dim=-1))
        cos, sin = draft.rope(block.positions.flatten().to(device), x.dtype)
        queries = layer.self_attn.queries(x, cos, sin)
        attended = attend(self._cache, 0, block, queries, *layer.self_attn.keys_values(x, cos, sin))
        x = x + layer.self_attn.o_proj(attended.flatten(1))
        return (x + layer.mlp(layer.post_attention_layernorm(x))).unflatten(0, hidden.shape[:2])


class Eagle1(Drafter):
    def build(
        self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]
    ) -> Eagle1Draft:
        config = DraftConfig.from_target(target.config, target.config["vocab_size"], tuple(layer_ids))
        return Eagle1Draft(config, **settings["options"]).share(target)

    def save(self, draft: Eagle1Draft, folder: Path) -> None:
        own = {"architectures": ["LlamaForCausalLM"], "drafter": draft.drafter}
        write_draft(folder, trained_tensors(draft), {**draft.config.to_dict(), **own})

    def load(self, folder: Path, target: TargetParts) -> Eagle1Draft:
        raw = json.loads((folder / "config.json").read_text())
        draft = Eagle1Draft(DraftConfig.from_dict({**raw, "architectures": [ARCHITECTURE]}))
        load_tensors(draft, load_file(folder / "model.safetensors"), folder, TARGETS_OWN)
        return draft.share(target)

    def settings(self, draft: Eagle1Draft, config: TrainingConfig) -> TrainingConfig:
        """One step: EAGLE-1 never sees its own output in training."""
        return replace(config, ttt_steps=1, ttt_ramp=())

    def unroll(self, dtype: torch.dtype = torch.float32, *, compiled: bool = False, recompute: bool = False) -> Unroll:
        made = (Unroll.compiled if compiled else Unroll)(dtype, recompute=recompute)
        return replace(made, cell=Eagle1Cell)

    def trainee(self, draft: Eagle1Draft, config: TrainingConfig, unroll: Unrolling) -> FeatureRegression:
        return FeatureRegression(draft, unroll)

    def decoder(self, draft: Eagle1Draft, batch: int, slots: int) -> Eagle1Cache:
        return Eagle1Cache(draft, batch, slots)

    def tree(self) -> Proposer:
        return StaticTree()


class Eagle2(Eagle1):
    def tree(self) -> Proposer:
        return DynamicTree(depth=6)
