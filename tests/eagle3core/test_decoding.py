"""The reference decoders: the text is as without speculation, whatever the batch, the tree or its end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3core.acceptance import Response
from eagle3core.decoding.drafter import Drafter
from eagle3core.decoding.propose import EAGLE1_PATHS, Chain, DynamicTree, Nothing, StaticTree
from eagle3core.decoding.speculate import Decoding, rounds_of, speculate
from eagle3core.decoding.target import SlotCache, prompt_block, tree_block
from eagle3core.packing import Chains, draft_id_table, pack
from eagle3core.unroll import Unroll
from eagle3core.verify import Sampling
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

PROPOSERS = [Nothing(), Chain(4), StaticTree(), DynamicTree(20, 4, 4), DynamicTree()]
NAMES = ["plain", "chain", "eagle1", "small-tree", "eagle2"]


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(8)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return [tiny.answer(target, prompt, 20) for prompt in prompts]


@pytest.fixture(scope="module")
def draft(target, prompts, texts):
    draft = tiny.make_draft(target)
    documents = [tiny.document(target, draft, t, len(p)) for p, t in zip(prompts, texts, strict=True)]
    tiny.fit(draft, documents, tiny.head_of(target, draft), 4, 25)
    return draft


@pytest.fixture(scope="module")
def decoder(target, draft):
    return HuggingFaceTarget(target, draft.config.layer_ids)


@pytest.mark.parametrize("batch", [1, 8], ids=["alone", "together"])
@pytest.mark.parametrize("proposer", PROPOSERS, ids=NAMES)
def test_greedy_text_is_the_targets_own(decoder, draft, prompts, texts, proposer, batch):
    """Against a decoder without any cache, batch or speculation."""
    for start in range(0, len(prompts), batch):
        part = prompts[start : start + batch]
        found = speculate(decoder, draft, part, proposer, Decoding(20, eos_token_ids=(tiny.EOS,)))
        wanted = [t[len(p) :].tolist() for p, t in zip(part, texts[start : start + batch], strict=True)]
        assert [generation.token_ids for generation in found] == wanted
        if batch == 1 and start >= 2:
            break


@pytest.mark.parametrize(
    "proposer",
    [Chain(4, Sampling(1.0)), Chain(4), StaticTree(sampling=Sampling(1.0)), DynamicTree(20, 4, 4)],
    ids=["sampled-chain", "greedy-chain", "eagle1", "eagle2"],
)
def test_what_is_sampled_does_not_depend_on_the_batch(decoder, draft, prompts, proposer):
    """Sequences end at different rounds and leave the batch; the others must not notice."""
    settings = Decoding(16, Sampling(0.8, top_p=0.95), (tiny.EOS,), seed=5)
    together = speculate(decoder, draft, prompts[:3], proposer, settings)
    (alone,) = speculate(decoder, draft, prompts[:1], proposer, settings)
    assert alone.token_ids == together[0].token_ids and alone.rounds == together[0].rounds


def test_rounds_tell_the_text(decoder, draft, prompts):
    chain = Chain(4)
    for generation in speculate(decoder, draft, prompts, chain, Decoding(20, eos_token_ids=(tiny.EOS,))):
        tokens = [token for item in generation.rounds for token in item.tokens]
        assert generation.token_ids[1:] == tokens  # the first token is the prefill's
        context = len(generation.prompt) + 1
        for item in generation.rounds:
            assert item.context == context and item.accepted <= item.drafted <= 4
            assert item.tokens and len(item.tokens) in (item.accepted, item.accepted + 1)
            context += len(item.tokens)


def test_a_text_ends_at_its_first_end_token_even_inside_a_draft(decoder, draft, prompts, texts):
    """Any token may be declared the end: take one from the middle of a known text."""
    answer = texts[0][len(prompts[0]) :].tolist()
    for place in range(1, 8):
        end = answer[place]
        wanted = answer[: answer.index(end) + 1]
        for proposer in (Chain(4), DynamicTree(20, 4, 4)):
            (found,) = speculate(decoder, draft, prompts[:1], proposer, Decoding(20, eos_token_ids=(end,)))
            assert found.token_ids == wanted
            assert all(item.drafted <= len(prompts[0]) + len(wanted) - item.context for item in found.rounds)


def test_one_new_token_needs_no_round(decoder, draft, prompts):
    found = speculate(decoder, draft, prompts, Chain(4), Decoding(1))
    assert all(len(g.token_ids) == 1 and not g.rounds and g.finished for g in found)
    assert len(rounds_of(found, [Response("p")] * len(prompts), Chain(4), "chain")) == 0


def test_impossible_requests_are_refused(decoder, draft, prompts):
    with pytest.raises(ValueError, match="at least one token"):
        speculate(decoder, draft, [torch.zeros(0, dtype=torch.int64)], Chain(2), Decoding(4))
    with pytest.raises(ValueError, match="needs a draft"):
        speculate(decoder, None, prompts, Chain(2), Decoding(4))
    with pytest.raises(ValueError, match="no parent or no earlier sibling"):
        StaticTree(((0,), (1, 0)))
    with pytest.raises(ValueError, match=r"layer id 9 is not in 0\.\.6"):
        HuggingFaceTarget(tiny.make_target(), (1, 2, 9))


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_incremental_drafting_gives_the_logits_of_training(target, prompts, texts, flags):
    """Train-step logits against decode logits: the same chain through the unroll and through the cache."""
    draft = tiny.make_draft(target, **flags)
    document = tiny.document(target, draft, texts[0], len(prompts[0]))
    head = tiny.head_of(target, draft)
    batch = pack([document], draft_id_table(draft.t2d), 4, follow=Chains.SERVED, target_head=head)
    outputs = Unroll()(draft, batch)
    with torch.no_grad():
        for place, row in list(enumerate(batch.chains.tolist()))[:3]:
            drafter = Drafter(draft, 1, 64)
            # Committed in two parts, with nodes drafted and dropped between, as rounds do.
            split = row // 2
            for rows in (slice(0, split), slice(split, row + 1)):
                if rows.start:
                    drafter.step(torch.tensor([[7, 9]]), torch.zeros(1, 2, dtype=torch.int64))
                tokens = document.token_ids[rows.start + 1 : rows.stop + 1]
                drafter.commit(document.features[None, rows], tokens[None], torch.tensor([len(tokens)]))
            logits = drafter.logits
            for step in range(4):
                assert torch.allclose(logits[0], draft.logits(outputs[step][place]), atol=2e-4), (row, step)
                token = document.token_ids[row + 2 + step]
                logits = drafter.step(token.reshape(1, 1), torch.tensor([[step]]))[:, 0]


def test_a_branch_sees_its_own_ancestors_only(draft):
    """A node's logits are those of a chain that holds its ancestors alone, whatever else was drafted."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 6, draft.config.feature_size, generator=generator)
    tokens = torch.randint(2, tiny.VOCAB, (1, 6), generator=generator)
    with torch.no_grad():
        tree = Drafter(draft, 1, 64)
        tree.commit(features, tokens, torch.tensor([6]))
        tree.step(torch.tensor([[10, 20, 30]]), torch.zeros(1, 3, dtype=torch.int64))
        logits = tree.step(torch.tensor([[11, 21, 22]]), torch.tensor([[1, 2, 2]]))
        for place, path in enumerate(((10, 11), (20, 21), (20, 22))):
            chain = Drafter(draft, 1, 64)
            chain.commit(features, tokens, torch.tensor([6]))
            for depth, token in enumerate(path):
                alone = chain.step(torch.tensor([[token]]), torch.tensor([[depth]]))
            assert torch.allclose(alone[0, 0], logits[0, place], atol=1e-5)


def test_the_target_answers_a_tree_as_it_answers_each_path(decoder, prompts):
    """Tree attention in one pass against one sequence a path."""
    tokens = torch.tensor([[5, 6, 7, 8, 9]])
    parents = [-1, 0, 0, 1, 3]
    seen = torch.eye(5, dtype=torch.bool)
    for node in range(1, 5):
        seen[node] |= seen[parents[node]]
    cache = decoder.new_cache(1, 64)
    decoder.forward(prompt_block(prompts[:1], cache), cache)
    cache.keep(torch.arange(len(prompts[0]))[None], torch.tensor([len(prompts[0])]))
    real = torch.ones(1, 5, dtype=torch.bool)
    output = decoder.forward(tree_block(tokens, seen.sum(-1)[None] - 1, seen[None], real, cache), cache)
    for node in range(5):
        path = torch.cat([prompts[0], tokens[0, seen[node]]])
        plain = decoder.new_cache(1, 64)
        alone = decoder.forward(prompt_block([path], plain), plain)
        assert torch.allclose(output.logits[0, node], alone.logits[0, -1], atol=1e-3)
        assert torch.allclose(output.features[0, node], alone.features[0, -1], atol=1e-3)


def test_features_are_the_hidden_states_of_the_named_layers(target, prompts):
    """The last id is the residual before the final norm, as servers capture it."""
    layers = target.config.num_hidden_layers
    decoder = HuggingFaceTarget(target, (0, 3, layers))
    cache = decoder.new_cache(1, 32)
    output = decoder.forward(prompt_block(prompts[:1], cache), cache)
    states = target(prompts[0][None], output_hidden_states=True).hidden_states
    embedding, middle, last = output.features[0].chunk(3, dim=-1)
    assert torch.allclose(embedding, states[0][0]) and torch.allclose(middle, states[3][0], atol=1e-4)
    assert torch.allclose(target.model.norm(last), states[layers][0], atol=1e-4)


def test_keeping_a_path_moves_it_behind_the_committed_slots():
    cache = SlotCache(2, 8, layers=1)
    keys = torch.arange(12.0).reshape(2, 1, 6, 1)
    cache.write(0, torch.arange(6).expand(2, -1), keys, keys, 6)
    cache.lengths = torch.tensor([2, 1])
    cache.keep(torch.tensor([[3, 5], [1, 0]]), torch.tensor([2, 1]))
    assert cache.lengths.tolist() == [4, 2]
    nothing = torch.zeros(2, 1, 1, 1)
    kept, _ = cache.write(0, torch.full((2, 1), cache.padding), nothing, nothing, 4)
    assert kept[0, 0, :, 0].tolist() == [0, 1, 3, 5] and kept[1, 0, :2, 0].tolist() == [6, 7]


class Constant:
    """A draft that says the same behind everything."""

    def __init__(self, probabilities: list[float], batch: int = 1) -> None:
        self.logits = torch.tensor([probabilities] * batch).log()
        self.target_ids = torch.arange(len(probabilities)) + 3

    def step(self, token_ids, parents):
        return self.logits[:, None].expand(-1, token_ids.shape[1], -1)


def test_the_dynamic_tree_keeps_the_most_probable_paths():
    tree = DynamicTree(nodes=6, depth=3, top_k=2).propose(Constant([0.7, 0.2, 0.1]), torch.tensor([1]), 9, [])
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), strict=True):
        paths.append(() if parent < 0 else (*paths[parent], token - 3))
    # 0.7, 0.49, 0.343, 0.2, and 0.14 twice; of equals the first candidate stays.
    assert set(paths) == {(), (0,), (1,), (0, 0), (0, 0, 0), (0, 1)}


def test_the_dynamic_tree_has_the_papers_size():
    probabilities = torch.arange(1.0, 41.0)
    draft = Constant((probabilities / probabilities.sum()).tolist(), batch=2)
    tree = DynamicTree().propose(draft, torch.tensor([1, 2]), 99, [])
    assert tree.tokens.shape == (2, 60) and bool(tree.real.all())
    assert bool((tree.parents[:, 1:] >= 0).all())
    assert bool((tree.parents < torch.arange(60)).all())
    # A path of probability 1 everywhere is a chain of the full depth.
    sure = DynamicTree(nodes=9).propose(Constant([1.0, 1e-9, 1e-9]), torch.tensor([1]), 9, [])
    assert sure.ancestors()[0].sum(-1).tolist() == list(range(1, 10))


def test_eagle1s_tree_is_the_published_one():
    assert len(EAGLE1_PATHS) == 25 and StaticTree().depth == 5
    tree = StaticTree().propose(Constant([0.4, 0.3, 0.2, 0.1]), torch.tensor([1]), 9, [None])
    assert tree.tokens.shape == (1, 26) and (tree.parents[0, 1:5] == 0).all()
    assert tree.tokens[0, 1:5].tolist() == [3, 4, 5, 6]


def test_a_static_tree_of_one_path_is_a_chain(decoder, draft, prompts):
    path = StaticTree(tuple((0,) * depth for depth in range(1, 5)))
    settings = Decoding(16, eos_token_ids=(tiny.EOS,))
    found = speculate(decoder, draft, prompts[:3], path, settings)
    assert [replace(g, prompt=None) for g in found] == [
        replace(g, prompt=None) for g in speculate(decoder, draft, prompts[:3], Chain(4), settings)
    ]
