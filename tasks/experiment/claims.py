"""The paper's claims as inequalities over figures, and what the figures say of each.

In: an experiment's arms and a `Measured`. Out: verdicts. The rule, the same for all: a claim is *found* where the
95 % interval of what it says to be positive lies above 0, *not found* where it lies below, *within noise* where it
holds 0, and where no arm was trained with several seeds. Where arms are equal a claim comes out found at most one
time in 40, and not found at most one time in 40.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from tasks.experiment.contrast import Contrast, Contrasts, Term
from tasks.experiment.measures import CHAIN, TREE, Cell, Measured, Quantity
from tasks.experiment.settings import ABLATE, SCALE

Outcome = Literal["found", "not found", "within noise"]

MOST_FALL = 0.08  # Figure 7: EAGLE-3's conditional rate from the first to the fifth position
LEAST_RATIO = 2.0  # Figures 1 and 4: EAGLE-3's gain from eight times the data over EAGLE's
FIFTH = 5


@dataclass(frozen=True)
class Claim:
    """says: the claim. measure: what `terms` minus `margin` is, which the claim says to be above 0. source: where
    the paper has it.
    """

    says: str
    measure: str
    terms: tuple[Term, ...]
    margin: float = 0.0
    source: str = ""


@dataclass(frozen=True)
class Verdict:
    """contrast: of the claim's terms, the margin taken off."""

    claim: Claim
    contrast: Contrast
    outcome: Outcome

    @property
    def sentence(self) -> str:
        """For a page: the claim, what was found, by how much."""
        found = self.contrast
        sure = f"{found.low:+.3f} to {found.high:+.3f}" if found.low == found.low else "no interval"
        alone = "" if found.replicated else "; one training seed, so luck in training is not in it"
        return f"{self.claim.says}: {self.outcome} ({self.claim.measure} {found.value:+.3f}, 95 % {sure}{alone})."


def decide(claim: Claim, contrasts: Contrasts) -> Verdict:
    """The rule. Raises MeasureError where a figure of the claim was not measured."""
    whole = contrasts.of(claim.terms)
    moved = Contrast(
        whole.value - claim.margin,
        whole.low - claim.margin,
        whole.high - claim.margin,
        whole.prompts,
        whole.seeds,
        whole.replicated,
    )
    outcome: Outcome = "within noise"
    if moved.replicated and moved.low > 0:
        outcome = "found"
    elif moved.replicated and moved.high < 0:
        outcome = "not found"
    return Verdict(claim, moved, outcome)


def claims_of(kind: str, arms: Sequence[str], measured: Measured) -> list[Claim]:
    """The claims that an experiment of this kind is about, over what was measured."""
    if kind == SCALE:
        return _scale(arms, measured)
    shared = _ablation(arms, measured) if kind == ABLATE else _against_last(arms, measured)
    return shared + _trees(arms, measured)


def _ablation(arms: Sequence[str], measured: Measured) -> list[Claim]:
    """Table 2: each arm accepts more than the one before it; Figure 7, of the first arm and the last."""
    pairs = [*pairwise(arms), *([(arms[0], arms[-1])] if len(arms) > 2 else [])]
    claims = [
        _higher(better, worse, Quantity(shape=shape), "Table 2")
        for shape in (CHAIN, TREE)
        for worse, better in pairs
        if _both(measured, worse, better, Quantity(shape=shape))
    ]
    last = min(FIFTH, measured.chain_length)
    fall = lambda arm, sign: (
        Term(sign, Cell(arm), Quantity("conditional", 1)),
        Term(-sign, Cell(arm), Quantity("conditional", last)),
    )
    if last > 1:
        claims.append(
            Claim(
                f"{arms[-1]}'s conditional rate falls by less than {MOST_FALL:g} from position 1 to {last}",
                f"{MOST_FALL:g} minus its fall",
                fall(arms[-1], -1.0),
                -MOST_FALL,
                "Figure 7",
            )
        )
        claims.append(
            Claim(
                f"{arms[0]}'s conditional rate falls by more than {arms[-1]}'s from position 1 to {last}",
                "its fall minus the other's",
                (*fall(arms[0], 1.0), *fall(arms[-1], -1.0)),
                0.0,
                "Figure 7",
            )
        )
    return claims


def _against_last(arms: Sequence[str], measured: Measured) -> list[Claim]:
    """The last arm accepts more than each of the others."""
    return [
        _higher(arms[-1], arm, quantity, "")
        for shape in (CHAIN, TREE)
        for temperature in measured.temperatures(shape)
        for arm in arms[:-1]
        if _both(measured, arm, arms[-1], quantity := Quantity(shape=shape, temperature=temperature))
    ]


def _trees(arms: Sequence[str], measured: Measured) -> list[Claim]:
    """A tree accepts more than the same draft's chain. Their depths are equal where the experiment sets them so."""
    chain, tree = Quantity(), Quantity(shape=TREE)
    return [
        Claim(
            f"{arm}'s tree accepts more than its chain (T = 0)",
            "tau of the tree minus tau of the chain",
            (Term(1.0, Cell(arm), tree), Term(-1.0, Cell(arm), chain)),
            0.0,
            "EAGLE-2",
        )
        for arm in arms
        if measured.has(Cell(arm), tree) and measured.has(Cell(arm), chain)
    ]


def _scale(arms: Sequence[str], measured: Measured) -> list[Claim]:
    """Figures 1 and 4: tau rises with the data, and the last arm gains more than the first, at least twice as much."""
    shares = sorted({cell.share for cell in measured.cells})
    times = f"from {1:g}x to {shares[-1] / shares[0]:g}x the data"
    gain = lambda arm, weight: (
        Term(weight, Cell(arm, shares[-1]), Quantity()),
        Term(-weight, Cell(arm, shares[0]), Quantity()),
    )
    claims = [
        Claim(f"{arm}'s tau rises {times} (chain, T = 0)", "gain in tau", gain(arm, 1.0), 0.0, "Figures 1, 4")
        for arm in arms
    ]
    against = lambda says, measure, ratio: Claim(
        f"{arms[-1]} gains {says} {arms[0]} gains {times}",
        measure,
        (*gain(arms[-1], 1.0), *gain(arms[0], -ratio)),
        0.0,
        "Figures 1, 4",
    )
    return [
        *claims,
        against("more than", "its gain minus the other's", 1.0),
        against(f"at least {LEAST_RATIO:g} times what", f"its gain minus {LEAST_RATIO:g} times the other's", LEAST_RATIO),
    ]


def _higher(better: str, worse: str, quantity: Quantity, source: str) -> Claim:
    return Claim(
        f"{better} accepts more than {worse} ({quantity.shape}, T = {quantity.temperature:g})",
        "difference of tau",
        (Term(1.0, Cell(better), quantity), Term(-1.0, Cell(worse), quantity)),
        0.0,
        source,
    )


def _both(measured: Measured, one: str, other: str, quantity: Quantity) -> bool:
    return measured.has(Cell(one), quantity) and measured.has(Cell(other), quantity)
