"""Stage: the recipe's sources as clean conversations, a seeded sample, split into train and held out.

In: a recipe. Out: a `conversations` artifact: part-*.parquet (ConversationRow; the evaluation sets' prompts
last), quarantine.parquet (what was refused and why), and a summary whose counts add up to the rows read.
"""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.schemas import ConversationRow, Message, QuarantineRow, to_table
from tasks.evaluation_sets import HeldoutSets, heldout_sets, set_identity
from tasks.heldout import ConversationsError, Split, all_rows, prompts_of, split_rows
from tasks.intake import Intake, IntakeReport
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe, Source
from tasks.selection import Doubles, Sample
from tasks.sources import source_bytes, source_identity
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.templates import Template

log = logging.getLogger(__name__)

STAGE = Stage(name="prepare-conversations", kind="conversations", version=1)

PART_ROWS = 2000
HELD_OUT = "heldout"
# Measured on the embedded ShareGPT file (125 MB, one busy core of two): reading, normalising, counting
# tokens.
BYTES_PER_SECOND = 10_000_000
START_SECONDS = 3.0  # tokenizer and imports
UNKNOWN_SECONDS = 600.0  # a data set that streams from a hub says no size


def plan(recipe: Recipe, target: TargetInfo) -> Plan:
    """Raises SourceError where a source or a set is not there: no stage starts before all have been found."""
    data = recipe.data
    parameters = {
        "sources": [
            {**source.model_dump(exclude={"uri"}), "content": source_identity(source)}
            for source in data.sources
        ],
        "exclude": [source_identity(prompts_of(uri)) for uri in data.exclude],
        **data.model_dump(include={"heldout", "max_prompt_tokens", "max_turns", "seed"}),
        "tokenizer": target.tokenizer_fingerprint,
        "chat_template": target.template_hash,
    }
    if recipe.evaluation.sets:
        parameters["evaluation_sets"] = [set_identity(each) for each in recipe.evaluation.sets]
    return Plan(STAGE, parameters)


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore) -> float:
    """Seconds, from the sources' bytes."""
    sizes = [source_bytes(source) for source in recipe.data.sources]
    return START_SECONDS + sum(UNKNOWN_SECONDS if size is None else size / BYTES_PER_SECOND for size in sizes)


def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore) -> ArtifactRef:
    """Find or make the conversations. Raises ConversationsError, EvaluationSetError or SourceError, one line
    each.
    """
    return run_plan(plan(recipe, target), store, lambda writer: _make(recipe, Template.load(target), writer))


def _make(recipe: Recipe, template: Template, writer: ArtifactWriter) -> Mapping[str, Any]:
    quarantine: list[QuarantineRow] = []
    with ExitStack() as stack:
        # Beside the parts, not in them: what is spilled is as large as the sample.
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(dir=writer.folder.parent, prefix=".spill-"))
        )
        samples: list[Sample] = []
        reports: list[IntakeReport] = []
        doubles = Doubles()
        sets = heldout_sets(recipe, _counter(template))
        for each in sets.rows:
            doubles.unique_id(each.id)  # theirs first: a data row of that name gets another
        for number, source in enumerate(recipe.data.sources):
            (folder / str(number)).mkdir()
            sample = stack.enter_context(Sample(source.limit, folder / str(number)))
            intake = Intake(
                source, _label(recipe, source), recipe.data, doubles, sample, _counter(template), quarantine
            )
            reports.append(intake.run())
            samples.append(sample)
        _refuse_bad(recipe, reports)
        split = split_rows(recipe, samples, sets, folder)
        quarantine += sets.refused
        written = _write(samples, split, sets, quarantine, writer)
    reports += sets.reports
    summary = {
        **written,
        "rows": sum(report.rows for report in reports),
        "sources": [report.to_dict() for report in reports],
        "excluded": [vars(overlap) for overlap in list(split.overlaps.values())[:100]],
    }
    log.info(
        "conversations: %d to train on, %d held out; refused %s",
        written["train"],
        written[HELD_OUT],
        _reasons(reports),
    )
    return summary


def _counter(template: Template) -> Any:
    def count(prompt: tuple[Message, ...]) -> int:
        return len(template.prompt([vars(message) for message in prompt]).token_ids)

    return count


def _label(recipe: Recipe, source: Source) -> str:
    """The source's kind, with its URI where the recipe has several of that kind."""
    alike = [other for other in recipe.data.sources if other.kind == source.kind]
    return source.kind if len(alike) == 1 else f"{source.kind}:{source.uri}"


def _refuse_bad(recipe: Recipe, reports: Sequence[IntakeReport]) -> None:
    """Stop where a source is empty, where nothing is left of it, or where too much of it was refused."""
    for report in reports:
        refused = report.refused.total()
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.refused.most_common(4))
        if not report.rows:
            raise ConversationsError(f"data source {report.source} is empty: it has no row to read")
        if not report.sampled:
            hint = (
                "; raise data.max_prompt_tokens"
                if report.refused["prompt_too_long"] * 2 > report.rows
                else ""
            )
            raise ConversationsError(
                f"data source {report.source}: none of its {report.rows} rows can be used ({reasons}){hint}"
            )
        if refused > recipe.data.max_bad_share * report.rows:
            raise ConversationsError(
                f"data source {report.source}: {refused} of {report.rows} rows refused ({reasons}), more "
                f"than "
                f"data.max_bad_share {recipe.data.max_bad_share:g} allows: is its kind right?"
            )


def _write(
    samples: Sequence[Sample],
    split: Split,
    sets: HeldoutSets,
    quarantine: list[QuarantineRow],
    writer: ArtifactWriter,
) -> dict[str, Any]:
    """Write the parts and the quarantine; counts by split, source and category."""
    counts: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    rows = chain(_kept(samples, split, quarantine), sets.rows)
    number = 0
    while part := list(islice(rows, PART_ROWS)):
        writer.write_table(f"part-{number:05d}.parquet", to_table(ConversationRow, part))
        number += 1
        for row in part:
            counts[row.split] += 1
            by_source[f"{row.source} {row.split}"] += 1
    if not counts["train"]:
        raise ConversationsError(
            "every training conversation holds a held-out or evaluation prompt: none is left"
        )
    writer.write_table("quarantine.parquet", to_table(QuarantineRow, quarantine))
    return {
        "train": counts["train"],
        HELD_OUT: counts[HELD_OUT],
        "overlaps_evaluation": len(split.overlaps),
        "quarantined": len(quarantine),
        "by_source": dict(sorted(by_source.items())),
    }


def _kept(
    samples: Sequence[Sample], split: Split, quarantine: list[QuarantineRow]
) -> Iterator[ConversationRow]:
    """The sources' rows with their split; those that hold an evaluation prompt go to the quarantine."""
    for row in all_rows(samples):
        if overlap := split.overlaps.get(row.id):
            detail = f"holds {overlap.evaluation_id} ({overlap.share:.0%} of its n-grams)"
            quarantine.append(QuarantineRow(row.id, row.source, "overlaps_evaluation", detail))
        else:
            yield replace(row, split=HELD_OUT if row.id in split.heldout else "train")


def _reasons(reports: Iterable[IntakeReport]) -> str:
    total = sum((report.refused for report in reports), Counter())
    return ", ".join(f"{reason} {count}" for reason, count in total.most_common()) or "none"


prepare_conversations = stage_task(STAGE, plan, run, estimate)
