"""`make plan` and `make report`: what a build would do and take, and where the finished one is.

Neither runs the target: a plan makes the conversations at most, which its figures are counted on.

In: a recipe. Out: lines on the console; `python -m flows plan RECIPE`, `python -m flows report RECIPE`.
"""

from __future__ import annotations

from flows import dag
from storage.artifacts import ArtifactRef, ArtifactStore
from storage.errors import StorageError
from tasks.outcome import outcome_of
from tasks.plan_build import page
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe
from tasks.stage_task import StageTask, spoken


def plan(recipe: Recipe) -> None:
    """Print what the prompts are and what the stages will take; then every stage: there, or to be made."""
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
    stage: StageTask,
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    inputs: tuple[ArtifactRef, ...],
) -> str:
    try:
        return spoken(stage.estimate(recipe, target, store, *inputs))
    except (StorageError, OSError):
        return "its time is known once its inputs are there"
