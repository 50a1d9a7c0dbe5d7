"""Acceptance without decoding: what a server would accept, from stored features alone, for every anchor.

In: a draft and `Document`s whose supervised tokens the target wrote. Out: `Rounds`, per anchor and walked.
Algorithms, section 5: while a chain has been accepted its tokens are the text, so the teacher-forced unroll
is the draft's real state. Given the text each drafted token has a chance min(1, q/p) of its own, so the walk
is an exact sum over where rounds can begin; for greedy text every chance is 0 or 1 and the walk is the
server's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional as F

from eagle3core.acceptance import Mode, Response, Rounds
from eagle3core.batch import Document
from eagle3core.drafters import drafter_of
from eagle3core.drafters.interface import Draft, Unrolling
from eagle3core.packing import Chains, PackedBatch, draft_id_table, pack
from eagle3core.teacher import OUTSIDE, TargetHead
from eagle3core.textprobs import text_log_probs

_LOGITS_BYTES = 64 << 20  # one block of draft logits
_KNOWN = 1e-4  # bounds this near are one value: half-precision log-probabilities do not tell them apart
_WALK: Mode = "walk"


class Proposal(Enum):
    """How the draft picks a token. vLLM drafts greedily at every temperature unless told otherwise."""

    GREEDY = "greedy"  # its argmax: accepted iff that is the text
    SAMPLED = "sampled"  # drawn at the answer's temperature: accepted with chance min(1, q/p)


@dataclass(frozen=True)
class Estimate:
    """anchor: every row at which a round could begin, all alike. walk: rounds as a server reaches them.

    unknown: share of the chances for which p is only bounded: sampled proposals for text outside the stored
    top-k. `anchor` and `walk` then take each chance's lower bound, the two `_high` ones its upper bound.
    Where unknown is 0 they are equal.
    """

    anchor: Rounds
    walk: Rounds
    anchor_high: Rounds
    walk_high: Rounds
    unknown: float


@torch.no_grad()
def estimate(
    draft: Draft,
    documents: Sequence[Document],
    responses: Sequence[Response],
    draft_length: int,
    *,
    proposal: Proposal = Proposal.GREEDY,
    unroll: Unrolling | None = None,
    target_head: TargetHead | None = None,
    rows_per_pack: int = 8192,
) -> Estimate:
    """Acceptance of chains of `draft_length` over `documents`; `responses` says what each document answers.

    A document with several supervised spans is as many responses to its prompt. A span's first token comes
    from prefill, so the first round begins behind it. Near a span's end a round drafts only the tokens that
    the text still has (K_r < K); a server drafts on and can count such tokens, in at most one round an
    answer. Raises ValueError where no round can be had at all.
    """
    if len(documents) != len(responses):
        raise ValueError(f"{len(documents)} documents for {len(responses)} responses")
    usable = [(d, r) for d, r in zip(documents, responses, strict=True) if _has_round(d)]
    if not usable:
        raise ValueError("no document has two supervised tokens in a row: there is no round to estimate")
    follow = _Follower(draft, draft_length, proposal, unroll or drafter_of(draft).unroll(), target_head)
    spans: list[_Span] = []
    for group in _groups(usable, rows_per_pack):
        spans += follow([d for d, _ in group], [r for _, r in group])
    drafted = sum(int(span.drafted.sum()) for span in spans)
    low, high = _anchors(spans, "low"), _anchors(spans, "high")
    return Estimate(
        anchor=low,
        walk=_walk(low),
        anchor_high=high,
        walk_high=_walk(high),
        unknown=sum(span.unknown for span in spans) / drafted,
    )


@dataclass(frozen=True)
class _Span:
    """One supervised span's n anchors, in order.

    context: [n] int64. drafted: [n] int64. low, high: [n, K] float64, chance that all up to a position are
    kept.
    """

    response: Response
    context: Tensor
    drafted: Tensor
    low: Tensor
    high: Tensor
    unknown: int


def _has_round(document: Document) -> bool:
    return bool((document.supervised[1:-1] & document.supervised[2:]).any())


def _groups(
    pairs: Sequence[tuple[Document, Response]], rows: int
) -> Iterator[list[tuple[Document, Response]]]:
    """Consecutive documents of together at most `rows` rows, or one document that is longer."""
    group: list[tuple[Document, Response]] = []
    total = 0
    for pair in pairs:
        length = len(pair[0].features)
        if group and total + length > rows:
            yield group
            group, total = [], 0
        group.append(pair)
        total += length
    yield group


@dataclass(frozen=True)
class _Follower:
    """Follows every chain of a pack through its steps."""

    draft: Draft
    draft_length: int
    proposal: Proposal
    unroll: Unrolling
    target_head: TargetHead | None

    def __call__(self, documents: Sequence[Document], responses: Sequence[Response]) -> list[_Span]:
        device = self.draft.lm_head.weight.device
        draft_ids = draft_id_table(self.draft.t2d)
        views = [drafter_of(self.draft).view(document) for document in documents]
        batch = pack(
            views, draft_ids.cpu(), self.draft_length, follow=Chains.SERVED, target_head=self.target_head
        )
        assert batch is not None  # every document has a round
        text = _Text.of(documents, views, responses, batch, self) if self._samples(responses) else None
        low, high, unknown = self._chances(batch.to(device), draft_ids, text)
        return _spans(documents, views, responses, batch, low.cpu(), high.cpu(), unknown.cpu())

    def _samples(self, responses: Sequence[Response]) -> bool:
        return self.proposal is Proposal.SAMPLED and any(r.temperature > 0 for r in responses)

    def _chances(
        self, batch: PackedBatch, draft_ids: Tensor, text: _Text | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """low and high [C, K] float64, and unknown [C] int64, of the batch's chains in their order."""
        chains = len(batch.chains)
        low = torch.zeros(chains, self.draft_length, dtype=torch.float64, device=batch.tokens.device)
        high = torch.zeros_like(low)
        unknown = torch.zeros(chains, dtype=torch.int64, device=low.device)
        block = max(1, _LOGITS_BYTES // (4 * self.draft.config.draft_vocab_size))
        for step, output in enumerate(self.unroll(self.draft, batch)):
            # A chain that is surely lost cannot be kept any longer: its logits are not needed.
            alive = torch.arange(len(output), device=low.device)
            if step:
                alive = alive[high[: len(output), step - 1] > 0]
            for rows in alive.split(block):
                labels = batch.chains[rows] + step + 1
                wanted = draft_ids[batch.tokens[labels]]
                logits = self.draft.logits(output[rows]).float()
                least, most = _kept(logits, wanted, labels, text)
                low[rows, step] = least * (low[rows, step - 1] if step else 1)
                high[rows, step] = most * (high[rows, step - 1] if step else 1)
                unknown[rows] += most - least > _KNOWN
        return low, high, unknown


@dataclass(frozen=True)
class _Text:
    """Per packed row, [R]: the temperature of its answer, and bounds on log p of the row's own token."""

    temperature: Tensor
    low: Tensor
    high: Tensor

    @classmethod
    def of(
        cls,
        documents: Sequence[Document],
        views: Sequence[Document],
        responses: Sequence[Response],
        batch: PackedBatch,
        how: _Follower,
    ) -> _Text:
        vocab_size, device = how.draft.config.vocab_size, how.draft.lm_head.weight.device
        rows = torch.bincount(batch.document, minlength=len(documents)).tolist()
        low, high, temperature = [], [], []
        for document, view, response, count in zip(documents, views, responses, rows, strict=True):
            # Packed row r holds token r+1, which is what the target's row r was asked for. 
            bounds = text_log_probs(document, response.temperature or 1.0, vocab_size, how.target_head)
            front = len(view.token_ids) - len(document.token_ids)  # rows of the view that the target has none of
            low.append(F.pad(bounds.low, (front, 0))[:count])
            high.append(F.pad(bounds.high, (front, 0))[:count])
            temperature.append(torch.full((count,), response.temperature))
        return cls(*(torch.cat(part).to(device) for part in (temperature, low, high)))


def _kept(logits: Tensor, wanted: Tensor, labels: Tensor, text: _Text | None) -> tuple[Tensor, Tensor]:
    """Bounds on the chance that each row's drafted token is kept, [rows] float64 each.

    logits: [rows, D] fp32. wanted: [rows] draft id of the text, OUTSIDE where the draft can never propose it.
    """
    hit = (logits.argmax(-1) == wanted).double()
    if text is None:
        return hit, hit
    temperature = text.temperature[labels]
    scaled = logits.double() / temperature.clamp_min(1e-6)[:, None]
    log_q = scaled.gather(1, wanted.clamp_min(0)[:, None]).squeeze(1) - scaled.logsumexp(-1)
    log_q = log_q.masked_fill(wanted == OUTSIDE, -torch.inf)
    greedy = temperature == 0
    low = torch.where(greedy, hit, (log_q - text.high[labels]).clamp_max(0).exp())
    high = (log_q - text.low[labels]).clamp_max(0).exp()
    # -inf minus -inf: a token that the draft lacks and the store does not know is never kept.
    high = torch.where(wanted == OUTSIDE, 0.0, high)
    return low, torch.where(greedy, hit, high)


def _spans(
    documents: Sequence[Document],
    views: Sequence[Document],
    responses: Sequence[Response],
    batch: PackedBatch,
    low: Tensor,
    high: Tensor,
    unknown: Tensor,
) -> list[_Span]:
    """The chains of a pack, put back in order and cut into the spans they belong to."""
    chains, order = batch.chains.sort()
    lives = sum((torch.arange(len(chains)) < step.alive).long() for step in batch.steps)[order]
    document, position = batch.document[chains], batch.positions[chains]
    spans = []
    for index, (whole, item, response) in enumerate(zip(documents, views, responses, strict=True)):
        front = len(item.token_ids) - len(whole.token_ids)
        starts = (item.supervised & ~item.supervised.roll(1)).long()
        starts[0] = item.supervised[0]
        number = starts.cumsum(0)  # which span each token is of
        mine = (document == index).nonzero().flatten()
        of_span = number[position[mine] + 1]
        for span in of_span.unique().tolist():
            rows = mine[of_span == span]
            written = int(((number == span) & item.supervised).sum())
            spans.append(
                _Span(
                    replace(response, output_tokens=written, turn=span - 1),
                    position[rows] + 2 - front,
                    lives[rows],
                    low[order[rows]],
                    high[order[rows]],
                    int(unknown[order[rows]].sum()),
                )
            )
    return spans


def _anchors(spans: Sequence[_Span], bound: str) -> Rounds:
    counts = torch.tensor([len(span.context) for span in spans])
    return Rounds(
        "anchor",
        tuple(span.response for span in spans),
        torch.repeat_interleave(torch.arange(len(spans)), counts),
        torch.cat([span.context for span in spans]),
        torch.cat([span.drafted for span in spans]),
        torch.cat([getattr(span, bound) for span in spans]),
        torch.ones(int(counts.sum()), dtype=torch.float64),
    )


def _walk(anchors: Rounds) -> Rounds:
    """The same rows, each weighed by the chance that a round begins there: the first, then a_r + 1 further
    on.
    """
    counts = torch.bincount(anchors.response, minlength=len(anchors.responses))
    place = torch.arange(len(anchors)) - (counts.cumsum(0) - counts)[anchors.response]
    rows, length = int(counts.max()), anchors.draft_length
    padded = torch.zeros(len(counts), rows, length, dtype=torch.float64)
    padded[anchors.response, place] = anchors.survived
    # jump[:, r, a]: chance that the round at row r keeps exactly a tokens.
    edges = F.pad(F.pad(padded, (1, 0), value=1.0), (0, 1))
    jump = edges[..., :-1] - edges[..., 1:]
    weight = torch.zeros(len(counts), rows + length + 1, dtype=torch.float64)
    weight[:, 0] = 1
    for row in range(rows):
        weight[:, row + 1 : row + 2 + length] += weight[:, row : row + 1] * jump[:, row]
    walked = replace(anchors, mode=_WALK, weight=weight[anchors.response, place])
    return walked.select(walked.weight > 0)
