"""Decoding along a text that the target has written already: every shape of draft, without the target.

In: a draft, a proposer, and documents with the target's text and stored features. Out: `Rounds`. A drafted token is
kept where it is the text's own next one: for greedy text that is the decoder's own verdict; for sampled text,
proposals that were chosen without chance (chains by argmax, trees) are kept with the same probability as by a
target that draws anew, because what it draws is distributed as the text is (algorithms, section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3core.acceptance import Mode, Response, Rounds
from eagle3core.batch import Document
from eagle3core.decoding.propose import Proposer
from eagle3core.decoding.tree import TokenTree
from eagle3core.drafters import drafter_of
from eagle3core.drafters.interface import Draft
from eagle3core.verify import Seeded


@dataclass(frozen=True)
class _Span:
    """One stretch that the target wrote: tokens [start, end) of a document, a response of its own."""

    document: Document
    response: Response
    start: int
    end: int


@torch.no_grad()
def replay(
    draft: Draft,
    documents: Sequence[Document],
    responses: Sequence[Response],
    proposer: Proposer,
    mode: Mode,
    *,
    batch: int = 16,
) -> Rounds:
    """Rounds of `proposer` over every supervised span of two tokens or more; `responses` says what each answers.

    A document with several spans is as many responses. A span's first token comes from prefill, so the first round
    begins behind it. mode: "chain" or "tree". batch: spans that are drafted for at once; no figure depends on it.
    Raises ValueError for a proposer that draws its tokens, and where no round can be had.
    """
    if getattr(proposer, "sampling", None) is not None:
        raise ValueError("a proposer that draws its tokens cannot be replayed: its chances need the target's distributions")
    spans = [span for pair in zip(documents, responses, strict=True) for span in _spans(*pair)]
    if not spans:
        raise ValueError("no document has two supervised tokens in a row: there is no round to replay")
    # Those that end together run together.
    order = sorted(range(len(spans)), key=lambda number: spans[number].end - spans[number].start)
    rows: list[tuple[int, int, int, int]] = []
    for first in range(0, len(spans), batch):
        numbers = order[first : first + batch]
        rows += _Replaying(draft, [spans[number] for number in numbers], numbers, proposer).run()
    columns = torch.tensor(sorted(rows), dtype=torch.int64).T
    return Rounds.counted(mode, [span.response for span in spans], *columns, proposer.depth)


class _Replaying:
    """Some spans side by side; those that are at their end leave."""

    def __init__(self, draft: Draft, spans: Sequence[_Span], numbers: Sequence[int], proposer: Proposer) -> None:
        self._spans, self._numbers, self._proposer = list(spans), list(numbers), proposer
        self._vocab_size = draft.config.vocab_size
        # Tokens of each text that are known, the one that a round drafts behind included.
        self._known = [span.start + 1 for span in spans]
        room = max(span.end for span in spans) + proposer.depth
        self._drafter = drafter_of(draft).decoder(draft, len(spans), room + proposer.steps)
        self._drafter.begin(torch.stack([span.document.token_ids[0] for span in spans]))
        self._commit([0] * len(spans))

    def run(self) -> list[tuple[int, int, int, int]]:
        """(the span's number, context, drafted, accepted) of every round."""
        rows = []
        while self._spans:
            last = torch.stack([s.document.token_ids[n - 1] for s, n in zip(self._spans, self._known, strict=True)])
            nothing_drawn = [Seeded(0)] * len(last)
            tree = self._proposer.propose(self._drafter, last, self._vocab_size, nothing_drawn)
            depths = tree.ancestors().sum(-1) - 1
            before = list(self._known)
            for row, (span, known) in enumerate(zip(self._spans, before, strict=True)):
                accepted = kept(tree, row, span.document.token_ids[known : span.end].tolist())
                drafted = min(int(depths[row][tree.real[row]].max()), span.end - known)
                rows.append((self._numbers[row], known, drafted, accepted))
                self._known[row] = known + accepted + 1
            self._drop_finished(before)
        return rows

    def _drop_finished(self, before: list[int]) -> None:
        going = [row for row, span in enumerate(self._spans) if self._known[row] < span.end]
        if len(going) < len(self._spans):
            for values in (self._spans, self._numbers, self._known, before):
                values[:] = [values[row] for row in going]
            if going:
                self._drafter.select(torch.tensor(going))
        if going:
            self._commit([known - 1 for known in before])

    def _commit(self, rows_from: list[int]) -> None:
        """Give the draft the text's rows from `rows_from` on: row t holds features t and token t+1."""
        parts: list[tuple[Tensor, Tensor]] = []
        for span, first, known in zip(self._spans, rows_from, self._known, strict=True):
            document = span.document
            parts.append((document.features[first : known - 1], document.token_ids[first + 1 : known]))
        counts = torch.tensor([len(tokens) for _, tokens in parts])
        longest, width = int(counts.max()), parts[0][0].shape[1]
        features = torch.zeros(len(parts), longest, width, dtype=parts[0][0].dtype)
        tokens = torch.zeros(len(parts), longest, dtype=torch.int64)
        for row, (states, following) in enumerate(parts):
            features[row, : len(states)], tokens[row, : len(following)] = states, following
        self._drafter.commit(features, tokens, counts)


def kept(tree: TokenTree, row: int, text: Sequence[int]) -> int:
    """How many of `text`'s first tokens are a path of the tree from its root down."""
    node, count = 0, 0
    parents, tokens, real = tree.parents[row].tolist(), tree.tokens[row].tolist(), tree.real[row].tolist()
    for wanted in text:
        child = next(
            (n for n in range(node + 1, len(tokens)) if real[n] and parents[n] == node and tokens[n] == wanted), None
        )
        if child is None:
            break
        node, count = child, count + 1
    return count


def _spans(document: Document, response: Response) -> list[_Span]:
    """The supervised stretches of a document that have a round: a first token, and one more to draft."""
    marks = torch.cat([torch.tensor([False]), document.supervised, torch.tensor([False])]).int().diff()
    starts, ends = (marks == 1).nonzero().flatten().tolist(), (marks == -1).nonzero().flatten().tolist()
    return [
        _Span(document, replace(response, output_tokens=end - start, turn=turn), start, end)
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True))
        if end - start > 1 and start > 0
    ]
