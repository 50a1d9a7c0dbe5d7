"""Overlap with evaluation prompts: copies are found in any dress, boilerplate is not."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa

from storage.schemas import Message
from tasks.decontaminate import NGRAM, THRESHOLD, find_overlaps, turns_on_disk, turns_table
from tasks.recipe import Source
from tasks.sources import read_source
from tasks.sources.shapes import conversation_of

WORDS = [a + b for a in "bdfglmnprst" for b in ("an", "el", "ir", "ot", "um")]


def table(**texts: str) -> pa.Table:
    return pa.table({"id": list(texts), "text": list(texts.values())})


def words(seed: int, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)


def test_a_copy_is_found_whatever_its_case_and_punctuation():
    found = find_overlaps(
        table(a="Why,  is the SKY blue?!", b="why is it blue"), table(e="why is the sky blue")
    )
    assert [(each.training_id, each.evaluation_id, each.exact) for each in found] == [("a", "e", True)]


def test_a_prompt_inside_a_longer_text_is_found_by_its_ngrams():
    prompt = " ".join(words(1, 30))
    found = find_overlaps(
        table(a=f"please answer: {prompt} thank you", b=" ".join(words(2, 40))), table(e=prompt)
    )
    assert [(each.training_id, each.share, each.exact) for each in found] == [("a", 1.0, False)]


def test_shares_agree_with_counting_by_hand():
    """The oracle: Python sets of word tuples."""
    asked = {f"e{i}": words(i, 25) for i in range(6)}
    seen = {}
    for i in range(30):
        start, length = i % 5, 8 + i % 18
        seen[f"t{i}"] = words(100 + i, 10) + asked[f"e{i % 6}"][start : start + length] + words(200 + i, 10)

    def grams(text: list[str]) -> set[tuple[str, ...]]:
        return {tuple(text[i : i + NGRAM]) for i in range(len(text) - NGRAM + 1)}

    expected = {}
    for name, text in seen.items():
        share = max(len(grams(text) & grams(prompt)) / len(grams(prompt)) for prompt in asked.values())
        if share >= THRESHOLD:
            expected[name] = share
    found = find_overlaps(
        table(**{name: " ".join(text) for name, text in seen.items()}),
        table(**{name: " ".join(text) for name, text in asked.items()}),
    )
    assert {each.training_id: each.share for each in found} == expected
    assert 0 < len(expected) < len(seen)


def test_a_frame_that_many_evaluation_prompts_share_trips_nothing():
    frame = (
        "Solve the following problem step by step and return your final response within boxed braces please"
    )
    asked = table(**{f"e{i}": f"{frame} {' '.join(words(i, 10))}" for i in range(5)})
    found = find_overlaps(
        table(a=f"{frame} {' '.join(words(99, 10))}", b=f"{frame} {' '.join(words(3, 10))}"), asked
    )
    assert [(each.training_id, each.evaluation_id) for each in found] == [("b", "e3")]


def test_nothing_against_nothing_is_nothing():
    assert find_overlaps(table(), table(e="a")) == [] == find_overlaps(table(a="a"), table())


def test_turns_are_the_users_in_memory_and_on_disk(tmp_path: Path):
    said = [Message("system", "s"), Message("user", "a"), Message("assistant", "b"), Message("user", "c")]
    assert turns_table([("x", said)]).to_pylist() == [{"id": "x", "text": "a"}, {"id": "x", "text": "c"}]
    assert turns_on_disk([("x", said)], tmp_path / "turns.parquet").to_table() == turns_table([("x", said)])
    assert turns_table([("x", said)], first_only=True).to_pylist() == [{"id": "x", "text": "a"}]


def test_real_evaluation_sets_are_found_in_themselves_and_not_in_real_training_prompts(shared_data: Path):
    def prompts(file: str, kind: str = "prompts") -> pa.Table:
        rows = read_source(Source(kind=kind, uri=str(shared_data / file)))
        dialogues = (conversation_of(kind, row.value) for row in rows)
        return turns_table(
            (str(i), [Message("user", str(t.content)) for t in each.turns if t.role in ("user", "human")])
            for i, each in enumerate(dialogues)
        )

    training = prompts("train/sharegpt_v3_1000.json", "sharegpt")
    for file in (
        "eval/mt_bench.jsonl",
        "eval/math500.jsonl",
        "eval/humaneval164.jsonl",
        "eval/gsm8k80.eagle.jsonl",
    ):
        asked = prompts(file)
        assert {each.training_id for each in find_overlaps(asked, asked)} == set(asked["id"].to_pylist())
        assert len(find_overlaps(training, asked)) <= 2, find_overlaps(training, asked)
