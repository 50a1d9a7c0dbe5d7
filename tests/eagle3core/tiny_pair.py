"""A tiny random target, its own texts as documents, and a draft overfitted to them: tests need acceptance."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3core.batch import Document, HiddenTeacher, TopKTeacher
from eagle3core.config import DraftConfig
from eagle3core.draft import Eagle3Draft
from eagle3core.packing import Chains, draft_id_table, pack
from eagle3core.teacher import TargetHead
from eagle3core.unroll import Unroll

VOCAB, EOS = 64, 1


def make_smooth_target() -> LlamaForCausalLM:
    """Its next token depends mostly on the last one, and is not sure: a draft can learn to agree at T = 1."""
    target = make_target()
    with torch.no_grad():
        for name, weight in target.named_parameters():
            if "layers" in name and weight.dim() == 2:
                weight.mul_(1 / 6)
        target.lm_head.weight.mul_(2.5)
    return target


def make_target(layers: int = 6, seed: int = 0) -> LlamaForCausalLM:
    """6 layers, so that the default layer ids are three different ones; wide weights, so that texts vary."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.3,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        bos_token_id=0,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def make_draft(target: LlamaForCausalLM, draft_vocab: int = 48, seed: int = 0, **flags: bool) -> Eagle3Draft:
    config = DraftConfig.from_target(target.config.to_dict(), draft_vocab, **flags)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Eagle3Draft(config)
    draft.set_vocabulary(torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values)
    draft.start_from_target(
        target.model.embed_tokens.weight, target.lm_head.weight, target.model.norm.weight
    )
    return draft


def prompts(count: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 12, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (length,), generator=generator) for length in lengths]


@torch.no_grad()
def answer(
    target: LlamaForCausalLM, prompt: Tensor, new_tokens: int, temperature: float = 0.0, seed: int = 0
) -> Tensor:
    """The target's own text, prompt included, one token at a time without any cache."""
    generator = torch.Generator().manual_seed(seed)
    text = prompt
    for _ in range(new_tokens):
        logits = target(text[None]).logits[0, -1].double()
        if temperature == 0:
            token = logits.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
        text = torch.cat([text, token])
        if token == EOS:
            break
    return text


@torch.no_grad()
def document(
    target: LlamaForCausalLM, draft: Eagle3Draft, text: Tensor, start: int, top_k: int | None = None
) -> Document:
    """Tokens from `start` on are the target's. Teacher: hidden states, or the top k log-probabilities."""
    output = target(text[None, :-1], output_hidden_states=True)
    states = output.hidden_states
    layer_ids = draft.config.layer_ids
    supervised = torch.arange(len(text)) >= start
    if top_k is None:
        hidden: list[Tensor] = []
        hook = target.model.norm.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0][0]))
        target(text[None, :-1])
        hook.remove()
        teacher = HiddenTeacher(hidden[0])
    else:
        log_probs = output.logits[0].log_softmax(-1)
        best = log_probs.topk(top_k, dim=-1)
        rest = log_probs.scatter(1, best.indices, -torch.inf).logsumexp(-1)
        teacher = TopKTeacher(best.indices, best.values, rest)
    return Document("tiny", text, supervised, torch.cat([states[i][0] for i in layer_ids], -1), teacher)


def head_of(target: LlamaForCausalLM, draft: Eagle3Draft) -> TargetHead:
    head, norm = target.lm_head.weight.detach(), target.model.norm.weight.detach()
    return TargetHead.build(head, norm, target.config.rms_norm_eps, draft.target_ids)


def fit(
    draft: Eagle3Draft, documents: list[Document], head: TargetHead, length: int, updates: int = 60
) -> None:
    """Plain cross-entropy on the text over every step of the unroll: enough to be accepted now and then."""
    ids = draft_id_table(draft.t2d)
    batch = pack(documents, ids, length, follow=Chains.SERVED, target_head=head)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(updates):
        loss = torch.zeros(())
        for step, output in enumerate(Unroll()(draft, batch)):
            labels = ids[batch.tokens[batch.chains[: len(output)] + step + 1]]
            loss = loss + F.cross_entropy(draft.logits(output), labels, ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
