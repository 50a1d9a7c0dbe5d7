"""What to draft: a chain, EAGLE-1's static tree, EAGLE-2's dynamic tree, or nothing.

In: something that gives logits behind a text and behind drafted nodes. Out: a `TokenTree` to be verified.
Algorithms, section 6. Sources: EAGLE (arXiv 2401.15077), EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3core.decoding.tree import TokenTree
from eagle3core.verify import Chance, Sampling, distribution

Chances = Sequence[Chance]  # one a sequence

# EAGLE-1's tree (`mc_sim_7b_63` in its repository): each path names the ranks of its tokens among their
# siblings.
EAGLE1_PATHS: tuple[tuple[int, ...], ...] = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)


class DraftSteps(Protocol):
    """What a proposer needs of a draft (`Drafter` is one; tests have tables).

    logits: [B, D], behind the text. target_ids: [D] int64. step: see `Drafter.step`.
    """

    @property
    def logits(self) -> Tensor: ...

    @property
    def target_ids(self) -> Tensor: ...

    def step(self, token_ids: Tensor, parents: Tensor) -> Tensor: ...


class Proposer(Protocol):
    """depth: the longest path it drafts. nodes: the most nodes it verifies, the text's last token included.

    steps: the most nodes it drafts behind, which is what the draft's cache must hold beyond the text.
    """

    @property
    def depth(self) -> int: ...

    @property
    def nodes(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def propose(self, draft: DraftSteps, last: Tensor, vocab_size: int, chances: Chances) -> TokenTree:
        """Draft behind `last` [B] int64, the last token of each text."""
        ...


@dataclass(frozen=True)
class Nothing:
    """No speculation: the loop's own baseline."""

    depth: int = 0
    nodes: int = 1
    steps: int = 0

    def propose(self, draft: DraftSteps, last: Tensor, vocab_size: int, chances: Chances) -> TokenTree:
        root = last[:, None]
        return TokenTree(root, torch.full_like(root, -1), torch.ones_like(root, dtype=torch.bool))


@dataclass(frozen=True)
class Chain:
    """K tokens in a row. sampling: None proposes the argmax (one-hot); else each is drawn, and q goes along.
    """

    length: int
    sampling: Sampling | None = None

    @property
    def depth(self) -> int:
        return self.length

    @property
    def nodes(self) -> int:
        return self.length + 1

    @property
    def steps(self) -> int:
        return self.length - 1

    def propose(self, draft: DraftSteps, last: Tensor, vocab_size: int, chances: Chances) -> TokenTree:
        batch = len(last)
        tokens, proposals = [last], []
        logits = draft.logits
        for depth in range(self.length):
            if depth:
                logits = draft.step(tokens[-1][:, None], torch.full((batch, 1), depth - 1))[:, 0]
            if self.sampling is None:
                picked = logits.argmax(-1).cpu()
            else:
                q = distribution(logits, self.sampling)
                picked = torch.tensor([chance.draw(row) for chance, row in zip(chances, q, strict=True)])
                proposals.append(_over_target(q, draft.target_ids, vocab_size))
            tokens.append(draft.target_ids.cpu()[picked])
        parents = torch.arange(-1, self.length).expand(batch, -1)
        real = torch.ones(batch, self.nodes, dtype=torch.bool)
        if self.sampling is None:
            return TokenTree(torch.stack(tokens, 1), parents, real)
        # Nobody drafts behind the last node; its row is never read.
        proposals.append(torch.zeros_like(proposals[-1]))
        return TokenTree(torch.stack(tokens, 1), parents, real, torch.stack(proposals, 1))


@dataclass(frozen=True)
class StaticTree:
    """EAGLE-1: the tree's shape is fixed; a node's children are its likeliest tokens, or drawn without
    replacement.
    """

    paths: tuple[tuple[int, ...], ...] = EAGLE1_PATHS
    sampling: Sampling | None = None

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            if path[:-1] not in known or (path[-1] and (*path[:-1], path[-1] - 1) not in known):
                raise ValueError(f"static tree: path {path} has no parent or no earlier sibling")

    @property
    def depth(self) -> int:
        return max(len(path) for path in self.paths)

    @property
    def nodes(self) -> int:
        return len(self.paths) + 1

    @property
    def steps(self) -> int:
        return len({path[:-1] for path in self.paths}) - 1

    def propose(self, draft: DraftSteps, last: Tensor, vocab_size: int, chances: Chances) -> TokenTree:
        ordered = [(), *sorted(self.paths, key=lambda path: (len(path), path))]
        place = {path: index for index, path in enumerate(ordered)}
        batch = len(last)
        tokens = torch.zeros(batch, len(ordered), dtype=torch.int64)
        tokens[:, 0] = last
        real = torch.zeros(batch, len(ordered), dtype=torch.bool)
        real[:, 0] = True
        proposals = torch.zeros(batch, len(ordered), vocab_size, dtype=torch.float64)
        stepped = {(): 0}  # the draft's own number of each node it has drafted behind
        for depth in range(self.depth):
            inner = [path for path in ordered if len(path) == depth and (*path, 0) in place]
            if depth:
                logits = draft.step(
                    tokens[:, [place[path] for path in inner]],
                    torch.tensor([stepped[path[:-1]] for path in inner]).expand(batch, -1),
                )
                stepped |= {path: len(stepped) + index for index, path in enumerate(inner)}
            else:
                logits = draft.logits[:, None]
            for index, path in enumerate(inner):
                children = [place[child] for child in ordered if child[:-1] == path and child]
                q = distribution(logits[:, index], self.sampling or Sampling(temperature=1.0))
                for row in range(batch):
                    picked = self._children(q[row], len(children), chances[row])
                    there = children[: len(picked)]
                    tokens[row, there] = draft.target_ids.cpu()[torch.tensor(picked, dtype=torch.int64)]
                    real[row, there] = bool(real[row, place[path]])
                proposals[:, place[path]] = _over_target(q, draft.target_ids, vocab_size)
        parents = torch.tensor([place[path[:-1]] if path else -1 for path in ordered]).expand(batch, -1)
        return TokenTree(tokens, parents, real, None if self.sampling is None else proposals)

    def _children(self, q: Tensor, count: int, chance: Chance) -> list[int]:
        """Draft ids of up to `count` children: fewer where q [D] has fewer tokens to give."""
        if self.sampling is None:
            return q.topk(min(count, len(q))).indices.tolist()
        picked: list[int] = []
        rest = q.cpu().clone()
        while len(picked) < count and rest.sum() > 0:
            picked.append(chance.draw(rest / rest.sum()))
            rest[picked[-1]] = 0
        return picked


@dataclass(frozen=True)
class DynamicTree:
    """EAGLE-2: the most probable paths of a beam of `top_k`, `depth` long; the best `nodes` - 1 are verified.

    A path's score is its log-probability by the draft at temperature 1. Nothing is drawn: proposals are
    one-hot.
    """

    nodes: int = 60
    depth: int = 8
    top_k: int = 10

    @property
    def steps(self) -> int:
        return self.top_k * (self.depth - 1)

    def propose(self, draft: DraftSteps, last: Tensor, vocab_size: int, chances: Chances) -> TokenTree:
        batch, rows = len(last), torch.arange(len(last))[:, None]
        target_ids = draft.target_ids.cpu()
        width = min(self.top_k, len(target_ids))
        best = _log_probs(draft.logits).topk(width, dim=-1)
        # Every candidate so far: its token, its path's score, its parent among the candidates (-1: the text).
        tokens, scores = target_ids[best.indices.cpu()], best.values.cpu()
        parents = torch.full((batch, width), -1)
        frontier = torch.arange(width).expand(batch, -1)
        drafted = torch.zeros_like(frontier)  # the draft's own number of each frontier node's parent
        number = 1
        for _ in range(self.depth - 1):
            logits = draft.step(tokens[rows, frontier], drafted)
            best = _log_probs(logits).topk(width, dim=-1)
            values = (scores[rows, frontier][..., None] + best.values.cpu()).flatten(1)
            first = tokens.shape[1]
            tokens = torch.cat([tokens, target_ids[best.indices.cpu()].flatten(1)], 1)
            scores = torch.cat([scores, values], 1)
            parents = torch.cat([parents, frontier.repeat_interleave(width, 1)], 1)
            kept = values.sort(dim=-1, descending=True, stable=True).indices[:, :width]
            drafted = number + kept // width
            number += frontier.shape[1]
            frontier = first + kept
        return self._rerank(last, tokens, scores, parents)

    def _rerank(self, last: Tensor, tokens: Tensor, scores: Tensor, parents: Tensor) -> TokenTree:
        """The best candidates as a tree.

        Scores never rise along a path and parents come first among equals: whoever is kept has a kept parent.
        """
        batch, rows = len(last), torch.arange(len(last))[:, None]
        count = min(self.nodes - 1, tokens.shape[1])
        chosen = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values
        place = torch.zeros_like(parents).scatter_(1, chosen, torch.arange(1, count + 1).expand(batch, -1))
        above = parents[rows, chosen]
        above = torch.where(above < 0, 0, place[rows, above.clamp_min(0)])
        return TokenTree(
            torch.cat([last[:, None], tokens[rows, chosen]], 1),
            torch.cat([torch.full((batch, 1), -1), above], 1),
            torch.ones(batch, count + 1, dtype=torch.bool),
        )


def _log_probs(logits: Tensor) -> Tensor:
    """Never above 0, rounding or not: scores must not rise along a path."""
    return logits.float().log_softmax(-1).clamp_max(0)


def _over_target(q: Tensor, target_ids: Tensor, vocab_size: int) -> Tensor:
    """[B, D] -> [B, V]: what the draft vocabulary lacks is never proposed."""
    whole = torch.zeros(len(q), vocab_size, dtype=q.dtype, device=q.device)
    return whole.index_copy_(1, target_ids, q).cpu()
