"""The teacher from captured states against the target's own logits, and the heads that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.engines.teacher import TargetHead, TeacherError
from tests.tiny_target import make_tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    return make_tiny_target(tmp_path_factory.mktemp("target"))


def test_top_k_and_the_rest_are_the_targets_own_distribution(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
    with torch.no_grad():
        log_probs = model(torch.arange(5, 105)[None]).logits[0].log_softmax(-1)
    top = TargetHead.load(folder, "cpu").top_k(before[0][0], 8)
    values, ids = log_probs.topk(8, dim=-1)
    assert torch.equal(top.ids.long(), ids)
    torch.testing.assert_close(top.log_probs, values, rtol=1e-5, atol=1e-5)
    expected = log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1)
    torch.testing.assert_close(top.rest, expected, rtol=1e-5, atol=1e-5)


def test_the_rest_keeps_its_digits_where_the_target_is_sure():
    head = TargetHead(norm=torch.ones(4), head=torch.eye(4) * 40, eps=1e-6)
    rest = head.top_k(torch.tensor([[3.0, 0.0, 0.0, 0.0]]), 1).rest
    assert rest[0] == pytest.approx(-80 + torch.tensor(3.0).log().item(), abs=1e-3)  # 1 - p would be 0


def test_a_head_that_scales_its_logits_is_refused_by_name(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(TeacherError, match="final_logit_softcapping"):
        TargetHead.load(tmp_path, "cpu")
