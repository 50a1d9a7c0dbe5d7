"""A server under test: `python -m tasks.engines.serve_worker spec.json` answers prompts and counts.

In: a ServeSpec. Out: one event a temperature, a `Served`: the answers and vLLM's own counters. Nothing is
captured and nothing of vLLM's decoding is replaced (but for vllm_patches), so what is counted is what a
server would do.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.engines import vllm_patches
from tasks.engines.requests import job_seed
from tasks.engines.serve_requests import DRAFT, NGRAM, PLAIN, Served, ServeSpec
from tasks.engines.vllm_engine import STEP_TOKENS, start
from tasks.processes import emit

# vLLM's own defaults for its free drafts: the last five tokens are looked up in the text so far.
LOOKUP = 5


def speculation(spec: ServeSpec) -> dict[str, Any]:
    """vLLM's `speculative_config`, or nothing."""
    if spec.method == PLAIN:
        return {}
    config: dict[str, Any] = {"method": spec.method, "num_speculative_tokens": spec.draft_length}
    if spec.method == DRAFT:
        config |= {"model": spec.draft, "method": spec.drafter}
    if spec.method == NGRAM:
        config |= {"prompt_lookup_max": LOOKUP, "prompt_lookup_min": LOOKUP}
    return {"speculative_config": config}


def serve(llm: Any, spec: ServeSpec, temperature: float) -> Served:
    """All prompts at one temperature, stepped by hand so that every decoding round is seen."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    before = counters(llm, spec.draft_length)
    names = {}
    prompts = [prompt for prompt in spec.prompts if prompt.temperature == temperature]
    for number, prompt in enumerate(prompts):
        parameters = SamplingParams(
            temperature=temperature,
            max_tokens=spec.max_new_tokens,
            seed=job_seed(spec.options.seed, prompt.id) if temperature > 0 else None,
            stop_token_ids=list(spec.target.eos_token_ids),
            detokenize=False,
            logprobs=2 if spec.gaps else None,
        )
        names[f"{number}-{temperature:g}"] = prompt.id
        engine.add_request(
            f"{number}-{temperature:g}", {"prompt_token_ids": list(prompt.token_ids)}, parameters
        )
    answers: dict[str, list[int]] = {}
    gaps: dict[str, list[float]] = {}
    rounds = 0
    began = time.monotonic()
    while engine.has_unfinished_requests():
        for output in engine.step():
            rounds += 1
            if output.finished:
                answer = output.outputs[0]
                answers[names[output.request_id]] = list(answer.token_ids)
                if spec.gaps:
                    gaps[names[output.request_id]] = [_gap(each) for each in answer.logprobs]
    seconds = time.monotonic() - began
    after = counters(llm, spec.draft_length)
    return Served(
        method=spec.method,
        temperature=temperature,
        answers=answers,
        gaps=gaps,
        drafts=after[0] - before[0],
        drafted=after[1] - before[1],
        accepted=[now - then for now, then in zip(after[2], before[2], strict=True)],
        rounds=rounds - len(prompts),  # a prompt's first token comes from reading it
        seconds=seconds,
    )


def counters(llm: Any, length: int) -> tuple[int, int, list[int]]:
    """vLLM's own (drafts, drafted tokens, accepted tokens by position) since it was started."""
    values = {metric.name: metric for metric in llm.get_metrics()}

    def count(name: str) -> int:
        metric = values.get(f"vllm:spec_decode_num_{name}")
        return int(metric.value) if metric else 0

    positions = values.get("vllm:spec_decode_num_accepted_tokens_per_pos")
    accepted = [int(value) for value in positions.values] if positions else [0] * length
    return count("drafts"), count("draft_tokens"), accepted


def _gap(position: Any) -> float:
    """Log-probability of the likeliest token less that of the second."""
    first, second = sorted((entry.logprob for entry in position.values()), reverse=True)[:2]
    return first - second


def _main(path: str) -> None:
    spec = ServeSpec.from_dict(json.loads(Path(path).read_text()))
    vllm_patches.apply()
    began = time.monotonic()
    llm = start(
        spec.target,
        spec.options,
        enable_prefix_caching=False,  # both temperatures must do the same work
        enable_chunked_prefill=False,  # a CPU generator cannot be rewound for a chunk
        max_num_batched_tokens=max(STEP_TOKENS, spec.options.max_model_len),
        **speculation(spec),
    )
    emit({"kind": "started", "seconds": round(time.monotonic() - began, 3)})
    for temperature in sorted({prompt.temperature for prompt in spec.prompts}):
        emit({"kind": "served", **asdict(serve(llm, spec, temperature))})
    sys.stdout.flush()
    os._exit(0)  # as in tasks.engines.worker: a clean exit of the engine takes long and does nothing for us


if __name__ == "__main__":
    _main(sys.argv[1])
