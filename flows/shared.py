"""What the flows share: the run's name, the recipe with its overrides, the target's checks, the pages they
leave.

In: a flow's parameters. Out: typed values, and the artifacts that Prefect's page of the run shows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect import runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact
from tasks.outcome import Outcome

from tasks.build_tracker import BuildTracker
from tasks.logs import log_to_file
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe

logger = logging.getLogger(__name__)


def run_name() -> str:
    """A flow run's name: the recipe, and what was changed in it."""
    parameters = runtime.flow_run.parameters
    recipe = parameters["recipe"]
    name = recipe.name if isinstance(recipe, Recipe) else recipe["name"]
    changes = [f"{key}={value}" for key, value in (parameters.get("overrides") or {}).items()]
    return " ".join([name, *changes])


@task(name="prepare-target", task_run_name="prepare-target {recipe.name}")
def check_target(recipe: Recipe) -> TargetInfo:
    """The target, looked at before any work: weights, tokenizer, template, a device with enough memory."""
    return prepare_target(recipe)


@contextmanager
def started(
    recipe: Recipe, overrides: Mapping[str, Any] | None
) -> Iterator[tuple[Recipe, TargetInfo, BuildTracker]]:
    """Around a flow's stages: its log file, the recipe as overridden, the checked target, the tracker."""
    name = runtime.flow_run.flow_name
    logger.info("everything is logged to %s", log_to_file(f"{name}-{recipe.name}"))
    recipe = build_recipe(recipe.model_dump(mode="json"), overrides, where=f"recipe {recipe.name}")
    target = check_target(recipe)
    with BuildTracker(
        recipe, target, flow=name, name=runtime.flow_run.name, page=runtime.flow_run.ui_url
    ) as tracker:
        yield recipe, target, tracker


def show(outcome: Outcome) -> None:
    """Leave the outcome on the run's page, and say where to look as the last lines of the log."""
    if outcome.acceptance:
        create_table_artifact(
            key=f"{outcome.name}-acceptance",
            table=outcome.acceptance,
            description=f"Acceptance of {outcome.name} per draft position, on held-out prompts",
        )
    if outcome.tracked:
        create_link_artifact(key=f"{outcome.name}-mlflow", link=outcome.tracked, link_text="MLflow run")
    create_markdown_artifact(
        key=f"{outcome.name}-result", markdown=outcome.markdown(), description="Where to look"
    )
    for line in outcome.lines():
        logger.info("%s", line)
