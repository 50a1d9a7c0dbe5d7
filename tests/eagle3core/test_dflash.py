"""DFlash's block against a slow oracle, and that training and drafting mean the same place by the same number."""

from __future__ import annotations

import math

import pytest
import torch

from eagle3core.drafters import drafter_of
from eagle3core.drafters.dflash import BlockPass, choose_anchors
from eagle3core.packing import draft_id_table, pack
from eagle3core.training_config import TrainingConfig
from tests.eagle3core import drafter_toys as toys
from tests.eagle3core import tiny_pair as tiny
from tests.eagle3core.test_drafters import require_same_logits
from tests.eagle3core.ttt_oracle import cross_entropy_loss, target_distribution


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


@pytest.fixture(scope="module")
def documents(target):
    draft = toys.make("dflash", target)
    return [toys.document(target, draft, tiny.answer(target, prompt, 9), 5) for prompt in tiny.prompts(3)]


def packed(target, draft, documents):
    steps = draft.shape.block - 1
    return pack(documents, draft_id_table(draft.t2d), steps, target_head=toys.head(target, draft))


def block_logits(draft, document, row):
    """Logits [block - 1, D] of the places behind the anchor, token row + 1: every place, head and key by itself."""
    places = draft.shape.block
    tokens = [document.token_ids[row + 1]] + [torch.tensor(draft.shape.mask_token_id)] * (places - 1)
    xs = [draft.embed_tokens(token) for token in tokens]
    context = draft.hidden_norm(draft.fc(document.features[: row + 1]))
    at = lambda position: draft.rope(torch.tensor([position]), torch.float32)
    for layer in draft.layers:
        attention = layer.self_attn
        keys, values = [], []
        for position in range(row + 1):
            k, v = attention.keys_values(context[position][None], *at(position))
            keys.append(k[0])
            values.append(v[0])
        normed = [layer.input_layernorm(x) for x in xs]
        for place in range(places):
            k, v = attention.keys_values(normed[place][None], *at(row + 1 + place))
            keys.append(k[0])
            values.append(v[0])
        after = []
        for place in range(places):
            query = attention.queries(normed[place][None], *at(row + 1 + place))[0]
            group = len(query) // len(keys[0])
            attended = []
            for head in range(len(query)):
                scores = torch.stack([k[head // group] @ query[head] for k in keys]) * query.shape[-1] ** -0.5
                attended.append(sum(w * v[head // group] for w, v in zip(scores.softmax(0), values, strict=True)))
            x = xs[place] + attention.o_proj(torch.cat(attended))
            after.append(x + layer.mlp(layer.post_attention_layernorm(x)))
        xs = after
    return torch.stack([draft.lm_head(draft.norm(x)) for x in xs[1:]])


def test_loss_and_gradients_are_the_oracles(target, documents):
    draft = toys.make("dflash", target, block=3, gamma=3.0, anchors=1.0)
    documents = documents[:2]
    which = drafter_of(draft)
    config = which.settings(draft, TrainingConfig())
    assert config.ttt_steps == 2 and config.step_decay == pytest.approx(math.exp(-1 / 3))
    result = which.trainee(draft, config, which.unroll())(packed(target, draft, documents))
    result.loss.backward()
    grads = {name: p.grad.clone() for name, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad()
    head = (target.lm_head.weight.detach(), target.model.norm.weight.detach())
    rows = []
    for document in documents:
        for row in range(len(document.token_ids) - 2):
            drafted = block_logits(draft, document, row)
            # Place k predicts token row + 1 + k.
            for k in range(1, draft.shape.block):
                token = row + 1 + k
                if token < len(document.token_ids) and document.supervised[token]:
                    p = target_distribution(draft, document, token - 1, head)
                    if p is not None:
                        rows.append((k - 1, drafted[k - 1], p))
    loss = cross_entropy_loss(rows, 2, math.exp(-1 / 3))
    loss.backward()
    assert int(result.labels.sum()) == len(rows)
    assert abs(float((result.loss - loss).detach())) < 1e-4
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(grads[name], parameter.grad, atol=1e-5), name
    assert not any(name.startswith(("lm_head", "embed_tokens")) for name in grads)


class OneApart(BlockPass):
    """The fault that a public trainer had: a place's output is taken for its neighbour's."""

    def __call__(self, draft, batch):
        right = super().__call__(draft, batch)
        return [right[0], *(output[: step.alive] for output, step in zip(right, batch.steps[1:], strict=False))]


class PositionsOneApart(BlockPass):
    """A block that stands one position too early in training."""

    def __call__(self, draft, batch):
        kept = draft.rope
        number = len(batch.chains) * draft.shape.block
        draft.rope = lambda positions, dtype: kept(positions - int(len(positions) == number), dtype)
        try:
            return super().__call__(draft, batch)
        finally:
            del draft.rope


@pytest.mark.parametrize("unroll", [OneApart(), PositionsOneApart()], ids=["label", "position"])
def test_a_training_that_is_one_place_apart_from_drafting_is_found_out(target, documents, unroll):
    draft = toys.make("dflash", target)
    head = toys.head(target, draft)
    require_same_logits(draft, documents[0], head, BlockPass())
    with pytest.raises(AssertionError):
        require_same_logits(draft, documents[0], head, unroll)


def test_what_was_taken_in_a_block_does_not_change_the_rest_of_it(target, documents):
    draft = toys.make("dflash", target)
    state = drafter_of(draft).decoder(draft, 1, 64)
    with torch.no_grad():
        state.commit(documents[0].features[None, :6], documents[0].token_ids[None, 1:7], torch.tensor([6]))
        both = state.step(torch.tensor([[7, 9]]), torch.zeros(1, 2, dtype=torch.int64))
        assert torch.equal(both[0, 0], both[0, 1]) and not torch.allclose(both[0, 0], state.logits[0], atol=1e-3)
        # Behind its last place a block says nothing: every token alike.
        node = torch.tensor([[1]])
        for _ in range(draft.shape.block):
            beyond, node = state.step(torch.tensor([[7]]), node), torch.tensor([[state._depths.shape[1] - 1]])
        assert float(beyond.abs().max()) == 0


def test_anchors_are_whole_chains_drawn_by_the_batchs_seed(target, documents):
    draft = toys.make("dflash", target)
    batch = packed(target, draft, documents)
    some = choose_anchors(batch, 0.4)
    assert torch.equal(some.chains, choose_anchors(batch, 0.4).chains)
    kept = set(some.chains.tolist())
    assert 1 <= len(kept) < len(batch.chains)
    for step in range(len(batch.steps)):
        before = {int(row) for row in batch.chains[batch.steps[step].scored]}
        assert {int(row) for row in some.chains[some.steps[step].scored]} == before & kept
        assert torch.equal(some.label_rows(step), some.chains[some.steps[step].scored] + step + 1)
    assert torch.equal(choose_anchors(batch, 1.0).chains, batch.chains)
    assert len(choose_anchors(batch, 1e-9).chains) == 1


def test_a_block_of_one_place_is_refused(target):
    with pytest.raises(ValueError, match="block 1 must be 2 or more"):
        toys.make("dflash", target, block=1)
