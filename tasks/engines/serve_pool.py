"""The serving check's engines: one for every way to speculate, side by side, each asked the same prompts.

In: a recipe, the draft's folder, prompts. Out: what each engine answered and counted (`Served`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3core.drafters import DRAFTERS
from tasks.engines.pool import engine_count, engine_options, environment, target_files
from tasks.engines.serve_requests import DRAFT, PLAIN, Prompt, Served, ServeSpec
from tasks.prepare_target import TargetInfo
from tasks.processes import device_lock, run_worker
from tasks.promise import Promised
from tasks.recipe import Recipe

logger = logging.getLogger(__name__)


def methods_of(recipe: Recipe) -> list[str]:
    return [DRAFT, PLAIN, *recipe.serving.baselines]


def serve_specs(
    recipe: Recipe, target: TargetInfo, draft: str, promised: Mapping[float, Sequence[Promised]]
) -> list[ServeSpec]:
    """One engine for every method, each asked the same prompts."""
    prompts = [
        Prompt(each.response.conversation_id, temperature, each.prompt_token_ids)
        for temperature, those in promised.items()
        for each in those
    ]
    return [
        ServeSpec(
            target=target_files(target),
            options=engine_options(recipe, "vllm", recipe.serving.max_num_seqs),
            method=method,
            draft=draft,
            draft_length=recipe.evaluation.chain_length,
            prompts=prompts,
            max_new_tokens=recipe.serving.max_new_tokens,
            drafter=DRAFTERS[recipe.draft.drafter].method,
        )
        for method in methods_of(recipe)
    ]


def near_ties(specs: Sequence[ServeSpec], names: set[str]) -> ServeSpec:
    """The plain engine once more, for these prompts alone, saying how near each token was to a tie."""
    plain = next(spec for spec in specs if spec.method == PLAIN)
    prompts = [each for each in plain.prompts if each.temperature == 0 and each.id in names]
    return replace(plain, prompts=prompts, gaps=True)


def serve(recipe: Recipe, target: TargetInfo, specs: Sequence[ServeSpec], place: Path) -> list[Served]:
    """Run the engines, as many side by side as the device has room for; `place` gets specs and logs."""
    engines = engine_count(recipe, target, len(specs))
    served: list[Served] = []
    failed = threading.Event()
    slots = list(range(engines))

    def work(number: int, spec: ServeSpec) -> None:
        slot = slots.pop()
        try:
            run_worker(
                "tasks.engines.serve_worker",
                spec.to_dict(),
                folder=place / f"{spec.method}-{number}",
                python=recipe.vllm.python,
                env=environment(recipe, engines, slot),
                on_event=lambda event: _hear(event, served),
                cancelled=failed.is_set,
            )
        except BaseException:
            failed.set()
            raise
        slots.append(slot)

    with device_lock(), ThreadPoolExecutor(engines, thread_name_prefix="serve") as threads:
        try:
            for future in [threads.submit(work, number, spec) for number, spec in enumerate(specs)]:
                future.result()
        except BaseException:
            failed.set()
            raise
    return served


def _hear(event: dict[str, Any], served: list[Served]) -> None:
    if event.pop("kind") == "served":
        served.append(Served(**event))
        each = served[-1]
        words = (each.method, each.temperature, each.tokens, each.seconds)
        logger.info("%s at T = %g: %d tokens in %.0f s", *words)
