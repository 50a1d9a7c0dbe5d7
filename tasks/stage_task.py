"""A stage as a Prefect task: found in the store, or made; its estimate said before, its time after.

In: a stage's plan, run and estimate functions. Out: an object that a flow calls with (recipe, target,
*artifacts). Importing this file does not import Prefect, so a worker process may import stage modules
cheaply.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.recipe import Recipe
from tasks.stage import Plan, Stage

if TYPE_CHECKING:
    from tasks.build_tracker import BuildTracker
    from tasks.prepare_target import TargetInfo

logger = logging.getLogger(__name__)


class NotBuiltError(LookupError):
    """An artifact that another flow has to make first."""


@dataclass(frozen=True)
class StageTask:
    """One stage of the DAG, callable inside a flow.

    `plan(recipe, target, *inputs) -> Plan` is cheap; `run(recipe, target, store, *inputs) -> ArtifactRef`
    finds or makes the artifact; `estimate(recipe, target, store, *inputs) -> float` gives the seconds it
    will take. `retries` is for stages whose failures can be of the moment (a server, a network), not for
    wrong input.
    """

    stage: Stage
    plan: Callable[..., Plan]
    run: Callable[..., ArtifactRef]
    estimate: Callable[..., float]
    retries: int = 0

    def __call__(
        self, recipe: Recipe, target: TargetInfo, *inputs: ArtifactRef, tracker: BuildTracker | None = None
    ) -> ArtifactRef:
        """Run as a Prefect task in the current flow.

        The cache key is the plan's fingerprint within its store. The manifest has the last word: where the
        artifact is gone, Prefect's own record of it is set aside.
        """
        from prefect import task

        store = ArtifactStore(recipe.store.uri)
        plan = self.plan(recipe, target, *inputs)
        found, expected = plan.find(store), store.reference(self.stage.kind, plan.fingerprint)
        if tracker is not None:
            tracker.planned(plan)

        @task(
            name=self.stage.name,
            task_run_name=f"{self.stage.name} {recipe.name}",
            cache_key_fn=lambda *_: re.sub(r"\W", "_", expected.uri),
            refresh_cache=found is None,
            persist_result=True,
            result_serializer="json",
            retries=self.retries,
            retry_delay_seconds=10,
            retry_condition_fn=_worth_retrying,
        )
        def work(inputs: tuple[ArtifactRef, ...]) -> ArtifactRef:
            if found is not None:
                return found
            return self.make(recipe, target, store, plan, *inputs, tracker=tracker)

        if found is not None:
            logger.info("%s: cached, %s", self.stage.name, found.uri)
        return work(inputs)

    def existing(self, recipe: Recipe, target: TargetInfo, *inputs: ArtifactRef) -> ArtifactRef:
        """The finished artifact. Raises NotBuiltError where this recipe, as it is, has none."""
        found = self.plan(recipe, target, *inputs).find(ArtifactStore(recipe.store.uri))
        if found is None:
            raise NotBuiltError(
                f"{recipe.name} has no {self.stage.kind} with these settings in {recipe.store.uri}: "
                f"build it first, `make build-draft TARGET={recipe.name}` with the same SET"
            )
        return found

    def make(
        self,
        recipe: Recipe,
        target: TargetInfo,
        store: ArtifactStore,
        plan: Plan,
        *inputs: ArtifactRef,
        tracker: BuildTracker | None = None,
    ) -> ArtifactRef:
        """Do the work without Prefect: estimate said first, measured time after."""
        logger.info("%s: %s", self.stage.name, spoken(self.estimate(recipe, target, store, *inputs)))
        started = time.monotonic()
        with tracker.stage(plan) if tracker else nullcontext():
            ref = self.run(recipe, target, store, *inputs)
        logger.info("%s: done in %s, %s", self.stage.name, duration(time.monotonic() - started), ref.uri)
        return ref


def stage_task(
    stage: Stage,
    plan: Callable[..., Plan],
    run: Callable[..., ArtifactRef],
    estimate: Callable[..., float],
    *,
    retries: int = 0,
) -> StageTask:
    """The stage's task; see StageTask."""
    return StageTask(stage, plan, run, estimate, retries)


def duration(seconds: float) -> str:
    """Seconds as a person says them: "8 s", "6 min", "1 h 20 min"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def spoken(seconds: float) -> str:
    """An estimate, rounded up to what it is good for: "about 6 min"."""
    if seconds < 10:
        return "some seconds"
    return f"about {duration(seconds if seconds >= 90 else 10 * -(-seconds // 10))}"


def _worth_retrying(task: object, task_run: object, state: object) -> bool:
    """Wrong input stays wrong; what a machine or a network did may not happen again."""
    error = state.result(raise_on_failure=False)  # type: ignore[attr-defined]
    return not isinstance(error, ValueError | LookupError | TypeError)
