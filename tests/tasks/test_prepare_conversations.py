"""The conversations stage: every row accounted for, a sample no order changes, nothing held out seen in
training.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.schemas import ConversationRow, Message, QuarantineRow, from_table, read_rows, to_table
from tasks import prepare_conversations as stage
from tasks.evaluation_sets import EvaluationSetError
from tasks.intake import Intake
from tasks.prepare_conversations import ConversationsError
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Data, Recipe, Source, build_recipe
from tasks.selection import Doubles, Sample, squeezed
from tasks.sources import SourceError
from tasks.statistics import source_statistics
from tasks.templates import Template
from tests.tiny_target import make_tiny_target

WORDS = ["sun", "moon", "star", "tree", "river", "stone", "cloud", "bird", "road", "house", "glass", "lamp"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(tiny: Path) -> TargetInfo:
    return prepare_target(recipe_for(tiny, tiny, tiny))


def recipe_for(
    tiny: Path, folder: Path, data: Path | str, kind: str = "sharegpt", **overrides: Any
) -> Recipe:
    raw = {
        "name": "tiny",
        "target": {"model": str(tiny), "dtype": "float32", "max_model_len": 512},
        "data": {
            "sources": [{"kind": kind, "uri": str(data)}],
            "heldout": 5,
            "max_prompt_tokens": 100,
            "max_tokens": 400,
        },
        "store": {"uri": str(folder / "store")},
    }
    return build_recipe(raw, overrides)


def question(i: int) -> str:
    return " ".join(random.Random(i).choices(WORDS, k=8)) + f" {i}"


def row(i: int, text: str | None = None, **more: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": text or question(i)}, {"from": "gpt", "value": f"answer {i}"}]
    return {"id": f"r{i}", "conversations": turns, **more}


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text(json.dumps(rows))
    return path


def build(
    recipe: Recipe, target: TargetInfo
) -> tuple[ArtifactStore, ArtifactRef, list[ConversationRow], list[QuarantineRow]]:
    store = ArtifactStore(recipe.store.uri)
    ref = stage.run(recipe, target, store)
    import pyarrow.parquet as pq

    quarantine = list(from_table(QuarantineRow, pq.read_table(store.local(ref) / "quarantine.parquet")))
    return store, ref, list(read_rows(ConversationRow, store.local(ref))), quarantine


def test_counts_add_up_and_what_was_refused_is_listed(tmp_path, tiny, target):
    rows = [row(i) for i in range(40)]
    rows += [
        {"id": "empty", "conversations": []},
        "not a row",
        row(3, id="copy"),
        row(50, "x " * 300),
        row(51, "y" * 9000),
    ]
    rows += [
        {
            "id": "r1",
            "conversations": [{"from": "gpt", "value": "hi"}, {"from": "human", "value": "same id\x00"}],
        }
    ]
    recipe = recipe_for(tiny, tmp_path, write(tmp_path / "a.json", rows))
    store, ref, kept, quarantine = build(recipe, target)
    summary = store.manifest(ref).summary
    report = summary["sources"][0]
    assert report["refused"] == {
        "empty_conversations_list": 1,
        "wrong_shape": 1,
        "duplicate": 1,
        "prompt_too_long": 2,
    }
    assert (
        report["kinds"]["same_id_different_content"]
        == report["kinds"]["exact_duplicate_content_different_id"]
        == 1
    )
    assert (
        report["rows"]
        == len(rows)
        == report["sampled"] + report["not_sampled"] + sum(report["refused"].values())
    )
    assert report["rows"] == report["clean"] + report["mended"] + 2  # the two that never were conversations
    assert {each.reason for each in quarantine} == set(report["refused"])
    assert len(kept) == summary["train"] + summary["heldout"] == 41
    assert len({each.id for each in kept}) == 41 and {"r1", "r1.2"} <= {each.id for each in kept}
    assert {each.category for each in kept} == {"sharegpt"}


def test_a_cut_off_file_is_said_and_counted(tmp_path, tiny, target):
    path = write(tmp_path / "a.json", [row(i) for i in range(30)])
    path.write_text(path.read_text()[:-60])
    store, ref, kept, quarantine = build(recipe_for(tiny, tmp_path, path), target)
    assert (len(kept), [each.reason for each in quarantine]) == (29, ["cut_off"])
    assert store.manifest(ref).summary["sources"][0]["cut_off"] == 1


def test_the_sample_is_seeded_and_the_order_of_the_file_does_not_matter(tmp_path, tiny, target):
    rows = [row(i) for i in range(200)]
    shuffled = random.Random(1).sample(rows, k=200)
    chosen = {}
    for name, data, seed in [("a", rows, 0), ("b", shuffled, 0), ("c", rows, 1)]:
        path = write(tmp_path / f"{name}.json", data)
        overrides = {"data.sources": [{"kind": "sharegpt", "uri": str(path), "limit": 30}], "data.seed": seed}
        _, _, kept, _ = build(recipe_for(tiny, tmp_path / name, path, **overrides), target)
        chosen[name] = {(each.messages[0].content, each.split) for each in kept}
        assert len(kept) == 30 and sum(each.split == "heldout" for each in kept) == 5
    assert chosen["a"] == chosen["b"] != chosen["c"]


def test_the_sample_holds_the_smallest_keys_of_the_rows_that_fit(tmp_path, tiny, target):
    """The oracle: the rows that are short enough, taken alone without a limit, give the same choice."""
    rows = [row(i, question(i) * (20 if i % 3 == 0 else 1)) for i in range(120)]
    short = write(tmp_path / "short.json", [each for i, each in enumerate(rows) if i % 3])
    mixed = write(tmp_path / "mixed.json", rows)
    kept = {}
    for path in (short, mixed):
        overrides = {"data.sources": [{"kind": "sharegpt", "uri": str(path), "limit": 20}]}
        kept[path] = build(recipe_for(tiny, tmp_path / path.stem, path, **overrides), target)[2]
    assert kept[short] == kept[mixed]


def test_no_held_out_prompt_is_trained_on(tmp_path, tiny, target):
    rows = [row(i, question(i % 12)) for i in range(36)]  # each question three times, with other answers
    long = " ".join(WORDS) + " of all things here"
    rows += [row(100 + i, f"{question(100 + i)} {i}") for i in range(3)] + [
        row(200, f"please: {long}"),
        row(201, long),
    ]
    recipe = recipe_for(tiny, tmp_path, write(tmp_path / "a.json", rows), **{"data.heldout": 8})
    _, _, kept, quarantine = build(recipe, target)
    held = {squeezed(each.messages[0].content) for each in kept if each.split == "heldout"}
    trained = {squeezed(each.messages[0].content) for each in kept if each.split == "train"}
    assert len(held) == 8 and not held & trained
    # The one is part of the other, so they are never on both sides.
    assert not (squeezed(long) in held and squeezed(f"please: {long}") in trained)
    assert any(each.reason == "overlaps_evaluation" for each in quarantine)


def test_evaluation_prompts_are_kept_out_of_training(tmp_path, tiny, target):
    rows = [row(i) for i in range(30)]
    asked = tmp_path / "evaluation.jsonl"
    asked.write_text(json.dumps({"question_id": 1, "turns": [question(7).upper() + "!", "and then?"]}) + "\n")
    overrides = {"data.exclude": [str(asked)], "data.heldout": 1}
    store, ref, kept, quarantine = build(
        recipe_for(tiny, tmp_path, write(tmp_path / "a.json", rows), **overrides), target
    )
    assert question(7) not in {each.messages[0].content for each in kept if each.split == "train"}
    listed = store.manifest(ref).summary["excluded"]
    assert [(each["training_id"], each["exact"]) for each in listed] in ([("r7", True)], [])
    assert len(kept) + len(quarantine) == 30


def test_turns_are_cut_and_categories_kept(tmp_path, tiny, target):
    rows = [
        {
            "id": str(i),
            "category": "maths",
            "messages": [
                {"role": r, "content": f"{question(i)} {k}"}
                for k, r in enumerate(["system", "user", "assistant", "user", "assistant", "user"])
            ],
        }
        for i in range(12)
    ]
    recipe = recipe_for(
        tiny, tmp_path, write(tmp_path / "a.json", rows), kind="messages", **{"data.max_turns": 2}
    )
    _, _, kept, _ = build(recipe, target)
    assert {each.category for each in kept} == {"maths"}
    assert {tuple(m.role for m in each.messages) for each in kept} == {
        ("system", "user", "assistant", "user", "assistant")
    }
    source = [{"kind": "messages", "uri": str(tmp_path / "a.json"), "system": "drop"}]
    _, _, kept, _ = build(recipe_for(tiny, tmp_path, tmp_path / "a.json", **{"data.sources": source}), target)
    assert {each.messages[0].role for each in kept} == {"user"}


def test_the_same_recipe_is_found_again_and_new_data_is_not(tmp_path, tiny, target):
    path = write(tmp_path / "a.json", [row(i) for i in range(20)])
    recipe = recipe_for(tiny, tmp_path, path)
    store, ref, *_ = build(recipe, target)
    assert stage.run(recipe, target, store) == ref
    assert [each.name for each in store.root.iterdir() if each.name.startswith(".spill")] == []
    write(path, [row(i) for i in range(21)])
    assert stage.plan(recipe, target).fingerprint != ref.fingerprint
    assert stage.estimate(recipe, target, store) > 0


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        ([], {}, "is empty"),
        (
            [row(i, "word " * 400) for i in range(20)],
            {},
            "none of its 20 rows can be used .*raise data.max_prompt_tokens",
        ),
        ([row(0), row(1), *[{"id": "x"}] * 18], {}, "18 of 20 rows refused .*max_bad_share"),
        ([row(i) for i in range(4)], {}, "lower data.heldout"),
        ([row(i, "same") for i in range(9)], {"data.heldout": 1}, "1 different first prompts"),
    ],
)
def test_data_that_cannot_do_is_one_line_and_leaves_nothing(tmp_path, tiny, target, rows, overrides, said):
    recipe = recipe_for(tiny, tmp_path, write(tmp_path / "a.json", rows), **overrides)
    store = ArtifactStore(recipe.store.uri)
    with pytest.raises(ConversationsError, match=said) as caught:
        stage.run(recipe, target, store)
    assert "\n" not in str(caught.value)
    assert store.list("conversations") == []


def test_a_source_that_is_not_there_is_said_before_anything_starts(tmp_path, tiny, target):
    with pytest.raises(SourceError, match="no such file"):
        stage.plan(recipe_for(tiny, tmp_path, tmp_path / "none.json"), target)


def sets_of(tmp_path: Path, *rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return {"evaluation.sets": [{"kind": "mt-bench", "uri": str(path), **more}]}


def two_turns(i: int, first: str) -> dict[str, Any]:
    return {"question_id": i, "category": "writing", "turns": [first, f"and now number {i} once more"]}


def test_evaluation_sets_are_held_out_beside_the_sampled_conversations(tmp_path, tiny, target):
    sets = sets_of(tmp_path, *[two_turns(i, question(500 + i)) for i in range(6)], limit=4)
    data = write(tmp_path / "a.json", [row(i) for i in range(30)] + [row(40, id="mt-bench/1")])
    store, ref, kept, _ = build(recipe_for(tiny, tmp_path, data, **sets), target)
    held = [each for each in kept if each.split == "heldout"]
    assert Counter(each.source for each in held) == {"sharegpt": 5, "mt-bench": 4}
    asked = [each for each in held if each.source == "mt-bench"]
    assert {each.category for each in asked} == {"writing"} and kept[-4:] == asked
    assert all(each.id.startswith("mt-bench/") for each in asked)
    assert {tuple(m.role for m in each.messages) for each in asked} == {("user", "assistant", "user")}
    assert len({each.id for each in kept}) == len(kept)  # the data's own "mt-bench/1" gives way
    summary = store.manifest(ref).summary
    assert (summary["heldout"], summary["by_source"]["mt-bench heldout"], summary["rows"]) == (9, 4, 37)
    statistics = source_statistics(store, ref, Template.load(target), 400)
    assert [(each.source, each.rows, each.train, each.heldout) for each in statistics] == [
        ("sharegpt", 31, 26, 5),
        ("mt-bench", 6, 0, 4),
    ]


def test_with_sets_nothing_needs_to_be_sampled(tmp_path, tiny, target):
    sets = sets_of(tmp_path, two_turns(1, question(501)))
    data = write(tmp_path / "a.json", [row(i) for i in range(6)])
    recipe = recipe_for(tiny, tmp_path, data, **sets, **{"data.heldout": 0, "data.max_turns": 1})
    _, _, kept, _ = build(recipe, target)
    (held,) = [each for each in kept if each.split == "heldout"]
    assert (held.id, [m.content for m in held.messages], len(kept)) == ("mt-bench/1", [question(501)], 7)


def test_a_planted_copy_of_an_evaluation_prompt_is_neither_trained_on_nor_measured_twice(tmp_path, tiny, target):
    """Copies of first and second turns, dressed up, at every seed's choice of what is held out."""
    long = " ".join(random.Random(9).choices(WORDS, k=24))
    sets = sets_of(tmp_path, two_turns(1, long), two_turns(2, question(502)))
    rows = [row(i) for i in range(12)]
    rows += [
        row(100, f"Please help me: {long.upper()}!"),
        row(101, question(502).title() + "?"),
        row(102, "And now, number 2 once more."),
    ]
    data = write(tmp_path / "a.json", rows)
    for seed in range(3):
        recipe = recipe_for(tiny, tmp_path / str(seed), data, **sets, **{"data.seed": seed, "data.max_prompt_tokens": 390})
        store, ref, kept, quarantine = build(recipe, target)
        assert not {each.id for each in kept} & {"r100", "r101", "r102"}
        assert {each.id: each.reason for each in quarantine} == {
            name: "overlaps_evaluation" for name in ("r100", "r101", "r102")
        }
        listed = {each["training_id"]: each for each in store.manifest(ref).summary["excluded"]}
        assert (listed["r100"]["evaluation_id"], listed["r100"]["exact"]) == ("mt-bench/1", False)
        assert (listed["r101"]["evaluation_id"], listed["r101"]["exact"]) == ("mt-bench/2", True)
        assert store.manifest(ref).summary["overlaps_evaluation"] == 3


def test_a_prompt_of_a_set_that_is_excluded_too_is_found_all_the_same(tmp_path, tiny, target):
    """Three lists that hold one prompt do not make boilerplate of it."""
    long = " ".join(random.Random(9).choices(WORDS, k=24))
    sets = sets_of(tmp_path, two_turns(1, long))
    copies = []
    for name in ("x", "y"):
        copies.append(tmp_path / f"{name}.jsonl")
        copies[-1].write_text(json.dumps({"prompt": long}) + "\n")
    data = write(tmp_path / "a.json", [row(i) for i in range(12)] + [row(100, f"so {long}")])
    more = {"data.exclude": [str(path) for path in copies], "data.max_prompt_tokens": 390}
    recipe = recipe_for(tiny, tmp_path, data, **sets, **more)
    assert "r100" not in {each.id for each in build(recipe, target)[2]}


def test_the_fingerprint_covers_the_sets_and_without_sets_is_what_it_was(tmp_path, tiny, target):
    data = write(tmp_path / "a.json", [row(i) for i in range(12)])
    bare = stage.plan(recipe_for(tiny, tmp_path, data), target)
    assert "evaluation_sets" not in bare.parameters
    seen = {bare.fingerprint}
    for rows, limit in [([1], None), ([1, 2], None), ([1, 2], 1)]:
        sets = sets_of(tmp_path, *[two_turns(i, question(500 + i)) for i in rows], limit=limit)
        seen.add(stage.plan(recipe_for(tiny, tmp_path, data, **sets), target).fingerprint)
    assert len(seen) == 4
    with pytest.raises(SourceError, match="no such file"):
        sets = {"evaluation.sets": [{"kind": "gsm8k", "uri": str(tmp_path / "none.jsonl")}]}
        stage.plan(recipe_for(tiny, tmp_path, data, **sets), target)


def test_a_set_that_cannot_be_used_is_one_line_and_leaves_nothing(tmp_path, tiny, target):
    data = write(tmp_path / "a.json", [row(i) for i in range(12)])
    sets = sets_of(tmp_path, two_turns(1, "word " * 400))
    recipe = recipe_for(tiny, tmp_path, data, **sets)
    store = ArtifactStore(recipe.store.uri)
    with pytest.raises(EvaluationSetError, match=r"none of its prompts fits \(prompt_too_long 1\)") as caught:
        stage.run(recipe, target, store)
    assert "\n" not in str(caught.value) and store.list("conversations") == []


def test_the_starter_set_fits_a_small_target(tmp_path, tiny, target):
    data = write(tmp_path / "a.json", [row(i) for i in range(12)])
    recipe = recipe_for(
        tiny, tmp_path, data, **{"evaluation.sets": [{"kind": "starter", "limit": 12}], "data.max_prompt_tokens": 390}
    )
    _, _, kept, _ = build(recipe, target)
    counts = Counter(each.category for each in kept if each.source == "starter")
    assert len(counts) == 6 and set(counts.values()) == {2}


ANYTHING = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.text(max_size=8),
        st.sampled_from(["human", "gpt", "hello there", "\u200b"]),
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["id", "conversations", "from", "value", "messages"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
TURN = st.fixed_dictionaries(
    {"from": st.sampled_from(["human", "gpt", "system", "nobody"]), "value": ANYTHING}
)
DAMAGED = st.one_of(
    ANYTHING, st.fixed_dictionaries({"id": st.text(max_size=2), "conversations": st.lists(TURN, max_size=4)})
)


@settings(max_examples=80, deadline=None)
@given(
    rows=st.lists(DAMAGED, max_size=25), limit=st.one_of(st.none(), st.integers(1, 5)), cut=st.integers(0, 40)
)
def test_random_damage_loses_no_row_uncounted(tmp_path_factory, rows, limit, cut):
    folder = tmp_path_factory.mktemp("damage")
    text = json.dumps(rows)
    (folder / "a.json").write_text(text[: len(text) - cut] if cut else text)
    quarantine: list[QuarantineRow] = []
    source = Source(kind="sharegpt", uri=str(folder / "a.json"), limit=limit)
    data = Data(sources=[source], max_prompt_tokens=3)
    with Sample(limit, folder) as sample:
        intake = Intake(source, "s", data, Doubles(), sample, _count_words, quarantine)
        report = intake.run()
        kept = list(sample.rows())
    assert report.rows == report.sampled + report.not_sampled + report.refused.total()
    assert report.not_sampled >= 0 and (report.not_sampled == 0 or len(kept) == limit)
    assert len(kept) == report.sampled == len({each.id for each in kept})
    assert len(quarantine) == report.refused.total() + report.cut_off
    if not cut:
        assert (report.rows, report.cut_off) == (len(rows), 0)
    to_table(QuarantineRow, quarantine)


def _count_words(messages: tuple[Message, ...]) -> int:
    return sum(len(message.content.split()) for message in messages)
