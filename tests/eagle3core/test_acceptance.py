"""Acceptance figures against counting by hand, and the intervals' promises."""

from __future__ import annotations

import json
import math

import pytest
import torch

from eagle3core.acceptance import (
    Response,
    Rounds,
    ServerCounters,
    compare,
    from_counters,
    require_comparable,
    summarise,
)
from eagle3core.groups import bucket, by_category, by_context, by_output, by_temperature
from eagle3core.intervals import bootstrap_rates


def rounds_of(records, responses, draft_length=3, mode="chain"):
    """Rounds from (response, context, drafted, accepted) tuples."""
    columns = torch.tensor(records, dtype=torch.int64).reshape(-1, 4).T
    return Rounds.counted(mode, responses, *columns, draft_length)


TWO = (Response("a", "math", 0.0, 20), Response("b", "code", 1.0, 200))
# Response 0: accepts 3 of 3, 1 of 3, then 1 of the 1 that the end of the text left. Response 1: 0 of 3, 2
# of 3.
RECORDS = [(0, 10, 3, 3), (0, 14, 3, 1), (0, 16, 1, 1), (1, 300, 3, 0), (1, 301, 3, 2)]


def test_every_figure_equals_counting_by_hand():
    summary = summarise(rounds_of(RECORDS, TWO))
    assert [(rate.numerator, rate.denominator) for rate in summary.survival] == [(4, 5), (2, 4), (1, 4)]
    # Position 2 was reached by the rounds that kept position 1 and drafted position 2: rounds 0, 1 and 4.
    assert [(rate.numerator, rate.denominator) for rate in summary.conditional] == [(4, 5), (2, 3), (1, 2)]
    assert (summary.flat.numerator, summary.flat.denominator) == (7, 13)
    assert summary.tau_micro.value == (7 + 5) / 5
    assert summary.tau_macro.value == pytest.approx(((5 + 3) / 3 + (2 + 2) / 2) / 2)
    assert (summary.rounds, summary.prompts, summary.responses) == (5, 2, 2)


def test_tau_is_one_plus_the_survivals_where_no_round_was_cut():
    records = [(0, 0, 3, accepted) for accepted in (0, 1, 3, 2, 3)]
    summary = summarise(rounds_of(records, TWO))
    assert summary.tau_micro.value == pytest.approx(1 + sum(rate.value for rate in summary.survival))


def test_weights_count_a_round_by_the_chance_that_it_began():
    whole = rounds_of(RECORDS, TWO)
    doubled = Rounds.concatenate([whole, whole])
    weighted = Rounds(**{**vars(whole), "weight": whole.weight * 2})
    assert summarise(doubled).flat.value == summarise(weighted).flat.value
    assert summarise(weighted).survival[0].denominator == 10


def test_a_tree_has_no_conditional_rate_and_no_flat_rate():
    summary = summarise(rounds_of(RECORDS, TWO, mode="tree"))
    assert summary.conditional == () and summary.flat is None
    with pytest.raises(ValueError, match="chains and trees do not compare"):
        require_comparable([summary, summarise(rounds_of(RECORDS, TWO))])


def test_answers_to_one_prompt_are_resampled_together():
    """200 rounds of 2 prompts, all kept or none kept: the interval must say that two things were seen, not
    200.
    """
    records = [(0, 0, 1, 1)] * 100 + [(1, 0, 1, 0)] * 100
    apart = summarise(rounds_of(records, TWO, draft_length=1))
    assert (apart.survival[0].low, apart.survival[0].high) == (0.0, 1.0)
    together = summarise(rounds_of(records, (Response("a"), Response("a")), draft_length=1))
    assert together.prompts == 1 and math.isnan(together.survival[0].low)


def test_all_or_nothing_keeps_an_interval_with_a_width():
    records = [(response, 0, 1, 0) for response in (0, 1) for _ in range(50)]
    rate = summarise(rounds_of(records, TWO, draft_length=1)).survival[0]
    assert rate.low == 0 and 0.02 < rate.high < 0.05


def test_intervals_cover_at_the_rate_they_promise():
    """Clustered data of 24 prompts, 1,500 repeats: prompts differ, so rounds are not independent."""
    generator = torch.Generator().manual_seed(7)
    covered = 0
    repeats, prompts, rounds = 1500, 24, 30
    for repeat in range(repeats):
        ease = torch.rand(prompts, generator=generator, dtype=torch.float64)
        kept = torch.rand(prompts, rounds, generator=generator) < ease[:, None]
        hits = kept.double().sum(1, keepdim=True)
        counts = torch.full_like(hits, rounds)
        (rate,) = bootstrap_rates(hits, counts, shares=1, resamples=400, seed=repeat)
        covered += rate.low <= 0.5 <= rate.high
    assert 0.93 <= covered / repeats <= 0.97


def test_the_bootstrap_is_seeded_and_chunks_do_not_show(monkeypatch):
    above, below = torch.arange(6.0).double()[:, None], torch.full((6, 1), 5.0, dtype=torch.float64)
    once = bootstrap_rates(above, below, shares=1, resamples=500, seed=3)
    assert once == bootstrap_rates(above, below, shares=1, resamples=500, seed=3)
    assert once != bootstrap_rates(above, below, shares=1, resamples=500, seed=4)
    monkeypatch.setattr("eagle3core.intervals._CHUNK", 60)
    chunked = bootstrap_rates(above, below, shares=1, resamples=500, seed=3)
    assert chunked[0].value == once[0].value and abs(chunked[0].low - once[0].low) < 0.05


def test_groups_hold_the_right_rounds_in_order():
    rounds = rounds_of(RECORDS, TWO)
    assert {name: len(part) for name, part in by_category(rounds).items()} == {"code": 2, "math": 3}
    assert {name: len(part) for name, part in by_temperature(rounds).items()} == {"0": 3, "1": 2}
    assert {name: len(part) for name, part in by_context(rounds, (12, 256)).items()} == {
        "0-11": 1,
        "12-255": 2,
        "256-": 2,
    }
    assert list(by_output(rounds)) == ["0-31", "128-255"]
    assert [bucket(value, (4, 8)) for value in (0, 3, 4, 8, 99)] == ["0-3", "0-3", "4-7", "8-", "8-"]


def test_no_rounds_give_empty_figures_and_valid_json():
    summary = summarise(rounds_of([], TWO))
    assert summary.rounds == 0 and math.isnan(summary.tau_micro.value)
    assert json.loads(json.dumps(summary.to_dict(), allow_nan=False))["tau_micro"]["value"] is None


def test_impossible_rounds_are_refused():
    with pytest.raises(ValueError, match="accepted <= drafted"):
        rounds_of([(0, 0, 2, 3)], TWO)
    with pytest.raises(ValueError, match="one mode and draft length"):
        Rounds.concatenate([rounds_of(RECORDS, TWO), rounds_of(RECORDS, TWO, draft_length=4)])


def test_a_servers_counters_give_the_same_figures_as_its_rounds():
    whole = [record for record in RECORDS if record[2] == 3]
    ours = summarise(rounds_of(whole, TWO))
    theirs = from_counters(ServerCounters(7, 21, (9, 6, 3)) - ServerCounters(3, 9, (6, 4, 2)))
    for name in ("survival", "conditional"):
        values = [rate.value for rate in getattr(theirs, name)]
        assert values == [rate.value for rate in getattr(ours, name)]
    assert theirs.flat.value == ours.flat.value and theirs.tau_micro.value == ours.tau_micro.value


def test_compare_tells_agreement_from_disagreement():
    records = [(index, 0, 1, int(index % 10 < 6)) for index in range(100)]
    ours = summarise(rounds_of(records, tuple(Response(str(index)) for index in range(100)), draft_length=1))
    (near,) = compare(ours, from_counters(ServerCounters(100, 100, (55,))))
    (far,) = compare(ours, from_counters(ServerCounters(100, 100, (20,))))
    assert near.inside and near.explained and not far.inside and not far.explained
    with pytest.raises(ValueError, match="draft lengths differ"):
        compare(ours, from_counters(ServerCounters(1, 2, (1, 1))))


def test_five_positions_asked_at_once_allow_a_wider_difference_each():
    one = compare(
        from_counters(ServerCounters(1000, 1000, (500,))), from_counters(ServerCounters(1000, 1000, (550,)))
    )
    five = compare(
        from_counters(ServerCounters(1000, 5000, (500, 100, 50, 20, 10))),
        from_counters(ServerCounters(1000, 5000, (550, 100, 50, 20, 10))),
    )
    assert not one[0].explained and five[0].explained
    assert [agreement.inside for agreement in five] == [False, True, True, True, True]
