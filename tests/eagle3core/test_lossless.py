"""Speculation changes nothing: its output's exact distribution, enumerated, is the target's to 1e-12."""

from __future__ import annotations

import itertools

import pytest
import torch

from eagle3core.decoding.propose import Chain, DynamicTree, Proposer, StaticTree
from eagle3core.verify import Sampling, distribution
from tests.eagle3core.table_models import TableBlock, TableDraft, TableTarget, every_outcome

CONTEXT = (0, 1)
SAMPLINGS = [
    Sampling(0.5),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_k=2),
    Sampling(1.5, top_p=0.7),
    Sampling(0.5, top_k=3, top_p=0.9),
    Sampling(0.0),
]
NAMES = [f"T{s.temperature:g}-k{s.top_k}-p{s.top_p:g}" for s in SAMPLINGS]


def one_round(
    proposer: Proposer, target: TableTarget, target_ids: torch.Tensor, chance, table: type[TableDraft] = TableDraft
) -> tuple[int, ...]:
    """What a round adds to the text."""
    draft, last = table(CONTEXT, target_ids), torch.tensor([CONTEXT[-1]])
    tree = proposer.propose(draft, last, target.vocab, [chance])
    tokens, parents = tree.tokens[0].tolist(), tree.parents[0].tolist()
    contexts: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        contexts.append(CONTEXT if parent < 0 else (*contexts[parent], token))
    behind = torch.stack([target.behind(context) for context in contexts])
    verdict = tree.verify(0, behind, chance)
    return (*(tokens[node] for node in verdict.path), verdict.token)


def text_probability(target: TableTarget, tokens: tuple[int, ...], start: int = 0) -> float:
    """The target's own probability of tokens[start:] behind the context and tokens[:start]."""
    probability = 1.0
    for place in range(start, len(tokens)):
        probability *= float(target.behind((*CONTEXT, *tokens[:place]))[tokens[place]])
    return probability


def check(
    proposer: Proposer,
    vocab: int,
    sampling: Sampling,
    draft_vocab: int | None = None,
    table: type[TableDraft] = TableDraft,
) -> None:
    """A round's output, completed by the target alone to depth + 1 tokens, against the target alone."""
    target = TableTarget(vocab, sampling)
    target_ids = torch.arange(vocab)[vocab - (draft_vocab or vocab) :]
    length = proposer.depth + 1
    found = dict.fromkeys(itertools.product(range(vocab), repeat=length), 0.0)
    total = 0.0
    for probability, added in every_outcome(lambda chance: one_round(proposer, target, target_ids, chance, table)):
        total += probability
        for rest in itertools.product(range(vocab), repeat=length - len(added)):
            text = (*added, *rest)
            found[text] += probability * text_probability(target, text, start=len(added))
    assert abs(total - 1) < 1e-12
    assert max(abs(found[text] - text_probability(target, text)) for text in found) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("vocab", [3, 4, 5, 6])
def test_greedy_chain(vocab, sampling):
    check(Chain(2), vocab, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("vocab", [3, 4, 5, 6])
def test_sampled_chain(vocab, sampling):
    check(Chain(2, sampling), vocab, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("vocab", [3, 4, 5, 6])
def test_dynamic_tree(vocab, sampling):
    check(DynamicTree(nodes=7, depth=3 if vocab < 5 else 2, top_k=3), vocab, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("vocab", [5, 6])
def test_static_tree_of_one_level(vocab, sampling):
    check(StaticTree(((0,), (1,), (2,)), sampling), vocab, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("vocab", [3])
def test_static_tree_of_two_levels(vocab, sampling):
    # Where q has fewer tokens than a node has children (always at T = 0), the tree has holes.
    check(StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0)), sampling), vocab, sampling)


@pytest.mark.parametrize("sampling", [Sampling(0.5), Sampling(1.5)], ids=["T0.5", "T1.5"])
def test_static_tree_with_greedy_children(sampling):
    check(StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (1, 0)), None), 5, sampling)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=NAMES)
@pytest.mark.parametrize("drawn", [False, True], ids=["greedy", "drawn"])
def test_a_block_that_is_drafted_at_once(sampling, drawn):
    """DFlash: places are independent of one another, and the text is the target's all the same."""
    check(Chain(2, sampling if drawn else None), 4, sampling, table=TableBlock)
    check(DynamicTree(nodes=6, depth=2, top_k=3), 4, sampling, table=TableBlock)


@pytest.mark.parametrize("proposer", [Chain(2, Sampling(1.0)), Chain(2), DynamicTree(5, 2, 2)], ids=str)
def test_a_draft_vocabulary_that_lacks_tokens(proposer):
    check(proposer, 5, Sampling(1.0), draft_vocab=3)


def test_the_draft_may_be_sampled_in_another_way_than_the_target():
    check(Chain(2, Sampling(1.5)), 4, Sampling(0.5, top_k=3))


def test_a_verifier_that_skips_the_residual_is_found_out(monkeypatch):
    """The test tests: emitting from p after a rejection, the classic mistake, is not lossless."""
    monkeypatch.setattr("eagle3core.verify._without", lambda token, p, q: (p, q))
    with pytest.raises(AssertionError):
        check(Chain(2, Sampling(1.0)), 4, Sampling(1.0))


def test_top_k_and_top_p_keep_what_servers_keep():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert distribution(logits, Sampling(1.0, top_k=2)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    # 0.5 + 0.3 reach 0.75 with the second token: the third goes.
    assert distribution(logits, Sampling(1.0, top_p=0.75)).tolist() == pytest.approx([0.625, 0.375, 0, 0])
    assert distribution(logits, Sampling(1.0, top_p=0.01)).tolist() == [1, 0, 0, 0]
    assert distribution(logits, Sampling(0.0)).tolist() == [1, 0, 0, 0]
    with pytest.raises(ValueError, match="top_p"):
        Sampling(1.0, top_p=0)
