"""The stage that puts together what a user takes away.

In: a draft, its acceptance and (where it was made) its serving check. Out: a published artifact that a server
loads as it is: model.safetensors, config.json, README.md (the model card), report.html and the curves. A
draft whose figures cannot be those of an honest, working one is published with that warning on top of card
and report, and in the manifest.
"""

from __future__ import annotations

import json
import logging
import shutil
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.model_card import PACKAGE, model_card, serve_commands
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.report.data import DraftReport, gather
from tasks.report.page import render
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.train_draft import DRAFT_FOLDER

log = logging.getLogger(__name__)

STAGE = Stage(name="publish-draft", kind="published", version=1)

WEIGHTS, CONFIG, CARD, REPORT = "model.safetensors", "config.json", "README.md", "report.html"
CURVES = ("curves.svg", "curves.png")
COPY_BYTES = 8 << 20


def plan(
    recipe: Recipe,
    target: TargetInfo,
    draft: ArtifactRef,
    acceptance: ArtifactRef,
    serving: ArtifactRef | None = None,
) -> Plan:
    """The card names recipe, target and prompts, so a change of these is another publication."""
    parameters = {
        "name": recipe.name,
        "target": target.model,
        "sources": [source.model_dump(mode="json") for source in recipe.data.sources],
        "keep_answers": recipe.responses.keep_answers,
        "drafter": recipe.draft.drafter,
    }
    return Plan(STAGE, parameters, (draft, acceptance, *([serving] if serving else [])))


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, *inputs: ArtifactRef) -> float:
    """Seconds: a page and a copy of the weights at some 200 MB/s."""
    return 3 + store.manifest(inputs[0]).bytes / 200e6


def run(
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    draft: ArtifactRef,
    acceptance: ArtifactRef,
    serving: ArtifactRef | None = None,
) -> ArtifactRef:
    def work(writer: ArtifactWriter) -> dict[str, Any]:
        return _publish(writer, recipe, target, store, gather(store, draft, acceptance, serving), acceptance)

    return run_plan(plan(recipe, target, draft, acceptance, serving), store, work)


def _publish(
    writer: ArtifactWriter,
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    report: DraftReport,
    acceptance: ArtifactRef,
) -> dict[str, Any]:
    source = store.local(report.draft) / DRAFT_FOLDER
    proof = store.local(acceptance)
    for path in (source / WEIGHTS, source / CONFIG, *(proof / name for name in CURVES)):
        with path.open("rb") as original, writer.create(path.name) as copy:
            shutil.copyfileobj(original, copy, COPY_BYTES)
    # A target from a package is served from the folder that it was turned into.
    served = target.path if target.model.startswith(PACKAGE) else target.model
    commands = serve_commands(served, writer.ref.uri, report.evaluation.chain_length, recipe.draft.drafter)
    config = json.loads((source / CONFIG).read_text())
    writer.write_text(CARD, model_card(report, config, recipe, commands))
    writer.write_text(REPORT, render(report))
    if report.warning:
        log.warning("published with a warning on its card: %s", report.warning)
    log.info("draft: %s", writer.ref.uri)
    log.info("report: %s/%s", writer.ref.uri, REPORT)
    log.info("serve it: %s", commands.vllm)
    log.info("or, on a machine without a GPU: %s", commands.vllm_cpu)
    return {
        "recipe": recipe.name,
        "target": report.target,
        "suspicious": report.warning,
        "parameters": report.parameters,
        "tau": {
            f"{figures.temperature:g}": figures.walk.tau_micro.value for figures in report.evaluation.figures
        },
        "serve": commands.vllm,
    }


publish_draft = stage_task(STAGE, plan, run, estimate)
