"""The draft vocabulary: what it counts, what is always in it, what it says about itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.artifacts import ArtifactStore
from tasks.build_vocabulary import TABLE, choose, count_tokens, coverage, plan, read_vocabulary, run
from tests.tasks.feature_samples import END, VOCAB, make_recipe, make_responses, make_samples, make_target


def test_the_most_frequent_ids_are_kept_in_ascending_order():
    vocabulary = choose(np.array([5, 0, 9, 1, 0, 7]), 3)
    assert vocabulary.target_ids.tolist() == [0, 2, 5]
    assert vocabulary.counts.tolist() == [5, 9, 7]
    assert vocabulary.cumulative_share.tolist() == pytest.approx([21 / 22, 9 / 22, 16 / 22])
    assert (vocabulary.distinct, vocabulary.filled) == (4, 0)


def test_ties_go_to_the_lower_id_and_unseen_ids_fill_from_the_lowest():
    assert choose(np.array([1, 2, 2, 2]), 2).target_ids.tolist() == [1, 2]
    vocabulary = choose(np.array([0, 0, 0, 4, 0]), 3)
    assert vocabulary.target_ids.tolist() == [0, 1, 3]
    assert (vocabulary.distinct, vocabulary.filled) == (1, 2)


def test_special_tokens_are_always_in_and_must_fit():
    assert choose(np.array([9, 8, 7, 0]), 2, always=[3]).target_ids.tolist() == [0, 3]
    with pytest.raises(ValueError, match=r"raise vocabulary\.size"):
        choose(np.array([9, 8, 7, 0]), 1, always=[2, 3])


def test_a_size_at_or_above_v_is_the_identity():
    vocabulary = choose(np.array([0, 3, 0]), 100)
    assert vocabulary.target_ids.tolist() == [0, 1, 2]


def test_choose_agrees_with_a_plain_sort_on_random_counts():
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts, size = rng.integers(0, 4, 30), int(rng.integers(1, 30))
        plain = sorted(range(30), key=lambda token: (-counts[token], token))[:size]
        assert choose(counts, size).target_ids.tolist() == sorted(plain)


@pytest.fixture
def built(tmp_path: Path):
    recipe = make_recipe(tmp_path)
    target, store = make_target(recipe), ArtifactStore(recipe.store.uri)
    samples = make_samples()
    responses = make_responses(store, samples)
    return recipe, target, store, samples, responses


def test_only_supervised_tokens_of_the_train_split_count(built):
    _, _, store, samples, responses = built
    counts = count_tokens(store.local(responses), VOCAB)
    for split in ("train", "heldout"):
        expected = np.zeros(VOCAB, int)
        for sample in samples:
            if sample.split == split:
                for start, end in sample.spans:
                    for token in sample.token_ids[start:end]:
                        expected[token] += 1
        assert counts.answers[split].tolist() == expected.tolist()


def test_the_prompts_of_the_train_split_are_what_is_left_of_it(built):
    _, _, store, samples, responses = built
    counts = count_tokens(store.local(responses), VOCAB)
    whole = np.zeros(VOCAB, int)
    for sample in samples:
        if sample.split == "train":
            for token in sample.token_ids:
                whole[token] += 1
    assert (counts.prompts + counts.answers["train"]).tolist() == whole.tolist()


def test_ids_of_no_answer_come_by_their_count_in_prompts():
    vocabulary = choose(np.array([0, 0, 0, 4, 0, 0]), 3, prompts=np.array([0, 1, 0, 9, 5, 0]))
    assert vocabulary.target_ids.tolist() == [1, 3, 4]


def test_the_stage_writes_an_ascending_map_with_the_end_of_turn_in_it(built):
    recipe, target, store, _, responses = built
    ref = run(recipe, target, store, responses)
    table = pq.read_table(store.local(ref) / TABLE)
    ids = read_vocabulary(store.local(ref))
    assert table["draft_id"].to_pylist() == list(range(64))
    assert (np.diff(ids) > 0).all()
    assert END in ids
    summary = store.manifest(ref).summary
    assert summary["size"] == 64
    assert summary["coverage_train"] == 1.0
    heldout = count_tokens(store.local(responses), VOCAB).answers["heldout"]
    assert summary["coverage_heldout"] == coverage(heldout, ids)
    assert run(recipe, target, store, responses) == ref


def test_another_tokenizer_is_another_vocabulary(built):
    recipe, target, _, _, responses = built
    from dataclasses import replace

    other = replace(target, tokenizer_fingerprint="another")
    assert plan(recipe, target, responses).fingerprint != plan(recipe, other, responses).fingerprint


def test_text_of_another_tokenizer_is_refused(built):
    _, _, store, _, responses = built
    with pytest.raises(ValueError, match="another tokenizer"):
        count_tokens(store.local(responses), 20)


def test_no_train_text_is_one_clear_line(tmp_path: Path):
    recipe = make_recipe(tmp_path)
    store = ArtifactStore(recipe.store.uri)
    responses = make_responses(store, make_samples(train=0))
    with pytest.raises(ValueError, match="no supervised token in the train split"):
        run(recipe, make_target(recipe), store, responses)
