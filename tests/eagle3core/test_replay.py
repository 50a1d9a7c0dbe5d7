"""Rounds replayed over a text against the decoding loop that wrote it."""

from __future__ import annotations

import pytest
import torch

from eagle3core.acceptance import Response
from eagle3core.decoding.propose import Chain, DynamicTree, StaticTree
from eagle3core.decoding.replay import replay
from eagle3core.decoding.speculate import Decoding, rounds_of, speculate
from eagle3core.estimate import estimate
from eagle3core.verify import Sampling
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

NEW = 20
COLUMNS = ("response", "context", "drafted", "survived", "weight")


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(6)


@pytest.fixture(scope="module")
def draft(prompts):
    target = tiny.make_smooth_target()
    texts = [tiny.answer(target, prompt, NEW) for prompt in prompts]
    draft = tiny.make_draft(target)
    documents = [tiny.document(target, draft, t, len(p)) for p, t in zip(prompts, texts, strict=True)]
    tiny.fit(draft, documents, tiny.head_of(target, draft), 4, 25)
    return draft


@pytest.fixture(scope="module")
def decoder(draft):
    return HuggingFaceTarget(tiny.make_smooth_target(), draft.config.layer_ids)


def responses(count: int) -> list[Response]:
    return [Response(str(index)) for index in range(count)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "proposer", [Chain(4), DynamicTree(20, 4, 4), StaticTree()], ids=["chain", "eagle2", "eagle1"]
)
def test_a_replay_over_its_own_text_is_the_loop_round_by_round(decoder, draft, prompts, proposer, temperature):
    settings = Decoding(NEW, Sampling(temperature), (tiny.EOS,), seed=3)
    generations = speculate(decoder, draft, prompts, proposer, settings)
    mode = "chain" if isinstance(proposer, Chain) else "tree"
    looped = rounds_of(generations, responses(len(prompts)), proposer, mode)
    documents = [decoder.document(g.prompt, torch.tensor(g.token_ids), "text") for g in generations]
    replayed = replay(draft, documents, responses(len(prompts)), proposer, mode, batch=4)
    for name in COLUMNS:
        assert torch.equal(getattr(replayed, name), getattr(looped, name)), name
    assert float(looped.accepted.max()) >= 2  # there was something to compare


def test_a_chains_replay_is_the_estimates_walk_over_every_turn(decoder, draft, prompts):
    """Two spans of one document are two responses, and each begins behind its own first token."""
    (first,) = speculate(decoder, draft, prompts[:1], Chain(4), Decoding(NEW))
    document = decoder.document(first.prompt, torch.tensor(first.token_ids), "text")
    start = len(first.prompt)
    document.supervised[start + 8 : start + 11] = False
    walked = estimate(draft, [document], responses(1), 4).walk
    replayed = replay(draft, [document], responses(1), Chain(4), "chain")
    assert [(each.output_tokens, each.turn) for each in replayed.responses] == [(8, 0), (9, 1)]
    assert replayed.responses == walked.responses
    for name in COLUMNS:
        assert torch.equal(getattr(replayed, name), getattr(walked, name)), name


def test_a_proposer_that_draws_is_refused(draft):
    with pytest.raises(ValueError, match="draws its tokens"):
        replay(draft, [], [], Chain(4, Sampling(1.0)), "chain")


def test_text_without_a_round_is_refused(decoder, draft, prompts):
    document = decoder.document(prompts[0], torch.tensor([3]), "one token")
    with pytest.raises(ValueError, match="no round"):
        replay(draft, [document], responses(1), Chain(4), "chain")
