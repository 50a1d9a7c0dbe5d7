"""SpS's draft is a plain Llama: transformers loads its folder, and its loss is that model's own, gradient by gradient."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from eagle3core.drafters import drafter_of
from eagle3core.packing import draft_id_table, pack
from eagle3core.training_config import TrainingConfig
from tests.eagle3core import drafter_toys as toys
from tests.eagle3core import tiny_pair as tiny


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


def test_loss_and_gradients_are_those_of_the_exported_model(target, tmp_path):
    draft = toys.make("sps", target)
    which = drafter_of(draft)
    texts = [tiny.answer(target, prompt, 12) for prompt in tiny.prompts(3)]
    views = [which.view(toys.document(target, draft, text, 5)) for text in texts]
    config = which.settings(draft, TrainingConfig())
    batch = pack(views, draft_id_table(draft.t2d), config.ttt_steps, target_head=toys.head(target, draft))
    result = which.trainee(draft, config, which.unroll())(batch)
    result.loss.backward()

    which.save(draft, tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    losses = [F.cross_entropy(model(text[None, :-1]).logits[0, 4:], text[5:], reduction="none") for text in texts]
    loss = torch.cat(losses).mean()
    loss.backward()
    assert int(result.labels[0]) == sum(map(len, losses))
    assert abs(float((result.loss - loss).detach())) < 1e-5
    theirs = dict(model.model.named_parameters())
    ours = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    assert ours.keys() == theirs.keys() and model.config.tie_word_embeddings
    for name, parameter in ours.items():
        assert torch.allclose(parameter.grad, theirs[name].grad, atol=1e-5), name


def test_a_width_that_its_heads_do_not_divide_is_refused(target):
    with pytest.raises(ValueError, match="width 20 must be an even multiple of heads 4"):
        toys.make("sps", target, width=20, heads=4)
