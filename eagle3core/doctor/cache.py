"""Is drafting with a cache the same as the pass that training makes? Where not, what kind of difference it
is.

In: a draft, one document and a decoder of drafts. Out: `Finding`s.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle3core.batch import Document
from eagle3core.decoding.drafter import Drafter
from eagle3core.doctor.patient import Finding
from eagle3core.draft import Eagle3Draft

STEPS = 3
CLOSE = 2e-3  # of the logits' own spread


@torch.no_grad()
def incremental_findings(
    draft: Eagle3Draft, document: Document, decoder: Callable[[Eagle3Draft, int, int], Drafter]
) -> list[Finding]:
    """Logits of one chain in the middle of `document`, through the cache and without any."""
    row = len(document.features) // 2
    wanted = [_whole_pass(draft, document, row, step) for step in range(STEPS)]
    plain = _through_cache(draft, document, row, decoder, rejected=False)
    wrong = [step for step, pair in enumerate(zip(wanted, plain, strict=True)) if not _close(*pair)]
    if wrong and wrong[0] == 0:
        text = "the first drafted token's logits differ from training's"
        return [Finding("committed-rows", text, "look at RoPE positions, the causal mask and `fc`")]
    if wrong:
        text = f"logits differ from training's from drafted token {wrong[0] + 1} on"
        remedy = "feed back the layer's output, normed in EAGLE-3.1 alone, never through `fc`, at t+i"
        return [Finding("feedback", text, remedy)]
    after = _through_cache(draft, document, row, decoder, rejected=True)
    if not all(_close(*pair) for pair in zip(wanted, after, strict=True)):
        text = "logits change once drafted tokens have been rejected"
        return [Finding("rejected-rows", text, "keep committed rows alone, made from the target's features")]
    return []


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() <= CLOSE * one.std().clamp_min(1e-6) * 10)


def _through_cache(
    draft: Eagle3Draft,
    document: Document,
    row: int,
    decoder: Callable[[Eagle3Draft, int, int], Drafter],
    rejected: bool,
) -> list[Tensor]:
    """Committed in two parts; with `rejected`, tokens that the text does not have are drafted between them.
    """
    drafter = decoder(draft, 1, row + 1 + 2 * STEPS + 2)
    for rows in (slice(0, row - 1), slice(row - 1, row + 1)):
        if rows.start and rejected:
            token = (document.token_ids[row] + 1) % draft.config.vocab_size
            for step in range(2):
                drafter.step(token.reshape(1, 1), torch.tensor([[step]]))
        tokens = document.token_ids[rows.start + 1 : rows.stop + 1].long()
        features = document.features[rows].to(draft.fc.weight.dtype)
        drafter.commit(features[None], tokens[None], torch.tensor([len(tokens)]))
    logits = [drafter.logits[0]]
    for step in range(STEPS - 1):
        token = document.token_ids[row + 2 + step].long()
        logits.append(drafter.step(token.reshape(1, 1), torch.tensor([[step]]))[0, 0])
    return logits


def _whole_pass(draft: Eagle3Draft, document: Document, row: int, steps: int) -> Tensor:
    """The chain's logits at `steps`, every row computed again at each step with plain attention."""
    tokens = document.token_ids.long()
    first = draft.fuse(document.features[: row + 1].to(draft.fc.weight.dtype))
    layer = draft.midlayer
    hidden, inputs = first, tokens[1 : row + 2]
    for step in range(steps + 1):
        x = layer.attention_input(draft.embed_tokens(inputs), hidden)
        cos, sin = draft.rope(torch.arange(len(inputs)), x.dtype)
        queries = layer.self_attn.queries(x, cos, sin)
        keys, values = layer.self_attn.keys_values(x, cos, sin)
        share = queries.shape[1] // keys.shape[1]
        keys, values = (part.repeat_interleave(share, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[-1] ** 0.5
        causal = torch.ones(len(inputs), len(inputs), dtype=torch.bool).tril()
        weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
        output = layer.finish(torch.einsum("hqk,khd->qhd", weights, values), hidden)
        if step == steps:
            return draft.logits(output[-1:])[0]
        hidden = torch.cat([hidden, draft.feedback(output[-1:])])
        inputs = torch.cat([inputs, tokens[row + 2 + step][None]])
    raise AssertionError("unreachable")
