"""EAGLE-1's loss and gradients against a slow oracle: every row by itself, plain softmax, plain autograd."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from eagle3core.drafters import drafter, drafter_of
from eagle3core.feed import Feed
from eagle3core.packing import draft_id_table, pack
from eagle3core.training_config import TrainingConfig
from tests.eagle3core import drafter_toys as toys
from tests.eagle3core import tiny_pair as tiny
from tests.eagle3core.training_toys import Memory
from tests.eagle3core.ttt_oracle import cross_entropy_loss, scored_rows


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


@pytest.fixture(scope="module")
def texts(target):
    return [tiny.answer(target, prompt, 12) for prompt in tiny.prompts(3)]


def documents(target, draft, texts):
    return [toys.document(target, draft, text, 5) for text in texts]


def step_of(draft, target, docs, config=TrainingConfig()):  # noqa: B008 (frozen)
    which = drafter_of(draft)
    config = which.settings(draft, config)
    batch = pack(docs, draft_id_table(draft.t2d), config.ttt_steps, target_head=toys.head(target, draft))
    draft.zero_grad()
    result = which.trainee(draft, config, which.unroll())(batch)
    result.loss.backward()
    return result, {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}


def normed(draft, features):
    return features * (features.square().mean(-1, keepdim=True) + draft.config.rms_norm_eps) ** -0.5 * draft.target_norm


def predicted_state(draft, document, row):
    """EAGLE-1's prediction of the state of token row + 1, from the rows up to `row`, a head at a time."""
    layer = draft.layers[0]
    attention = layer.self_attn
    xs = [
        draft.fc(torch.cat([draft.embed_tokens(document.token_ids[j + 1]), normed(draft, document.features[j])]))
        for j in range(row + 1)
    ]
    keys, values = [], []
    for j, x in enumerate(xs):
        k, v = attention.keys_values(x[None], *draft.rope(torch.tensor([j]), torch.float32))
        keys.append(k[0])
        values.append(v[0])
    query = attention.queries(xs[row][None], *draft.rope(torch.tensor([row]), torch.float32))[0]
    group = len(query) // len(keys[0])
    attended = []
    for head in range(len(query)):
        scores = torch.stack([k[head // group] @ query[head] for k in keys]) * query.shape[-1] ** -0.5
        attended.append(sum(w * v[head // group] for w, v in zip(scores.softmax(0), values, strict=True)))
    hidden = xs[row] + attention.o_proj(torch.cat(attended))
    return hidden + layer.mlp(layer.post_attention_layernorm(hidden))


def test_loss_and_gradients_are_the_oracles(target, texts):
    draft = toys.make("eagle1", target, noise=1e-9)
    docs = documents(target, draft, texts)
    result, grads = step_of(draft, target, docs)
    draft.zero_grad()
    losses = []
    for document in docs:
        for row in range(len(document.token_ids) - 2):
            if not document.supervised[row + 2]:
                continue
            predicted, wanted = predicted_state(draft, document, row), normed(draft, document.features[row + 1])
            p = (draft.lm_head.weight @ wanted).softmax(0)
            log_q = (draft.lm_head.weight @ predicted).log_softmax(0)
            losses.append(F.smooth_l1_loss(predicted, wanted) - 0.1 * (p * log_q).sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    assert int(result.labels) == len(losses)
    assert abs(float((result.loss - loss).detach())) < 1e-5
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(grads[name], parameter.grad, atol=1e-5), name


def test_the_targets_own_parts_stay_as_they_are(target, texts):
    draft = toys.make("eagle1", target)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[0] for name in trained} == {"fc", "layers"}
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)


def test_noise_is_as_wide_as_said_and_the_same_for_the_same_step(target, texts):
    draft = toys.make("eagle1", target, noise=0.3)
    docs = documents(target, draft, texts)
    which = drafter_of(draft)
    config = which.settings(draft, TrainingConfig(tokens_per_batch=1000, epochs=2))
    feed = Feed(Memory(docs), config, draft_id_table(draft.t2d), toys.head(target, draft))
    module = which.trainee(draft, config, which.unroll())
    first, again, other = (module._noise(feed.step(number).batches[0]) for number in (0, 0, 1))
    assert torch.equal(first, again) and not torch.equal(first[:8], other[:8])
    batch = feed.step(0).batches[0]
    for index in range(len(docs)):
        mine = first[batch.document == index]
        widest = 0.3 * 512 / len(mine) / 2
        assert 0.9 * widest < float(mine.abs().max()) <= widest


def test_without_the_constraint_the_step_is_training_time_test_over_one_state(target, texts):
    """EAGLE-2 + TTT against the oracle of EAGLE-3, which reads whatever `fuse` gives it."""
    draft = toys.make("eagle2-ttt", target)
    docs = documents(target, draft, texts)
    result, grads = step_of(draft, target, docs, TrainingConfig(ttt_steps=3))
    draft.zero_grad()
    rows = scored_rows(draft, docs, 3, (target.lm_head.weight.detach(), target.model.norm.weight.detach()))
    loss = cross_entropy_loss(rows, 3, 0.8)
    loss.backward()
    assert abs(float((result.loss - loss).detach())) < 1e-4
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(grads[name], parameter.grad, atol=1e-5), name
    assert torch.allclose(draft.fuse(docs[0].features), normed(draft, docs[0].features), atol=1e-6)
    assert not any("fc" in name for name, _ in draft.named_parameters())


def test_each_drafts_with_its_papers_tree():
    assert (drafter("eagle1").tree().depth, drafter("eagle2").tree().depth, drafter("eagle3").tree().depth) == (5, 6, 8)
