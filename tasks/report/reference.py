"""Figures that others published, each with the mode it was measured in, so that like stands beside like only.

In: a target's name and how our own figures were measured. Out: the published figures that may stand beside
them, and a sentence about those that may not. Source: EAGLE-3 (arXiv 2503.01840), tables 1 and 2: fp16, batch
of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Published:
    """One published figure. speedup is None where only tau was given; draft_length is the chain's K or the
    tree's depth.
    """

    target: str
    task: str
    mode: Literal["chain", "tree"]
    draft_length: int
    temperature: float
    tau: float
    speedup: float | None
    source: str


@dataclass(frozen=True)
class Comparison:
    """`beside`: figures of the same target, mode and length. `refused`: why others are not shown; None where
    there are none.
    """

    beside: tuple[Published, ...]
    refused: str | None


_TASKS = ("MT-bench", "HumanEval", "GSM8K", "Alpaca", "CNN/DM")
_TABLE_1 = {
    "Llama-3.1-8B-Instruct": ((4.40, 6.13), (4.85, 6.74), (4.48, 6.23), (4.82, 6.70), (3.65, 5.34)),
    "vicuna-13b-v1.3": ((5.58, 6.65), (6.47, 7.54), (5.32, 6.29), (5.16, 6.17), (5.01, 6.47)),
    "Llama-3.3-70B-Instruct": ((4.11, 5.63), (4.79, 6.52), (4.34, 6.15), (4.30, 6.09), (3.27, 5.02)),
    "DeepSeek-R1-Distill-Llama-8B": ((4.05, 5.58), (4.59, 6.38), (5.01, 6.93), (3.65, 5.37), (3.52, 4.92)),
}
TREE_DEPTH = 8

PUBLISHED = (
    *(
        Published(target, task, "tree", TREE_DEPTH, 0.0, tau, speedup, "EAGLE-3, table 1")
        for target, figures in _TABLE_1.items()
        for task, (speedup, tau) in zip(_TASKS, figures, strict=True)
    ),
    Published("Llama-3.1-8B-Instruct", "MT-bench", "chain", 7, 0.0, 3.5, None, "published head in vLLM"),
)


def beside(target: str, mode: Literal["chain", "tree"], draft_length: int) -> Comparison:
    """What may stand beside our figures for `target` (a hub id or a folder's name)."""
    name = target.rstrip("/").rsplit("/", 1)[-1].lower()
    same_target = [figure for figure in PUBLISHED if figure.target.lower() == name]
    fitting = tuple(f for f in same_target if f.mode == mode and f.draft_length == draft_length)
    others = [figure for figure in same_target if figure not in fitting]
    if not others:
        return Comparison(fitting, None)
    kinds = sorted({f"{figure.mode} of {figure.draft_length}" for figure in others})
    refused = (
        f"{len(others)} published figures for this target are left out: they were measured with a "
        f"{' and a '.join(kinds)}, ours with a {mode} of {draft_length}. The two do not compare."
    )
    return Comparison(fitting, refused)
