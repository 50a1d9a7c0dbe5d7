"""The teacher from captured states against the target's own logits, and the heads that are refused."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.engines.teacher import BLOCK, TargetHead, TeacherError, likeliest
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


@pytest.mark.parametrize("k", [1, 8, 40])
@pytest.mark.parametrize("order", ["random", "rising", "one block"])
def test_the_likeliest_are_those_of_a_whole_sort(k, order):
    logits = torch.randn(7, 20 * BLOCK, generator=torch.Generator().manual_seed(0))
    if order == "rising":
        logits = logits.sort(-1).values  # the likeliest are neighbours
    elif order == "one block":
        logits[:, 3 * BLOCK : 4 * BLOCK] += 100
    values, ids = likeliest(logits, k)
    expected = logits.sort(-1, descending=True)
    assert torch.equal(values, expected.values[:, :k]) and torch.equal(ids, expected.indices[:, :k])


@pytest.mark.parametrize("vocabulary", [BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_a_vocabulary_of_no_whole_blocks_and_more_rows_than_a_chunk(vocabulary, monkeypatch):
    monkeypatch.setattr("tasks.engines.teacher.CHUNK_ROWS", 5)
    monkeypatch.setattr("tasks.engines.teacher.LEAST_ROWS", 4)
    random = torch.Generator().manual_seed(0)
    head = TargetHead(torch.rand(16, generator=random), -torch.rand(vocabulary, 16, generator=random), eps=1e-6)
    hidden = torch.rand(13, 16, generator=random)  # every logit is below 0: a column that is filled up would win
    log_probs = (torch.nn.functional.rms_norm(hidden, (16,), head.norm, 1e-6) @ head.head.T).log_softmax(-1)
    for _ in range(2):  # the second call finds the first one's logits
        top = head.top_k(hidden, 8)
        values, ids = log_probs.topk(8, dim=-1)
        assert torch.equal(top.ids.long(), ids)
        torch.testing.assert_close(top.log_probs, values, rtol=1e-5, atol=1e-5)
        outside = log_probs.scatter(-1, ids, float("-inf")).logsumexp(-1)
        torch.testing.assert_close(top.rest, outside, rtol=1e-5, atol=1e-5)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    random = torch.Generator().manual_seed(0)
    head = TargetHead(torch.rand(96, generator=random), torch.randn(9_001, 96, generator=random), eps=1e-6)
    hidden = torch.randn(500, 96, generator=random)
    together = head.top_k(hidden, 16)
    for start, count in ((0, 1), (3, 7), (130, 31), (200, 32), (90, 300)):
        alone = head.top_k(hidden[start : start + count], 16)
        for name in ("ids", "log_probs", "rest"):
            assert torch.equal(getattr(alone, name), getattr(together, name)[start : start + count]), (name, start)
