"""What the experiments' flows share: every arm through the same DAG, what arms have in common once.

In: the name of one of a recipe's experiments. Out: its report's reference. Conversations, responses, features and
vocabulary are made once, for the union of what the arms read; a stage whose inputs and parameters are those of an
earlier arm is that arm's.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from flows import dag
from flows.shared import Build, started
from storage.artifacts import ArtifactRef
from tasks.experiment.arms import ArmRun, arm_runs, capture_union
from tasks.experiment.measures import Cell
from tasks.experiment.report_experiment import inputs_of, report_experiment
from tasks.experiment.result import MeasuredDraft
from tasks.recipe import Recipe, build_recipe
from tasks.stage_task import StageTask

# What only one arm's draft goes through; all before it is the experiment's.
OWN_KINDS = frozenset({"draft", "acceptance", "trees"})


def run_experiment(kind: str, recipe: Recipe, overrides: Mapping[str, Any] | None) -> ArtifactRef:
    """Train and measure every arm, decide the claims, draw the page. Arms are checked before any work."""
    arm_runs(kind, build_recipe(recipe.model_dump(mode="json"), overrides, where=f"recipe {recipe.name}"))
    with started(recipe, overrides) as build, ExitStack() as stack:
        runs = capture_union(arm_runs(kind, build.recipe), build.target)
        shared = Shared(build)
        trees = getattr(build.recipe.experiments, kind).trees
        arms = [stack.enter_context(build.arm(run.recipe, run.label)) for run in runs]
        drafts = [_measure(shared, run, arm, trees) for run, arm in zip(runs, arms, strict=True)]
        page = build.do(report_experiment(kind, drafts), *inputs_of(drafts))
        build.show(page)
        if build.tracker.opened:  # else an earlier run of the same experiment has all of them
            for arm, draft in zip(arms, drafts, strict=True):
                arm.tracker.finish(draft.acceptance, acceptance=draft.acceptance)
    return page


@dataclass
class Shared:
    """Stages of all arms, each done once in a run of the flow."""

    build: Build
    _made: dict[tuple[str, str], ArtifactRef] = field(default_factory=dict)

    def of(self, arm: Build) -> dag.Do:
        """The ways of one arm: its own stages are its own run's, the rest is the experiment's."""
        common = replace(self.build, recipe=arm.recipe.model_copy(update={"name": self.build.recipe.name}))

        def do(stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
            work = stage.plan(arm.recipe, arm.target, *inputs)
            key = (work.stage.kind, work.fingerprint)
            if key not in self._made:
                owner = arm if work.stage.kind in OWN_KINDS else common
                self._made[key] = owner.do(stage, *inputs)
            return self._made[key]

        return do


def _measure(shared: Shared, run: ArmRun, arm: Build, trees: bool) -> MeasuredDraft:
    trained, proof, tree = dag.measure(shared.of(arm), trees=trees)
    return MeasuredDraft(Cell(run.arm, run.share), run.seed, trained.draft, proof.acceptance, tree)
