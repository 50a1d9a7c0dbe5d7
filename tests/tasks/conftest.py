"""A tiny draft, trained and evaluated once for every test that needs one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe


@dataclass(frozen=True)
class SmallBuild:
    """A build on made-up features up to its evaluation; `seed` is that of its samples."""

    recipe: Recipe
    target: TargetInfo
    store: ArtifactStore
    features: ArtifactRef
    draft: ArtifactRef
    acceptance: ArtifactRef
    seed: int


@pytest.fixture(scope="session")
def small_build(tmp_path_factory: pytest.TempPathFactory) -> SmallBuild:
    # Here, so that tests which need no draft do not wait for torch.
    from tasks.build_vocabulary import run as build_vocabulary
    from tasks.evaluate_draft import run as evaluate_draft
    from tasks.train_draft import run as train_draft
    from tests.tasks.feature_samples import (
        make_features,
        make_recipe,
        make_responses,
        make_samples,
        make_target,
    )

    folder = tmp_path_factory.mktemp("small-build")
    recipe = make_recipe(folder, **{"training.epochs": 6})
    target, store, seed = make_target(recipe), ArtifactStore(recipe.store.uri), 1
    samples = make_samples(seed=seed)
    responses = make_responses(store, samples)
    features = make_features(store, target, samples, responses)
    draft = train_draft(recipe, target, store, features, build_vocabulary(recipe, target, store, responses))
    acceptance = evaluate_draft(recipe, target, store, draft, features)
    return SmallBuild(recipe, target, store, features, draft, acceptance, seed)
