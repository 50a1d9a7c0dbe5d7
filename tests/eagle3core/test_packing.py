"""What is packed: which rows, which chains, which labels, which keys each query may see."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from ttt_oracle import make_document

from eagle3core.packing import Chains, PackedBatch, draft_id_table, pack
from eagle3core.windows import _varlen, find_windows

EVERYTHING = draft_id_table(torch.ones(23, dtype=torch.bool))


def mask(tokens: int, *spans: tuple[int, int]) -> torch.Tensor:
    result = torch.zeros(tokens, dtype=torch.bool)
    for start, end in spans:
        result[start:end] = True
    return result


def scored(batch: PackedBatch, step: int) -> set[int]:
    return set(batch.chains[batch.steps[step].scored].tolist())


def test_the_label_moves_with_the_step_and_the_mask_with_the_label() -> None:
    """Tokens 10..12 of 16 are supervised: row t counts at step i where t + 2 + i is one of them."""
    document = make_document(16, mask(16, (10, 13)))
    batch = pack([document], EVERYTHING, 3)
    assert [scored(batch, step) for step in range(3)] == [{8, 9, 10}, {7, 8, 9}, {6, 7, 8}]
    assert [step.alive for step in batch.steps] == [5, 4, 3]
    assert batch.counts.tolist() == [3, 3, 3]
    for step in range(3):
        rows = batch.chains[batch.steps[step].scored]
        assert torch.equal(batch.tokens[batch.label_rows(step)], document.token_ids[rows + 2 + step])
        assert torch.equal(
            batch.positions[batch.input_rows(step)], batch.chains[: batch.steps[step].alive] + step
        )


def test_rows_behind_the_last_chain_are_dropped() -> None:
    document = make_document(40, mask(40, (10, 13)))
    assert len(pack([document], EVERYTHING, 3).tokens) == 10 + 1 + 3


def test_nothing_leaks_over_a_documents_end() -> None:
    """A document that is supervised to its last token: no label lies in the next document."""
    documents = [make_document(9, mask(9, (4, 9)), seed=1), make_document(8, mask(8, (0, 8)), seed=2)]
    batch = pack(documents, EVERYTHING, 7)
    for step in range(7):
        rows = batch.chains[batch.steps[step].scored]
        assert torch.equal(batch.document[rows], batch.document[batch.label_rows(step)])
    alone = sum(pack([document], EVERYTHING, 7).counts for document in documents)
    assert torch.equal(batch.counts, alone)


def test_a_label_outside_the_draft_vocabulary_does_not_count() -> None:
    document = make_document(16, mask(16, (6, 16)))
    teacher_argmax = document.teacher.ids[:, 0].long()
    kept = torch.ones(23, dtype=torch.bool)
    kept[teacher_argmax[9]] = False  # the label of every chain that is to predict token 10
    batch = pack([document], draft_id_table(kept), 4)
    labels = torch.cat([batch.label_rows(step) for step in range(4)])
    assert not (teacher_argmax[labels] == teacher_argmax[9]).any()


def test_nothing_to_learn_packs_to_nothing() -> None:
    assert pack([make_document(16, mask(16))], EVERYTHING, 3) is None
    assert pack([make_document(16, mask(16, (0, 2)))], EVERYTHING, 3) is None


def test_served_chains_begin_where_a_round_can_and_end_with_the_text() -> None:
    """Tokens 5..8 and 12..13 were generated: rounds begin behind the first token of each answer."""
    batch = pack([make_document(16, mask(16, (5, 9), (12, 14)))], EVERYTHING, 4, follow=Chains.SERVED)
    assert [scored(batch, step) for step in range(4)] == [{4, 5, 6, 11}, {4, 5}, {4}, set()]


def test_top_k_is_restricted_to_the_draft_vocabulary_and_renormalised() -> None:
    document = make_document(16, mask(16, (4, 16)))
    kept = torch.arange(23) % 2 == 0
    batch = pack([document], draft_id_table(kept), 2)
    target = batch.teacher.at(batch.label_rows(0))
    torch.testing.assert_close(target.probs.sum(-1), torch.ones(len(target.probs)))
    row = int(batch.label_rows(0)[0])
    wanted = {
        int(i): float(p)
        for i, p in zip(document.teacher.ids[row], document.teacher.log_probs[row].exp(), strict=True)
        if i % 2 == 0
    }
    found = {2 * int(i): float(p) for i, p in zip(target.ids[0], target.probs[0], strict=True) if p > 0}
    assert found == pytest.approx({i: p / sum(wanted.values()) for i, p in wanted.items()})


def visible(windows, alive: int) -> list[set[int]]:
    """Rows that each chain's query sees, from the CPU's windows."""
    slots = range(alive) if windows.slots is None else windows.slots.tolist()
    by_slot = {}
    for span in windows.spans:
        for offset, row in enumerate(range(span.first, span.stop)):
            by_slot[span.slot + offset] = set(range(span.document, row + 1))
    return [by_slot[slot] for slot in slots]


def test_windows_see_the_own_document_up_to_the_own_row() -> None:
    chains = torch.tensor([3, 4, 9, 80, 81, 103, 140, 7, 82])
    starts, document = torch.tensor([0, 100]), (torch.arange(160) >= 100).long()
    windows = find_windows(chains, starts, document)
    assert len(windows.spans) == 3
    expected = [set(range(100 if row >= 100 else 0, row + 1)) for row in chains.tolist()]
    assert visible(windows, len(chains)) == expected
    # CUDA's kernel aligns its causal mask with the last key: window j's query q sees keys up to keys -
    # queries + q.
    varlen = _varlen(windows.spans, torch.device("cpu"))
    seen = []
    for j in range(len(windows.spans)):
        keys = varlen.key_rows[varlen.keys[j] : varlen.keys[j + 1]].tolist()
        queries = int(varlen.queries[j + 1] - varlen.queries[j])
        seen += [set(keys[: len(keys) - queries + q + 1]) for q in range(queries)]
    assert [seen[slot] for slot in windows.slots.tolist()] == expected
