"""The evaluation stage: its figures are those of its rows, and its rows those of a slow walk over the
text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from eagle3core.export import load_draft
from storage.features import FeatureReader
from storage.schemas import DecodedRow, read_rows
from tasks.documents import HeldoutDocument, heldout_documents
from tasks.evaluate_draft import run
from tasks.evaluate_worker import in_turn, loops
from tasks.evaluation import EXAMPLES, ROUNDS, ROWS, Evaluation
from tasks.recipe import build_recipe
from tasks.report.example import MOST_PROMPT, PromptPart, examples_json, make_example, prompt_parts, read_examples
from tasks.speed import speed_up
from tasks.target_weights import read_target_weights
from tests.tasks.feature_samples import make_samples


def test_the_artifact_holds_rows_figures_examples_and_curves(small_build):
    store, acceptance = small_build.store, small_build.acceptance
    folder = store.local(acceptance)
    names = {path.name for path in folder.iterdir()}
    assert names == {ROWS, ROUNDS, "summary.json", EXAMPLES, "curves.svg", "curves.png", "manifest.json"}
    evaluation = Evaluation.read(folder)
    assert [figures.temperature for figures in evaluation.figures] == [0.0, 1.0]
    assert evaluation.figures[0].sampled is None and evaluation.figures[1].sampled is not None
    headline = store.manifest(acceptance).summary["temperatures"]["0"]
    assert headline["tau_walk"] == evaluation.figures[0].walk.tau_micro.value


def test_figures_are_recomputed_from_the_rows(small_build):
    store, acceptance = small_build.store, small_build.acceptance
    rows = pq.read_table(store.local(acceptance) / ROWS).to_pylist()
    for figures in Evaluation.read(store.local(acceptance)).figures:
        for summary in (figures.walk, figures.anchor, figures.tree):
            mine = [r for r in rows if r["mode"] == summary.mode and r["temperature"] == figures.temperature]
            assert len(mine) == summary.rounds
            tau = sum(row["accepted"] + 1 for row in mine) / len(mine)
            assert tau == pytest.approx(summary.tau_micro.value)
            for position, rate in enumerate(summary.survival, 1):
                reached = [row for row in mine if row["drafted"] >= position]
                assert rate.denominator == len(reached)
                assert rate.numerator == sum(row["accepted"] >= position for row in reached)


def test_the_sampled_figure_is_the_rounds_that_a_server_runs(small_build):
    """Not every position alike: fewer rounds than anchors, and a tau of its own."""
    (sampled,) = [each for each in Evaluation.read(small_build.store.local(small_build.acceptance)).figures if each.sampled]
    assert sampled.sampled.mode == "walk"
    assert sampled.sampled.rounds < sampled.anchor.rounds


def test_the_decoder_is_timed_beside_its_own_loop_without_a_draft(small_build):
    """Two prompts, both temperatures, three ways; greedy texts are one text, and every round has its row."""
    folder = small_build.store.local(small_build.acceptance)
    speed, rows = Evaluation.read(folder).speed, list(read_rows(DecodedRow, folder, ROUNDS))
    for temperature in (0.0, 1.0):
        plain, *drafted = (speed.of(way, temperature) for way in ("none", "chain", "tree"))
        assert plain.acceptance is None and all(answer.rounds == answer.tokens for answer in plain.answers)
        for found in drafted:
            mine = [row for row in rows if (row.mode, row.temperature) == (found.drafting, temperature)]
            assert found.acceptance.mode == found.drafting and len(mine) == found.acceptance.rounds
            assert sum(len(row.tokens) for row in mine) == sum(answer.tokens for answer in found.answers)
            assert all(len(row.tokens) in (row.accepted, row.accepted + 1) for row in mine)
            assert all(answer.identical is (True if temperature == 0 else None) for answer in found.answers)
            assert speed_up(found, plain) == pytest.approx(found.tokens_per_second() / plain.tokens_per_second())
        here = [each for each in speed.predictions if each.temperature == temperature]
        assert [each.size for each in here if each.drafting == "chain"] == [1, 2, 3]
        assert [each.size for each in here if each.drafting == "tree"] == [60, 30, 15]
        assert sum(each.best for each in here) == 1
        assert [each.size for each in here if each.measured is not None] == [3, 60]


def test_a_recipe_may_leave_tree_and_decoder_out(small_build, tmp_path: Path):
    recipe = build_recipe(
        small_build.recipe.model_dump(), {"evaluation.tree_prompts": 0, "evaluation.decode.prompts": 0}
    )
    ref = run(recipe, small_build.target, small_build.store, small_build.draft, small_build.features)
    evaluation = Evaluation.read(small_build.store.local(ref))
    assert evaluation.speed is None and all(figures.tree is None for figures in evaluation.figures)
    assert ref.fingerprint != small_build.acceptance.fingerprint


def test_prompts_are_taken_from_the_categories_in_turn():
    items = [HeldoutDocument(None, f"p{i}", category, 0.0) for i, category in enumerate("aaabbc")]
    assert "".join(item.category for item in in_turn(items)) == "abcaba"


def test_figures_of_an_older_program_are_refused_in_one_line(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps({"target": "t", "chain_length": 5, "figures": []}))
    with pytest.raises(ValueError, match="evaluate the draft again"):
        Evaluation.read(tmp_path)


def test_walked_rows_are_those_of_a_slow_walk_over_the_text(small_build):
    """The oracle drafts one token at a time by rerunning the draft over everything it has seen."""
    build = small_build
    store, features, draft = build.store, build.features, build.draft
    head = load_draft(store.local(draft) / "draft", read_target_weights(Path(build.target.path)).embedding)
    document = heldout_documents(FeatureReader(store.local(features)), 0.0)[1].document
    text = document.token_ids.tolist()
    first = int(document.supervised.nonzero()[0])
    expected, row = [], first - 1
    while row + 2 < len(text):
        drafted = min(build.recipe.evaluation.chain_length, len(text) - row - 2)
        guess = slow_chain(head, document.features, text, row, drafted)
        accepted = next((i for i in range(drafted) if guess[i] != text[row + 2 + i]), drafted)
        expected.append((row, drafted, accepted))
        row += accepted + 1
    rows = pq.read_table(store.local(build.acceptance) / ROWS).to_pylist()
    walked = [
        (r["anchor"], r["drafted"], r["accepted"])
        for r in rows
        if (r["mode"], r["prompt_id"], r["temperature"]) == ("walk", "h1", 0.0)
    ]
    assert walked == expected


@torch.no_grad()
def slow_chain(draft, features, text: Sequence[int], row: int, length: int) -> list[int]:
    """Greedy chain begun at `row`: the layer over all earlier rows and the chain's own, nothing cached."""
    hidden = draft.fuse(features[: row + 1].float())
    tokens = list(text[1 : row + 2])
    chain = []
    for _ in range(length):
        output = slow_layer(draft, hidden, torch.tensor(tokens))[-1:]
        best = int(draft.target_ids[draft.logits(output)[0].argmax()])
        chain.append(best)
        tokens.append(best)
        hidden = torch.cat([hidden, draft.feedback(output)])
    return chain


def slow_layer(draft, hidden, tokens):
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    x = layer.attention_input(draft.embed_tokens(tokens), hidden)
    cos, sin = draft.rope(torch.arange(len(tokens)), torch.float32)
    queries, (keys, values) = attention.queries(x, cos, sin), attention.keys_values(x, cos, sin)
    groups = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / attention.head_dim**0.5
    scores = scores.masked_fill(~torch.ones(len(tokens), len(tokens)).tril().bool(), -torch.inf)
    return layer.finish(torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), hidden)


def test_coverage_counts_held_out_tokens_outside_the_map(small_build):
    build = small_build
    store, features, draft = build.store, build.features, build.draft
    head = load_draft(store.local(draft) / "draft", read_target_weights(Path(build.target.path)).embedding)
    reader = FeatureReader(store.local(features))
    kept = set(head.target_ids.tolist())
    tokens = [
        token
        for temperature in (0.0, 1.0)
        for item in heldout_documents(reader, temperature)
        for token in item.document.token_ids[item.document.supervised].tolist()
    ]
    (found,) = Evaluation.read(store.local(build.acceptance)).coverage
    assert (found.category, found.tokens) == ("counting", len(tokens))
    assert found.covered == sum(token in kept for token in tokens)


def test_examples_hold_the_whole_answer_in_order(small_build):
    build = small_build
    store = build.store
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(build.target.path)
    examples = read_examples(store.local(build.acceptance) / EXAMPLES)
    assert len(examples) == 4
    heldout = [s for s in make_samples(seed=build.seed) if s.split == "heldout"]
    answers = {
        tokenizer.decode(s.token_ids[s.spans[0][0] :]).rstrip("\ufffd")
        for s in heldout
    }
    for example in examples:
        assert "".join(each.accepted + each.own for each in example.rounds) in answers


def test_an_example_cuts_text_where_its_rounds_end():
    words = ["a", "b", "c", "d", "e", "f", "g"]
    example = make_example(
        range(7), 2, [1, 0, 1], lambda ids: "".join(words[i] for i in ids), special=(), category="x", temperature=0.0
    )
    assert example.prompt == (PromptPart("ab", False),)
    assert [(r.accepted, r.own) for r in example.rounds] == [("", "c"), ("d", "e"), ("", "f"), ("g", "")]
    assert example.tau == pytest.approx(4 / 3)


def test_the_templates_words_stand_apart_from_the_prompts():
    """ChatML's roles and special tokens are the template's; a word of the text that is a role's name is not."""
    words = ["<|im_start|>", "user\nWhat is a ", "user", "?", "<|im_end|>", "\n", "<|im_start|>", "assistant\n"]
    parts = prompt_parts(range(8), lambda ids: "".join(words[i] for i in ids), {0, 4, 6})
    assert [(part.text, part.template) for part in parts] == [
        ("<|im_start|>", True),
        ("user", True),
        ("What is a user?", False),
        ("<|im_end|>", True),
        ("<|im_start|>", True),
        ("assistant", True),
    ]


def test_of_a_long_prompt_the_end_is_shown():
    (part,) = prompt_parts(range(1000), lambda ids: "x" * len(ids), ())
    assert part.text == "…" + "x" * MOST_PROMPT


def test_examples_survive_json(tmp_path: Path):
    example = make_example(range(5), 1, [1, 1], lambda ids: "x" * len(ids), special={0}, category="", temperature=1.0)
    (tmp_path / "examples.json").write_text(examples_json([example]))
    assert read_examples(tmp_path / "examples.json") == (example,)
    assert json.loads(examples_json([])) == []


def test_a_half_character_belongs_to_the_round_that_completes_it():
    pieces = {0: "", 1: "a", 2: "a\ufffd", 3: "aé"}
    example = make_example(
        range(4),
        1,
        [1],
        lambda ids: pieces[len(ids)] if 1 in ids or not ids else "",
        special=(),
        category="",
        temperature=0.0,
    )
    assert [(r.accepted, r.own) for r in example.rounds] == [("", "a"), ("", "é")]


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        ([*range(50), *[7] * 40], True),
        ([*range(50), *[1, 2, 3] * 12], True),
        (list(range(200)), False),
        ([*range(50), *[7] * 6], False),
        ([*[1, 2, 3] * 12, 99, 98], False),
    ],
)
def test_runaway_repetition_is_seen_at_the_end_only(tokens: list[int], answer: bool):
    assert loops(tokens) is answer
