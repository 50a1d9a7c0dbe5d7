"""DFlash: a block of tokens in one pass. The anchor (the text's last token) and masks behind it see each other and the
text's context, which every layer reads from the target's fused features.

In: target features [rows, 3H]. Block place 0 is the anchor, token t+1 at position t+1; place k > 0 predicts token
t+1+k and stands at its position. So step i of the chain that begins at row t is place i+1, in training and in drafting
alike. Loss: cross-entropy with the target's distribution, weight exp(-(k-1)/gamma), from random anchors; the paper's
own label is the text, whose expectation that distribution is. Source: arXiv 2602.06036; names as vLLM loads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from eagle3core.attention import ttt_attention
from eagle3core.config import ARCHITECTURE, DraftConfig
from eagle3core.decoding.cached import attend
from eagle3core.decoding.propose import Chain, Proposer
from eagle3core.decoding.target import Block, SlotCache, tree_block
from eagle3core.drafters.interface import Drafter, TargetParts
from eagle3core.drafters.layers import NormedAttention, PlainLayer
from eagle3core.export import MAP_NAMES, load_tensors, trained_tensors, write_draft
from eagle3core.packing import PackedBatch, PackedStep
from eagle3core.rotary import cos_sin, inverse_frequencies
from eagle3core.training_config import TrainingConfig
from eagle3core.ttt import StepResult, TrainingTimeTest
from eagle3core.unroll import Unrolling
from eagle3core.windows import find_windows


@dataclass(frozen=True)
class BlockShape:
    """block: places, the anchor included; a server must draft block - 1 tokens, for every place sees all others, and
    one less is another block. mask_token_id: whose embedding stands for a token that is not known yet.
    gamma: decay of the loss along the block. anchors: share of the rows that a step trains from.
    """

    block: int
    layers: int
    gamma: float
    anchors: float
    mask_token_id: int

    def __post_init__(self) -> None:
        if self.block < 2 or not 0 < self.anchors <= 1:
            raise ValueError(f"draft.options: block {self.block} must be 2 or more, anchors {self.anchors} in (0, 1]")


class DFlashDraft(nn.Module):
    """`embed_tokens` and `lm_head` (the draft vocabulary's rows) are the target's, frozen."""

    drafter = "dflash"

    def __init__(self, config: DraftConfig, shape: BlockShape) -> None:
        super().__init__()
        self.config, self.shape = config, shape
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(config.feature_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(PlainLayer(config, NormedAttention) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.lm_head.weight.requires_grad_(False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.ones(config.vocab_size, dtype=torch.bool))
        frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def share_embedding(self, embedding: Tensor) -> None:
        """Take the target's embedding [V, H] itself."""
        self.embed_tokens.weight = nn.Parameter(embedding.detach(), requires_grad=False)

    @property
    def target_ids(self) -> Tensor:
        """Target id of every draft id, [D] int64."""
        return self.d2t + torch.arange(self.config.draft_vocab_size, device=self.d2t.device)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return cos_sin(positions, self.frequencies, dtype)

    def context(self, features: Tensor) -> Tensor:
        """Target features [rows, 3H] -> what every layer projects into keys and values, [rows, H]."""
        return self.hidden_norm(self.fc(features))

    def block_tokens(self, anchors: Tensor) -> Tensor:
        """Anchor tokens [n] -> the block's tokens [n, block]."""
        masks = torch.full((len(anchors), self.shape.block - 1), self.shape.mask_token_id, device=anchors.device)
        return torch.cat([anchors[:, None], masks], dim=1)

    def logits(self, output: Tensor) -> Tensor:
        """Outputs of places [rows, H] -> logits over the draft vocabulary [rows, D]; of no place (0), all alike."""
        return self.lm_head(self.norm(output))


@dataclass(frozen=True)
class BlockPass:
    """Every chain's block in one pass; attention is the causal part over context and a diagonal for each place."""

    dtype: torch.dtype = torch.float32

    def __call__(self, draft: DFlashDraft, batch: PackedBatch) -> list[Tensor]:
        """See `Unrolling`. Steps behind the block's end are zeros: there the draft knows nothing."""
        places, chains = draft.shape.block, batch.chains
        windows = batch.steps[0].windows
        with torch.autocast(batch.tokens.device.type, self.dtype, enabled=self.dtype != torch.float32):
            context = draft.context(batch.features.to(draft.lm_head.weight.dtype))
            turn = draft.rope(batch.positions, self.dtype)
            # Place-major: [block * C, H].
            x = draft.embed_tokens(draft.block_tokens(batch.tokens[chains]).T.flatten()).float()
            positions = batch.positions[chains] + 1 + torch.arange(places, device=chains.device)[:, None]
            own_turn = draft.rope(positions.flatten(), self.dtype)
            for layer in draft.layers:
                keys, values = (part.to(self.dtype) for part in layer.self_attn.keys_values(context, *turn))
                parts = (part.to(self.dtype).chunk(places) for part in layer.project(x, *own_turn))
                queries, own_keys, own_values = parts
                own = list(zip(own_keys, own_values, strict=True))
                attended = [ttt_attention(place, keys, values, windows, own) for place in queries]
                x = layer.finish(torch.cat(attended), x)
        outputs = x.unflatten(0, (places, -1))
        return [
            outputs[number + 1, : step.alive] if number + 1 < places else outputs.new_zeros(step.alive, x.shape[1])
            for number, step in enumerate(batch.steps)
            if step.alive
        ]


class BlockTraining(TrainingTimeTest):
    """Soft cross-entropy over the block's places, from a random share of the rows; scaled so that its expectation is
    that of all."""

    def forward(self, batch: PackedBatch | None, counts: Tensor | None = None) -> StepResult:
        if batch is None:
            return super().forward(batch, counts)
        share = self.draft.shape.anchors
        counts = batch.counts if counts is None else counts
        return super().forward(choose_anchors(batch, share), counts * share)


def choose_anchors(batch: PackedBatch, share: float) -> PackedBatch:
    """The batch with a random `share` of its chains, one at least, as its seed draws them."""
    drawn = torch.rand(len(batch.chains), generator=torch.Generator().manual_seed(batch.seed))
    kept = (drawn <= max(share, float(drawn.min()))).to(batch.chains.device)
    chains, place = batch.chains[kept], kept.cumsum(0) - 1
    document = batch.document.cpu()
    starts = torch.searchsorted(document, torch.arange(int(document[-1]) + 1))
    windows = find_windows(chains.cpu(), starts, document).to(batch.tokens.device)
    steps = [
        PackedStep(int(kept[: step.alive].sum()), windows, place[step.scored[kept[step.scored]]]) for step in batch.steps
    ]
    return replace(batch, chains=chains, steps=tuple(steps))


class DFlashCache:
    """B texts; a commit drafts the whole block behind each, and `step` reads it out whatever token was taken."""

    def __init__(self, draft: DFlashDraft, batch: int, slots: int) -> None:
        self._draft = draft
        self._cache = SlotCache(batch, slots + draft.shape.block, len(draft.layers))
        self._depths = torch.zeros(batch, 1, dtype=torch.int64)  # of every node
        self._drafted = torch.zeros(0)  # [B, block, D]: what is drafted behind a node of each depth
        self.logits = torch.zeros(0)

    @property
    def target_ids(self) -> Tensor:
        return self._draft.target_ids

    def begin(self, token_ids: Tensor) -> None:
        """A text's first token stands in no row."""

    def commit(self, features: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """See `DraftCache.commit`."""
        batch, rows = token_ids.shape
        draft, weight = self._draft, self._draft.lm_head.weight
        order = torch.arange(rows).expand(batch, -1)
        seen = torch.ones(rows, rows, dtype=torch.bool).tril().expand(batch, -1, -1)
        block = tree_block(token_ids, order, seen, order < counts[:, None], self._cache)
        context = draft.context(features.to(weight.device, weight.dtype).flatten(0, 1))
        turn = draft.rope(block.positions.flatten().to(weight.device), weight.dtype)
        for number, layer in enumerate(draft.layers):
            keys, values = layer.self_attn.keys_values(context, *turn)
            apart = (part.unflatten(0, (batch, rows)).transpose(1, 2) for part in (keys, values))
            self._cache.write(number, block.slots.to(weight.device), *apart, block.mask.shape[-1])
        self._cache.lengths = self._cache.lengths + counts
        outputs = self._block(token_ids[torch.arange(batch), counts - 1])
        # Behind the block's last place nothing is drafted: zeros, as in training's steps beyond it.
        drafted = torch.cat([outputs[:, 1:], torch.zeros_like(outputs[:, :1])], dim=1)
        self._drafted = draft.logits(drafted)
        self._depths = torch.zeros(batch, 1, dtype=torch.int64)
        self.logits = self._drafted[:, 0]

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor:
        """See `DraftCache.step`; only the depth of a node matters."""
        rows = torch.arange(len(token_ids))[:, None]
        depths = self._depths[rows, parents] + 1
        self._depths = torch.cat([self._depths, depths], dim=1)
        return self._drafted[rows, depths.clamp_max(self._draft.shape.block - 1)]

    def select(self, rows: Tensor) -> None:
        self._cache.select(rows)
        self._depths, self._drafted, self.logits = self._depths[rows], self._drafted[rows], self.logits[rows]

    def _block(self, anchors: Tensor) -> Tensor:
        """Outputs [B, block, H] behind the committed rows; the anchor's position is the next one."""
        draft, device = self._draft, self._draft.lm_head.weight.device
        tokens, length = draft.block_tokens(anchors), self._cache.lengths[:, None]
        places = length + torch.arange(tokens.shape[1])
        seen = torch.arange(int(places.max()) + 1) < (length + tokens.shape[1])
        block = Block(tokens, places, places, seen[:, None].expand(-1, tokens.shape[1], -1))
        x = draft.embed_tokens(tokens.flatten().to(device))
        turn = draft.rope(places.flatten().to(device), x.dtype)
        for number, layer in enumerate(draft.layers):
            x = layer.finish(attend(self._cache, number, block, *layer.project(x, *turn)), x)
        return x.unflatten(0, tokens.shape)


class DFlash(Drafter):
    def build(
        self, target: TargetParts, vocabulary: Tensor, layer_ids: Sequence[int], settings: Mapping[str, Any]
    ) -> DFlashDraft:
        config = DraftConfig.from_target(target.config, len(vocabulary), tuple(layer_ids))
        draft = DFlashDraft(config, BlockShape(**settings["options"]))
        draft.d2t.copy_(vocabulary - torch.arange(len(vocabulary)))
        draft.t2d.zero_()[vocabulary] = True
        draft.share_embedding(target.embedding)
        with torch.no_grad():
            draft.lm_head.weight.copy_(target.head[vocabulary])
            if settings["start_from_target"]:
                draft.norm.weight.copy_(target.norm)
        return draft

    def save(self, draft: DFlashDraft, folder: Path) -> None:
        tensors = {**trained_tensors(draft), "lm_head.weight": draft.lm_head.weight}
        if draft.config.draft_vocab_size < draft.config.vocab_size:
            tensors |= {name: getattr(draft, name) for name in MAP_NAMES}
        shape = draft.shape
        config = {
            **draft.config.to_dict(),
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": shape.layers,
            "block_size": shape.block,
            # vLLM adds 1 to these: they count layers, not states.
            "dflash_config": {
                "mask_token_id": shape.mask_token_id,
                "target_layer_ids": [layer - 1 for layer in draft.config.layer_ids],
                "gamma": shape.gamma,
                "anchors": shape.anchors,
            },
            "drafter": draft.drafter,
        }
        write_draft(folder, tensors, config)

    def load(self, folder: Path, target: TargetParts) -> DFlashDraft:
        raw = json.loads((folder / "config.json").read_text())
        own = raw["dflash_config"]
        shape = BlockShape(
            raw["block_size"], raw["num_hidden_layers"], own["gamma"], own["anchors"], own["mask_token_id"]
        )
        draft = DFlashDraft(DraftConfig.from_dict({**raw, "architectures": [ARCHITECTURE]}), shape)
        load_tensors(draft, load_file(folder / "model.safetensors"), folder, ("embed_tokens.weight", *(
            MAP_NAMES if draft.config.draft_vocab_size == draft.config.vocab_size else ()
        )))  # fmt: skip
        draft.share_embedding(target.embedding)
        return draft

    def settings(self, draft: DFlashDraft, config: TrainingConfig) -> TrainingConfig:
        """A step for every place but the anchor's; whole chains are drawn as anchors, not steps of them."""
        shape = draft.shape
        decay = math.exp(-1 / shape.gamma)
        return replace(config, ttt_steps=shape.block - 1, ttt_ramp=(), step_decay=decay, anchor_share=1.0)

    def unroll(self, dtype: torch.dtype = torch.float32, *, compiled: bool = False, recompute: bool = False) -> BlockPass:
        return BlockPass(dtype)

    def trainee(self, draft: DFlashDraft, config: TrainingConfig, unroll: Unrolling) -> BlockTraining:
        return BlockTraining(draft, config.loss, config.step_decay, unroll)

    def decoder(self, draft: DFlashDraft, batch: int, slots: int) -> DFlashCache:
        return DFlashCache(draft, batch, slots)

    def tree(self) -> Proposer:
        """A block is a chain: what stands at a place does not depend on what was taken before it."""
        return Chain(5)
