"""The plan's figures: statistics as counted by hand, stages as the recipe's own arithmetic gives them."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from storage.artifacts import ArtifactStore
from tasks import prepare_conversations
from tasks.plan_build import Expected, expect, feature_bytes_per_token, lines, page
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import Recipe, build_recipe
from tasks.statistics import SourceStatistics, script_of, source_statistics
from tasks.templates import Template
from tests.tiny_target import make_tiny_target


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, TargetInfo]:
    folder = tmp_path_factory.mktemp("plan")
    rows = [
        {
            "messages": [
                {"role": role, "content": f"{role} {i} {k}"}
                for k, role in enumerate(["user", "assistant"] * 2)
            ]
        }
        for i in range(20)
    ]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in [*rows, {"messages": []}]))
    recipe = build_recipe(
        {
            "name": "t",
            "target": {
                "model": str(make_tiny_target(folder / "target")),
                "dtype": "float32",
                "max_model_len": 512,
            },
            "data": {
                "sources": [{"kind": "messages", "uri": str(folder / "rows.jsonl")}],
                "heldout": 4,
                "max_tokens": 100,
                "max_prompt_tokens": 60,
            },
            "features": {"dtype": "float32", "teacher_k": 8},
            "store": {"uri": str(folder / "store")},
        }
    )
    return recipe, prepare_target(recipe)


def test_statistics_are_those_of_the_rendered_dialogues(made):
    recipe, target = made
    store, template = ArtifactStore(recipe.store.uri), Template.load(target)
    ref = prepare_conversations.run(recipe, target, store)
    [found] = source_statistics(store, ref, template, recipe.data.max_tokens)
    assert (found.rows, found.train, found.heldout, found.user_turns) == (21, 16, 4, 40)
    assert (found.scripts, found.refused) == ({"latin": 20}, {"empty_conversations_list": 1})
    tokens = supervised = truncated = 0
    for i in range(20):
        messages = [
            {"role": role, "content": f"{role} {i} {k}"} for k, role in enumerate(["user", "assistant"] * 2)
        ]
        rendered = template.conversation(messages)
        truncated += len(rendered.token_ids) > 100
        marked = [i for start, end in rendered.spans for i in range(start, end) if i < 100]
        tokens, supervised = tokens + min(100, len(rendered.token_ids)), supervised + len(marked)
    assert (found.tokens, found.supervised, found.truncated) == (tokens, supervised, truncated)


def test_disk_follows_the_bytes_of_a_token(made):
    recipe, target = made
    assert feature_bytes_per_token(recipe, target) == 4 + 3 * 64 * 4 + 8 * 6 + 4
    statistics = SourceStatistics("s", 20, 16, 0, user_turns=16, counted=16, prompt_tokens=16 * 30)
    answers, features, training = expect(recipe, target, [statistics])
    assert features.tokens == 16 * 100  # 30 and 0.8 * 1024 are cut to 100
    assert features.bytes == features.tokens * feature_bytes_per_token(recipe, target)
    assert features.seconds == 0  # captured by the pass that answers
    assert 0 < training.tokens < features.tokens and answers.seconds > 0


def test_a_page_has_every_source_and_every_later_stage_and_makes_conversations_alone(made, tmp_path):
    recipe, target = made
    store = ArtifactStore(str(tmp_path / "store"))
    text = "\n".join(page(recipe, target, store))
    for said in ("messages", "latin 100%", "refused: empty_conversations_list 1", "bytes a token", "free"):
        assert said in text
    for stage in ("make-responses", "extract-features", "train-draft"):
        assert stage in text
    assert len(store.list("conversations")) == 1
    assert not any(store.list(kind) for kind in ("responses", "features", "draft"))


def test_a_window_bounds_the_disk_and_every_epoch_reads_again(made):
    recipe, target = made
    statistics = SourceStatistics("s", 20, 16, 0, user_turns=16, counted=16, prompt_tokens=16 * 30)
    size = 16 * 100 * feature_bytes_per_token(recipe, target)

    def features(epochs: int, window: float) -> Expected:
        overrides = {"store.window_gb": window / 1e9, "training.epochs": epochs}
        return expect(build_recipe(recipe.model_dump(mode="json"), overrides), target, [statistics])[1]

    assert features(1, size / 2).bytes == size / 2 and features(1, 2 * size).bytes == size
    assert features(1, 2 * size).seconds == features(3, 2 * size).seconds > 0
    assert features(3, size / 2).seconds > 2 * features(1, size / 2).seconds


def test_a_disk_that_is_too_small_is_said(made):
    recipe, target = made
    statistics = SourceStatistics(
        "s", 9, 9, 1, 10, 10, 100, 50, 50, scripts=Counter(latin=10), refused={"duplicate": 2}
    )
    assert "not enough room" in lines(recipe, target, [statistics], free=1000)[-1]
    page = "\n".join(lines(recipe, target, [statistics], free=10**15))
    assert "not enough room" not in page and "refused: duplicate 2" in page


@pytest.mark.parametrize(
    ("text", "script"),
    [("Hello", "latin"), ("你好 ok 世界", "cjk"), ("привет", "cyrillic"), ("12 + 3", "none")],
)
def test_scripts_by_unicodes_names(text, script):
    assert script_of(text) == script
