"""Evaluation sets: every published shape is read, keys are unique, and the set that ships is this project's own."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from storage.schemas import Message
from tasks.evaluation_sets import EvaluationSetError, expected_heldout, heldout_sets, load_set, set_identity
from tasks.evaluation_sets.shapes import KINDS
from tasks.recipe import EvaluationSet, Recipe, RecipeError, build_recipe
from tasks.sources import SourceError, read_source

STARTER = EvaluationSet(kind="starter")
TASKS = {"dialogue", "code", "grade-school math", "instruction", "summarization", "competition math"}
MT_BENCH = {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"}
OVERLAP_WORDS = 13

SHARED = [
    ("mt-bench", "mt_bench.jsonl", 80, None),
    ("humaneval", "humaneval164.jsonl", 164, "code"),
    ("humaneval", "humaneval80.eagle.jsonl", 80, "code"),
    ("gsm8k", "gsm8k80.eagle.jsonl", 80, "grade-school math"),
    ("alpaca", "alpaca80.eagle.jsonl", 80, "instruction"),
    ("cnn-dailymail", "cnndm_sum80.eagle.jsonl", 80, "summarization"),
    ("math-500", "math500.jsonl", 500, "competition math"),
]

# One row of each set's own columns, as published, and what is asked.
OWN = [
    ("mt-bench", {"prompt": ["One?", "Two?"], "category": "writing", "prompt_id": 7}, "7", ("One?", "Two?")),
    (
        "humaneval",
        {"task_id": "HumanEval/0", "prompt": "\ndef f(x):\n    '''{x}'''\n", "entry_point": "f", "test": ""},
        "HumanEval/0",
        ("Complete the code I provided.\n\ndef f(x):\n    '''{x}'''",),
    ),
    ("gsm8k", {"question": "2 apples?", "answer": "#### 2"}, "0", ("2 apples?",)),
    ("alpaca", {"instruction": "Sort.", "input": "b, a", "output": "", "text": "t"}, "0", ("Sort.\n\nb, a",)),
    ("alpaca", {"instruction": "Sing.", "input": "", "output": "", "text": "t"}, "0", ("Sing.",)),
    ("cnn-dailymail", {"article": "It rains.", "highlights": "", "id": "ab"}, "ab", ("Summarize: It rains.",)),
    (
        "math-500",
        {"problem": "Find $x$.", "solution": "", "subject": "Algebra", "unique_id": "test/1.json"},
        "test/1.json",
        ("Find $x$.",),
    ),
    ("prompts", {"id": "q", "category": "law", "prompt": "Is it?"}, "q", ("Is it?",)),
]


def lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def at(kind: str, path: Path, **more: Any) -> EvaluationSet:
    return EvaluationSet(kind=kind, uri=str(path), **more)


def recipe(sets: list[dict[str, Any]], **data: Any) -> Recipe:
    raw = {
        "name": "r",
        "target": {"model": "m"},
        "data": {"sources": [{"kind": "sharegpt", "uri": "u"}], **data},
        "evaluation": {"sets": sets},
    }
    return build_recipe(raw)


def count_words(messages: tuple[Message, ...]) -> int:
    return sum(len(message.content.split()) for message in messages)


def test_every_kind_that_a_recipe_may_name_has_a_shape():
    assert set(get_args(EvaluationSet.model_fields["kind"].annotation)) == set(KINDS)


@pytest.mark.parametrize(("kind", "file", "rows", "category"), SHARED)
def test_the_published_files_are_read_whole_with_unique_keys(shared_data, kind, file, rows, category):
    chosen = at(kind, shared_data / "eval" / file)
    loaded = load_set(chosen)
    assert len(loaded.prompts) == loaded.rows == rows == len({prompt.key for prompt in loaded.prompts})
    assert {prompt.category for prompt in loaded.prompts} == ({category} if category else MT_BENCH)
    assert all(prompt.key.startswith(f"{kind}/") for prompt in loaded.prompts)
    assert {len(prompt.turns) for prompt in loaded.prompts} == {2 if kind == "mt-bench" else 1}


def test_eagle_questions_are_asked_to_the_letter(shared_data):
    for kind, file, *_ in SHARED:
        if "eagle" not in file and kind != "mt-bench":
            continue
        published = [json.loads(line) for line in (shared_data / "eval" / file).read_text().splitlines()]
        asked = {prompt.id: prompt.turns for prompt in load_set(at(kind, shared_data / "eval" / file)).prompts}
        for row in published:
            assert asked[str(row["question_id"])] == tuple(turn.strip() for turn in row["turns"])


def test_humaneval_is_worded_as_eagle_words_it(shared_data):
    """The same functions in both files, once the line breaks behind the instruction are set aside."""

    def squeezed(file: str) -> set[str]:
        loaded = load_set(at("humaneval", shared_data / "eval" / file))
        return {re.sub(r"\s+", "", prompt.turns[0]) for prompt in loaded.prompts}

    assert len(squeezed("humaneval80.eagle.jsonl") & squeezed("humaneval164.jsonl")) >= 70


@pytest.mark.parametrize(("kind", "row", "name", "turns"), OWN)
def test_a_sets_own_columns_are_worded(tmp_path, kind, row, name, turns):
    (prompt,) = load_set(at(kind, lines(tmp_path / "set.jsonl", [row]))).prompts
    assert (prompt.key, prompt.turns) == (f"{kind}/{name}", turns)
    assert prompt.category == (KINDS[kind].category or row["category"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "starter"])
def test_every_kind_takes_the_question_shape(tmp_path, kind):
    row = {"question_id": 3, "category": "writing", "turns": ["One?", "Two?"], "reference": ["1", "2"]}
    (prompt,) = load_set(at(kind, lines(tmp_path / "set.jsonl", [row]), name="mine")).prompts
    assert (prompt.set, prompt.id, prompt.turns) == ("mine", "3", ("One?", "Two?"))
    assert prompt.category == (KINDS[kind].category or "writing")


@pytest.mark.parametrize(
    ("kind", "rows", "said"),
    [
        ("gsm8k", [], "gsm8k is empty"),
        ("gsm8k", [{"problem": "p"}], r"set.jsonl#0: neither turns nor question .*it has problem.*is gsm8k its kind"),
        ("gsm8k", [{"question": " "}], "blank"),
        ("humaneval", [{"prompt": 3}], "prompt is int, not text"),
        ("mt-bench", [{"question_id": 1, "turns": ["a", None]}], "a turn is NoneType"),
        ("gsm8k", [{"question_id": 1, "turns": ["a"]}] * 2, "id '1' stands twice"),
        ("alpaca", ["just text"], "a row is an object"),
    ],
)
def test_a_set_that_is_not_whole_is_refused_in_one_line(tmp_path, kind, rows, said):
    with pytest.raises(EvaluationSetError, match=said) as caught:
        load_set(at(kind, lines(tmp_path / "set.jsonl", rows)))
    assert "\n" not in str(caught.value)


def test_a_broken_download_is_refused_rather_than_measured(tmp_path):
    path = lines(tmp_path / "set.jsonl", [{"question": f"q {i}"} for i in range(4)])
    path.write_text(path.read_text()[:-8])
    with pytest.raises(EvaluationSetError, match=r"cut_off.*fetch the file again"):
        load_set(at("gsm8k", path))


def test_a_set_that_is_not_there_is_said_by_the_reader(tmp_path):
    with pytest.raises(SourceError, match="no such file"):
        set_identity(at("gsm8k", tmp_path / "none.jsonl"))


def test_a_hub_id_names_its_configuration_and_the_usual_split(tmp_path, monkeypatch):
    """The hub's cache in its own layout: two configurations, two splits each."""
    for config in ("main", "socratic"):
        for split in ("train", "test"):
            (tmp_path / config).mkdir(exist_ok=True)
            lines(tmp_path / config / f"{split}-00000.jsonl", [{"question": f"{config} {split}?"}])
    asked: list[str] = []

    def cached(hub_id: str, **_: Any) -> str:
        asked.append(hub_id)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    (prompt,) = load_set(EvaluationSet(kind="gsm8k", uri="openai/gsm8k/main")).prompts
    assert prompt.turns == ("main test?",) and set(asked) == {"openai/gsm8k"}
    (prompt,) = load_set(EvaluationSet(kind="gsm8k", uri="openai/gsm8k/socratic", split="train")).prompts
    assert prompt.turns == ("socratic train?",)


def test_a_hub_set_that_is_not_cached_is_streamed_by_name_and_configuration(monkeypatch):
    called: list[Any] = []

    def not_cached(*_: Any, **__: Any) -> str:
        raise OSError("not in the cache")

    def stream(*where: Any, **how: Any) -> list[dict[str, str]]:
        called.append((where, how))
        return [{"article": "A.", "id": "x"}, {"article": "B.", "id": "y"}]

    monkeypatch.setattr("huggingface_hub.snapshot_download", not_cached)
    monkeypatch.setattr("datasets.load_dataset", stream)
    loaded = load_set(EvaluationSet(kind="cnn-dailymail", uri="abisee/cnn_dailymail/3.0.0"))
    assert sorted(prompt.key for prompt in loaded.prompts) == ["cnn-dailymail/x", "cnn-dailymail/y"]
    assert called == [(("abisee/cnn_dailymail", "3.0.0"), {"split": "test", "streaming": True})]


def test_a_limit_takes_all_categories_alike_whatever_the_order_of_the_file(tmp_path):
    rows = [{"id": f"{kind}{i}", "category": kind, "prompt": f"{kind} {i}"} for kind in "abc" for i in range(9)]
    taken = [
        load_set(at("prompts", lines(tmp_path / f"{n}.jsonl", order), name="p", limit=6)).prompts
        for n, order in enumerate((rows, rows[::-1]))
    ]
    assert taken[0] == taken[1]
    assert [prompt.category for prompt in taken[0]] == list("abcabc")


def test_the_identity_is_the_content_and_what_is_taken_of_it_not_the_place(tmp_path):
    (tmp_path / "b").mkdir()
    here = lines(tmp_path / "set.jsonl", [{"question": "q"}])
    there = lines(tmp_path / "b" / "set.jsonl", [{"question": "q"}])
    assert set_identity(at("gsm8k", here)) == set_identity(at("gsm8k", there))
    lines(there, [{"question": "r"}])
    others = [at("gsm8k", there), at("gsm8k", here, limit=1), at("gsm8k", here, name="n"), at("prompts", here)]
    assert all(set_identity(other) != set_identity(at("gsm8k", here)) for other in others)


def test_the_starter_set_covers_every_kind_of_task():
    loaded = load_set(STARTER)
    counts = Counter(prompt.category for prompt in loaded.prompts)
    assert len(loaded.prompts) >= 60 and set(counts) == TASKS and min(counts.values()) >= 10
    assert len({prompt.key for prompt in loaded.prompts}) == len(loaded.prompts) == KINDS["starter"].size
    assert {len(p.turns) for p in loaded.prompts if p.category == "dialogue"} == {2}
    topics = {p.id.rsplit("-", 1)[0] for p in loaded.prompts if p.category == "dialogue"}
    assert topics == MT_BENCH
    assert max(len(turn.split()) for prompt in loaded.prompts for turn in prompt.turns) < 120
    assert {prompt.category for prompt in loaded.prompts[:6]} == TASKS  # a beginning holds them all


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def grams(texts: list[str]) -> set[tuple[str, ...]]:
    found = set()
    for text in texts:
        split = words(text)
        found |= {tuple(split[i : i + OVERLAP_WORDS]) for i in range(len(split) - OVERLAP_WORDS + 1)}
    return found


def test_no_starter_prompt_stands_in_a_published_set(shared_data):
    """No turn whole, and no 13 words in a row: the common bar for contamination."""
    published = [
        turn
        for kind, file, *_ in SHARED
        for prompt in load_set(at(kind, shared_data / "eval" / file)).prompts
        for turn in prompt.turns
    ]
    mine = [turn for prompt in load_set(STARTER).prompts for turn in prompt.turns]
    assert not {tuple(words(turn)) for turn in mine} & {tuple(words(turn)) for turn in published}
    assert not grams(mine) & grams(published)
    assert len({tuple(words(turn)) for turn in mine}) == len(mine)


def test_long_prompts_are_left_out_and_counted(tmp_path, caplog):
    rows = [{"question": "word " * (3 if i % 2 else 30) + str(i)} for i in range(10)]
    path = lines(tmp_path / "set.jsonl", rows)
    chosen = recipe([{"kind": "gsm8k", "uri": str(path), "limit": 8}], max_prompt_tokens=10)
    found = heldout_sets(chosen, count_words)
    (report,) = found.reports
    assert report.rows == 10 == report.sampled + report.not_sampled + report.refused.total()
    assert report.not_sampled == 2 and len(found.prompts) == 8
    assert len(found.rows) == report.sampled and len(found.refused) == report.refused["prompt_too_long"] > 0
    assert all(row.split == "heldout" and row.source == "gsm8k" for row in found.rows)
    assert "of 8 prompts are measured" in caplog.text
    with pytest.raises(EvaluationSetError, match=r"none of its prompts fits .*raise data.max_prompt_tokens"):
        heldout_sets(recipe([{"kind": "gsm8k", "uri": str(path)}], max_prompt_tokens=1), count_words)


def test_both_turns_are_asked_as_far_as_the_recipe_lets_them(tmp_path):
    path = lines(tmp_path / "set.jsonl", [{"question_id": 1, "category": "writing", "turns": ["One?", "Two?"]}])
    roles = {}
    for turns in (1, 2):
        (row,) = heldout_sets(recipe([{"kind": "mt-bench", "uri": str(path)}], max_turns=turns), count_words).rows
        roles[turns] = [(message.role, message.content) for message in row.messages]
        assert (row.id, row.source, row.category) == ("mt-bench/1", "mt-bench", "writing")
    assert roles[1] == [("user", "One?")]
    assert roles[2] == [("user", "One?"), ("assistant", ""), ("user", "Two?")]


def test_every_beginning_holds_all_sets_alike(tmp_path):
    sets = []
    for name, count in (("a", 2), ("b", 5)):
        path = lines(tmp_path / f"{name}.jsonl", [{"prompt": f"{name} {i}"} for i in range(count)])
        sets.append({"kind": "prompts", "uri": str(path), "name": name})
    sources = [row.source for row in heldout_sets(recipe(sets), count_words).rows]
    assert sources == ["a", "b", "a", "b", "b", "b", "b"]


def test_estimates_know_how_much_will_be_held_out():
    sets = [{"kind": "mt-bench", "uri": "o/m"}, {"kind": "gsm8k", "uri": "o/g", "limit": 20}, {"kind": "starter"}]
    assert expected_heldout(recipe(sets, heldout=10)) == 10 + 80 + 20 + KINDS["starter"].size
    assert expected_heldout(recipe(sets[:1], heldout=0)) == 80


@pytest.mark.parametrize(
    ("sets", "data", "said"),
    [
        ([{"kind": "gsm8k"}], {}, "gsm8k needs a uri"),
        ([{"kind": "starter", "uri": "x"}], {}, "takes no uri"),
        ([{"kind": "starter"}, {"kind": "starter"}], {}, "several evaluation sets are named 'starter'"),
        ([{"kind": "gsm8k", "uri": "x", "name": "sharegpt"}], {}, "named as a data source"),
        ([{"kind": "gsm8k", "uri": "x", "name": "a/b"}], {}, "name"),
        ([], {"heldout": 0}, "heldout 0 leaves nothing to measure on"),
    ],
)
def test_a_recipe_that_cannot_be_measured_is_refused(sets, data, said):
    with pytest.raises(RecipeError, match=said):
        recipe(sets, **data)


def test_the_starter_set_is_read_by_the_layer_that_reads_all_sources():
    from tasks.evaluation_sets.read import STARTER as path
    from tasks.recipe import Source

    rows = list(read_source(Source(kind="prompts", uri=str(path))))
    assert not [row.problem for row in rows if row.problem] and len(rows) == KINDS["starter"].size
