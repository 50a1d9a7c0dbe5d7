"""Evaluation sets as held-out conversations: what of them the recipe's limits let in, counted as every source is.

In: a recipe, and what counts a prompt's tokens. Out: `HeldoutSets`: rows, texts to keep out of training,
refusals, counts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from storage.schemas import ConversationRow, Message, QuarantineRow
from tasks.evaluation_sets.read import EvaluationPrompt, load_set
from tasks.evaluation_sets.shapes import KINDS, EvaluationSetError
from tasks.intake import IntakeReport, first_prompt
from tasks.recipe import Recipe

log = logging.getLogger(__name__)

HELD_OUT = "heldout"


@dataclass(frozen=True)
class HeldoutSets:
    """rows: the conversations, the sets in turn, so that every beginning holds all of them alike. prompts: all
    that were taken of the sets, those too long for `rows` among them. refused: those, with the reason.
    reports: one a set, its counts adding up as a data source's do.
    """

    rows: tuple[ConversationRow, ...]
    prompts: tuple[EvaluationPrompt, ...]
    refused: tuple[QuarantineRow, ...]
    reports: tuple[IntakeReport, ...]


def heldout_sets(recipe: Recipe, prompt_tokens: Callable[[tuple[Message, ...]], int]) -> HeldoutSets:
    """Read every set of the recipe. `prompt_tokens` counts a first prompt's tokens, or raises ValueError.

    Turns beyond data.max_turns are not asked. Raises EvaluationSetError where nothing of a set is left;
    otherwise as `load_set`.
    """
    by_set: list[list[ConversationRow]] = []
    prompts: list[EvaluationPrompt] = []
    refused: list[QuarantineRow] = []
    reports: list[IntakeReport] = []
    for chosen in recipe.evaluation.sets:
        loaded = load_set(chosen)
        report = IntakeReport(loaded.name, rows=loaded.rows, clean=loaded.rows)
        rows = []
        for prompt in loaded.prompts:
            messages = _messages(prompt.turns[: recipe.data.max_turns])
            try:
                tokens = prompt_tokens(first_prompt(messages))
            except ValueError as error:
                reason, detail = "template_refused", str(error)
            else:
                reason = "prompt_too_long" if tokens > recipe.data.max_prompt_tokens else ""
                detail = f"{tokens} tokens, data.max_prompt_tokens is {recipe.data.max_prompt_tokens}"
            if reason:
                report.refused[reason] += 1
                refused.append(QuarantineRow(prompt.key, loaded.name, reason, detail))
                continue
            rows.append(ConversationRow(prompt.key, loaded.name, HELD_OUT, prompt.category, messages))
        report.sampled, report.not_sampled = len(rows), loaded.rows - len(loaded.prompts)
        _check(report)
        by_set.append(rows)
        prompts += loaded.prompts
        reports.append(report)
    in_turn = tuple(row for group in zip_longest(*by_set) for row in group if row is not None)
    return HeldoutSets(in_turn, tuple(prompts), tuple(refused), tuple(reports))


def expected_heldout(recipe: Recipe) -> int:
    """Conversations that will be held out, for estimates: nothing is read."""
    sizes = (min(KINDS[each.kind].size, each.limit or KINDS[each.kind].size) for each in recipe.evaluation.sets)
    return recipe.data.heldout + sum(sizes)


def _messages(asked: Sequence[str]) -> tuple[Message, ...]:
    """User turns with blank answers between them: the target writes its own."""
    turns = [each for text in asked for each in (Message("user", text), Message("assistant", ""))]
    return tuple(turns[:-1])


def _check(report: IntakeReport) -> None:
    """Say what is left out, and stop where that is everything."""
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.refused.most_common())
    if not report.sampled:
        raise EvaluationSetError(
            f"evaluation set {report.source}: none of its prompts fits ({reasons}): raise data.max_prompt_tokens"
        )
    if reasons:
        asked = report.sampled + report.refused.total()
        log.warning(
            "evaluation set %s: %d of %d prompts are measured, the rest left out (%s)",
            report.source,
            report.sampled,
            asked,
            reasons,
        )
