"""How often drafts are accepted, counted one way everywhere: training, estimates, decoders, server counters.

In: `Rounds` (what each round drafted and kept) or a server's `ServerCounters`. Out: an `AcceptanceSummary`
with a count and a 95 % interval behind every figure. The names are those of section 1 of the algorithms:
survival, conditional rate (the papers' n-alpha), flat rate, tau. A tau here always includes the bonus token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any, Literal

import torch
from torch import Tensor

from eagle3core.intervals import Rate, bootstrap_rates, proportion

Mode = Literal["anchor", "walk", "chain", "tree", "server"]
_ROUND_FIELDS = ("response", "context", "drafted", "survived", "weight")


@dataclass(frozen=True)
class Response:
    """One answer of the target. Answers to the same prompt share `prompt_id` and are resampled together; `turn`
    counts those of one dialogue from 0.
    """

    prompt_id: str
    category: str = ""
    temperature: float = 0.0
    output_tokens: int = 0
    turn: int = 0


@dataclass(frozen=True)
class Rounds:
    """R rounds of at most K drafted tokens, over a list of responses.

    response: [R] int64, index into `responses`. context: [R] int64, tokens known when the round began.
    drafted: [R] int64, K_r: below K where the end of the text or the length limit cuts the draft.
    survived: [R, K] float64, the probability that the first k+1 drafted tokens were all kept; 0 or 1 where
    the round was really decided (greedy text, a decoder), a conditional expectation for the sampled
    estimators; 0 beyond K_r. weight: [R] float64, the probability that a round began here: 1 for decoders
    and per-anchor averages.
    """

    mode: Mode
    responses: tuple[Response, ...]
    response: Tensor
    context: Tensor
    drafted: Tensor
    survived: Tensor
    weight: Tensor

    def __post_init__(self) -> None:
        if len({len(getattr(self, name)) for name in _ROUND_FIELDS}) != 1:
            raise ValueError(f"rounds: {', '.join(_ROUND_FIELDS)} must have one entry a round")
        too_long = self.drafted > self.draft_length
        if bool((too_long | (self.accepted > self.drafted + 1e-9)).any()):
            raise ValueError("rounds: accepted <= drafted <= draft length does not hold everywhere")

    @classmethod
    def counted(
        cls,
        mode: Mode,
        responses: Sequence[Response],
        response: Tensor,
        context: Tensor,
        drafted: Tensor,
        accepted: Tensor,
        draft_length: int,
    ) -> Rounds:
        """Rounds that really happened: `accepted` [R] int64 tokens of `drafted` [R] were kept."""
        survived = accepted[:, None] > torch.arange(draft_length, device=accepted.device)
        weight = torch.ones(len(response), dtype=torch.float64, device=accepted.device)
        return cls(mode, tuple(responses), response, context, drafted, survived.double(), weight)

    @classmethod
    def concatenate(cls, parts: Sequence[Rounds]) -> Rounds:
        """Several sets as one. Raises ValueError where modes or draft lengths differ: no average holds for
        both.
        """
        kinds = sorted({f"{part.mode} of {part.draft_length}" for part in parts})
        if len(kinds) != 1:
            raise ValueError(f"rounds of one mode and draft length only, not: {', '.join(kinds)}")
        offsets = [sum(len(part.responses) for part in parts[:index]) for index in range(len(parts))]
        return cls(
            parts[0].mode,
            tuple(response for part in parts for response in part.responses),
            torch.cat([part.response + offset for part, offset in zip(parts, offsets, strict=True)]),
            *(torch.cat([getattr(part, name) for part in parts]) for name in _ROUND_FIELDS[1:]),
        )

    def __len__(self) -> int:
        return len(self.response)

    @property
    def draft_length(self) -> int:
        """K, the longest draft."""
        return self.survived.shape[1]

    @property
    def accepted(self) -> Tensor:
        """[R] float64, a_r: a whole number where the round really happened, its expectation otherwise."""
        return self.survived.sum(1)

    def select(self, mask: Tensor) -> Rounds:
        """The rounds where `mask` [R] bool holds; the responses stay as they are."""
        return Rounds(self.mode, self.responses, *(getattr(self, name)[mask] for name in _ROUND_FIELDS))


@dataclass(frozen=True)
class AcceptanceSummary:
    """Every figure of one set of rounds. Index k of the per-position tuples is draft position k + 1.

    conditional and flat exist for chains (a tree tries several tokens a position): () and None for trees.
    tau_micro: tokens over rounds of the whole set. tau_macro: mean over responses of each response's own tau;
    None where only totals are known (a server's counters).
    """

    mode: Mode
    draft_length: int
    prompts: int
    responses: int
    rounds: float
    survival: tuple[Rate, ...]
    conditional: tuple[Rate, ...]
    flat: Rate | None
    tau_micro: Rate
    tau_macro: Rate | None
    interval: str

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; nan becomes None."""
        return _without_nan(asdict(self))


def summarise(rounds: Rounds, *, resamples: int = 1000, seed: int = 0) -> AcceptanceSummary:
    """Every figure with its counts, and intervals from a bootstrap that resamples whole prompts.

    Rounds of one prompt are alike, so resampling rounds would give intervals that are too narrow. Positions
    that were never drafted leave the denominator: survival at k is over rounds with K_r >= k.
    """
    length = rounds.draft_length
    weight = rounds.weight[:, None]
    reached = (rounds.drafted[:, None] > torch.arange(length, device=weight.device)).double()
    before = torch.cat([torch.ones_like(rounds.survived[:, :1]), rounds.survived[:, :-1]], dim=1)
    tokens = weight * (rounds.accepted[:, None] + 1)
    macro, answered = _macro_terms(rounds, tokens)

    # Every figure is a ratio of two sums over prompts; one column each, in the order they are unpacked below.
    hits = weight * rounds.survived
    above = torch.cat([hits, hits, weight * rounds.accepted[:, None], tokens], dim=1)
    below = torch.cat(
        [weight * reached, weight * reached * before, weight * rounds.drafted[:, None], weight], dim=1
    )
    prompt_of_response, prompts = _prompt_index(rounds)
    prompt_of_round = prompt_of_response[rounds.response]
    above = torch.cat(
        [_sum_by(above, prompt_of_round, prompts), _sum_by(macro, prompt_of_response, prompts)], dim=1
    )
    below = torch.cat(
        [_sum_by(below, prompt_of_round, prompts), _sum_by(answered, prompt_of_response, prompts)], dim=1
    )
    present = below[:, 2 * length + 1] > 0
    rates = bootstrap_rates(
        above[present], below[present], shares=2 * length + 1, resamples=resamples, seed=seed
    )
    tree = rounds.mode == "tree"
    return AcceptanceSummary(
        mode=rounds.mode,
        draft_length=length,
        prompts=int(present.sum()),
        responses=int(answered.sum()),
        rounds=float(rounds.weight.sum()),
        survival=tuple(rates[:length]),
        conditional=() if tree else tuple(rates[length : 2 * length]),
        flat=None if tree else rates[2 * length],
        tau_micro=rates[2 * length + 1],
        tau_macro=rates[2 * length + 2],
        interval="95 %, bootstrap over prompts",
    )


def _macro_terms(rounds: Rounds, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Each response's own tau and whether it had a round at all, both [responses, 1] float64."""
    count = len(rounds.responses)
    total = _sum_by(tokens, rounds.response, count)
    number = _sum_by(rounds.weight[:, None], rounds.response, count)
    answered = (number > 0).double()
    return torch.where(number > 0, total / number.clamp(min=1e-300), 0.0), answered


def _prompt_index(rounds: Rounds) -> tuple[Tensor, int]:
    """The number of each response's prompt, [responses] int64, and how many prompts there are."""
    numbers: dict[str, int] = {}
    index = [numbers.setdefault(response.prompt_id, len(numbers)) for response in rounds.responses]
    return torch.tensor(index, dtype=torch.int64, device=rounds.response.device), len(numbers)


def _sum_by(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sums of the rows of `values` [rows, columns] that share an index, [count, columns] float64."""
    sums = torch.zeros(count, values.shape[1], dtype=torch.float64, device=values.device)
    return sums.index_add_(0, index, values.double())


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@dataclass(frozen=True)
class ServerCounters:
    """What vLLM counts: rounds (`num_drafts`), drafted tokens, and tokens accepted at each position."""

    drafts: int
    drafted: int
    accepted: tuple[int, ...]

    def __sub__(self, earlier: ServerCounters) -> ServerCounters:
        """What was counted since `earlier`: counters of a server only grow."""
        accepted = tuple(now - then for now, then in zip(self.accepted, earlier.accepted, strict=True))
        return ServerCounters(self.drafts - earlier.drafts, self.drafted - earlier.drafted, accepted)


def from_counters(counters: ServerCounters) -> AcceptanceSummary:
    """A server's totals as a summary, with Wilson's intervals: totals do not tell prompts apart.

    Those are narrower than a bootstrap over prompts would be. A server drafts all K tokens even where the
    answer ends inside them, so its denominator at every position is every draft.
    """
    before = (counters.drafts, *counters.accepted[:-1])
    total = sum(counters.accepted)
    # tau is 1 + a count that may exceed the drafts: no binomial, so no interval.
    tau = (total + counters.drafts) / counters.drafts if counters.drafts else math.nan
    return AcceptanceSummary(
        mode="server",
        draft_length=len(counters.accepted),
        prompts=0,
        responses=0,
        rounds=float(counters.drafts),
        survival=tuple(proportion(hits, counters.drafts) for hits in counters.accepted),
        conditional=tuple(
            proportion(hits, count) for hits, count in zip(counters.accepted, before, strict=True)
        ),
        flat=proportion(total, counters.drafted),
        tau_micro=Rate(tau, math.nan, math.nan, float(total + counters.drafts), float(counters.drafts)),
        tau_macro=None,
        interval="95 %, Wilson over rounds",
    )


@dataclass(frozen=True)
class Agreement:
    """Survival at one position, ours against a server's.

    inside: the server's value lies in our interval. explained: the difference lies within both intervals'
    half widths taken together (the root of their squares), widened so that all K positions, asked at once,
    agree 95 times in 100 where nothing is wrong (Bonferroni): the test where both sides sampled their own text.
    """

    position: int
    ours: Rate
    theirs: Rate
    inside: bool
    explained: bool


def compare(ours: AcceptanceSummary, theirs: AcceptanceSummary) -> list[Agreement]:
    """Position by position. Raises ValueError for a chain beside a tree, or for different draft lengths."""
    require_comparable([ours, theirs])
    if ours.draft_length != theirs.draft_length:
        raise ValueError(f"draft lengths differ: {ours.draft_length} and {theirs.draft_length}")
    pairs = zip(ours.survival, theirs.survival, strict=True)
    normal = NormalDist().inv_cdf
    wider = normal(1 - 0.025 / ours.draft_length) / normal(1 - 0.025)
    return [_agreement(position, *pair, wider) for position, pair in enumerate(pairs, 1)]


def _agreement(position: int, ours: Rate, theirs: Rate, wider: float) -> Agreement:
    half = [(rate.high - rate.low) / 2 for rate in (ours, theirs)]
    explained = abs(ours.value - theirs.value) <= wider * math.hypot(*half)
    return Agreement(position, ours, theirs, ours.low <= theirs.value <= ours.high, explained)


def require_comparable(summaries: Iterable[AcceptanceSummary]) -> None:
    """Raise ValueError where chains and trees would stand in one table without being told apart."""
    modes = {summary.mode for summary in summaries}
    if "tree" in modes and len(modes) > 1:
        raise ValueError(f"chains and trees do not compare; found {', '.join(sorted(modes))} together")
