"""What web pages, share buttons and broken encodings leave inside a turn's text: found, and taken out.

In: one turn's text. Out: the kinds of residue in it; the text without what has no place in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
SURROGATE = re.compile(r"[\ud800-\udfff]")
# Joiners that scripts and emoji need (U+200C, U+200D) are counted and stay.
ZERO_WIDTH = re.compile(r"[\u200c-\u200e\ufeff]")
INVISIBLE = re.compile(r"[\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff\xad]")
CJK = re.compile(r"[\u4e00-\u9fff]")
HTML = re.compile(r"</?(?:div|span|p|br|button|html)\b")
ESCAPED = re.compile(r"(?<=\w)\\_(?=\w)")
# Chat formats' own marks, which a tokenizer would read as the end of a turn.
SPECIAL = re.compile(
    r"<\|(?:endoftext|endofprompt|im_start|im_end|im_sep|begin_of_text|end_of_text|start_header_id|end_header_id|eot_id"
    r"|eom_id|python_tag|system|user|assistant|end|fim_prefix|fim_middle|fim_suffix)\|>|<｜[^｜<>\n]{1,40}｜>|</s>"
)
ENDOFTEXT = "<|endoftext|>"
SHARE_PROMPT = "Share Prompt"
BUTTONS = (SHARE_PROMPT, "지금 번역하기")  # a share button, and a browser extension's "translate now"
COPY_CODE = re.compile(r"(?m)(^```\w*\n?)?^ ?Copy code$\n?")
THOUGHTS = (("<|begin_of_thought|>", "<|end_of_thought|>"), ("<think>", "</think>"))
CJK_SHARE = 0.05


def kinds_in(text: str, role: str) -> set[str]:
    """The kinds of residue in one turn, by the names of the rules."""
    kinds = _blank(text, role)
    if CONTROL.search(text):
        kinds.add("control_characters")
    if "\\_" in text and ESCAPED.search(text):
        kinds.add("escaped_markdown_underscore")
    if SHARE_PROMPT in text:
        kinds.add("share_prompt_residue")
    if BUTTONS[1] in text or "Copy code" in text:
        kinds.add("ui_residue")
    if ("<|" in text or "</s>" in text or "<｜" in text) and SPECIAL.search(text):
        literal = role == "assistant" and ENDOFTEXT in text
        kinds.add("endoftext_literal_in_gpt" if literal else "special_token_text")
    if role == "assistant":
        if "<" in text and HTML.search(text):
            kinds.add("html_in_gpt")
        if text.count("```") % 2:
            kinds.add("unbalanced_code_fence_gpt")
    if not text.isascii():
        kinds |= _beyond_ascii(text)
    return kinds


def mend(text: str) -> str:
    """The text without control and invisible characters, marks of chat formats, escapes, buttons; outer
    blanks cut.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = CONTROL.sub("", text)
    if not text.isascii():
        # A pair of surrogates that a careless writer escaped one by one is one character.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        text = INVISIBLE.sub("", text).replace("\ufffd", "")
    while "<" in text and (clean := SPECIAL.sub("", text)) != text:
        text = clean  # again: taking one out can bring another together
    if "\\_" in text:
        text = ESCAPED.sub("_", text)
    if "Copy code" in text:
        text = COPY_CODE.sub(lambda match: match[1] or "", text)
    text = text.strip()
    while text.endswith(BUTTONS):
        for button in BUTTONS:
            text = text.removesuffix(button).rstrip()
    return text


def cut_mid_sentence(text: str) -> bool:
    """Whether an answer stops at a letter or a comma: most such were cut by a length limit."""
    last = text.rstrip()[-1:]
    return last == "," or "a" <= last <= "z"


def unclosed_thought(text: str) -> bool:
    """Whether the text opens a thought and never closes it."""
    return any(opener in text and closer not in text for opener, closer in THOUGHTS)


def mostly_cjk(texts: Sequence[str]) -> bool:
    """Whether more than a twentieth of all characters are Han characters."""
    if all(text.isascii() for text in texts):
        return False
    count = sum(len(CJK.findall(text)) for text in texts if not text.isascii())
    return count > CJK_SHARE * sum(len(text) for text in texts)


def printable(text: str, longest: int = 200) -> str:
    """The text as it may stand in a table or a log: no lone surrogates, cut to a length."""
    return text[:longest].encode("utf-8", "replace").decode()


def _blank(text: str, role: str) -> set[str]:
    if (text if text.isascii() else INVISIBLE.sub("", text)).strip():
        return set()
    if role == "assistant":
        return {"gpt_value_only_zero_width_space" if text else "empty_gpt_value"}
    return {"empty_human_value"} if role == "user" else set()


def _beyond_ascii(text: str) -> set[str]:
    found = {
        "lone_surrogate": SURROGATE,
        "replacement_char_fffd": re.compile("\ufffd"),
        "bidi_or_zero_width": ZERO_WIDTH,
        "invisible_characters": INVISIBLE,
    }
    return {kind for kind, pattern in found.items() if pattern.search(text)}
