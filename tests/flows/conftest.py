"""Stages that take no time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.recipe import Recipe
from tests.flows.fake_stages import TARGET, FakeStage, fake_recipe

STAGES = {
    "prepare_conversations": "conversations",
    "make_responses": "responses",
    "extract_features": "features",
    "build_vocabulary": "vocabulary",
    "train_draft": "draft",
    "evaluate_draft": "acceptance",
    "measure_trees": "trees",
    "check_serving": "serving",
    "publish_draft": "published",
}


@pytest.fixture
def stages(prefect_server: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeStage]:
    """Every stage of the DAG replaced by one that only says what it was made from, in a folder of the test's
    own.
    """
    from flows import dag, shared

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shared, "prepare_target", lambda recipe: TARGET)
    fakes = {name: FakeStage(name.replace("_", "-"), kind) for name, kind in STAGES.items()}
    for name, fake in fakes.items():
        monkeypatch.setattr(dag, name, fake.task())
    return fakes


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return fake_recipe(tmp_path)
