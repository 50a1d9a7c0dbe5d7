"""The dumb oracle of training-time test: every chain drafted by itself, a step at a time, with a growing
cache of keys and values.

No packing, no flash, no merging, no fused loss: plain loops, plain softmax, plain autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3core.batch import Document, HiddenTeacher, TopKTeacher
from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft


def make_draft(
    seed: int = 0,
    vocabulary: int = 23,
    draft_vocabulary: int = 11,
    heads: int = 4,
    kv_heads: int = 2,
    **flags: bool,
) -> Eagle3Draft:
    """A small random draft whose norms and map are not trivial."""
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=8,
        vocab_size=vocabulary,
        draft_vocab_size=draft_vocabulary,
        rms_norm_eps=1e-5,
        rope_theta=1000.0,
        max_position_embeddings=128,
        layer_ids=(2, 3, 5),
        **flags,
    )
    draft = Eagle3Draft(config)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "embed" not in name:
                parameter.normal_(0, 0.2)
    draft.set_vocabulary(torch.randperm(vocabulary)[:draft_vocabulary].sort().values)
    return draft


def make_document(
    tokens: int,
    supervised: Tensor,
    teacher: str = "topk",
    vocabulary: int = 23,
    width: int = 48,
    hidden: int = 16,
    seed: int = 0,
) -> Document:
    """Random tokens, features and teacher."""
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator)
    if teacher == "topk":
        log_probs = (2 * randn(tokens - 1, vocabulary)).log_softmax(-1)
        top = log_probs.topk(6, -1)
        rest = (1 - top.values.exp().sum(-1)).log()
        target = TopKTeacher(top.indices.int(), top.values, rest)
    else:
        target = HiddenTeacher(randn(tokens - 1, hidden))
    ids = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return Document(f"d{seed}", ids, supervised, randn(tokens - 1, width), target)


def chain_logits(draft: Eagle3Draft, document: Document, row: int, steps: int) -> list[Tensor]:
    """Logits [D] of the chain begun at `row`, for as many steps as the document has input tokens."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    rows = torch.arange(row + 1)
    hidden = draft.fuse(document.features[: row + 1])
    cos, sin = draft.rope(rows, torch.float32)
    x = layer.attention_input(draft.embed_tokens(document.token_ids[rows + 1]), hidden)
    cache_k, cache_v = attention.keys_values(x, cos, sin)
    x, hidden = x[-1:], hidden[-1:]
    result = []
    for step in range(steps):
        if row + 1 + step >= len(document.token_ids):
            break
        cos, sin = draft.rope(torch.tensor([row + step]), torch.float32)
        if step > 0:
            x = layer.attention_input(
                draft.embed_tokens(document.token_ids[row + 1 + step : row + 2 + step]), hidden
            )
            k, v = attention.keys_values(x, cos, sin)
            cache_k, cache_v = torch.cat([cache_k, k]), torch.cat([cache_v, v])
        q = attention.queries(x, cos, sin)[0]
        group = q.shape[0] // cache_k.shape[1]
        attended = []
        for head in range(q.shape[0]):
            scores = cache_k[:, head // group] @ q[head] * q.shape[-1] ** -0.5
            attended.append(scores.softmax(0) @ cache_v[:, head // group])
        output = layer.finish(torch.stack(attended)[None], hidden)
        result.append(draft.logits(output)[0])
        hidden = draft.feedback(output)
    return result


def target_distribution(
    draft: Eagle3Draft, document: Document, row: int, head: tuple[Tensor, Tensor] | None
) -> Tensor | None:
    """The target's distribution for token row+1 over D, [D]; None where its argmax is outside D. head:
    (weight [V, H], norm [H]).
    """
    ids = draft.target_ids
    teacher = document.teacher
    if isinstance(teacher, HiddenTeacher):
        weight, norm = head
        hidden = teacher.hidden[row]
        logits = weight @ (hidden * (hidden.square().mean() + 1e-5) ** -0.5 * norm)
        return logits[ids].softmax(0) if bool((ids == logits.argmax()).any()) else None
    if not bool((ids == teacher.ids[row, 0]).any()):
        return None
    dense = torch.zeros(draft.config.vocab_size)
    dense[teacher.ids[row].long()] = teacher.log_probs[row].exp()
    return dense[ids] / dense[ids].sum()


def scored_rows(
    draft: Eagle3Draft, documents: list[Document], steps: int, head=None
) -> list[tuple[int, Tensor, Tensor]]:
    """(step, logits [D], target distribution [D]) of every scored row of every chain."""
    result = []
    for document in documents:
        for row in range(len(document.token_ids) - 2):
            for step, logits in enumerate(chain_logits(draft, document, row, steps)):
                label = row + 2 + step
                if label < len(document.token_ids) and bool(document.supervised[label]):
                    p = target_distribution(draft, document, label - 1, head)
                    if p is not None:
                        result.append((step, logits, p))
    return result


def cross_entropy_loss(rows: list[tuple[int, Tensor, Tensor]], steps: int, decay: float) -> Tensor:
    """sum_i decay**i * mean over step i's rows of -sum p log q."""
    total = torch.zeros(())
    for step in range(steps):
        losses = [-(p * logits.log_softmax(0)).sum() for number, logits, p in rows if number == step]
        if losses:
            total = total + decay**step * torch.stack(losses).mean()
    return total
