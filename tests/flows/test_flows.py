"""The flows around their stages: order, cache, names, what is left on the run's page, what an error looks
like.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun, TaskRun

from flows.build_draft import build_draft
from flows.evaluate_draft import evaluate_draft
from flows.regenerate_data import regenerate_data
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.recipe import Recipe, RecipeError
from tasks.stage_task import NotBuiltError
from tests.flows.fake_stages import FakeStage

Stages = dict[str, FakeStage]


def run(
    flow: Any, recipe: Recipe, overrides: dict[str, Any] | None = None
) -> tuple[ArtifactRef, FlowRun, list[TaskRun]]:
    """The flow's result, its run, and its task runs in the order of their starts."""
    state = flow(recipe=recipe, overrides=overrides, return_state=True)
    result = state.result()
    run_id = state.state_details.flow_run_id
    with get_client(sync_client=True) as client:
        return result, client.read_flow_run(run_id), settled_tasks(client, run_id)


def settled_tasks(client: SyncPrefectClient, run_id: UUID) -> list[TaskRun]:
    """The server learns of task runs from events, some of them after the flow's end: read until nothing is new."""
    before: list[tuple[UUID, str]] | None = None
    for _ in range(60):
        tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[run_id])))
        now = sorted((task.id, task.state.name) for task in tasks)
        if tasks and now == before and all(task.state.is_final() and task.start_time for task in tasks):
            return sorted(tasks, key=lambda task: task.start_time)
        before = now
        time.sleep(1)
    raise AssertionError(f"the task runs of {run_id} did not settle: {before}")


def calls(stages: Stages) -> dict[str, int]:
    return {name: stage.calls for name, stage in stages.items()}


def each_ran_once(stages: Stages) -> bool:
    """Every stage of a build did; the experiments' own one is none of them."""
    done = calls(stages)
    return done.pop("measure_trees") == 0 and set(done.values()) == {1}


def test_a_build_runs_every_stage_once_in_order_and_returns_the_published_draft(
    stages: Stages, recipe: Recipe
):
    published, flow_run, tasks = run(build_draft, recipe)
    assert published.kind == "published"
    assert each_ran_once(stages)
    assert [task.name for task in tasks] == [
        f"{name} smollm2-135m"
        for name in (
            "prepare-target",
            "prepare-conversations",
            "make-responses",
            "extract-features",
            "build-vocabulary",
            "train-draft",
            "evaluate-draft",
            "check-serving",
            "publish-draft",
        )
    ]
    assert flow_run.name == "smollm2-135m"


def test_what_was_done_is_cached_and_what_was_deleted_is_made_again(stages: Stages, recipe: Recipe):
    run(build_draft, recipe)
    published, _, tasks = run(build_draft, recipe)
    assert [task.state.name for task in tasks[1:]] == ["Cached"] * 8
    assert each_ran_once(stages)

    store = ArtifactStore(recipe.store.uri)
    store.delete(store.list("vocabulary")[0])
    again, _, tasks = run(build_draft, recipe)
    assert again == published
    assert {task.name.split()[0] for task in tasks if task.state.name == "Completed"} == {
        "prepare-target",
        "build-vocabulary",
    }
    assert calls(stages)["build_vocabulary"] == 2


def test_an_artifact_that_prefect_knows_nothing_of_is_taken_from_the_store(stages: Stages, recipe: Recipe):
    from tests.flows.fake_stages import TARGET

    conversations = stages["prepare_conversations"]
    conversations.run(recipe, TARGET, ArtifactStore(recipe.store.uri))
    run(regenerate_data, recipe)
    assert calls(stages)["prepare_conversations"] == 1


def test_an_override_makes_another_draft_and_names_the_run(stages: Stages, recipe: Recipe):
    first, _, _ = run(build_draft, recipe)
    second, flow_run, _ = run(build_draft, recipe, {"training.lr": 2e-3})
    assert second != first
    assert flow_run.name == "smollm2-135m training.lr=0.002"


def test_a_wrong_override_stops_before_any_stage(stages: Stages, recipe: Recipe):
    with pytest.raises(RecipeError, match=r"recipe smollm2-135m: training.lr: .* greater than 0"):
        run(build_draft, recipe, {"training.lr": 0})
    assert set(calls(stages).values()) == {0}


def test_regenerate_data_stops_at_the_answers(stages: Stages, recipe: Recipe):
    responses, _, _ = run(regenerate_data, recipe)
    assert responses.kind == "responses"
    assert [name for name, count in calls(stages).items() if count] == [
        "prepare_conversations",
        "make_responses",
    ]


def test_evaluate_draft_measures_what_is_there_and_builds_nothing(stages: Stages, recipe: Recipe):
    with pytest.raises(NotBuiltError, match="make build-draft TARGET=smollm2-135m"):
        run(evaluate_draft, recipe)
    assert set(calls(stages).values()) == {0}
    run(build_draft, recipe)
    acceptance, _, _ = run(evaluate_draft, recipe)
    assert acceptance.kind == "acceptance"
    assert each_ran_once(stages)


def test_a_recipe_may_leave_the_server_out(stages: Stages, recipe: Recipe):
    run(build_draft, recipe, {"serving.enabled": False})
    assert calls(stages)["check_serving"] == 0
    assert calls(stages)["publish_draft"] == 1


def test_the_runs_page_has_the_table_and_where_to_look(stages: Stages, recipe: Recipe):
    published, flow_run, _ = run(build_draft, recipe)
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run.id]))
        )
    by_key = {artifact.key: artifact.data for artifact in found if artifact.key}
    assert '"position": 1' in by_key["smollm2-135m-acceptance"]
    assert published.uri in by_key["smollm2-135m-result"]


def test_each_stage_says_how_long_it_will_take_before_it_starts(
    stages: Stages, recipe: Recipe, caplog: pytest.LogCaptureFixture
):
    stages["train_draft"].seconds = 350
    with caplog.at_level(logging.INFO, logger="tasks"):
        run(build_draft, recipe)
    said = [record.getMessage() for record in caplog.records]
    before = said.index("train-draft: about 6 min")
    after = next(i for i, line in enumerate(said) if line.startswith("train-draft: done in"))
    assert before < after


def test_an_error_is_whole_in_the_log_file_and_what_was_finished_stays(
    stages: Stages, recipe: Recipe, tmp_path: Path
):
    def work(writer: ArtifactWriter) -> None:
        raise RuntimeError("the trainer fell over")

    stages["train_draft"].work = work
    with pytest.raises(RuntimeError, match="fell over"):
        run(build_draft, recipe)
    (log,) = (tmp_path / ".run/logs").glob("build-draft-smollm2-135m-*.log")
    text = log.read_text()
    assert "Traceback" in text
    assert "RuntimeError: the trainer fell over" in text

    stages["train_draft"].work = stages["train_draft"]._write
    run(build_draft, recipe)
    assert calls(stages)["make_responses"] == 1
