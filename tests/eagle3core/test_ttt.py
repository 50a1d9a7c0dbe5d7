"""The training step equals drafting every chain by itself: losses and every gradient, to 1e-5 in fp32."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))
from ttt_oracle import cross_entropy_loss, make_document, make_draft, scored_rows

from eagle3core.batch import Document
from eagle3core.draft import Eagle3Draft
from eagle3core.packing import draft_id_table, pack
from eagle3core.teacher import TargetHead
from eagle3core.ttt import StepResult, TrainingTimeTest
from eagle3core.unroll import Unroll

TOLERANCE = 1e-5
HEAD = (torch.randn(23, 16, generator=torch.Generator().manual_seed(5)), torch.linspace(0.5, 1.5, 16))


def gradients(draft: Eagle3Draft) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad()
    return found


def packed_step(
    draft: Eagle3Draft,
    documents: list[Document],
    steps: int,
    unroll: Unroll | None = None,
    loss: str = "ce",
    **options,
) -> StepResult:
    head = TargetHead.build(*HEAD, 1e-5, draft.target_ids)
    batch = pack(documents, draft_id_table(draft.t2d), steps, target_head=head, **options)
    result = TrainingTimeTest(draft, loss, 0.8, unroll)(batch)
    result.loss.backward()
    return result


def assert_same(
    left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float = TOLERANCE
) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        scale = max(1.0, float(value.abs().max()))
        torch.testing.assert_close(
            right[name], value, rtol=0, atol=tolerance * scale, msg=lambda text, n=name: f"{n}: {text}"
        )


MASKS = {
    "random": lambda tokens: torch.rand(tokens, generator=torch.Generator().manual_seed(tokens)) < 0.4,
    "answer": lambda tokens: torch.arange(tokens) >= tokens // 2,
    "all": lambda tokens: torch.ones(tokens, dtype=torch.bool),
    "turns": lambda tokens: torch.arange(tokens) % 9 >= 5,
}
VERSIONS = {
    "EAGLE-3": {},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "normed features": {"fc_norm": True},
    "normed feedback": {"norm_output": True},
}


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 99),
    version=st.sampled_from(list(VERSIONS)),
    kv_heads=st.sampled_from([1, 2, 4]),
    draft_vocabulary=st.sampled_from([5, 11, 23]),  # 23: D = V
    teacher=st.sampled_from(["topk", "hidden"]),
    masks=st.lists(st.tuples(st.integers(3, 20), st.sampled_from(list(MASKS))), min_size=1, max_size=3),
    steps=st.integers(1, 7),
)
def test_step_equals_drafting_each_chain_by_itself(
    seed: int,
    version: str,
    kv_heads: int,
    draft_vocabulary: int,
    teacher: str,
    masks: list[tuple[int, str]],
    steps: int,
) -> None:
    draft = make_draft(seed, 23, draft_vocabulary, 4, kv_heads, **VERSIONS[version])
    documents = [make_document(n, MASKS[kind](n), teacher, seed=i) for i, (n, kind) in enumerate(masks)]
    rows = scored_rows(draft, documents, steps, HEAD)
    head = TargetHead.build(*HEAD, 1e-5, draft.target_ids)
    batch = pack(documents, draft_id_table(draft.t2d), steps, target_head=head)
    if not rows:
        assert batch is None
        return
    expected = cross_entropy_loss(rows, steps, 0.8)
    expected.backward()
    wanted = gradients(draft)
    result = packed_step(draft, documents, steps)
    assert result.loss.item() == pytest.approx(expected.item(), abs=TOLERANCE * max(1, expected.item()))
    count = lambda value: [
        sum(value(logits.detach(), p) for i, logits, p in rows if i == step) for step in range(steps)
    ]
    assert result.labels.tolist() == count(lambda logits, p: 1)
    assert result.hits.tolist() == count(lambda logits, p: int(logits.argmax() == p.argmax()))
    overlap = count(lambda logits, p: float(torch.minimum(p, logits.softmax(0)).sum()))
    assert result.alpha.tolist() == pytest.approx(overlap, abs=1e-4)
    assert_same(wanted, gradients(draft))


def answers(count: int = 3, tokens: int = 20) -> list[Document]:
    return [make_document(tokens + i, torch.arange(tokens + i) >= 7, seed=i) for i in range(count)]


def test_windows_with_wide_holes_equal_the_dense_rows() -> None:
    """Holes wider than a window may have: several flash calls a document, each with keys before it."""
    mask = torch.zeros(160, dtype=torch.bool)
    mask[[9, 10, 11, 90, 91, 150, 151, 152]] = True
    draft, documents = make_draft(draft_vocabulary=23), [make_document(160, mask, seed=1), *answers(1)]
    expected = cross_entropy_loss(scored_rows(draft, documents, 3), 3, 0.8)
    expected.backward()
    wanted = gradients(draft)
    result = packed_step(draft, documents, 3)
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_same(wanted, gradients(draft))


@pytest.mark.parametrize(
    "unroll", [Unroll(recompute=True), pytest.param(None, id="compiled", marks=pytest.mark.slow)]
)
def test_options_change_no_gradient(unroll: Unroll | None) -> None:
    draft = make_draft(norm_output=True)
    plain = packed_step(draft, answers(), 4)
    wanted = gradients(draft)
    other = packed_step(draft, answers(), 4, unroll or Unroll.compiled())
    assert other.loss.item() == pytest.approx(plain.loss.item(), abs=1e-5)
    assert_same(wanted, gradients(draft))


@pytest.mark.parametrize("version", ["EAGLE-3", "EAGLE-3.1"])
def test_bfloat16_stays_close(version: str) -> None:
    """GEMMs and attention in bf16, as on a GPU; residuals, softmax, loss and gradients' sums in fp32."""
    draft = make_draft(**VERSIONS[version])
    plain = packed_step(draft, answers(), 4)
    wanted = gradients(draft)
    other = packed_step(draft, answers(), 4, Unroll(torch.bfloat16))
    assert other.loss.item() == pytest.approx(plain.loss.item(), rel=0.01)
    for name, value in gradients(draft).items():
        assert value.dtype == torch.float32
        assert (value - wanted[name]).norm() < 0.05 * wanted[name].norm(), name


def test_document_order_and_neighbours_change_nothing() -> None:
    """Nothing leaks over a document's end: packed together or summed one by one, the gradients are the same.
    """
    draft, documents = make_draft(), answers(4)
    packed_step(draft, documents, 5)
    together = gradients(draft)
    table = draft_id_table(draft.t2d)
    counts = pack(documents, table, 5).counts
    for document in reversed(documents):
        TrainingTimeTest(draft)(pack([document], table, 5), counts).loss.backward()
    assert_same(together, gradients(draft))


def test_sampled_anchors_have_an_unbiased_gradient() -> None:
    """The mean over many draws approaches the whole gradient; each draw computes fewer chains."""
    draft, documents = make_draft(), answers(3)
    packed_step(draft, documents, 4)
    whole = gradients(draft)
    generator, draws = torch.Generator().manual_seed(0), 200
    total = {name: torch.zeros_like(value) for name, value in whole.items()}
    fewer = 0
    table = draft_id_table(draft.t2d)
    full = pack(documents, table, 4)
    for _ in range(draws):
        batch = pack(documents, table, 4, anchor_share=0.5, generator=generator)
        assert torch.equal(batch.counts, full.counts)
        fewer += batch.steps[1].alive < full.steps[1].alive
        TrainingTimeTest(draft)(batch).loss.backward()
        for name, value in gradients(draft).items():
            total[name] += value / draws
    assert fewer > 0.9 * draws
    for name, value in whole.items():
        assert (total[name] - value).norm() < 0.15 * value.norm(), name


def chain_table(
    draft: Eagle3Draft, documents: list[Document], steps: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Per chain: alphas by step (0 where the step is not scored), and cross-entropies, for the losses that
    weigh chains.
    """
    from ttt_oracle import chain_logits, target_distribution

    table = []
    for document in documents:
        for row in range(len(document.token_ids) - 2):
            alphas, entropies = [], []
            for step, logits in enumerate(chain_logits(draft, document, row, steps)):
                label = row + 2 + step
                p = None
                if label < len(document.token_ids) and bool(document.supervised[label]):
                    p = target_distribution(draft, document, label - 1, None)
                q = logits.log_softmax(0)
                alphas.append(torch.zeros(()) if p is None else torch.minimum(p, q.exp()).sum())
                entropies.append(torch.zeros(()) if p is None else -(p * q).sum())
            table.append((alphas, entropies))
    return table


def test_acceptance_loss_has_the_gradient_of_the_expected_accepted_length() -> None:
    draft, documents, steps = make_draft(draft_vocabulary=23), answers(2), 4
    expected = torch.zeros(())
    for alphas, _ in chain_table(draft, documents, steps):
        expected = expected - torch.stack(alphas).cumprod(0).sum()
    chains = len([p for step, _, p in scored_rows(draft, documents, steps) if step == 0])
    (expected / chains).backward()
    wanted = gradients(draft)
    packed_step(draft, documents, steps, loss="acceptance")
    assert_same(wanted, gradients(draft))


@pytest.mark.parametrize("teacher", ["topk", "hidden"])
@pytest.mark.parametrize("loss", ["lk-alpha", "lk-lambda"])
def test_overlap_losses_have_their_gradients(loss: str, teacher: str) -> None:
    draft, steps = make_draft(draft_vocabulary=11), 3
    documents = [make_document(20, torch.arange(20) >= 6, teacher, seed=i) for i in range(2)]
    rows = scored_rows(draft, documents, steps, HEAD)

    def row_loss(p: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        q = logits.softmax(0)
        alpha = torch.minimum(p, q).sum()
        if loss == "lk-alpha":
            return -alpha.log()
        mix = torch.exp(-3 * alpha.detach())
        return mix * -(p * q.log()).sum() + (1 - mix) * (1 - alpha)

    expected = torch.zeros(())
    for step in range(steps):
        expected = (
            expected + 0.8**step * torch.stack([row_loss(p, z) for i, z, p in rows if i == step]).mean()
        )
    expected.backward()
    wanted = gradients(draft)
    result = packed_step(draft, documents, steps, loss=loss)
    assert result.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert_same(wanted, gradients(draft))


def test_d_pace_weighs_cross_entropy_by_survival() -> None:
    draft, documents, steps = make_draft(draft_vocabulary=23), answers(2), 3
    expected = torch.zeros(())
    for alphas, entropies in chain_table(draft, documents, steps):
        survival = torch.stack(alphas).detach().cumprod(0)
        for step, entropy in enumerate(entropies):
            expected = expected + survival[step:].sum() * entropy
    chains = len([p for step, _, p in scored_rows(draft, documents, steps) if step == 0])
    (expected / chains).backward()
    wanted = gradients(draft)
    packed_step(draft, documents, steps, loss="d-pace")
    assert_same(wanted, gradients(draft))
