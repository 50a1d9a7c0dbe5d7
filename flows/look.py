"""`make plan` and `make report`: what a build would do and take, and where the finished one is.

Neither runs the target: a plan makes the conversations at most, which its figures are counted on.

In: a recipe. Out: lines on the console; `python -m flows plan RECIPE`, `python -m flows report RECIPE`.
"""

from __future__ import annotations

import math
from functools import partial

from flows import dag
from storage.artifacts import ArtifactRef, ArtifactStore
from storage.errors import StorageError
from tasks.experiment.arms import ArmRun, arm_runs, capture_union
from tasks.experiment.settings import ABLATE, COMPARE, SCALE
from tasks.outcome import outcome_of
from tasks.plan_build import page
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe
from tasks.stage_task import StageTask, spoken

KINDS = (ABLATE, SCALE, COMPARE)  # in the order of `make reproduce`


def plan(recipe: Recipe) -> None:
    """Print what the prompts are and what the stages will take; then every stage: there, or to be made; then the
    experiments.
    """
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    print("\n".join([*page(recipe, target, store), ""]))

    def look(stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        work = stage.plan(recipe, target, *inputs)
        found = work.find(store) is not None
        state = "there" if found else f"to make, {_estimate(stage, recipe, target, store, inputs)}"
        print(f"{stage.stage.name:<24}{work.fingerprint}  {state}")
        return store.reference(stage.stage.kind, work.fingerprint)

    trained = dag.train(look)
    dag.publish(look, trained, dag.prove(look, trained, serving=recipe.serving.enabled))
    print("\nexperiments")
    for kind in KINDS:
        print(_experiment(kind, recipe, target, store))


def _experiment(kind: str, recipe: Recipe, target: TargetInfo, store: ArtifactStore) -> str:
    """One line: its drafts, those that are there, the time of what is to be made."""
    runs = capture_union(arm_runs(kind, recipe), target)
    drafts: set[str] = set()
    missing: dict[tuple[str, str], float] = {}

    def look(run: ArmRun, stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        work = stage.plan(run.recipe, target, *inputs)
        ref = store.reference(stage.stage.kind, work.fingerprint)
        if ref.kind == "draft":
            drafts.add(ref.fingerprint)
        if work.find(store) is None and (ref.kind, ref.fingerprint) not in missing:
            missing[ref.kind, ref.fingerprint] = _seconds(stage, run.recipe, target, store, inputs)
        return ref

    for run in runs:
        dag.measure(partial(look, run), trees=getattr(recipe.experiments, kind).trees)
    new = sum(kind == "draft" for kind, _ in missing)
    times = [seconds for seconds in missing.values() if not math.isnan(seconds)]
    unknown = len(missing) - len(times)
    state = f"{spoken(sum(times))} to go" if missing else "all there"
    later = f", and {unknown} stages whose time is known later" if unknown else ""
    return f"{kind.replace('_', '-'):<24}{len(drafts)} drafts, {new} to train; {state}{later}"


def report(recipe: Recipe) -> None:
    """Print where the finished draft, its report and its runs are. Raises NotBuiltError where it is not
    finished.
    """
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)

    def existing(stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        return stage.existing(recipe, target, *inputs)

    trained = dag.train(existing)
    proof = dag.prove(existing, trained, serving=recipe.serving.enabled)
    published = dag.publish(existing, trained, proof)
    for line in outcome_of(recipe, target, store, published, proof.acceptance, None).lines():
        print(line)


def _estimate(
    stage: StageTask, recipe: Recipe, target: TargetInfo, store: ArtifactStore, inputs: tuple[ArtifactRef, ...]
) -> str:
    seconds = _seconds(stage, recipe, target, store, inputs)
    return "its time is known once its inputs are there" if math.isnan(seconds) else spoken(seconds)


def _seconds(
    stage: StageTask, recipe: Recipe, target: TargetInfo, store: ArtifactStore, inputs: tuple[ArtifactRef, ...]
) -> float:
    """NaN where it follows from an artifact that is not there yet."""
    try:
        return stage.estimate(recipe, target, store, *inputs)
    except (StorageError, OSError):
        return math.nan
