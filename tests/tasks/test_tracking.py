"""What a build leaves in MLflow, and that MLflow can neither stop nor hold up a build."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from mlflow import MlflowClient
from mlflow.entities import Run

import tasks.build_tracker
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.build_tracker import ARTIFACT_TAG, BuildTracker, MetricsTail
from tasks.evaluation import SUMMARY
from tasks.recipe import Recipe
from tasks.tracked_figures import Figure, flat, numbers, redacted
from tests.flows.fake_stages import TARGET, FakeStage, fake_recipe, write_metrics
from tests.tasks.report_samples import make_evaluation

ROOT = Path(__file__).resolve().parents[2]
DEAD = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One database for all: making it takes longer than the tests. Each test has an experiment of its own."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture
def recipe(database: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Recipe:
    return fake_recipe(
        tmp_path,
        **{
            "tracking.enabled": True,
            "tracking.uri": f"sqlite:///{database}/mlflow.db",
            "tracking.experiment": request.node.name,
        },
    )


def follow(recipe: Recipe, *stages: FakeStage) -> tuple[list[ArtifactRef], str | None]:
    """A build of the stages, each reading the one before, as a flow does it; its artifacts and its page."""
    store, made = ArtifactStore(recipe.store.uri), []
    with BuildTracker(recipe, TARGET, flow="build-draft", name="a build", page="http://page") as tracker:
        for stage in stages:
            plan = stage.plan(recipe, TARGET, *made[-1:])
            tracker.planned(plan)
            found = plan.find(store)
            made.append(found or stage.task().make(recipe, TARGET, store, plan, *made[-1:], tracker=tracker))
        acceptance = next((ref for ref in made if ref.kind == "acceptance"), None)
        page = tracker.finish(made[-1], acceptance=acceptance)
    return made, page


def runs(recipe: Recipe) -> dict[str, Run]:
    """Every run of the recipe's experiment, by name."""
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    found = client.search_runs([experiment.experiment_id])
    named = {run.info.run_name: run for run in found}
    assert len(named) == len(found)
    return named


def history(recipe: Recipe, run: Run, metric: str) -> dict[int, float]:
    client = MlflowClient(recipe.tracking.uri)
    return {point.step: point.value for point in client.get_metric_history(run.info.run_id, metric)}


def test_a_build_is_a_run_with_a_child_for_every_stage_that_worked(recipe: Recipe):
    (conversations, responses), page = follow(
        recipe, FakeStage("ask", "conversations"), FakeStage("answer", "responses")
    )
    found = runs(recipe)
    build, answer = found["a build"], found["answer smollm2-135m"]
    assert answer.data.tags["mlflow.parentRunId"] == build.info.run_id
    assert {run.info.status for run in found.values()} == {"FINISHED"}
    assert build.data.params["training.lr"] == json.dumps(recipe.training.lr)
    assert build.data.tags["draftline.responses"] == responses.fingerprint
    assert answer.data.tags["draftline.input.conversations"] == conversations.fingerprint
    assert answer.data.tags[ARTIFACT_TAG] == f"responses/{responses.fingerprint}"
    assert answer.data.metrics["samples"] == 7
    assert page.endswith(f"/runs/{build.info.run_id}")


def test_a_build_that_finds_everything_points_at_the_run_that_made_it(recipe: Recipe):
    stages = FakeStage("ask", "conversations"), FakeStage("answer", "responses")
    _, first = follow(recipe, *stages)
    _, second = follow(recipe, *stages)
    assert second == first
    assert len(runs(recipe)) == 3


def test_acceptance_is_logged_by_draft_position(recipe: Recipe):
    follow(recipe, FakeStage("evaluate", "acceptance"))
    build = runs(recipe)["a build"]
    walk = make_evaluation().at(0.0).walk
    assert history(recipe, build, "survival_walk_t0") == pytest.approx(
        {position: rate.value for position, rate in enumerate(walk.survival, start=1)}
    )
    assert build.data.metrics["tau_walk_t0"] == pytest.approx(walk.tau_micro.value)
    assert "tau_walk_t1" in build.data.metrics


def test_training_shows_while_it_runs_and_is_whole_at_its_end(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tasks.build_tracker, "TAIL_SECONDS", 0.05)
    seen: dict[int, float] = {}

    def work(writer: ArtifactWriter) -> None:
        write_metrics(writer, 2)
        with writer.path("training/metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')  # torn: the trainer is in the middle of a line
        deadline = time.monotonic() + 20
        while not seen and time.monotonic() < deadline:
            time.sleep(0.1)
            seen.update(history(recipe, runs(recipe)["train smollm2-135m"], "loss"))
        write_metrics(writer, 4)

    train = FakeStage("train", "draft")
    train.work = work
    follow(recipe, train)
    assert seen == {1: 1.0, 2: 0.5}
    run = runs(recipe)["train smollm2-135m"]
    assert history(recipe, run, "loss") == {1: 1.0, 2: 0.5, 3: 1 / 3, 4: 0.25}
    assert history(recipe, run, "accuracy.2") == dict.fromkeys([1, 2, 3, 4], 0.4)


class TailedFile:
    """A trainer's file, what was sent of it, and a tail that is asked to look by hand."""

    def __init__(self, folder: Path) -> None:
        self.path, self.sent, self.down = folder / "metrics.jsonl", [], False
        self.tail = MetricsTail(self, "run", self.path)

    def log(self, run: str, figures: list[Figure]) -> None:
        if not self.down:
            self.sent += [(figure.step, figure.value) for figure in figures]

    def try_again(self) -> None: ...

    def holds(self, steps: range, torn: str = "") -> None:
        self.path.write_text(
            "".join(f'{{"kind": "step", "step": {step}, "loss": {step}.5}}\n' for step in steps) + torn
        )
        self.tail.finish(self.path)


@pytest.mark.parametrize("torn", ["", '{"kind": "step", "st'])
def test_a_run_that_goes_on_from_a_checkpoint_drops_lines_and_each_step_is_sent_once(tmp_path: Path, torn: str):
    """A build that was killed in training ended with a parsing error once its training was done."""
    file = TailedFile(tmp_path)
    file.holds(range(1, 30), torn)
    file.holds(range(1, 21))  # cut back to the checkpoint, shorter than what was read
    file.holds(range(1, 26))
    file.holds(range(1, 40))  # and longer than it ever was
    assert file.sent == [(step, step + 0.5) for step in range(1, 40)]


def test_a_file_that_was_cut_and_grew_between_two_looks_is_read_anew(tmp_path: Path):
    file = TailedFile(tmp_path)
    file.holds(range(1, 9))
    file.path.write_text('{"kind": "evaluation", "step": 4, "tau": 1.25}\n')
    file.holds(range(100, 120))
    assert [step for step, _ in file.sent] == [*range(1, 9), *range(100, 120)]


def test_what_a_tracker_that_is_down_did_not_take_is_sent_later(tmp_path: Path):
    file = TailedFile(tmp_path)
    file.down = True
    file.holds(range(1, 4))
    file.down = False
    file.holds(range(1, 6))
    assert [step for step, _ in file.sent] == [1, 2, 3, 4, 5]


def test_a_stage_that_fails_leaves_failed_runs(recipe: Recipe):
    def work(writer: ArtifactWriter) -> None:
        raise OSError("no space")

    broken = FakeStage("train", "draft")
    broken.work = work
    with pytest.raises(OSError, match="no space"):
        follow(recipe, broken)
    assert {run.info.status for run in runs(recipe).values()} == {"FAILED"}


def test_a_killed_build_is_closed_by_the_next_one(recipe: Recipe, tmp_path: Path):
    killed = f"""
import os, signal
from tests.flows.fake_stages import FakeStage
from tests.tasks.test_tracking import follow
from tasks.recipe import load_recipe

def work(writer):
    os.kill(os.getpid(), signal.SIGKILL)

train = FakeStage("train", "draft")
train.work = work
follow(load_recipe({str(tmp_path / "recipe.yaml")!r}), train)
"""
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe.model_dump(mode="json")))
    done = subprocess.run(
        [sys.executable, "-c", killed], cwd=ROOT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert {run.info.status for run in runs(recipe).values()} == {"RUNNING"}

    follow(recipe, FakeStage("ask", "conversations"))
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    statuses = [run.info.status for run in client.search_runs([experiment.experiment_id])]
    assert sorted(statuses) == ["FINISHED", "FINISHED", "KILLED", "KILLED"]


def test_a_dead_server_is_said_once_and_a_later_build_logs_what_was_missed(
    recipe: Recipe, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    stages = (
        FakeStage("ask", "conversations"),
        FakeStage("train", "draft"),
        FakeStage("evaluate", "acceptance"),
    )
    away = recipe.model_copy(update={"tracking": recipe.tracking.model_copy(update={"uri": DEAD})})
    with caplog.at_level(logging.WARNING):
        made, page = follow(away, *stages)
    assert page is None
    assert len(made) == 3
    assert len([record for record in caplog.records if "is away" in record.message]) == 1

    _, page = follow(recipe, *stages)
    assert page is not None
    assert [stage.calls for stage in stages] == [1, 1, 1]
    found = runs(recipe)
    assert set(found) == {"a build", "ask smollm2-135m", "train smollm2-135m", "evaluate smollm2-135m"}
    assert history(recipe, found["train smollm2-135m"], "loss") == {1: 1.0, 2: 0.5, 3: 1 / 3}
    assert "tau_walk_t0" in found["a build"].data.metrics


def test_the_alias_best_moves_only_where_tau_rose_and_nothing_is_suspicious(recipe: Recipe):
    client = MlflowClient(recipe.tracking.uri)
    best = []
    for lr, hit, doubt in ((1e-4, 0.4, None), (2e-4, 0.6, None), (3e-4, 0.5, None), (4e-4, 0.9, "too good")):
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update={"lr": lr})})
        evaluate = FakeStage("evaluate", "acceptance")
        text = json.dumps(make_evaluation(hit).to_dict())
        evaluate.work = lambda writer, text=text: writer.write_text(SUMMARY, text)
        publish = FakeStage("publish", "published")
        publish.summary["suspicious"] = doubt
        follow(changed, FakeStage("train", "draft"), evaluate, publish)
        best.append(client.get_model_version_by_alias("smollm2-135m-eagle3", "best").version)
    assert [int(version) for version in best] == [1, 2, 2, 2]
    assert len(client.search_model_versions("name = 'smollm2-135m-eagle3'")) == 4


def test_the_report_is_an_artifact_of_the_build(recipe: Recipe):
    follow(recipe, FakeStage("evaluate", "acceptance"), FakeStage("publish", "published"))
    client = MlflowClient(recipe.tracking.uri)
    listed = client.list_artifacts(runs(recipe)["a build"].info.run_id)
    assert "report.html" in [entry.path for entry in listed]


def test_tracking_that_is_off_makes_no_database(tmp_path: Path):
    recipe = fake_recipe(tmp_path)
    _, page = follow(recipe, FakeStage("ask", "conversations"))
    assert page is None
    assert not (tmp_path / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:pw@db/mlflow", "postgresql://***@db/mlflow"),
        ("http://host/v1?api_key=abc&x=1", "http://host/v1?api_key=***&x=1"),
        ('["https://u:p@a/v1", "https://b/v1"]', '["https://***@a/v1", "https://b/v1"]'),
        ("token hf_abcdefghijklmnopqrstuv here", "token *** here"),
        ("s3://bucket/store", "s3://bucket/store"),
        ("tokens_per_batch=512", "tokens_per_batch=512"),
    ],
)
def test_secrets_are_taken_out(text: str, shown: str):
    assert redacted(text) == shown


def test_no_secret_of_a_recipe_reaches_mlflow(recipe: Recipe):
    data = recipe.data.model_copy(
        update={"sources": [recipe.data.sources[0].model_copy(update={"uri": "https://me:geheim@host/x"})]}
    )
    follow(recipe.model_copy(update={"data": data}), FakeStage("ask", "conversations"))
    build = runs(recipe)["a build"]
    assert "geheim" not in json.dumps(build.data.params)
    assert "https://***@host/x" in build.data.params["data.sources"]


def test_numbers_of_a_record_with_a_step_are_series_and_others_count_from_one():
    with_step = list(numbers({"step": 5, "loss": 0.5, "accuracy": [0.9, None], "note": "x", "ok": True}))
    assert with_step == [Figure("loss", 0.5, 5), Figure("accuracy.1", 0.9, 5)]
    assert list(numbers({"survival": [0.6, 0.3]})) == [Figure("survival", 0.6, 1), Figure("survival", 0.3, 2)]
    assert list(numbers({"at": {"0": {"tau": 1.4}}, "bad": float("nan")})) == [Figure("at.0.tau", 1.4)]


def test_nested_values_are_dotted_names():
    assert flat({"a": {"b": 1, "c": "x"}, "d": [1, 2]}) == {"a.b": "1", "a.c": "x", "d": "[1, 2]"}


def test_an_arm_is_a_child_of_its_experiment_and_its_stages_are_below_it(recipe: Recipe):
    """And again with everything there: nothing is opened, the earlier run is pointed at."""
    conversations, draft, acceptance = (
        FakeStage(*names) for names in (("prepare", "conversations"), ("train", "draft"), ("evaluate", "acceptance"))
    )
    page = FakeStage("report", "experiment")
    store, pages = ArtifactStore(recipe.store.uri), []
    for _ in range(2):
        with BuildTracker(recipe, TARGET, flow="compare-drafters", name="all") as tracker:
            arm = tracker.arm(recipe, "EAGLE-3, seed 0")
            made: list[ArtifactRef] = []
            for stage, owner in ((conversations, tracker), (draft, arm), (acceptance, arm), (page, tracker)):
                plan = stage.plan(recipe, TARGET, *made[-1:])
                owner.planned(plan)
                task = stage.task()
                made.append(plan.find(store) or task.make(recipe, TARGET, store, plan, *made[-1:], tracker=owner))
            pages.append(tracker.finish(made[-1]))
            if tracker.opened:
                with arm:
                    arm.finish(made[2], acceptance=made[2])
    assert pages[0] == pages[1]
    found = runs(recipe)
    parent = lambda name: found[name].data.tags.get("mlflow.parentRunId")
    assert parent("all") is None
    assert parent("EAGLE-3, seed 0") == found["all"].info.run_id
    arm_id = found["EAGLE-3, seed 0"].info.run_id
    assert {name: parent(name) == arm_id for name in found if name.endswith(recipe.name)} == {
        f"prepare {recipe.name}": False,
        f"report {recipe.name}": False,
        f"train {recipe.name}": True,
        f"evaluate {recipe.name}": True,
    }
    assert "tau_walk_t0" in found["EAGLE-3, seed 0"].data.metrics
    assert found["EAGLE-3, seed 0"].info.status == "FINISHED"
