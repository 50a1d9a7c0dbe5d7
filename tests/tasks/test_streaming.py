"""Features through a window: the batches, losses and draft of the run without one, on a bounded disk, after any kill."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.artifacts import ArtifactRef
from storage.errors import StorageError
from storage.features import FeatureReader, FeatureWriter
from storage.folder import PartFolder
from tasks import extract_features, train_draft, train_worker
from tasks.documents import heldout_documents
from tasks.engines import pool, worker
from tasks.engines.requests import WorkerSpec
from tasks.recipe import Recipe
from tasks.streaming.costs import fill_count, streaming_seconds
from tasks.streaming.fills import Schedule, WindowError
from tasks.streaming.plan import plan_window
from tasks.streaming.rows import StreamedReader, rows_of
from tests.tasks.streaming_build import (
    HELDOUT,
    TRAIN,
    Answered,
    MadeUp,
    answered,
    extracted,
    spec_of,
    stream,
    train_here,
    training_spec,
)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Answered:
    return answered(tmp_path_factory.mktemp("streaming"))


@pytest.fixture(scope="module")
def patch() -> pytest.MonkeyPatch:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def features(build: Answered, patch: pytest.MonkeyPatch) -> ArtifactRef:
    """All features at once, as without a window."""
    return extracted(build, build.recipe, MadeUp(), patch)


@pytest.fixture(scope="module")
def whole(build: Answered, features: ArtifactRef, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training over all of them."""
    folder = tmp_path_factory.mktemp("whole")
    train_here(training_spec(build, build.recipe, features, folder / "training"))
    return folder


@pytest.fixture(scope="module")
def recipe(build: Answered, features: ArtifactRef) -> Recipe:
    """A window of half of what all features take."""
    return build.windowed(build.store.manifest(features).bytes / 2)


@pytest.fixture(scope="module")
def kept(build: Answered, recipe: Recipe, patch: pytest.MonkeyPatch) -> ArtifactRef:
    return extracted(build, recipe, MadeUp(), patch)


def course(folder: Path) -> list[dict[str, Any]]:
    """What was learnt, step by step: everything but times, and when it was saved."""
    lines = [json.loads(line) for line in (folder / "training/metrics.jsonl").read_text().splitlines()]
    kinds = {"step", "evaluation", "end"}
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines if line["kind"] in kinds]


def assert_same(left: Path, right: Path) -> None:
    assert course(left) == course(right)
    drafts = [(folder / "training/best/model.safetensors").read_bytes() for folder in (left, right)]
    assert drafts[0] == drafts[1]


def disk(*folders: Path) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())


def test_what_the_order_follows_from_is_known_before_a_feature_exists(build: Answered, features: ArtifactRef):
    columns = ["id", "conversation_id", "split", "n_tokens", "n_supervised"]
    stored = FeatureReader(build.store.local(features)).index.select(columns).sort_by("id")
    known = rows_of(build.store.local(build.responses)).select(columns).sort_by("id")
    assert known.equals(stored)


def test_losses_and_draft_are_those_of_the_whole_run_and_the_disk_stays_under_the_window(
    build: Answered,
    recipe: Recipe,
    kept: ArtifactRef,
    whole: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    caplog.set_level(logging.INFO)
    kept_folder, most = build.store.local(kept), [0]

    def watch() -> None:
        most[0] = max(most[0], disk(kept_folder, tmp_path / ".window"))

    class Watched(MadeUp):
        def __call__(self, *given: Any) -> Any:
            watch()
            took = super().__call__(*given)
            watch()
            return took

    read = Watched()
    result = stream(build, recipe, kept, tmp_path, read, watch)
    assert_same(tmp_path, whole)
    window = recipe.store.window_gb * 1e9
    assert 0.7 * window < most[0] <= window
    # Every epoch's documents are extracted again, once for each fill that has them, and that is said before.
    assert result["fills"] > 2 and len(read.read) > 1.5 * TRAIN
    assert result["extracted_tokens"] > 0
    assert not (tmp_path / ".window").exists()
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("window of") and "fills" in text for text in said)
    (again,) = [text for text in said if "extracts again" in text]
    assert again.startswith("epoch 2 of 2") and "tokens/s measured so far" in again


def test_with_the_real_engine_the_bits_are_those_of_the_whole_run(
    tmp_path: Path, patch: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
):
    """The Hugging Face engine reads in this process; parts, handover and order are as they always are."""
    patch.undo()  # the module's made-up extraction
    monkeypatch.setattr(pool, "run_worker", engine_here)
    build = answered(tmp_path / "build", **{"training.epochs": 1})
    features = extract_features.run(build.recipe, build.target, build.store, build.responses)
    train_here(training_spec(build, build.recipe, features, tmp_path / "whole/training"))
    recipe = build.windowed(0.6 * build.store.manifest(features).bytes)
    kept = extract_features.run(recipe, build.target, build.store, build.responses)
    assert stream(build, recipe, kept, tmp_path / "legs", None)["fills"] > 1
    assert_same(tmp_path / "legs", tmp_path / "whole")


def engine_here(module: str, spec: dict[str, Any], *, on_event: Callable[[dict[str, Any]], None], **_: Any) -> None:
    told = WorkerSpec.from_dict(json.loads(json.dumps(spec)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "emit", on_event)
        worker.run(told, worker.start_engine(told))


def test_data_that_fits_is_extracted_once_for_all_epochs(
    build: Answered, features: ArtifactRef, whole: Path, tmp_path: Path, patch: pytest.MonkeyPatch
):
    recipe = build.windowed(1.5 * build.store.manifest(features).bytes)
    kept, read = extracted(build, recipe, MadeUp(), patch), MadeUp()
    result = stream(build, recipe, kept, tmp_path, read)
    assert_same(tmp_path, whole)
    assert result["fills"] == 1
    assert len(read.read) == len(set(read.read))
    # Killed after its last checkpoint: there is nothing to extract and nothing to train, only a result to tell.
    again = MadeUp()
    stream(build, recipe, kept, tmp_path, again)
    assert not again.read


def test_a_killed_trainer_finds_what_it_needs(
    build: Answered, recipe: Recipe, kept: ArtifactRef, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = plan_of(build, recipe, kept).schedule.fills()[1]

    def dies(event: Any) -> None:
        if event.kind == "step" and event.step == first.until - 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train_worker, "_report", dies)
        stream(build, recipe, kept, tmp_path, MadeUp())
    assert (tmp_path / ".window" / first.name).is_dir()
    read, legs = MadeUp(), []
    stream(build, recipe, kept, tmp_path, read, lambda: legs.append(len(read.read)))
    assert legs[0] == 0  # the leg is gone on with, nothing is extracted for it
    assert_same(tmp_path, whole)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_killed_extractor_leaves_its_parts(
    build: Answered, recipe: Recipe, kept: ArtifactRef, whole: Path, tmp_path: Path, parts: int
):
    killed = MadeUp(fail_after=parts)
    with pytest.raises(KeyboardInterrupt):
        stream(build, recipe, kept, tmp_path, killed)
    read = MadeUp()
    stream(build, recipe, kept, tmp_path, read)
    assert_same(tmp_path, whole)
    fills = plan_of(build, recipe, kept).schedule.fills()
    assert len(killed.read) + len(read.read) == sum(len(fill.documents) for fill in fills)


def test_a_damaged_part_of_the_window_is_made_again(
    build: Answered, recipe: Recipe, kept: ArtifactRef, whole: Path, tmp_path: Path
):
    def spoil() -> None:
        part = next((tmp_path / ".window").glob("steps-*/part-00001.parquet"))
        data = bytearray(part.read_bytes())
        data[len(data) // 2] ^= 1
        part.write_bytes(data)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(build, recipe, kept, tmp_path, MadeUp(), spoil)
    stream(build, recipe, kept, tmp_path, MadeUp())
    assert_same(tmp_path, whole)


def test_another_window_in_the_middle_changes_nothing_that_is_learnt(
    build: Answered, recipe: Recipe, kept: ArtifactRef, whole: Path, tmp_path: Path
):
    legs = []

    def dies() -> None:
        legs.append(None)
        if len(legs) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream(build, recipe, kept, tmp_path, MadeUp(), dies)
    smaller = build.windowed(0.8 * recipe.store.window_gb * 1e9)
    stream(build, smaller, kept, tmp_path, MadeUp())
    assert_same(tmp_path, whole)


def test_minutes_become_steps_in_the_first_leg(build: Answered, recipe: Recipe, kept: ArtifactRef, tmp_path: Path):
    """The dry run reads the first steps before the first one is done: they are there together."""
    timed = build.windowed(1.6 * recipe.store.window_gb * 1e9, max_cpu_minutes=1e-6)
    plan = plan_of(build, timed, kept)
    early = {i for step in range(3) for i in plan.schedule.needs(step)}
    assert early <= set(plan.schedule.fill(0).documents)
    assert stream(build, timed, kept, tmp_path, MadeUp())["fills"] == 1
    assert [line["step"] for line in course(tmp_path) if line["kind"] == "step"] == [1]


def test_a_window_that_is_too_small_is_said_before_anything_is_extracted(
    tmp_path: Path, patch: pytest.MonkeyPatch, build: Answered, kept: ArtifactRef
):
    fresh, read = answered(tmp_path), MadeUp()
    with pytest.raises(WindowError, match=r"store.window_gb 1e-05 is too small: .*, or lower") as error:
        extracted(fresh, fresh.windowed(1e4), read, patch)
    assert not read.read
    enough = float(str(error.value).split("set it to ")[1].split(" at least")[0]) * 1e9
    extracted(fresh, fresh.windowed(1.01 * enough), read, patch)
    assert read.read
    with pytest.raises(WindowError):  # what is kept is there already, made under a larger window
        stream(build, build.windowed(0.9 * enough), kept, tmp_path, MadeUp())


def test_what_is_kept_is_what_is_evaluated_and_the_window_has_the_rest(
    build: Answered, features: ArtifactRef, kept: ArtifactRef, tmp_path: Path
):
    readers = [FeatureReader(build.store.local(ref)) for ref in (features, kept)]
    pairs = [heldout_documents(reader, 0.0) for reader in readers]
    assert [each.document.id for each in pairs[0]] == [f"h{i}" for i in range(HELDOUT)]
    for left, right in zip(*pairs, strict=True):
        assert left.document.features.equal(right.document.features)
    assert set(readers[1].index["split"].to_pylist()) == {"train", "heldout"}  # validation is there too
    summary, all_of_it = (build.store.manifest(ref).summary for ref in (kept, features))
    assert summary["tokens"] == all_of_it["tokens"] and summary["rows"] < all_of_it["rows"]
    assert summary["streamed_rows"] + summary["rows"] == all_of_it["rows"]

    FeatureWriter(PartFolder(tmp_path), spec_of(build)).finish()
    reader = StreamedReader(build.store.local(kept), tmp_path)
    ids = reader.index["id"].to_pylist()
    assert reader.read(ids.index("h0")).id == "h0"
    absent = next(i for i, name in enumerate(ids) if name not in readers[1].index["id"].to_pylist())
    with pytest.raises(StorageError, match=f"sample {ids[absent]} is not in"):
        reader.read(absent)


def test_the_windows_size_is_no_part_of_what_is_made_but_that_there_is_one_is(build: Answered, recipe: Recipe):
    def fingerprint(recipe: Recipe) -> str:
        return extract_features.plan(recipe, build.target, build.responses).fingerprint

    assert fingerprint(recipe) == fingerprint(build.windowed(1e12)) != fingerprint(build.recipe)
    # Answers are not captured on the way: their order is not that of training.
    one_pass = {"responses": build.recipe.responses.model_copy(update={"engine": "huggingface"})}
    assert extract_features.made_by_responses(build.recipe.model_copy(update=one_pass))
    assert not extract_features.made_by_responses(recipe.model_copy(update=one_pass))


def test_estimates_count_every_epochs_extraction(build: Answered, recipe: Recipe, kept: ArtifactRef):
    tokens = build.store.manifest(kept).summary["tokens"]
    assert fill_count(recipe, build.target, tokens, 2) == 4  # half of the data fits
    assert fill_count(build.windowed(1e12), build.target, tokens, 2) == 1
    once, twice = (streaming_seconds(recipe, build.target, tokens, epochs) for epochs in (1, 2))
    assert twice > 1.5 * once
    arguments = build.target, build.store, kept, build.vocabulary
    with_window, without = (train_draft.estimate(each, *arguments) for each in (recipe, build.recipe))
    assert with_window - without == pytest.approx(twice)


@given(
    steps=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=4), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 9), min_size=13, max_size=13),
    room=st.integers(1, 60),
    least=st.integers(1, 3),
)
def test_fills_are_every_step_once_with_what_it_reads_and_never_more_than_fits(steps, sizes, room, least):
    schedule = Schedule(lambda step: steps[step % len(steps)], sizes, room, len(steps), least)
    if schedule.largest > room:
        with pytest.raises(WindowError):
            schedule.fills()
        return
    fills = schedule.fills()
    assert [step for fill in fills for step in range(fill.first, fill.until)] == list(range(len(steps)))
    for fill in fills:
        assert set(fill.documents) >= {i for step in range(fill.first, fill.until) for i in steps[step]}
        assert len(set(fill.documents)) == len(fill.documents)
        assert fill.bytes == sum(sizes[i] for i in fill.documents) <= room
        assert fill == schedule.between(fill.first, fill.until)
    for fill, following in pairwise(fills):  # none ends before it has to
        assert schedule.between(fill.first, following.first + 1).bytes > room
    assert fills[0].epoch == 1


def plan_of(build: Answered, recipe: Recipe, kept: ArtifactRef):
    rows = rows_of(build.store.local(build.responses))
    return plan_window(recipe, spec_of(build), rows, build.store.manifest(kept).bytes)
