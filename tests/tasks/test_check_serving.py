"""The serving check's own arithmetic: the promise cut to what was asked, divergences, the verdict."""

from __future__ import annotations

import math

import pytest

from eagle3core.acceptance import summarise
from storage.schemas import AcceptanceRow, ResponseRow, Span
from tasks.check_serving import check, choose_prompts, counter_rows, diverging, judge
from tasks.engines.serve_requests import DRAFT, NGRAM, PLAIN, Served
from tasks.promise import Promised, promised_rounds
from tests.tasks.tiny_build import tiny_recipe


def response(name: str, answer: int, prompt: int = 10, temperature: float = 0.0, earlier=()) -> ResponseRow:
    spans = (*earlier, Span(prompt, prompt + answer))
    ids = tuple(range(prompt + answer))
    return ResponseRow(
        name + "@0", name, "s", "heldout", "", (), ids, spans, "length", temperature, 0, False
    )


def walk(name: str, anchor: int, drafted: int, accepted: int, temperature: float = 0.0, mode: str = "walk"):
    return AcceptanceRow(mode, name, "", temperature, anchor, drafted, accepted)


def served(method: str = DRAFT, temperature: float = 0.0, **changes) -> Served:
    values = {"answers": {"a": [1, 2, 3, 4]}, "gaps": {}, "drafts": 4, "drafted": 12, "accepted": [2, 1, 0]}
    return Served(method, temperature, **{**values, "rounds": 8, "seconds": 2.0, **changes})


def test_a_promise_is_cut_to_the_tokens_that_the_server_may_write():
    # Answer tokens 10..19. Rounds begin at rows 9, 12, 16; the server may write four tokens, 10..13.
    rows = [walk("a", 9, 3, 2), walk("a", 12, 3, 3), walk("a", 16, 2, 1)]
    rounds = promised_rounds(rows, [Promised(response("a", 10), 4)], 0.0, 3)
    assert rounds.drafted.tolist() == [3]  # tokens 11, 12, 13; row 12 would draft 14 and on
    assert rounds.accepted.tolist() == [2]
    whole = promised_rounds(rows, [Promised(response("a", 10), 100)], 0.0, 3)
    assert whole.drafted.tolist() == [3, 3, 2]


def test_a_cut_round_keeps_no_more_than_it_may():
    rounds = promised_rounds([walk("a", 9, 3, 3)], [Promised(response("a", 10), 3)], 0.0, 3)
    assert (rounds.drafted.tolist(), rounds.accepted.tolist()) == ([2], [2])
    assert summarise(rounds, resamples=10).survival[2].denominator == 0


def test_only_walked_rounds_of_these_prompts_at_this_temperature_in_the_last_turn_count():
    rows = [
        walk("a", 9, 3, 1),
        walk("a", 9, 3, 3, mode="anchor"),
        walk("b", 9, 3, 3),
        walk("a", 9, 3, 3, temperature=1.0),
        walk("a", 4, 3, 3),  # an earlier turn
    ]
    rounds = promised_rounds(rows, [Promised(response("a", 10, earlier=(Span(5, 8),)), 10)], 0.0, 3)
    assert rounds.accepted.tolist() == [1]
    with pytest.raises(ValueError, match=r"T = 0\.5"):
        promised_rounds(rows, [Promised(response("a", 10), 10)], 0.5, 3)


def test_prompts_are_the_first_heldout_ones_that_can_have_a_round(tmp_path):
    recipe = tiny_recipe(tmp_path, **{"serving.prompts": 2})
    rows = [response("one", 1), response("a", 5), response("b", 5), response("c", 5)]
    chosen = choose_prompts(recipe, rows)
    assert [each.response.conversation_id for each in chosen[0.0]] == ["a", "b"]
    assert chosen[0.0][0].prompt_token_ids == tuple(range(10))


def test_a_divergence_names_the_first_other_token_and_how_near_a_tie_it_was():
    gaps = {"a": [1.0, 0.25, 3.0], "b": [1.0, 1.0]}
    plain = served(PLAIN, answers={"a": [1, 2, 3], "b": [5, 6]}, gaps=gaps)
    found = diverging(served(answers={"a": [1, 9, 3], "b": [5, 6]}), plain)
    assert [(each.prompt_id, each.position, each.gap) for each in found] == [("a", 1, 0.25)]
    shorter = diverging(served(answers={"a": [1, 2, 3, 4], "b": [5, 6]}), plain)
    assert shorter[0].position == 3 and math.isnan(shorter[0].gap)


def test_a_baseline_counts_the_rounds_in_which_it_had_nothing_to_draft():
    ngram = check(served(NGRAM), 1, None, 10)
    assert ngram.served.survival[0].value == pytest.approx(2 / 8)
    assert ngram.agreement == ()


def test_the_verdict_says_no_where_one_answer_or_one_position_is_off():
    rows = [walk(name, 9 + 2 * i, 3, i % 2) for name in "abcd" for i in range(5)]
    rounds = promised_rounds(rows, [Promised(response(name, 60), 60) for name in "abcd"], 0.0, 3)
    good = check(served(drafts=20, drafted=60, accepted=[8, 0, 0]), 1, rounds, 200)
    assert all(judge([good]).values())
    changed = check(served(drafts=20, drafted=60, accepted=[8, 0, 0]), 0, rounds, 200)
    assert list(judge([changed]).values()) == [False, True]
    other = check(served(drafts=20, drafted=60, accepted=[20, 20, 20]), 1, rounds, 200)
    assert list(judge([other]).values()) == [True, False]


def test_counters_are_stored_by_position():
    assert [(row.position, row.drafts, row.accepted) for row in counter_rows(served())] == [
        (1, 4, 2),
        (2, 4, 1),
        (3, 4, 0),
    ]
