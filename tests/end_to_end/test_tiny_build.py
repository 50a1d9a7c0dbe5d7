"""The real DAG on a tiny random Llama: every stage real, the Hugging Face engine, no server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient
from safetensors import safe_open

from flows.build_draft import build_draft
from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.evaluation import Evaluation
from tasks.recipe import Recipe
from tests.end_to_end.tiny import tiny_recipe

KINDS = ("conversations", "responses", "features", "vocabulary", "draft", "acceptance", "published")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    return tiny_recipe(tmp_path_factory.mktemp("build"))


@pytest.fixture(scope="module")
def published(recipe: Recipe, prefect_server: None) -> ArtifactRef:
    return build_draft(recipe=recipe)


@pytest.fixture(scope="module")
def store(recipe: Recipe) -> ArtifactStore:
    return ArtifactStore(recipe.store.uri)


def test_one_artifact_of_every_kind_and_nothing_half_written(published: ArtifactRef, store: ArtifactStore):
    assert [len(store.list(kind)) for kind in KINDS] == [1] * len(KINDS)
    assert not list(store.root.glob("*/.partial-*"))
    assert all(not store.damage(store.list(kind)[0]) for kind in KINDS)


def test_the_published_folder_is_what_a_server_loads(published: ArtifactRef, store: ArtifactStore):
    folder = store.local(published)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= names


def test_every_artifact_of_the_draft_can_be_followed_back_to_the_prompts(
    published: ArtifactRef, store: ArtifactStore
):
    def ancestors(ref: ArtifactRef) -> set[str]:
        return {ref.kind}.union(*(ancestors(parent) for parent in store.manifest(ref).inputs))

    assert ancestors(published) == set(KINDS)


def test_acceptance_is_measured_on_the_held_out_prompts_alone(published: ArtifactRef, store: ArtifactStore):
    evaluation = Evaluation.read(store.local(store.list("acceptance")[0]))
    assert [figures.temperature for figures in evaluation.figures] == [0.0, 1.0]
    assert all(figures.walk.prompts == 6 for figures in evaluation.figures)
    assert all(1 <= figures.walk.tau_micro.value <= 4 for figures in evaluation.figures)


def test_mlflow_has_the_build_its_stages_and_its_draft(
    published: ArtifactRef, recipe: Recipe, store: ArtifactStore
):
    client = MlflowClient(recipe.tracking.uri)
    experiment = client.get_experiment_by_name(recipe.tracking.experiment)
    runs = client.search_runs([experiment.experiment_id])
    stages = {run.data.tags["draftline.stage"] for run in runs if "draftline.stage" in run.data.tags}
    assert len(stages) == len(KINDS)
    (build,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert build.info.run_name == "build-draft tiny"
    positions = [point.step for point in client.get_metric_history(build.info.run_id, "survival_walk_t0")]
    assert positions == [1, 2, 3]
    train = next(run for run in runs if run.data.tags.get("draftline.stage") == "train-draft")
    assert len(client.get_metric_history(train.info.run_id, "loss")) >= 1
    (version,) = client.search_model_versions("name = 'tiny-eagle3'")
    assert version.run_id == build.info.run_id
    # A random target's draft hits next to nothing: it is registered, with that warning, and is nobody's best.
    assert store.manifest(published).summary["suspicious"]
    assert not client.get_registered_model("tiny-eagle3").aliases


def test_the_same_build_again_does_nothing(published: ArtifactRef, recipe: Recipe, store: ArtifactStore):
    def written() -> dict[Path, float]:
        return {path: path.stat().st_mtime for path in store.root.rglob("manifest.json")}

    before = written()
    assert build_draft(recipe=recipe) == published
    assert written() == before


def test_another_learning_rate_trains_again_on_the_same_answers(
    published: ArtifactRef, recipe: Recipe, store: ArtifactStore
):
    other = build_draft(recipe=recipe, overrides={"training.lr": 2e-3})
    assert other != published
    assert len(store.list("responses")) == 1
    assert len(store.list("draft")) == 2


def test_another_drafter_goes_through_the_same_flow(published: ArtifactRef, recipe: Recipe, store: ArtifactStore):
    other = build_draft(recipe=recipe, overrides={"draft.drafter": "eagle1"})
    folder = store.local(other)
    assert json.loads((folder / "config.json").read_text())["drafter"] == "eagle1"
    assert "EAGLE-1" in (folder / "README.md").read_text() and (folder / "report.html").is_file()
    assert len(store.list("responses")) == 1
