"""The training stage: it learns, it resumes to the bit, it refuses what is not its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3core.checkpoint import CheckpointError
from eagle3core.config import DraftConfig
from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from tasks.build_vocabulary import read_vocabulary
from tasks.build_vocabulary import run as build_vocabulary
from tasks.documents import FeatureDocuments, as_tensor, heldout_documents, heldout_temperatures, split_train
from tasks.train_draft import TrainingSpec, multiply_adds, plan, run
from tasks.train_worker import train
from tests.tasks.feature_samples import (
    HIDDEN,
    make_features,
    make_recipe,
    make_responses,
    make_samples,
    make_target,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Target, responses, features and vocabulary; and a draft trained without interruption."""
    folder = tmp_path_factory.mktemp("made")
    recipe = make_recipe(folder)
    target, store = make_target(recipe), ArtifactStore(recipe.store.uri)
    samples = make_samples()
    responses = make_responses(store, samples)
    features = make_features(store, target, samples, responses)
    vocabulary = build_vocabulary(recipe, target, store, responses)
    return (
        recipe,
        target,
        store,
        samples,
        features,
        vocabulary,
        run(recipe, target, store, features, vocabulary),
    )


def test_a_document_is_the_stored_sample(made):
    _, _, store, samples, features, *_ = made
    reader = FeatureReader(store.local(features))
    split = split_train(reader.index)
    documents = FeatureDocuments(reader, split.train)
    by_id = {sample.id: sample for sample in samples}
    document = documents[3]
    sample = by_id[document.id]
    assert document.token_ids.tolist() == sample.token_ids.tolist()
    assert document.supervised.nonzero().flatten().tolist() == list(range(*sample.spans[0]))
    assert np.array_equal(document.features.numpy(), sample.features)
    assert document.teacher.ids.tolist() == sample.teacher_ids.tolist()
    assert documents.lengths[3] == len(sample.token_ids)
    assert documents.supervised_counts[3] == int(document.supervised.sum())


def test_validation_is_whole_conversations_and_never_held_out(made):
    _, _, store, _, features, *_ = made
    reader = FeatureReader(store.local(features))
    split = split_train(reader.index)
    conversations = reader.index["conversation_id"].to_pylist()
    chosen = {conversations[row] for row in split.validation}
    assert chosen and chosen.isdisjoint({conversations[row] for row in split.train})
    assert all(name.startswith("t") for name in chosen)
    assert heldout_temperatures(reader) == [0.0, 1.0]
    heldout = heldout_documents(reader, 1.0)
    assert [(d.prompt_id, d.category) for d in heldout] == [(f"h{i}", "counting") for i in range(4)]


def test_bfloat16_bits_become_the_same_numbers():
    numbers = torch.randn(7, 3).to(torch.bfloat16)
    bits = numbers.view(torch.int16).numpy().view(np.uint16)
    bits.flags.writeable = False  # as the store maps them
    assert torch.equal(as_tensor(bits), numbers)
    assert as_tensor(bits).data_ptr() == bits.ctypes.data


def test_the_artifact_is_a_servable_draft_and_its_course(made):
    *_, store, _, _, vocabulary, draft = made
    folder = store.local(draft)
    tensors = load_file(folder / "draft/model.safetensors")
    config = DraftConfig.from_dict(json.loads((folder / "draft/config.json").read_text()))
    ids = torch.from_numpy(read_vocabulary(store.local(vocabulary)))
    assert torch.equal(tensors["d2t"] + torch.arange(len(ids)), ids)
    assert (config.hidden_size, config.draft_vocab_size, config.layer_ids, config.fc_norm) == (
        HIDDEN,
        64,
        (1, 2, 3),
        True,
    )
    summary = store.manifest(draft).summary
    lines = [json.loads(line) for line in (folder / "training/metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "step"]
    assert len(losses) == summary["steps"]
    assert losses[-1] < losses[0] - 1
    assert summary["best_tau"] > 1.5  # the made-up answers count up by one
    assert summary["documents"] + summary["validation_documents"] == 24
    assert not (folder / ".worker").exists()


def test_a_second_run_finds_the_first(made):
    recipe, target, store, _, features, vocabulary, draft = made
    assert run(recipe, target, store, features, vocabulary) == draft


def test_threads_and_checkpoints_are_no_part_of_the_result_but_the_rate_is(made):
    recipe, target, _, _, features, vocabulary, _ = made

    def of(**training: object) -> str:
        changed = recipe.model_copy(update={"training": recipe.training.model_copy(update=training)})
        return plan(changed, target, features, vocabulary).fingerprint

    assert of() == of(threads=2, checkpoint_every=1)
    assert of() != of(lr=1e-5)


def test_a_killed_run_goes_on_and_ends_bit_identical(made, tmp_path: Path):
    """SIGKILL of the whole run after its first checkpoints; the same command then."""
    recipe, target, store, _, features, vocabulary, whole = made
    other = ArtifactStore(str(tmp_path / "store"))
    for ref in (features, vocabulary):
        shutil.copytree(store.local(ref), other.root / ref.kind / ref.fingerprint)
    moved = recipe.model_copy(update={"store": recipe.store.model_copy(update={"uri": other.uri})})
    (tmp_path / "run.json").write_text(
        json.dumps({"recipe": moved.model_dump(mode="json"), "target": asdict(target)}, default=list)
    )
    code = (
        "import json, sys; from tasks.recipe import build_recipe\n"
        "from tasks.prepare_target import TargetInfo\n"
        "from storage.artifacts import ArtifactStore; from tasks.train_draft import run\n"
        f"told = json.load(open({str(tmp_path / 'run.json')!r})); recipe = build_recipe(told['recipe'])\n"
        "store = ArtifactStore(recipe.store.uri)\n"
        "run(recipe, TargetInfo.from_dict(told['target']), store,"
        f" store.reference('features', {features.fingerprint!r}),"
        f" store.reference('vocabulary', {vocabulary.fingerprint!r}))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, start_new_session=True)
    partial = other.root / "draft" / f".partial-{whole.fingerprint}"
    deadline = time.monotonic() + 60
    while not list(partial.glob("training/checkpoint/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert other.find("draft", whole.fingerprint) is None
    time.sleep(0.3)  # the worker is ended by the kernel's parent-death signal

    ref = run(moved, target, other, features, vocabulary)
    for name in ("draft/model.safetensors", "draft/config.json"):
        assert (other.local(ref) / name).read_bytes() == (store.local(whole) / name).read_bytes()
    steps = [
        json.loads(line)["step"]
        for line in (other.local(ref) / "training/metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "step"
    ]
    assert steps == list(range(1, len(steps) + 1))


def make_spec(made, folder: Path) -> TrainingSpec:
    recipe, target, store, _, features, vocabulary, _ = made
    return TrainingSpec(
        target=target.to_dict(),
        features=str(store.local(features)),
        vocabulary=str(store.local(vocabulary)),
        folder=str(folder),
        draft=recipe.draft.model_dump(),
        training=recipe.training.model_dump(),
        chain_length=recipe.evaluation.chain_length,
    )


def test_a_checkpoint_over_another_vocabulary_is_refused(made, tmp_path: Path):
    *_, store, _, _, _, whole = made
    shutil.copytree(store.local(whole) / "training", tmp_path / "training")
    file = next((tmp_path / "training/checkpoint").glob("step-*/tensors.safetensors"))
    tensors = load_file(file)
    tensors["map.d2t"][-1] += 1
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match="another draft vocabulary"):
        train(make_spec(made, tmp_path / "training"), torch.device("cpu"))


def test_features_of_another_target_are_refused(made, tmp_path: Path):
    spec = make_spec(made, tmp_path)
    with pytest.raises(ValueError, match="extract again"):
        train(replace(spec, target={**spec.target, "fingerprint": "another"}), torch.device("cpu"))


def test_the_work_grows_with_vocabulary_and_size(made):
    _, target, *_ = made
    assert multiply_adds(target, 128) - multiply_adds(target, 64) == 3 * 64 * HIDDEN
    bigger = replace(
        target, config={**target.config, "intermediate_size": 2 * target.config["intermediate_size"]}
    )
    assert multiply_adds(bigger, 64) > multiply_adds(target, 64)
