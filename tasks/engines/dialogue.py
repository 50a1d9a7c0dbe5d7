"""A conversation answered turn by turn, each turn seeing the target's own earlier answers.

In: a job's messages and the target's template. Out: the next request, and in the end the samples. No engine
is known here: whoever runs the target asks `next_request`, hands the answer to `take`, and reads `outcome`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tasks.engines.requests import LATER, Finished, Job, Outcome, Refused, Request, Sample, job_seed
from tasks.templates import Rendered, Template, TemplateError

if TYPE_CHECKING:
    from torch import Tensor

# An answer that ends in this many tokens of one pattern, repeated, has run away.
RUNAWAY_TOKENS = 32
RUNAWAY_PERIOD = 16


class Dialogue:
    """State of one job: what was said, which turn is next, and the samples so far.

    A dialogue ends with its last user turn; before that where an answer was cut by a length limit (the
    template would close it with an end-of-turn token that the target never wrote), where an answer is
    empty, where there is no answer, or where the next prompt leaves no room.
    """

    def __init__(self, job: Job, template: Template, max_tokens: int) -> None:
        self.job = job
        self._template = template
        self._max_tokens = max_tokens
        self._waiting = [dict(message) for message in job.messages if message["role"] != "assistant"]
        self._said: list[dict[str, str]] = []
        self._prompt: Rendered | None = None
        self._latest: tuple[Sample, Tensor | None] | None = None
        self._earlier: list[tuple[Sample, Tensor | None]] = []
        self._refused: Refused | None = None
        self._turn = 0

    def next_request(self) -> Request | None:
        """The next turn's prompt; None when the dialogue is over."""
        if self._refused or (self._latest and self._latest[0].truncated) or not self._take_turn():
            return None
        try:
            prompt = self._template.prompt(self._said)
        except TemplateError as error:
            return self._stop("template", str(error))
        room = self._max_tokens - len(prompt.token_ids)
        if room < 1:
            tokens = len(prompt.token_ids)
            return self._stop("too long", f"the prompt has {tokens} tokens, a sample {self._max_tokens}")
        self._prompt = prompt
        self._turn += 1
        return Request(
            id=self.job.id,
            token_ids=prompt.token_ids,
            temperature=self.job.temperature,
            max_new_tokens=min(room, self.job.max_new_tokens),
            seed=job_seed(self.job.seed, self._turn),
        )

    def take(self, answer: Finished) -> None:
        """The target's answer to the last request, with its states."""
        assert self._prompt is not None
        if answer.error:
            self._stop("no answer", answer.error)
            return
        start = len(self._prompt.token_ids)
        token_ids = [*self._prompt.token_ids, *answer.token_ids]
        ended = bool(answer.token_ids) and answer.token_ids[-1] in self._template.end_ids
        text = self._template.decode(answer.token_ids[:-1] if ended else answer.token_ids)
        self._said = [*self._said, {"role": "assistant", "content": text}]
        sample = Sample(
            id=self.job.id,
            token_ids=token_ids,
            spans=[*self._spans_so_far(), (start, len(token_ids))],
            messages=self._said,
            finish_reason=answer.finish_reason,
            truncated=answer.finish_reason == "length",
        )
        self._latest = (sample, answer.states)
        if not text.strip():
            self._waiting.clear()

    def outcome(self) -> Outcome:
        """What the job came to, once `next_request` has returned None."""
        found = [*self._earlier, *([self._latest] if self._latest else [])]
        refused = self._refused
        if not found and refused is None:
            refused = Refused(self.job.id, "no user turn", "nothing to answer")
        return Outcome(self.job, tuple(sample for sample, _ in found), refused, tuple(states for _, states in found))

    def _spans_so_far(self) -> list[tuple[int, int]]:
        """Spans of the turns before, where this prompt goes on from them token for token.

        Where it does not (a template drops thinking from earlier turns; an answer's text has other tokens when
        it is read than when it was written), what stands there now is not what the target wrote: the turn
        before is closed as a sample of its own.
        """
        if self._latest is None:
            return []
        assert self._prompt is not None
        before = self._latest[0]
        if self._prompt.token_ids[: len(before.token_ids)] == before.token_ids:
            return list(before.spans)
        if self.job.every_turn:
            self._earlier.append((replace(before, id=f"{before.id}#{self._turn - 1}"), self._latest[1]))
        return []

    def _take_turn(self) -> bool:
        """Move messages up to and including the next user turn from waiting to said."""
        users = [i for i, message in enumerate(self._waiting) if message["role"] == "user"]
        if not users:
            return False
        self._said = [*self._said, *self._waiting[: users[0] + 1]]
        del self._waiting[: users[0] + 1]
        return True

    def _stop(self, reason: str, detail: str) -> None:
        self._refused = Refused(self.job.id, (LATER if self._latest else "") + reason, detail)
        self._waiting.clear()


def given(job: Job, states: Tensor | None = None) -> Outcome:
    """A job whose text exists, as its one sample."""
    sample = Sample(job.id, list(job.token_ids), [tuple(span) for span in job.spans], [], "given", False)
    return Outcome(job, (sample,), None, (states,))


def prompt_messages(messages: list[dict[str, str]], max_turns: int) -> list[dict[str, str]]:
    """The messages up to user turn number `max_turns`, and the assistant's turn after it, if any."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    end = users[max_turns] if len(users) > max_turns else len(messages)
    return messages[:end]


def is_runaway(token_ids: list[int]) -> bool:
    """Whether the last RUNAWAY_TOKENS tokens repeat a pattern of at most RUNAWAY_PERIOD tokens."""
    tail = token_ids[-RUNAWAY_TOKENS - RUNAWAY_PERIOD :]
    return any(
        len(tail) >= RUNAWAY_TOKENS + period
        and all(tail[-i] == tail[-i - period] for i in range(1, RUNAWAY_TOKENS + 1))
        for period in range(1, RUNAWAY_PERIOD + 1)
    )
