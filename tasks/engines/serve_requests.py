"""What the serving check tells its worker, and what it hears back; JSON-able, standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tasks.engines.requests import EngineOptions, TargetFiles

PLAIN = "none"  # no speculation
DRAFT = "eagle3"  # the build's own draft, whichever drafter's it is
NGRAM = "ngram"


@dataclass(frozen=True)
class Prompt:
    """One held-out prompt, to be answered at one temperature."""

    id: str
    temperature: float
    token_ids: Sequence[int]


@dataclass(frozen=True)
class ServeSpec:
    """One engine with one way to speculate, asked the prompts of one temperature after the other.

    `draft`: the folder that vLLM loads, for method DRAFT, under vLLM's name `drafter`. `draft_length`: tokens drafted a
    round.
    """

    target: TargetFiles
    options: EngineOptions
    method: str  # PLAIN | DRAFT | NGRAM
    draft: str
    draft_length: int
    prompts: Sequence[Prompt]
    max_new_tokens: int
    drafter: str = "eagle3"
    gaps: bool = False  # also say how near each greedy token was to a tie: slow, so never where speed is read

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ServeSpec:
        target = dict(values["target"])
        target["eos_token_ids"] = tuple(target["eos_token_ids"])
        parts = {
            "target": TargetFiles(**target),
            "options": EngineOptions(**values["options"]),
            "prompts": [Prompt(**prompt) for prompt in values["prompts"]],
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True)
class Served:
    """What one engine did at one temperature.

    `answers`: new tokens by prompt id. `gaps`: by prompt id, the log-probability of the likeliest token less
    that of the second at each new token, where the spec asked for them. `drafts`, `drafted`, `accepted`:
    vLLM's own counters, the last one by position. `rounds`: decoding steps, drafted or not, over all prompts.
    """

    method: str
    temperature: float
    answers: dict[str, list[int]]
    gaps: dict[str, list[float]]
    drafts: int
    drafted: int
    accepted: list[int]
    rounds: int
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(map(len, self.answers.values()))
