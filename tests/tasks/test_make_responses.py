"""Responses and features from one pass: parts, resume after SIGKILL, quarantine, and every way to refuse."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from storage.features import FeatureReader
from storage.schemas import QuarantineRow, ResponseRow, read_rows
from tasks import extract_features, make_responses
from tests.tasks.tiny_build import TinyBuild, tiny_build


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyBuild, object]:
    build = tiny_build(tmp_path_factory.mktemp("responses"))
    return build, make_responses.run(build.recipe, build.target, build.store, build.conversations)


def rows_of(build: TinyBuild, ref) -> list[ResponseRow]:
    return list(read_rows(ResponseRow, build.store.local(ref)))


def test_every_conversation_is_answered_and_heldout_ones_once_a_temperature(built):
    build, ref = built
    rows = rows_of(build, ref)
    assert sorted(row.id for row in rows if row.split == "train") == sorted(f"c/{i}" for i in range(10))
    heldout = {(row.conversation_id, row.temperature) for row in rows if row.split == "heldout"}
    assert heldout == {(f"c/{i}", t) for i in (10, 11, 12) for t in (0.0, 1.0)}
    assert {row.temperature for row in rows if row.split == "train"} == {0.0, 1.0}
    summary = build.store.manifest(ref).summary
    assert summary["samples"] == len(rows) == 16
    assert sum(summary["finish_reasons"].values()) == 16


def test_the_same_pass_stored_the_features_of_exactly_these_tokens(built):
    build, ref = built
    plan = extract_features.plan(build.recipe, build.target, ref)
    features = plan.find(build.store)
    assert features is not None
    reader = FeatureReader(build.store.local(features))
    stored = {reader.read(i).id: reader.read(i) for i in range(len(reader))}
    for row in rows_of(build, ref):
        sample = stored.pop(row.id)
        assert sample.token_ids.tolist() == list(row.token_ids)
        assert [tuple(span) for span in sample.spans] == [(span.start, span.end) for span in row.spans]
        assert sample.features.shape == (len(row.token_ids) - 1, 3 * 64)
    assert not stored
    assert extract_features.estimate(build.recipe, build.target, build.store, ref) == 0
    assert extract_features.run(build.recipe, build.target, build.store, ref) == features


def test_the_teacher_of_a_greedy_answer_prefers_what_was_written(built):
    build, ref = built
    features = extract_features.plan(build.recipe, build.target, ref).find(build.store)
    reader = FeatureReader(build.store.local(features))
    for i in range(len(reader)):
        sample = reader.read(i)
        rows = np.concatenate([np.arange(start - 1, end - 1) for start, end in sample.spans[-1:]])
        inside = np.exp(sample.teacher_log_probs[rows].astype(float)).sum(-1)
        np.testing.assert_allclose(inside + np.exp(sample.teacher_rest[rows]), 1, atol=2e-3)
        if sample.temperature == 0:
            assert sample.teacher_ids[rows, 0].tolist() == sample.token_ids[rows + 1].tolist()
        # Rows that no label needs say that the k tokens have no mass.
        assert np.exp(sample.teacher_log_probs[0].astype(float)).sum() == 0


def test_existing_text_read_again_gives_the_same_features(built):
    build, ref = built
    first = extract_features.plan(build.recipe, build.target, ref).find(build.store)
    features = build.recipe.features.model_copy(update={"teacher_k": 9})
    other = build.recipe.model_copy(update={"features": features})
    second = extract_features.run(other, build.target, build.store, ref)
    one, two = (FeatureReader(build.store.local(each)) for each in (first, second))
    for i in range(len(one)):
        a, b = one.read(i), two.read(i)
        assert a.id == b.id
        np.testing.assert_allclose(a.features, b.features, rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(a.teacher_ids[-1], b.teacher_ids[-1, :8])


def test_a_changed_temperature_is_another_artifact_and_a_changed_batch_is_not(built):
    build, ref = built

    def fingerprint(**changes) -> str:
        responses = build.recipe.responses.model_copy(update=changes)
        recipe = build.recipe.model_copy(update={"responses": responses})
        return make_responses.plan(recipe, build.target, build.conversations).fingerprint

    assert fingerprint(max_num_seqs=3) == ref.fingerprint
    assert fingerprint(temperature=0.7) != ref.fingerprint
    assert fingerprint(seed=1) != ref.fingerprint


def test_too_many_refused_prompts_stop_the_run_and_a_laxer_recipe_takes_its_parts_over(tmp_path):
    short = {"data.max_tokens": 26, "data.max_prompt_tokens": 25, "features.engine": "vllm"}
    strict = tiny_build(tmp_path, **short, **{"data.max_bad_share": 0.01})
    with pytest.raises(make_responses.ResponsesError, match="max_bad_share"):
        make_responses.run(strict.recipe, strict.target, strict.store, strict.conversations)

    build = tiny_build(tmp_path, **short)
    ref = make_responses.run(build.recipe, build.target, build.store, build.conversations)
    assert "engines" not in build.store.manifest(ref).summary  # nothing had to be made again
    refused = list(read_rows(QuarantineRow, build.store.local(ref), "quarantine-*.parquet"))
    assert {row.reason for row in refused} == {"too long"}
    assert len(refused) + len(rows_of(build, ref)) == 16


def test_kept_answers_are_the_datas_own_and_heldout_is_answered_all_the_same(tmp_path):
    build = tiny_build(tmp_path, **{"responses.keep_answers": True, "features.engine": "vllm"})
    ref = make_responses.run(build.recipe, build.target, build.store, build.conversations)
    rows = rows_of(build, ref)
    train = [row for row in rows if row.split == "train"]
    assert all(row.finish_reason == "given" for row in train)
    assert all(row.finish_reason in {"stop", "length"} for row in rows if row.split == "heldout")
    refused = list(read_rows(QuarantineRow, build.store.local(ref), "quarantine-*.parquet"))
    assert {row.reason for row in refused} == {"no answer"}
    assert len(train) + len(refused) == 10


def test_features_that_would_not_fit_the_disk_are_refused_with_both_figures(built, monkeypatch):
    build, _ = built
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1_000_000))
    with pytest.raises(extract_features.RoomError, match=r"of up to 1,000,000 tokens take .* GB"):
        extract_features.check_room(build.recipe, build.target, build.store, 1_000_000)


RUN = """
import sys
from pathlib import Path
from tests.tasks.tiny_build import tiny_build
from tasks import make_responses
b = tiny_build(Path(sys.argv[1]), train=20, **{"responses.max_num_seqs": 2})
make_responses.run(b.recipe, b.target, b.store, b.conversations)
"""


def test_a_killed_run_goes_on_and_gives_what_an_uninterrupted_one_gives(tmp_path):
    whole = tiny_build(tmp_path / "whole", train=20, **{"responses.max_num_seqs": 2})
    expected = make_responses.run(whole.recipe, whole.target, whole.store, whole.conversations)

    root = str(Path(__file__).resolve().parents[2])
    child = subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path / "killed")], env={**os.environ, "PYTHONPATH": root}
    )
    store = tmp_path / "killed" / "store"
    try:
        while not list(store.glob("responses/.partial-*/part-*.parquet")) and child.poll() is None:
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    left = {path.name: path.read_bytes() for path in store.glob("responses/.partial-*/part-*.parquet")}
    if not left:
        pytest.fail("the run ended before it could be killed")

    build = tiny_build(tmp_path / "killed", train=20, **{"responses.max_num_seqs": 2})
    ref = make_responses.run(build.recipe, build.target, build.store, build.conversations)
    folder = build.store.local(ref)
    assert all((folder / name).read_bytes() == data for name, data in left.items())
    assert rows_of(build, ref) == rows_of(whole, expected)
    ids = [row.id for row in rows_of(build, ref)]
    assert len(ids) == len(set(ids)) == 26
    features = extract_features.plan(build.recipe, build.target, ref).find(build.store)
    assert sorted(FeatureReader(build.store.local(features)).index["id"].to_pylist()) == sorted(ids)
