"""The target's probability of its own text, at the temperature it was sampled at, from what the store holds.

In: a `Document` and a temperature. Out: bounds on log p of every token; the two are equal wherever p is
known: everywhere with stored hidden states, inside the stored top-k with stored log-probabilities at
temperature 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3core.batch import Document, TopKTeacher
from eagle3core.teacher import LOGITS_BYTES, TargetHead


@dataclass(frozen=True)
class TextLogProbs:
    """Row t bounds log p(token t+1 | tokens 0..t): low <= log p <= high, both [T-1] float32."""

    low: Tensor
    high: Tensor


def text_log_probs(
    document: Document, temperature: float, vocab_size: int, head: TargetHead | None = None
) -> TextLogProbs:
    """Bounds on the log-probability of each next token under softmax(logits / temperature), temperature > 0.

    Raises ValueError where hidden states are stored and the target's head is missing.
    """
    text = document.token_ids[1:].long()
    if isinstance(document.teacher, TopKTeacher):
        return _from_top_k(document.teacher, text, temperature, vocab_size)
    if head is None:
        raise ValueError(f"document {document.id} stores hidden states: the target's head must be given")
    known = _from_hidden(document.teacher.hidden, text, temperature, head)
    return TextLogProbs(known, known)


def _from_hidden(hidden: Tensor, text: Tensor, temperature: float, head: TargetHead) -> Tensor:
    block = max(1, LOGITS_BYTES // (4 * len(head.weight)))
    parts = []
    for states, tokens in zip(hidden.split(block), text.split(block), strict=True):
        logits = (head.normed(states) @ head.weight.T).float() / temperature
        parts.append(logits.gather(1, tokens[:, None]).squeeze(1) - logits.logsumexp(-1))
    return torch.cat(parts)


def _from_top_k(teacher: TopKTeacher, text: Tensor, temperature: float, vocab_size: int) -> TextLogProbs:
    """Exact inside the top-k at temperature 1. Elsewhere what the k-th probability and the rest's mass allow.

    At another temperature the stored log-probabilities are scaled and normalised again; the unstored tail's
    share of the new sum lies between that of a flat tail and that of a tail of tokens as likely as the k-th.
    """
    power = 1 / temperature
    log_probs, rest = teacher.log_probs.float(), teacher.rest.float()
    # An unstored token is no likelier than the k-th, nor than all of the rest together.
    least = torch.minimum(log_probs[:, -1], rest)
    outside = max(vocab_size - log_probs.shape[1], 1)
    flat = math.log(outside) + power * (rest - math.log(outside))
    steep = rest + (power - 1) * least
    kept = (power * log_probs).logsumexp(-1)
    total_low = torch.logaddexp(kept, torch.minimum(flat, steep))
    total_high = torch.logaddexp(kept, torch.maximum(flat, steep))
    match = teacher.ids.long() == text[:, None]
    inside = match.any(1)
    most = torch.where(inside, log_probs.masked_fill(~match, 0).sum(1), least)
    high = power * most - total_low
    low = torch.where(inside, power * most - total_high, -math.inf)
    return TextLogProbs(low, high)
