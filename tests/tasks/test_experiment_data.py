"""What arms share and what is their own: shares of the data, states among those captured, trees along the text."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from tasks.documents import FeatureDocuments, heldout_documents, split_train
from tasks.evaluation import ROWS
from tasks.experiment.measure_trees import TreesSpec
from tasks.experiment.trees_worker import measure, proposer_of
from tasks.train_draft import DRAFT_FOLDER, plan
from tests.tasks.feature_samples import HIDDEN, make_features, make_recipe, make_responses, make_samples, make_target


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> FeatureReader:
    recipe = make_recipe(tmp_path_factory.mktemp("shares"))
    store, samples = ArtifactStore(recipe.store.uri), make_samples(seed=1)
    features = make_features(store, make_target(recipe), samples, make_responses(store, samples))
    return FeatureReader(store.local(features))


def test_a_smaller_share_lies_within_every_larger_one_and_validation_stays(reader: FeatureReader):
    splits = [split_train(reader.index, share) for share in (0.125, 0.25, 0.5, 1.0)]
    sizes = [len(split.train) for split in splits]
    assert sizes == sorted(set(sizes))
    for smaller, larger in pairwise(splits):
        assert set(smaller.train) < set(larger.train)
        assert smaller.validation == larger.validation
    assert splits[-1] == split_train(reader.index)
    assert 0.2 < sizes[1] / sizes[3] < 0.3


def test_a_draft_reads_its_own_states_in_its_own_order(reader: FeatureReader):
    rows = split_train(reader.index).train
    whole, some = FeatureDocuments(reader, rows), FeatureDocuments(reader, rows, (3, 1))
    first, _, third = whole[0].features.split(HIDDEN, dim=1)
    assert torch.equal(some[0].features, torch.cat([third, first], dim=1))
    held = [heldout_documents(reader, 0.0, ids)[0].document.features for ids in (None, (2,))]
    assert torch.equal(held[1], held[0][:, HIDDEN : 2 * HIDDEN])


def test_a_state_that_was_not_captured_is_named(reader: FeatureReader):
    with pytest.raises(ValueError, match=r"reads hidden_states \[4\], the features hold \[1, 2, 3\]"):
        FeatureDocuments(reader, [0], (1, 4))


def test_a_share_is_another_training_and_the_whole_is_the_same_as_ever(small_build):
    build = small_build
    share = build.recipe.model_copy(update={"data": build.recipe.data.model_copy(update={"train_share": 0.5})})
    prints = [plan(recipe, build.target, build.features, build.draft) for recipe in (build.recipe, share)]
    assert prints[0].fingerprint != prints[1].fingerprint
    assert "train_share" not in prints[0].parameters


def test_a_tree_of_single_children_is_the_walked_chain(small_build, tmp_path: Path):
    build = small_build
    length = build.recipe.evaluation.chain_length
    spec = TreesSpec(
        target=build.target.to_dict(),
        drafter="eagle3",
        draft=str(build.store.local(build.draft) / DRAFT_FOLDER),
        features=str(build.store.local(build.features)),
        folder=str(tmp_path),
        chain_length=length,
        tree={"nodes": length + 1, "depth": length, "top_k": 1},
        threads=1,
    )
    measure(spec)
    key = lambda row: (row["prompt_id"], row["anchor"], row["drafted"], row["accepted"])
    trees = sorted(map(key, pq.read_table(tmp_path / ROWS).to_pylist()))
    rows = pq.read_table(build.store.local(build.acceptance) / ROWS).to_pylist()
    assert trees == sorted(key(row) for row in rows if row["mode"] == "walk" and row["temperature"] == 0)


def test_the_tree_is_the_drafters_own_and_the_recipe_sizes_a_dynamic_one():
    spec = TreesSpec({}, "eagle2", "", "", "", 5, {"nodes": 30, "depth": 5, "top_k": 6}, None)
    assert (proposer_of(spec).nodes, proposer_of(spec).depth) == (30, 5)
    static = proposer_of(TreesSpec({}, "eagle1", "", "", "", 5, {"nodes": 30, "depth": 5, "top_k": 6}, None))
    assert (static.nodes, static.depth) == (26, 5)
