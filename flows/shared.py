"""What the flows share: the run's name, the recipe with its overrides, the target's checks, the pages they
leave.

In: a flow's parameters. Out: a `Build`, whose methods run stages, find them, and show what came of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from prefect import runtime, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.build_tracker import BuildTracker
from tasks.logs import log_to_file
from tasks.outcome import outcome_of
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe
from tasks.stage_task import StageTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Build:
    """One run of a flow: what it works with, and the ways it gets artifacts."""

    recipe: Recipe
    target: TargetInfo
    tracker: BuildTracker

    def do(self, stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        """The stage's artifact: found, or made now as a task of this run."""
        return stage(self.recipe, self.target, *inputs, tracker=self.tracker)

    @contextmanager
    def arm(self, recipe: Recipe, name: str) -> Iterator[Build]:
        """The same run with another recipe, under a name of its own with the tracker."""
        with self.tracker.arm(recipe, name) as tracker:
            yield replace(self, recipe=recipe, tracker=tracker)

    def existing(self, stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        """The stage's artifact, which has to be there. Raises NotBuiltError."""
        return stage.existing(self.recipe, self.target, *inputs)

    def show(self, result: ArtifactRef, *, acceptance: ArtifactRef | None = None) -> None:
        """Leave the outcome with the tracker and on the run's page, and say where to look as the log's last
        lines.
        """
        tracked = self.tracker.finish(result, acceptance=acceptance)
        store = ArtifactStore(self.recipe.store.uri)
        outcome = outcome_of(self.recipe, self.target, store, result, acceptance, tracked)
        key = self.recipe.name.replace(".", "-")
        if outcome.acceptance:
            create_table_artifact(
                key=f"{key}-acceptance",
                table=[dict(row) for row in outcome.acceptance],
                description=f"Acceptance of {self.recipe.name}'s draft by position, on held-out prompts",
            )
        if tracked:
            create_link_artifact(key=f"{key}-mlflow", link=tracked, link_text="MLflow run")
        create_markdown_artifact(outcome.markdown(), key=f"{key}-result", description="Where to look")
        for line in outcome.lines():
            logger.info("%s", line)


def run_name() -> str:
    """A flow run's name: the recipe, and what was changed in it."""
    parameters = runtime.flow_run.parameters
    recipe = parameters["recipe"]
    name = recipe if isinstance(recipe, str) else recipe["name"] if isinstance(recipe, dict) else recipe.name
    return " ".join([name, *(f"{key}={value}" for key, value in (parameters.get("overrides") or {}).items())])


@task(name="prepare-target", task_run_name="prepare-target {recipe.name}")
def check_target(recipe: Recipe) -> TargetInfo:
    """The target, looked at before any work: weights, tokenizer, template, a device with enough memory."""
    return prepare_target(recipe)


@contextmanager
def started(recipe: Recipe, overrides: Mapping[str, Any] | None) -> Iterator[Build]:
    """Around a flow's stages: its log file, the recipe as overridden, the checked target, the tracker."""
    flow_name = runtime.flow_run.flow_name
    with log_to_file(f"{flow_name}-{recipe.name}"):
        recipe = build_recipe(recipe.model_dump(mode="json"), overrides, where=f"recipe {recipe.name}")
        target = check_target(recipe)
        page = runtime.flow_run.ui_url
        with BuildTracker(recipe, target, flow=flow_name, name=f"{flow_name} {runtime.flow_run.name}", page=page) as tracker:
            yield Build(recipe, target, tracker)
