"""The decoding loop: draft, verify in one pass of the target, keep what was accepted, and again.

In: a target, a draft, prompts. Out: one `Generation` a prompt with a record of every round. With `Nothing`
as the proposer it is plain decoding through the same code: the baseline that speed-up is told against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from eagle3core.acceptance import Mode, Response, Rounds
from eagle3core.decoding.propose import Nothing, Proposer
from eagle3core.decoding.target import TargetModel, TargetOutput, prompt_block, tree_block
from eagle3core.decoding.tree import TokenTree
from eagle3core.drafters import drafter_of
from eagle3core.drafters.interface import Draft
from eagle3core.verify import GREEDY, Sampling, Seeded, Verdict, distribution


@dataclass(frozen=True)
class Decoding:
    """How to decode. A text ends with one of `eos_token_ids` or after `max_new_tokens`."""

    max_new_tokens: int
    sampling: Sampling = GREEDY
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Round:
    """context: tokens known when it began. tokens: what it added to the text, cut at the text's end.

    drafted: the longest path that could be kept; where the text ends inside the draft, as many tokens as it
    still had (the estimate's K_r). accepted: drafted tokens kept.
    """

    context: int
    drafted: int
    accepted: int
    tokens: tuple[int, ...]


@dataclass
class Generation:
    """One prompt's answer so far. token_ids: what was written, its end-of-text token included."""

    prompt: Tensor
    token_ids: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finished: bool = False

    def cut_rounds(self) -> None:
        """Positions behind the text's end do not count as drafted: K_r is at most what was still to come."""
        end = len(self.prompt) + len(self.token_ids)
        self.rounds = [replace(item, drafted=min(item.drafted, end - item.context)) for item in self.rounds]


def speculate(
    target: TargetModel,
    draft: Draft | None,
    prompts: Sequence[Tensor],
    proposer: Proposer,
    decoding: Decoding,
) -> list[Generation]:
    """Decode `prompts` ([tokens] int64 each) together; every sequence has its own seed, so batches do not
    matter.

    `draft` may be None for `Nothing` alone. Raises ValueError for an empty prompt.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt needs at least one token")
    with torch.no_grad():
        loop = _Loop(target, draft, list(prompts), proposer, decoding)
        while loop.running:
            loop.round()
    return loop.generations


class _Loop:
    """The state of one batch: sequences leave it as they finish."""

    def __init__(
        self,
        target: TargetModel,
        draft: Draft | None,
        prompts: list[Tensor],
        proposer: Proposer,
        decoding: Decoding,
    ) -> None:
        if draft is None and not isinstance(proposer, Nothing):
            raise ValueError("this proposer needs a draft")
        self._target, self._proposer, self._decoding = target, proposer, decoding
        self.generations = [Generation(prompt) for prompt in prompts]
        self._chances = [Seeded(decoding.seed * 1_000_003 + index) for index in range(len(prompts))]
        self.running = list(range(len(prompts)))  # numbers of the generations in each row of the caches
        room = max(len(prompt) for prompt in prompts) + decoding.max_new_tokens + proposer.depth
        self._cache = target.new_cache(len(prompts), room + proposer.nodes)
        slots = room + proposer.steps
        self._drafter = drafter_of(draft).decoder(draft, len(prompts), slots) if draft is not None else None
        self._prefill(prompts)

    def _prefill(self, prompts: list[Tensor]) -> None:
        """The prompts' rows, and each text's first token, which the target writes alone."""
        output = self._target.forward(prompt_block(prompts, self._cache), self._cache)
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        longest = int(lengths.max())
        self._cache.keep(torch.arange(longest).expand(len(prompts), -1), lengths)
        last = output.logits[torch.arange(len(prompts)), lengths - 1]
        first = distribution(last, self._decoding.sampling).cpu()
        following = torch.zeros(len(prompts), longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            token = self._chances[row].draw(first[row])
            self._write(row, [token])
            following[row, : len(prompt)] = torch.cat([prompt[1:].cpu(), torch.tensor([token])])
        if self._drafter is not None:
            self._drafter.begin(torch.stack([prompt[0] for prompt in prompts]))
            self._drafter.commit(output.features, following, lengths)
        self._drop_finished()

    def round(self) -> None:
        """One draft and one pass of the target for every running sequence."""
        last = torch.tensor([self.generations[number].token_ids[-1] for number in self.running])
        chances = [self._chances[number] for number in self.running]
        tree = self._proposer.propose(self._drafter, last, self._target.vocab_size, chances)
        ancestors = tree.ancestors()
        depths = ancestors.sum(-1) - 1
        block = tree_block(tree.tokens, depths, ancestors, tree.real, self._cache)
        output = self._target.forward(block, self._cache)
        behind = distribution(output.logits, self._decoding.sampling).cpu()
        verdicts = [tree.verify(row, behind[row], chance) for row, chance in enumerate(chances)]
        for row, verdict in enumerate(verdicts):
            self._record(row, tree, verdict, int(depths[row][tree.real[row]].max()))
        self._commit(tree, verdicts, output)
        self._drop_finished()

    def _record(self, row: int, tree: TokenTree, verdict: Verdict, depth: int) -> None:
        generation = self.generations[self.running[row]]
        context = len(generation.prompt) + len(generation.token_ids)
        added = self._write(row, [*tree.tokens[row, list(verdict.path)].tolist(), verdict.token])
        accepted = min(len(verdict.path), len(added))
        generation.rounds.append(Round(context, depth, accepted, tuple(added)))
        if generation.finished:
            generation.cut_rounds()

    def _write(self, row: int, tokens: list[int]) -> list[int]:
        """Add `tokens` to a text up to its end; returns what was added."""
        generation, decoding = self.generations[self.running[row]], self._decoding
        tokens = tokens[: decoding.max_new_tokens - len(generation.token_ids)]
        ends = [place for place, token in enumerate(tokens) if token in decoding.eos_token_ids]
        if ends:
            tokens = tokens[: ends[0] + 1]
        generation.token_ids += tokens
        generation.finished = bool(ends) or len(generation.token_ids) == decoding.max_new_tokens
        return tokens

    def _commit(self, tree: TokenTree, verdicts: list[Verdict], output: TargetOutput) -> None:
        """Both caches go on from the accepted path; the draft's rows are made from the target's own
        features.
        """
        paths = [(0, *verdict.path) for verdict in verdicts]
        counts = torch.tensor([len(path) for path in paths])
        nodes = torch.zeros(len(paths), int(counts.max()), dtype=torch.int64)
        following = torch.zeros_like(nodes)
        for row, (path, verdict) in enumerate(zip(paths, verdicts, strict=True)):
            nodes[row, : len(path)] = torch.tensor(path)
            following[row, : len(path)] = torch.tensor(
                [*tree.tokens[row, list(verdict.path)].tolist(), verdict.token]
            )
        self._cache.keep(self._cache.lengths[:, None] + nodes, counts)
        if self._drafter is not None:
            rows = torch.arange(len(paths))[:, None]
            self._drafter.commit(output.features[rows, nodes], following, counts)

    def _drop_finished(self) -> None:
        rows = [row for row, number in enumerate(self.running) if not self.generations[number].finished]
        if len(rows) < len(self.running):
            self.running = [self.running[row] for row in rows]
            if rows:
                self._cache.select(torch.tensor(rows))
                if self._drafter is not None:
                    self._drafter.select(torch.tensor(rows))


def rounds_of(
    generations: Sequence[Generation], responses: Sequence[Response], proposer: Proposer, mode: Mode
) -> Rounds:
    """What the generations' rounds drafted and kept, for `summarise`. mode: "chain" or "tree"."""
    rows = [
        (index, item.context, item.drafted, item.accepted)
        for index, generation in enumerate(generations)
        for item in generation.rounds
    ]
    columns = torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).T
    return Rounds.counted(mode, responses, *columns, proposer.depth)
