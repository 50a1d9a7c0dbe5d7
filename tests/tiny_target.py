"""A tiny random Llama as a Hugging Face folder, for every test that needs a target model.

In: a folder and sizes. Out: safetensors, config.json, tokenizer.json and a ChatML template in that folder;
the same seed gives the same bytes. Nothing is fetched.
"""

from __future__ import annotations

import itertools
import string
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny_target(
    folder: Path,
    *,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    head_dim: int = 32,
    max_position_embeddings: int = 512,
    context: float = 1.0,
    seed: int = 0,
) -> Path:
    """Write the model to `folder` and return it.

    The weights are wide enough that the next-token distribution is peaked: greedy text is varied, the top two
    logits lie far apart for fp32, and a sampled answer is not noise. `head_dim` is 32 because vLLM's CPU
    attention takes no smaller one. Ids run to `vocab` exactly, so whatever the model writes can be decoded.
    `context` scales what attention and MLPs add to the embedding: near 0 the next token depends on the last
    one alone, and a draft learns to predict it in seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tiny_tokenizer(vocab)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.convert_tokens_to_ids(START),
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        dtype=torch.float32,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(context)
            layer.mlp.down_proj.weight.mul_(context)
    model.save_pretrained(folder)
    return folder


def make_tiny_tokenizer(vocab: int = 512) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly `vocab` ids: 3 specials, 256 bytes, and pairs of letters as merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [START, END, PAD]
    wanted = vocab - len(specials) - len(alphabet)
    letters = string.ascii_lowercase
    pairs = [(a, b) for a, b in itertools.product(letters, letters)][: max(wanted, 0)]
    if len(pairs) != wanted:
        raise ValueError(f"vocab {vocab} must lie in 259..{259 + len(letters) ** 2}")
    tokens = [*specials, *alphabet, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=PAD)
    fast.chat_template = CHAT_TEMPLATE
    return fast
