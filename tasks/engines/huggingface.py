"""Hugging Face transformers as an Engine: slow, exact, and the reference that vLLM is held against.

In: requests. Out: answers, with the target's states where capture is on. Requests are batched by equal prompt
length, so no row is padded: a row's numbers are those it would have alone (up to the order of sums). Text that
is only read is read alone: its states are the same to the bit whatever else is asked, and whenever.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from tasks.engines.requests import CaptureOptions, EngineOptions, Finished, Request, TargetFiles


@dataclass
class _Row:
    """One request in the running batch: what it wrote, and its captured states step by step."""

    request: Request
    written: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)


class HuggingFaceEngine:
    """`step` takes waiting requests of one prompt length, at most `capacity`, and runs them to their ends; one
    alone where nothing is to be written.
    """

    def __init__(self, target: TargetFiles, options: EngineOptions, capture: CaptureOptions | None) -> None:
        self.capacity = options.capacity
        self._eos = set(target.eos_token_ids)
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._layer_ids = capture.layer_ids if capture else ()
        self._model = AutoModelForCausalLM.from_pretrained(
            target.path, dtype=getattr(torch, target.dtype), trust_remote_code=target.trust_remote_code
        ).to(self._device)
        self._model.eval()
        self._before_norm: Tensor | None = None
        if capture:
            # hidden_states[L] is what comes *out* of the final norm; its input is the residual that vLLM
            # captures.
            self._model.base_model.norm.register_forward_pre_hook(self._keep_before_norm)
        self._waiting: list[Request] = []

    def add(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Finished]:
        if not self._waiting:
            return []
        kinds = Counter(self._kind(request) for request in self._waiting)
        chosen = kinds.most_common(1)[0][0]
        most = self.capacity if chosen[1] else 1
        batch = [request for request in self._waiting if self._kind(request) == chosen][:most]
        taken = {id(request) for request in batch}
        self._waiting = [request for request in self._waiting if id(request) not in taken]
        return self._run(batch)

    @staticmethod
    def _kind(request: Request) -> tuple[int, bool]:
        return len(request.token_ids), request.max_new_tokens > 0

    @torch.inference_mode()
    def _run(self, batch: list[Request]) -> list[Finished]:
        rows = [_Row(request) for request in batch]
        for row in rows:
            row.generator.manual_seed(row.request.seed)
        writes = batch[0].max_new_tokens > 0
        # Reading T tokens takes T - 1: the last one's state predicts nothing that is known.
        inputs = torch.tensor([list(r.token_ids) if writes else list(r.token_ids)[:-1] for r in batch])
        if not writes:
            self._forward(inputs, None, rows)
            return [self._finished(row, "given") for row in rows]
        cache = DynamicCache(config=self._model.config)
        finished: list[Finished] = []
        while rows:
            logits = self._forward(inputs, cache, rows)
            going: list[int] = []
            for i, row in enumerate(rows):
                row.written.append(_choose(logits[i], row.request.temperature, row.generator))
                reason = self._reason(row)
                if reason:
                    finished.append(self._finished(row, reason))
                else:
                    going.append(i)
            if len(going) < len(rows):
                cache.batch_select_indices(torch.tensor(going, dtype=torch.long, device=self._device))
                rows = [rows[i] for i in going]
            inputs = torch.tensor([[row.written[-1]] for row in rows])
        return finished

    def _forward(self, inputs: Tensor, cache: DynamicCache | None, rows: list[_Row]) -> Tensor:
        """One pass: keeps each row's states of `inputs` [B, t]; returns the last logits [B, V] in fp32."""
        output = self._model(
            inputs.to(self._device),
            past_key_values=cache,
            use_cache=cache is not None,
            output_hidden_states=bool(self._layer_ids),
            logits_to_keep=1,
        )
        if self._layer_ids:
            last = self._model.config.get_text_config().num_hidden_layers
            states = [self._before_norm if i == last else output.hidden_states[i] for i in self._layer_ids]
            stacked = torch.stack(states, dim=2).cpu()
            for row, state in zip(rows, stacked, strict=True):
                row.states.append(state)
        return output.logits[:, -1].float().cpu()

    def _reason(self, row: _Row) -> str | None:
        if row.written[-1] in self._eos:
            return "stop"
        return "length" if len(row.written) >= row.request.max_new_tokens else None

    def _finished(self, row: _Row, reason: str) -> Finished:
        states = torch.cat(row.states) if row.states else None
        return Finished(row.request.id, row.written, reason, states)

    def _keep_before_norm(self, _module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._before_norm = inputs[0]


def _choose(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """The next token of one row: the likeliest, or a draw from softmax(logits / temperature)."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))
