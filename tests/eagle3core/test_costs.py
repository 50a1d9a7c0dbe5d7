"""The cost model on made-up curves, where the answer is known, and once on a real pair."""

from __future__ import annotations

import pytest

from eagle3core.costs import Costs, Curve, best_choice, chain_choices, measure_costs, tree_choices
from eagle3core.decoding.propose import Chain, DynamicTree, Nothing
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

FREE = Curve((1, 64), (0.0, 0.0))


def costs(target: Curve, step: float = 0.0) -> Costs:
    return Costs(128, 1, target, Curve((1, 10), (step, step)), Curve((1, 10), (step, step)), FREE)


def test_curves_are_straight_between_and_beyond_what_was_measured():
    curve = Curve((1, 4, 8), (1.0, 1.6, 3.6))
    assert [curve.at(size) for size in (1, 2, 4, 6, 8, 10)] == pytest.approx([1.0, 1.2, 1.6, 2.6, 3.6, 4.6])
    with pytest.raises(ValueError, match="two sizes"):
        Curve((1,), (1.0,)).at(2)


def test_where_tokens_are_free_speed_up_is_tau_and_longer_is_better():
    flat = costs(Curve((1, 64), (1.0, 1.0)))
    choices = chain_choices(flat, [0.8, 0.6, 0.5])
    assert [choice.speed_up for choice in choices] == pytest.approx([1.8, 2.4, 2.9])
    assert best_choice(flat, choices).proposer == Chain(3)


def test_where_every_token_costs_the_same_no_draft_is_best():
    steep = costs(Curve((1, 64), (1.0, 64.0)))
    choices = chain_choices(steep, [0.8, 0.6, 0.5])
    assert best_choice(steep, choices).proposer == Nothing()
    assert choices[0].speed_up == pytest.approx(1.8 / 2)


def test_the_drafts_own_time_stops_long_chains():
    slow = costs(Curve((1, 64), (1.0, 1.0)), step=0.2)
    choices = chain_choices(slow, [0.8, 0.5, 0.1, 0.05])
    assert choices[1].round_seconds == pytest.approx(1.0 + 0.2 + 0.2)
    assert best_choice(slow, choices).proposer == Chain(2)


def test_a_tree_pays_for_its_nodes_and_levels():
    linear = costs(Curve((1, 64), (1.0, 1.63)), step=0.1)
    tree = DynamicTree(nodes=31, depth=4, top_k=10)
    (choice,) = tree_choices(linear, {tree: 3.0})
    assert choice.round_seconds == pytest.approx(1.3 + 0.1 + 3 * 0.1)
    assert choice.speed_up == pytest.approx(3.0 / 1.7)


def test_costs_of_a_real_pair_are_measured():
    target = tiny.make_target()
    draft = tiny.make_draft(target)
    decoder = HuggingFaceTarget(target, draft.config.layer_ids)
    measured = measure_costs(
        decoder, draft, context=40, batch=2, target_sizes=(1, 16), draft_sizes=(1, 10), repeats=3
    )
    for curve in (measured.target, measured.step, measured.commit, measured.choose):
        assert all(0 < seconds < 5 for seconds in curve.seconds)
    assert (measured.target.sizes, measured.step.sizes) == ((1, 16), (1, 10))


def test_noise_never_makes_one_token_dearer_than_two():
    curve = Curve.rising((1, 2, 4, 8), (0.175, 0.1, 0.12, 0.11))
    assert curve.seconds == (0.1, 0.1, 0.11, 0.11)
    assert Curve.rising((1, 2, 4), (0.1, 0.2, 0.3)).seconds == (0.1, 0.2, 0.3)
