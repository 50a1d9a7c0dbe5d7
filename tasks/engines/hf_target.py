"""A Hugging Face causal LM as the decoders' `TargetModel`: tree attention in one pass, a slot cache.

In: a loaded model and the captured layer ids (HF `hidden_states` indices). Out: logits, features.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from eagle3core.batch import Document, TopKTeacher
from eagle3core.decoding.target import Block, SlotCache, TargetOutput, prompt_block


class HuggingFaceTarget:
    """Any decoder that takes a 4D mask and position ids as Llama does (Llama, Mistral, Qwen2, Qwen3)."""

    def __init__(self, model: PreTrainedModel, layer_ids: tuple[int, ...]) -> None:
        self._model = model.eval()
        self._layers = model.config.get_text_config().num_hidden_layers
        self._layer_ids = self._known(layer_ids)
        self._wanted: tuple[int, ...] = ()
        self._captured: dict[int, Tensor] = {}
        # hidden_states[k] is what goes into layer k (0-based), and into the final norm for the last.
        for layer, module in enumerate([*model.base_model.layers, model.base_model.norm]):
            module.register_forward_pre_hook(self._keeper(layer))

    @classmethod
    def load(cls, folder: Path, layer_ids: tuple[int, ...], dtype: torch.dtype) -> HuggingFaceTarget:
        """From a Hugging Face folder, on the first GPU where there is one."""
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
        return cls(model.to("cuda" if torch.cuda.is_available() else "cpu"), layer_ids)

    @property
    def vocab_size(self) -> int:
        return self._model.config.get_text_config().vocab_size

    def new_cache(self, batch: int, slots: int) -> SlotCache:
        return SlotCache(batch, slots, self._layers)

    def forward(self, block: Block, cache: SlotCache) -> TargetOutput:
        return self._run(block, cache, self._layer_ids)

    def capture(self, texts: Sequence[Tensor], layer_ids: tuple[int, ...]) -> list[Tensor]:
        """Features [T - 1, 3H] of every text [T] at any three layers, all texts in one padded batch."""
        cache = self.new_cache(len(texts), max(len(text) for text in texts))
        output = self._run(prompt_block([text[:-1] for text in texts], cache), cache, self._known(layer_ids))
        return [
            features[: len(text) - 1].cpu() for features, text in zip(output.features, texts, strict=True)
        ]

    def document(self, prompt: Tensor, answer: Tensor, name: str, top_k: int = 16) -> Document:
        """A prompt [P] and the target's own answer [n] with features and a top-k teacher, from one pass."""
        text = torch.cat([prompt, answer])
        cache = self.new_cache(1, len(text))
        output = self.forward(prompt_block([text[:-1]], cache), cache)
        log_probs = output.logits[0].float().log_softmax(-1).cpu()
        best = log_probs.topk(top_k, dim=-1)
        rest = log_probs.scatter(1, best.indices, -torch.inf).logsumexp(-1)
        supervised = torch.arange(len(text)) >= len(prompt)
        teacher = TopKTeacher(best.indices, best.values, rest)
        return Document(name, text, supervised, output.features[0].cpu(), teacher)

    @torch.no_grad()
    def _run(self, block: Block, cache: SlotCache, layer_ids: tuple[int, ...]) -> TargetOutput:
        device = self._model.device
        mask = block.mask.to(device)[:, None]
        self._wanted = layer_ids
        output = self._model(
            input_ids=block.token_ids.to(device),
            position_ids=block.positions.to(device),
            attention_mask=torch.zeros(mask.shape, dtype=self._model.dtype, device=device).masked_fill_(
                ~mask, torch.finfo(self._model.dtype).min
            ),
            past_key_values=_BlockCache(cache, block.slots.to(device), mask.shape[-1]),
            use_cache=True,
        )
        # Nothing captured is a draft that reads tokens alone: features of width 0.
        features = torch.cat([output.logits[..., :0], *(self._captured[layer] for layer in layer_ids)], dim=-1)
        self._wanted = ()
        self._captured.clear()
        return TargetOutput(output.logits, features)

    def _known(self, layer_ids: tuple[int, ...]) -> tuple[int, ...]:
        for layer in layer_ids:
            if not 0 <= layer <= self._layers:
                raise ValueError(f"layer id {layer} is not in 0..{self._layers}, the target's hidden states")
        return layer_ids

    def _keeper(self, layer: int) -> Any:
        def keep(_module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if layer in self._wanted:
                self._captured[layer] = inputs[0]

        return keep


class _BlockCache:
    """What a transformers attention layer sees of the cache during one block."""

    is_compileable = False

    def __init__(self, cache: SlotCache, slots: Tensor, width: int) -> None:
        self._cache, self._slots, self._width = cache, slots, width

    def update(
        self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self._cache.write(layer, self._slots, keys, values, self._width)

    def get_seq_length(self, *_: Any) -> int:
        return 0  # positions are given with every block
