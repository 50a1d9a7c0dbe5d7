"""The model card of a published draft, written from the run's own figures.

In: a `DraftReport`, the draft's configuration, and where target and draft will lie. Out: Markdown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eagle3core.drafters import DRAFTERS
from eagle3core.intervals import Rate
from tasks.recipe import Recipe
from tasks.report.data import DraftReport
from tasks.report.page import TEMPLATES
from tasks.report.serving_view import serving_lines

PACKAGE = "package:"


@dataclass(frozen=True)
class ServeCommands:
    """What a user types to serve a target with this draft.

    vllm_cpu: for vLLM's CPU build, whose own `vllm serve` does not start. sglang: None where SGLang does not serve
    this drafter.
    """

    vllm: str
    vllm_cpu: str
    sglang: str | None


def serve_commands(target: str, draft: str, chain_length: int, drafter: str = "eagle3") -> ServeCommands:
    """`target`: hub id or folder. `draft`: the published folder. `drafter`: its name in the registry."""
    line = DRAFTERS[drafter]
    speculative = json.dumps({"method": line.method, "model": draft, "num_speculative_tokens": chain_length})
    return ServeCommands(
        vllm=f"vllm serve {target} --speculative-config '{speculative}'",
        vllm_cpu=(
            f"python -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --model {target} --enforce-eager "
            f"--speculative-config '{speculative}'"
        ),
        sglang=(
            f"python -m sglang.launch_server --model-path {target} --speculative-algorithm {line.sglang} "
            f"--speculative-draft-model-path {draft} --speculative-num-steps {chain_length} "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {chain_length + 1}"
        )
        if line.sglang
        else None,
    )


def model_card(report: DraftReport, config: Mapping[str, Any], recipe: Recipe, commands: ServeCommands) -> str:
    """The card; its figures are the report's. config: the draft's config.json."""
    env = Environment(
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sources = ", ".join(
        f"{source.kind} ({source.uri}{', at most ' + format(source.limit, ',') if source.limit else ''})"
        for source in recipe.data.sources
    )
    answered = "the data's own answers" if recipe.responses.keep_answers else "answered by the target itself"
    text = env.get_template("card.md.j2").render(
        report=report,
        config=config,
        layer_ids=config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids", []),
        drafter=DRAFTERS[recipe.draft.drafter].title,
        tag=recipe.draft.drafter,
        K=report.evaluation.chain_length,
        figures=report.evaluation.figures,
        rate=_rate,
        target=report.target.removeprefix(PACKAGE),
        sentence=headline(report),
        serving_lines=serving_lines(report.serving),
        trained=report.trained,
        sources=f"prompts of {sources}, {answered}",
        commands=commands,
    )
    return text.rstrip() + "\n"


def headline(report: DraftReport) -> str:
    """The card's first sentence."""
    parts = [
        f"{figures.walk.tau_micro.value:.2f} tokens per target pass at temperature {figures.temperature:g} "
        f"({figures.walk.survival[0].value:.0%} of first drafted tokens accepted)"
        for figures in report.evaluation.figures
    ]
    return f"On held-out prompts this draft yields {' and '.join(parts)}."


def _rate(rate: Rate, digits: int) -> str:
    if math.isnan(rate.value):
        return "–"
    interval = "" if math.isnan(rate.low) else f" ({rate.low:.{digits}f}–{rate.high:.{digits}f})"
    return f"{rate.value:.{digits}f}{interval}"
