"""The doctor's command: a folder and a target in, findings out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft
from eagle3core.export import save_draft
from tasks.examine_draft import PROMPTS, findings_of, main
from tasks.prepare_target import prepare_target
from tasks.recipe import build_recipe
from tasks.target_weights import read_target_weights
from tests.tiny_target import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = make_tiny_target(tmp_path_factory.mktemp("target"), layers=6)
    raw = {
        "name": "tiny",
        "target": {"model": str(folder), "dtype": "float32", "max_model_len": 512},
        "data": {
            "sources": [{"kind": "prompts", "uri": "none"}],
            "max_prompt_tokens": 128,
            "max_tokens": 256,
        },
    }
    return prepare_target(build_recipe(raw))


@pytest.fixture
def draft(target, tmp_path):
    """Untrained, from the target's own rows."""
    weights = read_target_weights(Path(target.path))
    torch.manual_seed(0)
    model = Eagle3Draft(DraftConfig.from_target(target.config, 512))
    model.set_vocabulary(torch.arange(512))
    model.start_from_target(weights.embedding, weights.head, weights.norm)
    save_draft(model, tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def recipe(target, tmp_path):
    file = tmp_path / "tiny.yaml"
    file.write_text(
        f"name: tiny\ntarget: {{model: {target.path}, dtype: float32, max_model_len: 512}}\n"
        "data: {sources: [{kind: prompts, uri: none}], max_prompt_tokens: 128, max_tokens: 256}\n"
    )
    return file


def names(draft, target):
    return [finding.name for finding in findings_of(draft, target, PROMPTS[:2], None, 16)]


def test_an_untrained_draft_is_told_as_one(draft, target):
    assert names(draft, target) == ["too-bad"]


def test_a_file_without_its_head(draft, target):
    tensors = load_file(draft / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, draft / "model.safetensors")
    assert names(draft, target) == ["missing-lm_head.weight"]


def test_a_lost_rope_base(draft, target):
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "rope_theta": 123.0}))
    assert names(draft, target) == ["rope-theta"]


def test_the_command_prints_findings_and_fails(draft, recipe, capsys):
    arguments = [str(recipe), "--draft", str(draft), "--new-tokens", "24"]
    assert main(arguments) == 1
    assert capsys.readouterr().out.startswith("too-bad: position 1")


def test_another_drafters_draft_is_said_in_one_line(draft, recipe, capsys):
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps({**config, "drafter": "eagle1"}))
    assert main([str(recipe), "--draft", str(draft)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and "EAGLE-1" in said and len(said.splitlines()) == 1
