"""Chat messages to token ids, and which of those tokens the assistant wrote, for any chat template.

In: messages (role, content). Out: `Rendered`: token ids and [start, end) spans of assistant tokens,
end-of-turn token included. Spans come from the template's `{% generation %}` tags where it has them, else
from rendering the dialogue up to each turn and checking that the full rendering really begins so; rendered
text is never matched by pattern.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tasks.prepare_target import TargetInfo

Message = Mapping[str, Any]
Span = tuple[int, int]


class TemplateError(ValueError):
    """These messages cannot be rendered by this template; the message says why."""


@dataclass(frozen=True)
class Rendered:
    """T token ids, as a server would see them, and the spans [start, end) that the assistant wrote.

    left_out: indices into the messages of assistant turns that carry no span, because the template shows them
    otherwise than they were written (thinking dropped from earlier turns, for one). truncated: cut on the
    right.
    """

    token_ids: list[int]
    spans: list[Span]
    left_out: tuple[int, ...] = ()
    truncated: bool = False

    @property
    def supervised(self) -> int:
        """Tokens inside the spans."""
        return sum(end - start for start, end in self.spans)

    def cut(self, max_tokens: int) -> Rendered | None:
        """Ids and spans cut together on the right; None where no supervised token would be left."""
        if len(self.token_ids) <= max_tokens:
            return self if self.spans else None
        spans = [(start, min(end, max_tokens)) for start, end in self.spans if start < max_tokens]
        return Rendered(self.token_ids[:max_tokens], spans, self.left_out, truncated=True) if spans else None


class Template:
    """A tokenizer with its chat template.

    end_ids: ids that end an assistant's turn. arguments: handed to the template as they are (enable_thinking,
    ...). Raises TemplateError where the tokenizer cannot tell which characters a token came from, or has no
    template.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        end_ids: Sequence[int],
        text: str | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.is_fast:
            raise TemplateError(
                f"{type(tokenizer).__name__} is a slow tokenizer: spans need one from tokenizer.json"
            )
        text = text or tokenizer.chat_template
        if not isinstance(text, str):
            raise TemplateError(
                "the tokenizer has no chat template: name a Jinja file as target.chat_template"
            )
        self.tokenizer = tokenizer
        self.end_ids = tuple(end_ids)
        self.text = text
        self._arguments = {**tokenizer.special_tokens_map, **(arguments or {})}
        self._tagged = _has_generation_tags(text)

    @classmethod
    def load(cls, target: TargetInfo) -> Template:
        """The target's own tokenizer and template, or the template that the recipe put in its place."""
        tokenizer = load_tokenizer(Path(target.path), target.trust_remote_code)
        return cls(tokenizer, target.eos_token_ids, target.chat_template, target.template_arguments)

    def prompt(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Rendered:
        """What a server is given to answer the last user turn: generation prompt at the end.

        Spans mark earlier assistant turns. Raises TemplateError where the template refuses the messages.
        """
        if not messages or messages[-1]["role"] == "assistant":
            raise TemplateError("a prompt ends with the user's turn, not the assistant's")
        text, tags = self._render(messages, tools, prompt=True, tags=self._tagged)
        return self._place(text, tags, messages, tools)

    def conversation(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Rendered:
        """A dialogue that ends with the assistant's answer, every answer marked.

        The last answer always begins where the server's prompt ends. Where the template would show it
        otherwise than it was written, it is laid behind that prompt as written, as a server's own output is.
        Raises TemplateError where the template refuses the messages.
        """
        if not messages or messages[-1]["role"] != "assistant":
            raise TemplateError("a conversation ends with the assistant's turn")
        text, tags = self._render(messages, tools, prompt=False, tags=self._tagged)
        rendered = self._place(text, tags, messages, tools)
        last = len(messages) - 1
        if last in rendered.left_out or not self._continues_prompt(rendered, messages, tools):
            return self._laid_behind_prompt(messages, tools)
        # A template's own text after the last answer (a newline, say) is nothing a server ever sees.
        end = rendered.spans[-1][1]
        return Rendered(rendered.token_ids[:end], rendered.spans, rendered.left_out)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The ids' text with nothing tidied up and special tokens shown."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _continues_prompt(self, rendered: Rendered, messages: Sequence[Message], tools: Any) -> bool:
        """Whether the ids begin with exactly the ids a server would be given; merges across the seam break
        this.
        """
        prompt, _ = self._render(messages[:-1], tools, prompt=True)
        ids = self._encode(prompt)
        return rendered.token_ids[: len(ids)] == ids and rendered.spans[-1][0] >= len(ids)

    def _laid_behind_prompt(self, messages: Sequence[Message], tools: Any) -> Rendered:
        """The server's prompt, then the answer as written, then the end-of-turn token."""
        prompt = self.prompt(messages[:-1], tools)
        bare, _ = self._render(messages[:-1], tools, prompt=False)
        full, _ = self._render(messages[:-1], tools, prompt=True)
        opener = full[len(bare) :] if full.startswith(bare) else ""
        answer = str(messages[-1].get("content") or "")
        # The prompt may open the thinking block itself ("<think>\n"): then the answer goes on from there.
        for start in range(len(opener)):
            if opener[start] in "<[" and answer.startswith(opener[start:]):
                answer = answer[len(opener) - start :]
                break
        ids = self._encode(answer)
        if not ids:
            raise TemplateError("the last answer is empty")
        start = len(prompt.token_ids)
        token_ids = [*prompt.token_ids, *ids, self.end_ids[0]]
        return Rendered(token_ids, [*prompt.spans, (start, len(token_ids))], prompt.left_out)

    def _place(self, text: str, tags: Sequence[Span], messages: Sequence[Message], tools: Any) -> Rendered:
        """Tokenise the full rendering once and find each assistant turn in it."""
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids: list[int] = encoded["input_ids"]
        self._refuse_double_bos(ids)
        offsets: list[Span] = encoded["offset_mapping"]
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans: list[Span] = []
        left_out: list[int] = []
        tagged = len(tags) == len(turns)
        for number, turn in enumerate(turns):
            region = self._region(text, messages, turn, tools)
            if region and tagged:
                region = (max(region[0], tags[number][0]), region[1])
            written = self._written(text, region, messages[turn], tagged) if region else None
            span = self._tokens(ids, offsets, region, written) if region and written else None
            if span is None:
                left_out.append(turn)
            else:
                spans.append(span)
        return Rendered(ids, spans, tuple(left_out))

    def _region(self, text: str, messages: Sequence[Message], turn: int, tools: Any) -> Span | None:
        """Characters from the end of the server's prompt for this turn to the end of the turn.

        None where the full rendering does not begin with that prompt, or shows the turn otherwise than it
        stood when it was the last: what the server wrote there is then not what the rendering shows.
        """
        before, _ = self._render(messages[:turn], tools, prompt=True)
        after, _ = self._render(messages[: turn + 1], tools, prompt=False)
        if not text.startswith(before):
            return None
        if not text.startswith(after):
            # The end may differ only where the template closes the last turn in a way of its own.
            content = _content(messages[turn])
            end = len(before) + len(content)
            if not content or text[len(before) : end] != content or after[len(before) : end] != content:
                return None
            following, _ = self._render(messages[: turn + 2], tools, prompt=False)
            return (len(before), len(following) if text.startswith(following) else len(text))
        return (len(before), len(after))

    def _written(self, text: str, region: Span, message: Message, tagged: bool) -> Span | None:
        """Where in the region the answer itself stands; what the template puts before it is not the
        assistant's.
        """
        if message.get("tool_calls"):
            return region  # the server writes the call in the template's own form
        for content in (_content(message), _content(message).strip()):
            start = text.find(content, *region) if content else -1
            if start >= 0:
                return (start, start + len(content))
        return region if tagged else None

    def _tokens(self, ids: list[int], offsets: list[Span], region: Span, written: Span) -> Span | None:
        """Token span of the answer and the end-of-turn token behind it; a token across the seam is not the
        answer's.
        """
        start = bisect_left(offsets, written[0] + 1, key=lambda pair: pair[1])
        while start < len(ids) and offsets[start][0] < region[0]:
            start += 1
        end = bisect_left(offsets, written[1], key=lambda pair: pair[0])
        last = bisect_left(offsets, region[1], key=lambda pair: pair[0])
        stops = [i for i in range(max(start, end), last) if ids[i] in self.end_ids]
        if stops:
            # A tool call's region holds its own end; otherwise the first one behind the answer.
            end = stops[-1] + 1 if written == region else stops[0] + 1
        return (start, end) if start < end else None

    def _render(
        self, messages: Sequence[Message], tools: Any, *, prompt: bool, tags: bool = False
    ) -> tuple[str, list[Span]]:
        """The rendered text and the characters inside generation tags."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, indices = render_jinja_template(
                [list(messages)],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=tags,
                add_generation_prompt=prompt,
                **self._arguments,
            )
        except Exception as error:
            # Templates are programs: whatever one raises is about these messages.
            raise TemplateError(
                f"the chat template refuses the messages: {' '.join(str(error).split())}"
            ) from error
        return texts[0], [tuple(pair) for pair in indices[0]] if tags else []

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _refuse_double_bos(self, ids: list[int]) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise TemplateError(
                f"the rendering begins with {self.tokenizer.bos_token!r} twice: template and messages"
            )


def _content(message: Message) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _has_generation_tags(text: str) -> bool:
    """Whether the template marks the assistant's text itself, read from Jinja's own tokens."""
    from jinja2 import Environment

    tokens = [(kind, value) for _, kind, value in Environment().lex(text) if kind != "whitespace"]
    return any(
        a[0] == "block_begin" and b == ("name", "generation")
        for a, b in pairwise(tokens)
    )
