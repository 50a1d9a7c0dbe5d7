"""vLLM as an Engine: started once, inside this process, and stepped by hand.

In: requests. Out: answers, with the target's states where capture is on. The engine core runs in-process
(VLLM_ENABLE_V1_MULTIPROCESSING=0): on a CPU that saves two processes and their imports, gives the core that
vLLM would keep for its scheduler back to the model, and lets the states be handed over without a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from tasks.engines import capture as connector
from tasks.engines.requests import CaptureOptions, EngineOptions, Finished, Request, TargetFiles

STEP_TOKENS = 8192


def start(target: TargetFiles, options: EngineOptions, **more: Any) -> Any:
    """A `vllm.LLM` for this target; `more` goes to it as it is (capture, speculation)."""
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": target.path,
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "max_model_len": options.max_model_len,
        "max_num_seqs": options.capacity,
        "gpu_memory_utilization": options.memory_share,
        "tensor_parallel_size": options.tensor_parallel,
        "enforce_eager": options.enforce_eager,
        "seed": options.seed,
        "disable_log_stats": False,
        "generation_config": "vllm",  # the model's own default top-k or top-p would change what is sampled
    }
    return LLM(**settings | more)


class VllmEngine:
    """Requests are queued in vLLM itself, which batches them as they fit."""

    def __init__(
        self, target: TargetFiles, options: EngineOptions, capture: CaptureOptions | None, handover: Path
    ) -> None:
        more: dict[str, Any] = {}
        if capture is not None:
            # vLLM returns each layer once, by rising id; ours may come in any order and repeat.
            captured = sorted(set(capture.layer_ids))
            self._order = [captured.index(i) for i in capture.layer_ids]
            more = connector.engine_options(tuple(captured), handover if options.tensor_parallel > 1 else
            None)
        self.capacity = 2 * options.capacity  # as many again are queued, so that a slot is never empty
        self._captures = capture is not None
        self._eos = list(target.eos_token_ids)
        # Prompts are read whole: a request's own seed rewinds its generator when a chunk's token is thrown
        # away, which a CPU generator cannot do, and states must come from whole steps. So a step holds the
        # longest.
        more["enable_chunked_prefill"] = False
        more["max_num_batched_tokens"] = max(STEP_TOKENS, options.max_model_len)
        self.llm = start(target, options, **more)
        self._engine = self.llm.llm_engine
        if capture is not None:
            connector.draft_nothing(self._engine)
        self._requests: dict[str, Request] = {}  # by vLLM's id, a number: ours may hold any character
        self._outputs: dict[str, Any] = {}  # finished, their states not handed over yet
        self._count = 0

    def add(self, request: Request) -> None:
        # Reading T tokens takes T - 1: the last one's state predicts nothing that is known.
        token_ids = list(request.token_ids) if request.max_new_tokens else list(request.token_ids)[:-1]
        name = str(self._count)
        self._count += 1
        self._requests[name] = request
        self._engine.add_request(name, {"prompt_token_ids": token_ids}, self.parameters(request))

    def parameters(self, request: Request) -> Any:
        """The request's `vllm.SamplingParams`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        writes = request.max_new_tokens > 0
        sampled = writes and request.temperature > 0
        return SamplingParams(
            temperature=request.temperature if writes else 0.0,
            max_tokens=max(1, request.max_new_tokens),
            seed=request.seed if sampled else None,  # neither the batch nor a resume changes the text
            stop_token_ids=self._eos,
            detokenize=False,
            # Nobody reads an answer before it is whole; by default every step makes a copy of all of it so far.
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args=connector.REQUEST_OPTIONS if self._captures else None,
        )

    def step(self) -> list[Finished]:
        for output in self._engine.step():
            if output.finished:
                self._outputs[output.request_id] = output
        finished = []
        for name in list(self._outputs):
            states = connector.take(self._outputs[name].kv_transfer_params) if self._captures else None
            if self._captures and states is None:
                continue  # they are copied in the step after the last one
            finished.append(self._finished(self._requests.pop(name), self._outputs.pop(name), states))
        return finished

    def _finished(self, request: Request, output: Any, states: Tensor | None) -> Finished:
        answer = output.outputs[0]
        written = list(answer.token_ids) if request.max_new_tokens else []
        reason = answer.finish_reason if request.max_new_tokens else "given"
        if states is not None:
            states = states[:, self._order]
        return Finished(request.id, written, reason, states)
