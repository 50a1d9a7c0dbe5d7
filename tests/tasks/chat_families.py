"""How chat models' templates behave, written anew as small templates, each with a tokenizer that has its
marks.

In: a family's name. Out: a `Template`. Not the vendors' texts: what counts is what each does to a dialogue.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.templates import Template

CORPUS = [
    "Hello there, how are you today?\n\nI am an assistant. Here is the code:\n```python\nprint('hello "
    "world')\n```\n",
    "The quick brown fox jumps over the lazy dog.\n\n1. One\n2. Two\n\n   - three   four\n" * 3,
    "USER: ASSISTANT: user assistant system think answer question because therefore <think>\n</think>\n\n",
] * 20

CHATML_TURN = "'<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n'"

LLAMA = (  # a system block that is always there, contents trimmed
    "{{ bos_token + '<|start_header_id|>system<|end_header_id|>\n\n"
    "Cutting Knowledge Date: December 2023\n\n' }}"
    "{%- if messages[0].role == 'system' %}{{ messages[0].content | trim }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{{ '<|eot_id|>' }}"
    "{%- for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n'"
    " + message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
VICUNA = (  # no marks at all but the end of an answer; a space that belongs to the answer's first token
    "{{ bos_token + 'A chat between a user and an assistant. ' }}"
    "{%- for message in messages %}{% if message.role == 'user' %}{{ 'USER: ' + message.content + ' ' }}"
    "{% elif message.role == 'assistant' %}{{ 'ASSISTANT: ' + message.content + eos_token }}"
    "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
QWEN25 = (  # a default system prompt; tool calls written out by the template
    "{%- if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{% if message.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% for call in message.tool_calls %}"
    "{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% else %}{{ " + CHATML_TURN + " }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (  # thinking is shown for answers to the last question only, an empty one where there was none
    "{%- set ns = namespace(last=0) %}"
    "{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
    "{%- for message in messages %}{% if message.role != 'assistant' %}{{ " + CHATML_TURN + " }}"
    "{% else %}"
    "{%- set parts = message.content.split('</think>') %}{% set answer = parts[-1].lstrip('\n') %}"
    "{%- set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ answer + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% endif %}{% endif %}"
)
R1 = (  # thinking dropped from every answer; the prompt itself opens the thought
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{{ message.content }}"
    "{% elif message.role == 'user' %}{{ '<｜User｜>' + message.content }}"
    "{% else %}{{ '<｜Assistant｜>' + message.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<｜Assistant｜><think>\n' }}{% endif %}"
)
TAGGED = (  # the template says itself what the assistant wrote
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Family:
    """keeps_history: earlier answers stand in a later prompt as they were written."""

    text: str
    bos: str
    end: str
    marks: tuple[str, ...] = ()
    pieces: bool = False
    keeps_history: bool = True


FAMILIES = {
    "llama-3.1": Family(
        LLAMA, "<|begin_of_text|>", "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>")
    ),
    "vicuna": Family(VICUNA, "<s>", "</s>", pieces=True),
    "qwen2.5": Family(QWEN25, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",)),
    "qwen3": Family(QWEN3, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",), keeps_history=False),
    "r1-distill": Family(
        R1,
        "<｜begin▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
        ("<｜User｜>", "<｜Assistant｜>"),
        keeps_history=False,
    ),
    "tagged": Family(TAGGED, "<|endoftext|>", "<|im_end|>", ("<|im_start|>",)),
}


def family_template(name: str, text: str | None = None, **arguments: object) -> Template:
    """The family's template (or another `text` in its place) over a tokenizer with the family's marks."""
    family = FAMILIES[name]
    tokenizer = (_pieces if family.pieces else _byte_level)([family.bos, family.end, *family.marks])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.end)
    return Template(fast, (fast.eos_token_id,), text or family.text, arguments)


def _byte_level(marks: list[str]) -> Tokenizer:
    """As Llama-3's and Qwen's: line ends merge with line ends, a space with the word behind it."""
    tokenizer = Tokenizer(models.BPE())
    split = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=marks, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _pieces(marks: list[str]) -> Tokenizer:
    """As Llama-2's: spaces are letters of their pieces, and unknown letters fall back to bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", *marks, *bytes_], show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=trained.get_vocab(),
            merges=_merges(trained),
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(marks)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    import json

    return [tuple(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
