"""What travels between a stage and the engine that runs the target: jobs in, answers out, all JSON-able.

In and out: frozen dataclasses. The worker may run under another Python that has vLLM and little else, so
nothing but the standard library is imported here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TargetFiles:
    """The share of a TargetInfo that an engine needs; `Template.load` takes it as well."""

    path: str
    dtype: str
    eos_token_ids: tuple[int, ...]
    chat_template: str
    template_arguments: Mapping[str, Any]
    trust_remote_code: bool


@dataclass(frozen=True)
class EngineOptions:
    """How the target is run. `threads`: CPU threads, None for the engine's own choice.

    `capacity`: sequences in flight. `kv_cache_gb` counts on a CPU alone; `memory_share` is of the device's
    memory.
    """

    engine: str  # "vllm" | "huggingface" | "http"
    capacity: int
    max_model_len: int
    memory_share: float
    kv_cache_gb: int | None
    tensor_parallel: int
    enforce_eager: bool
    seed: int
    servers: tuple[str, ...] = ()  # base URLs, for engine http


@dataclass(frozen=True)
class CaptureOptions:
    """What is kept of the target's states. `layer_ids` index HF hidden_states, in stored order."""

    layer_ids: tuple[int, ...]
    dtype: str  # "bfloat16" | "float16" | "float32" | "fp8_e4m3" | "int8"
    teacher: str  # "topk" | "hidden"
    teacher_k: int


@dataclass(frozen=True)
class Job:
    """One sample to be made, in part `part`.

    With `messages` the target answers every user turn; assistant turns among them are passed over. With
    `token_ids` and `spans` the text exists and is only read. `seed` is the job's own, so that neither batch
    nor resume matters. `every_turn`: turns that a later prompt shows otherwise than they were written become
    samples of their own; else they are left out.
    """

    id: str
    part: int
    messages: Sequence[Mapping[str, str]] = ()
    temperature: float = 0.0
    max_new_tokens: int = 0
    seed: int = 0
    token_ids: Sequence[int] = ()
    spans: Sequence[tuple[int, int]] = ()
    every_turn: bool = True


@dataclass(frozen=True)
class Sample:
    """T token ids (a prompt and its answer, as the server saw them) and the spans that the target wrote.

    A job's last sample has the job's id, an earlier one the turn's number behind it. `messages` end with the
    target's last answer. `finish_reason`: stop, length, or given (the text existed). `truncated`: an answer hit
    the length limit, so later user turns, if any, were not asked.
    """

    id: str
    token_ids: list[int]
    spans: list[tuple[int, int]]
    messages: list[dict[str, str]]
    finish_reason: str
    truncated: bool


LATER = "later turn: "  # before a reason: what the job gave until then is kept


@dataclass(frozen=True)
class Refused:
    """A job that gave no sample, or not all of them: `reason` in a few words to count by, `detail` says more."""

    id: str
    reason: str
    detail: str


@dataclass(frozen=True)
class Outcome:
    """What a job came to. `states[i]` belongs to `samples[i]`, None where nothing is captured."""

    job: Job
    samples: tuple[Sample, ...]
    refused: Refused | None = None
    states: tuple[Tensor | None, ...] = ()


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker is told. `handover`: folder for the arrays of finished parts."""

    target: TargetFiles
    options: EngineOptions
    capture: CaptureOptions | None
    jobs: Sequence[Job]
    max_tokens: int
    handover: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> WorkerSpec:
        target = dict(values["target"])
        target["eos_token_ids"] = tuple(target["eos_token_ids"])
        capture = values["capture"] and CaptureOptions(
            **{**values["capture"], "layer_ids": tuple(values["capture"]["layer_ids"])}
        )
        jobs = [Job(**{**job, "spans": [tuple(span) for span in job["spans"]]}) for job in values["jobs"]]
        rest = {"target": TargetFiles(**target), "options": EngineOptions(**values["options"])}
        return cls(**{**values, **rest, "capture": capture, "jobs": jobs})


@dataclass(frozen=True)
class Request:
    """One prompt for the engine. `max_new_tokens` 0 means: read the prompt, write nothing."""

    id: str
    token_ids: Sequence[int]
    temperature: float = 0.0
    max_new_tokens: int = 0
    seed: int = 0


@dataclass(frozen=True)
class Finished:
    """What became of a request.

    `token_ids`: the new tokens, the end-of-turn token included where one was written. `states`: the
    target's states after every token of prompt and answer but the last, [tokens - 1, layers, H], where the
    engine captures.
    """

    id: str
    token_ids: list[int]
    finish_reason: str
    states: Tensor | None = field(default=None, repr=False)
    error: str = ""  # why there is no answer; empty where there is one


@dataclass(frozen=True)
class ServerCount:
    """What one server did in this run: requests answered, attempts that failed, how often it went away.

    `up`: whether it answers now. `error`: the last failure in its own words, "" where there was none.
    """

    server: str
    answered: int
    failed: int
    times_away: int
    up: bool
    error: str

    def __str__(self) -> str:
        state = "is back" if self.up else f"is away ({self.error}); the others take its requests, it is asked again"
        return f"{self.server} {state}; {self.answered} answered, {self.failed} failed attempts until now"


class Engine(Protocol):
    """A way to run the target. Requests go in at any time; `step` does some work and returns what is done."""

    capacity: int

    def add(self, request: Request) -> None: ...

    def step(self) -> list[Finished]: ...


def job_seed(seed: int, *names: object) -> int:
    """A seed of 31 bits for one job (or one turn of it), from the recipe's seed and the job's own names."""
    text = "\0".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1
