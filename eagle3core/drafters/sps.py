"""SpS: a small Llama of its own, trained on the target's answers; it reads nothing of the target but its text.

In: token ids. Out: logits over the target's whole vocabulary. Depth and width are the recipe's. Exported as a plain
`LlamaForCausalLM` with tied embeddings, which vLLM serves as `draft_model`. Source: arXiv 2302.01318.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3core.attention import ttt_attention
from eagle3core.batch import Document, TopKTeacher
from eagle3core.config import ARCHITECTURE, DraftConfig
from eagle3core.decoding.cached import DraftCache, attend
from eagle3core.decoding.target import Block
from eagle3core.drafters.interface import Drafter, TargetParts
from eagle3core.drafters.layers import PlainLayer
from eagle3core.export import load_tensors, trained_tensors, write_draft
from eagle3core.packing import PackedBatch
from eagle3core.rotary import cos_sin, inverse_frequencies
from eagle3core.training_config import TrainingConfig
from eagle3core.windows import find_windows

INIT_STD = 0.02
PREFIX = "model."
NOT_SAVED = ("lm_head.weight", "d2t", "t2d")  # tied, and the identity


class SpsDraft(nn.Module):
    """A Llama whose head is its embedding. config: hidden_size and heads are the draft's own; layer_ids is empty."""

    drafter = "sps"

    def __init__(self, config: DraftConfig, layers: int) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(PlainLayer(config) for _ in range(layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=INIT_STD)
        self.register_buffer("d2t", torch.zeros(config.vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def target_ids(self) -> Tensor:
        """Every id of the target, [V] int64."""
        return torch.arange(self.config.vocab_size, device=self.d2t.device)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos_sin(positions, self.frequencies, dtype)

    def logits(self, output: Tensor) -> Tensor:
        """Last layer's output [rows, H] -> logits [rows, V]."""
        return self.lm_head(self.norm(output))


@dataclass(frozen=True)
class LanguageModel:
    """One causal pass gives every chain its steps: what it drafted was the text, so step i is the row i further on."""

    dtype: torch.dtype = torch.float32

    def __call__(self, draft: SpsDraft, batch: PackedBatch) -> list[Tensor]:
        """See `Unrolling`."""
        document = batch.document.cpu()
        starts = torch.searchsorted(document, torch.arange(int(document[-1]) + 1))
        windows = find_windows(torch.arange(len(document)), starts, document).to(batch.tokens.device)
        cos, sin = draft.rope(batch.positions, self.dtype)
        x = draft.embed_tokens(batch.tokens).float()
        with torch.autocast(x.device.type, self.dtype, enabled=self.dtype != torch.float32):
            for layer in draft.layers:
                queries, keys, values = (part.to(self.dtype) for part in layer.project(x, cos, sin))
                x = layer.finish(ttt_attention(queries, keys, values, windows, []), x)
        return [x[batch.input_rows(number)] for number, step in enumerate(batch.steps) if step.alive]


class SpsCache(DraftCache):
    """Row t holds token t, at position t; there is no state to hand on."""

    def begin(self, token_ids: Tensor) -> None:
        nothing = torch.zeros(len(token_ids), 1, 0)
        self.commit(nothing, token_ids[:, None], torch.ones(len(token_ids), dtype=torch.int64))

    def _start(self, features: Tensor) -> Tensor:
        return features

    def _next(self, outputs: Tensor) -> Tensor:
        return outputs

    def _run(self, hidden: Tensor, block: Block) -> Tensor:
        draft, device = self._draft, hidden.device
        x = draft.embed_tokens(block.token_ids.flatten().to(device))
        cos, sin = draft.rope(block.positions.flatten().to(device), x.dtype)
        for number, layer in enumerate(draft.layers):
            x = layer.finish(attend(self._cache, number, block, *layer.project(x, cos, sin)), x)
        return x.unflatten(0, block.token_ids.shape)


class Sps(Drafter):
    def build(
        self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]
    ) -> SpsDraft:
        """Raises ValueError where the width is no multiple of the heads."""
        options = settings["options"]
        width, heads = options["width"], options["heads"]
        if width % (2 * heads):
            raise ValueError(f"draft.options: width {width} must be an even multiple of heads {heads}")
        own = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": heads, "head_dim": width // heads}
        own |= {"intermediate_size": 3 * width, "target_hidden_size": None}
        config = DraftConfig.from_target(target.config, target.config["vocab_size"], tuple(layer_ids), **own)
        return SpsDraft(config, options["layers"])

    def save(self, draft: SpsDraft, folder: Path) -> None:
        values = {key: value for key, value in asdict(draft.config).items() if key not in _HEAD_ONLY}
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **values,
            "num_hidden_layers": len(draft.layers),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "drafter": draft.drafter,
        }
        write_draft(folder, {PREFIX + name: value for name, value in trained_tensors(draft).items()}, config)

    def load(self, folder: Path, target: TargetParts) -> SpsDraft:
        raw = json.loads((folder / "config.json").read_text())
        head = {
            "architectures": [ARCHITECTURE],
            "draft_vocab_size": raw["vocab_size"],
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": []},
        }
        draft = SpsDraft(DraftConfig.from_dict({**raw, **head}), raw["num_hidden_layers"])
        tensors = {name.removeprefix(PREFIX): value for name, value in load_file(folder / "model.safetensors").items()}
        load_tensors(draft, tensors, folder, NOT_SAVED)
        return draft

    def view(self, document: Document) -> Document:
        """A token in front, never read, so that row t holds token t; the text itself is what is learnt."""
        text = document.token_ids.long()
        no, yes = torch.zeros(len(text)), torch.full((len(text),), -torch.inf)
        return replace(
            document,
            token_ids=torch.cat([text[:1], text]),
            supervised=torch.cat([torch.tensor([False]), document.supervised]),
            features=torch.zeros(len(text), 0),
            teacher=TopKTeacher(text[:, None], no[:, None], yes),
        )

    def settings(self, draft: SpsDraft, config: TrainingConfig) -> TrainingConfig:
        """One step: a row's prediction is the same at every step, so a second one would count it twice."""
        return replace(config, ttt_steps=1, ttt_ramp=())

    def unroll(
        self, dtype: torch.dtype = torch.float32, *, compiled: bool = False, recompute: bool = False
    ) -> LanguageModel:
        return LanguageModel(dtype)

    def decoder(self, draft: SpsDraft, batch: int, slots: int) -> SpsCache:
        return SpsCache(draft, batch, slots, len(draft.layers))


# Of `DraftConfig`, what a plain language model's config does not say.
_HEAD_ONLY = ("draft_vocab_size", "layer_ids", "target_hidden_size", "fc_norm", "norm_output")
