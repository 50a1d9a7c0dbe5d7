"""Acceptance without decoding against the decoders, on tiny models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eagle3core.acceptance import Response, Rounds, compare, summarise
from eagle3core.decoding.propose import Chain, Nothing
from eagle3core.decoding.speculate import Decoding, rounds_of, speculate
from eagle3core.estimate import Proposal, _walk, estimate
from eagle3core.textprobs import text_log_probs
from eagle3core.verify import Sampling
from tasks.engines.hf_target import HuggingFaceTarget
from tests.eagle3core import tiny_pair as tiny

LENGTH = 4


@pytest.fixture(scope="module")
def target():
    return tiny.make_target()


@pytest.fixture(scope="module")
def prompts():
    return tiny.prompts(10)


@pytest.fixture(scope="module")
def texts(target, prompts):
    return [tiny.answer(target, prompt, 24) for prompt in prompts]


def fitted(target, prompts, texts, updates=25, **flags):
    draft = tiny.make_draft(target, **flags)
    documents = [tiny.document(target, draft, t, len(p)) for p, t in zip(prompts, texts, strict=True)]
    tiny.fit(draft, documents[:6], tiny.head_of(target, draft), LENGTH, updates)
    return draft, documents


@pytest.fixture(scope="module")
def pair(target, prompts, texts):
    return fitted(target, prompts, texts)


def responses(count):
    return [Response(str(index)) for index in range(count)]


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_the_walk_is_the_chain_decoder_round_by_round(target, prompts, texts, flags):
    draft, documents = fitted(target, prompts, texts, **flags)
    walk = estimate(draft, documents, responses(10), LENGTH, target_head=tiny.head_of(target, draft)).walk
    decoder = HuggingFaceTarget(target, draft.config.layer_ids)
    generations = speculate(decoder, draft, prompts, Chain(LENGTH), Decoding(24, eos_token_ids=(tiny.EOS,)))
    rounds = rounds_of(generations, responses(10), Chain(LENGTH), "chain")
    for name in ("response", "context", "drafted", "survived", "weight"):
        assert torch.equal(getattr(walk, name), getattr(rounds, name)), name
    # There was something to compare.
    assert float(walk.accepted.max()) >= 2 and float(walk.accepted.mean()) > 0.1
    assert int(walk.drafted.min()) < LENGTH


def test_packs_of_any_size_and_top_k_teachers_give_the_same(target, prompts, texts, pair):
    draft, documents = pair
    head = tiny.head_of(target, draft)
    whole = estimate(draft, documents, responses(10), LENGTH, target_head=head)
    small = estimate(draft, documents, responses(10), LENGTH, target_head=head, rows_per_pack=40)
    sparse = [tiny.document(target, draft, t, len(p), top_k=8) for p, t in zip(prompts, texts, strict=True)]
    for other in (small, estimate(draft, sparse, responses(10), LENGTH)):
        assert torch.equal(other.anchor.survived, whole.anchor.survived)
        assert torch.equal(other.walk.context, whole.walk.context)


def test_every_span_of_a_document_is_a_response_of_its_own(target, pair):
    draft, documents = pair
    long = documents[0]
    supervised = torch.zeros_like(long.supervised)
    start = int(long.supervised.nonzero()[0])
    supervised[start : start + 8] = True
    supervised[start + 11 : start + 12] = True  # one token: written by prefill alone, no round
    supervised[start + 14 : start + 22] = True
    cut = replace(long, supervised=supervised)
    head = tiny.head_of(target, draft)
    found = estimate(draft, [cut], [Response("p", "math")], LENGTH, target_head=head)
    named = [(r.prompt_id, r.category, r.output_tokens) for r in found.anchor.responses]
    assert named == [("p", "math", 8)] * 2
    first, second = (found.anchor.select(found.anchor.response == index) for index in (0, 1))
    # The first token of a span comes from prefill, and the last leaves nothing to draft.
    assert first.context.tolist() == list(range(start + 1, start + 8))
    assert second.context.tolist() == list(range(start + 15, start + 22))
    assert first.drafted.tolist() == [4, 4, 4, 4, 3, 2, 1]
    # What lies behind a span's end does not matter, what lies before does: as the whole document's rows.
    whole = estimate(draft, [long], [Response("p")], LENGTH, target_head=head).anchor
    rows = torch.isin(whole.context, first.context)
    inside = torch.arange(LENGTH) < first.drafted[:, None]
    assert torch.equal(first.survived, torch.where(inside, whole.survived[rows], 0.0))


def test_nothing_to_walk_is_said(target, pair):
    draft, documents = pair
    silent = replace(documents[0], supervised=torch.zeros_like(documents[0].supervised))
    with pytest.raises(ValueError, match="no round to estimate"):
        estimate(draft, [silent], [Response("p")], LENGTH)
    with pytest.raises(ValueError, match="1 documents for 2 responses"):
        estimate(draft, [silent], responses(2), LENGTH)


def test_the_walk_weighs_rows_by_the_chance_that_a_round_begins_there():
    """Against following every outcome of every round by hand."""
    generator = torch.Generator().manual_seed(0)
    rows, length = 6, 3
    drafted = torch.tensor([min(length, rows - row) for row in range(rows)])
    survived = torch.rand(rows, length, generator=generator, dtype=torch.float64).cumprod(1)
    survived *= torch.arange(length) < drafted[:, None]
    anchors = Rounds(
        "anchor", (Response("a"),), torch.zeros(rows).long(), torch.arange(rows) + 2, drafted, survived,
        torch.ones(rows).double(),
    )  # fmt: skip
    visits = [0.0] * (rows + length + 1)

    def follow(row: int, probability: float) -> None:
        if row >= rows:
            return
        visits[row] += probability
        chances = [1.0, *survived[row].tolist(), 0.0]
        for accepted in range(length + 1):
            follow(row + accepted + 1, probability * (chances[accepted] - chances[accepted + 1]))

    follow(0, 1.0)
    assert _walk(anchors).weight.tolist() == pytest.approx(visits[:rows], abs=1e-12)


def test_bounds_on_the_texts_probability_hold_and_are_exact_inside_the_top_k(target, prompts, texts, pair):
    draft, _ = pair
    text = tiny.answer(target, prompts[0], 30, temperature=1.0, seed=3)
    head = tiny.head_of(target, draft)
    exact = tiny.document(target, draft, text, len(prompts[0]))
    sparse = tiny.document(target, draft, text, len(prompts[0]), top_k=6)
    inside = (sparse.teacher.ids == text[1:, None]).any(1)
    assert 0 < int(inside.sum()) < len(inside)
    for temperature in (0.5, 1.0, 1.7):
        known = text_log_probs(exact, temperature, tiny.VOCAB, head)
        assert torch.equal(known.low, known.high)
        bounds = text_log_probs(sparse, temperature, tiny.VOCAB)
        assert bool((bounds.low <= known.low + 1e-4).all()) and bool((known.low <= bounds.high + 1e-4).all())
        if temperature == 1.0:
            assert torch.allclose(bounds.low[inside], known.low[inside], atol=1e-4)
            assert torch.allclose(bounds.high[inside], known.low[inside], atol=1e-4)


@pytest.fixture(scope="module")
def smooth():
    """A target, a draft that learned from some of its sampled answers, and the others with their prompts."""
    target = tiny.make_smooth_target()
    draft = tiny.make_draft(target)
    prompts = tiny.prompts(120, seed=5)
    decoder = HuggingFaceTarget(target, draft.config.layer_ids)
    plain = speculate(decoder, None, prompts, Nothing(), Decoding(32, Sampling(1.0), (tiny.EOS,), seed=77))
    documents = [tiny.document(target, draft, written(g), len(g.prompt)) for g in plain]
    tiny.fit(draft, documents[:50], tiny.head_of(target, draft), 2, 25)
    return target, draft, prompts[50:], documents[50:]


def written(generation):
    return torch.cat([generation.prompt, torch.tensor(generation.token_ids)])


@pytest.mark.parametrize("proposal", list(Proposal), ids=lambda proposal: proposal.value)
def test_sampled_estimators_agree_with_sampled_decoding(smooth, proposal):
    """At least 2,000 decoded rounds; the estimate comes from other answers to the same prompts."""
    target, draft, prompts, documents = smooth
    sampling = Sampling(1.0)
    chain = Chain(LENGTH, sampling if proposal is Proposal.SAMPLED else None)
    decoder = HuggingFaceTarget(target, draft.config.layer_ids)
    # Two answers to each prompt, under one prompt id.
    names = [Response(str(index % len(prompts)), temperature=1.0) for index in range(2 * len(prompts))]
    generations = speculate(decoder, draft, prompts * 2, chain, Decoding(32, sampling, (tiny.EOS,), seed=1))
    decoded = rounds_of(generations, names, chain, "chain")
    assert len(decoded) >= 2000
    head = tiny.head_of(target, draft)
    found = estimate(draft, documents, names[: len(prompts)], LENGTH, proposal=proposal, target_head=head)
    assert found.unknown == 0
    agreements = compare(summarise(found.walk), summarise(decoded))
    assert all(agreement.explained for agreement in agreements), agreements
    assert agreements[0].ours.value > 0.15


def test_sparse_teachers_bracket_the_sampled_estimate(target, prompts, pair):
    draft, _ = pair
    texts = [tiny.answer(target, p, 24, temperature=1.0, seed=i) for i, p in enumerate(prompts)]
    names = [Response(str(index), temperature=1.0) for index in range(len(prompts))]

    def found(top_k: int | None):
        pairs = zip(prompts, texts, strict=True)
        documents = [tiny.document(target, draft, text, len(prompt), top_k) for prompt, text in pairs]
        head = tiny.head_of(target, draft) if top_k is None else None
        return estimate(draft, documents, names, LENGTH, proposal=Proposal.SAMPLED, target_head=head)

    exact, sparse = found(None), found(6)
    assert exact.unknown == 0 and 0 < sparse.unknown < 1
    assert bool((sparse.anchor.survived <= exact.anchor.survived + 1e-4).all())
    assert bool((sparse.anchor_high.survived >= exact.anchor.survived - 1e-4).all())
    assert torch.allclose(exact.anchor.survived, exact.anchor_high.survived)


def test_greedy_text_under_the_sampled_proposal_is_the_greedy_estimate(target, pair):
    draft, documents = pair
    head = tiny.head_of(target, draft)
    mixed = [Response(str(index), temperature=float(index % 2)) for index in range(10)]
    sampled = estimate(draft, documents, mixed, LENGTH, proposal=Proposal.SAMPLED, target_head=head).anchor
    greedy = estimate(draft, documents, mixed, LENGTH, target_head=head).anchor
    at_zero = torch.tensor([r.temperature == 0 for r in greedy.responses])[greedy.response]
    assert torch.equal(sampled.survived[at_zero], greedy.survived[at_zero])
    assert not torch.equal(sampled.survived[~at_zero], greedy.survived[~at_zero])


def test_the_estimates_interval_covers_at_the_rate_it_promises():
    """1,000 repeats of 40 prompts of a known population of unlike prompts: rounds are not independent."""
    generator = torch.Generator().manual_seed(0)
    rows, length = 16, 3
    everyone = _population(4000, rows, length, generator)
    truth = summarise(everyone, resamples=2)
    wanted = [*(rate.value for rate in truth.survival), truth.tau_micro.value]
    inside = torch.zeros(len(wanted))
    repeats = 1000
    for repeat in range(repeats):
        sample = _sample(everyone, torch.randint(4000, (40,), generator=generator), rows)
        found = summarise(sample, resamples=300, seed=repeat)
        rates = [*found.survival, found.tau_micro]
        inside += torch.tensor([r.low <= w <= r.high for r, w in zip(rates, wanted, strict=True)])
    assert bool(((inside / repeats >= 0.93) & (inside / repeats <= 0.97)).all()), inside / repeats


def _population(prompts: int, rows: int, length: int, generator: torch.Generator) -> Rounds:
    """Walked rounds of many prompts, each easy or hard to draft for. Every row is kept, visited or not."""
    ease = torch.rand(prompts, 1, 1, generator=generator, dtype=torch.float64)
    chances = (torch.rand(prompts, rows, length, generator=generator, dtype=torch.float64) + ease) / 2
    drafted = (rows - torch.arange(rows)).clamp_max(length).repeat(prompts)
    survived = chances.flatten(0, 1).cumprod(1) * (torch.arange(length) < drafted[:, None])
    response = torch.arange(prompts).repeat_interleave(rows)
    context = torch.arange(rows).repeat(prompts) + 2
    ones = torch.ones(prompts * rows, dtype=torch.float64)
    names = tuple(Response(str(index)) for index in range(prompts))
    return _walk(Rounds("anchor", names, response, context, drafted, survived, ones))


def _sample(everyone: Rounds, prompts: torch.Tensor, rows: int) -> Rounds:
    """The rounds of `prompts` drawn with replacement, each draw a prompt of its own."""
    places = (prompts[:, None] * rows + torch.arange(rows)).flatten()
    names = tuple(Response(str(index)) for index in range(len(prompts)))
    response = torch.arange(len(prompts)).repeat_interleave(rows)
    columns = (getattr(everyone, name)[places] for name in ("context", "drafted", "survived", "weight"))
    return Rounds("walk", names, response, *columns)
