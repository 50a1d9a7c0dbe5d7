"""The stage in which the target answers every conversation, its states captured in the same pass if possible.

In: conversations. Out: a responses artifact, one row a sample, in parts as they come; where the answering
engine captures, the features artifact too, part by part, features first: a part counts when both are there. A
rerun goes on with the parts that are missing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.features import FeatureWriter
from storage.schemas import ConversationRow, QuarantineRow, ResponseRow, read_rows, to_table
from tasks import extract_features
from tasks.engines.pool import Part, engine_count, run_engines
from tasks.engines.rates import engine_seconds
from tasks.engines.requests import LATER
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.samples import HELDOUT, Planned, Tally, feature_sample, plan_jobs, quarantine_row, response_row
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.templates import Template

logger = logging.getLogger(__name__)

STAGE = Stage(name="make-responses", kind="responses", version=1)

# English text of the shipped data sets, for the estimate alone.
CHARACTERS_PER_TOKEN = 4.0
# Most answers end before their limit.
FILLED_SHARE = 0.85


class ResponsesError(RuntimeError):
    """No usable responses came out; the message says why."""


def plan(recipe: Recipe, target: TargetInfo, conversations: ArtifactRef) -> Plan:
    values = recipe.responses
    parameters = {
        "target": target.identity(),
        "engine": values.engine,
        "keep_answers": values.keep_answers,
        "temperature": values.temperature,
        "greedy_share": values.greedy_share,
        "heldout_temperatures": list(values.heldout_temperatures),
        "max_new_tokens": values.max_new_tokens,
        "heldout_max_new_tokens": values.heldout_max_new_tokens,
        "max_tokens": recipe.data.max_tokens,
        "max_turns": recipe.data.max_turns,
        "part_size": values.part_size,
        "seed": values.seed,
    }
    if recipe.data.max_turns > 1:
        parameters["rewritten_turns"] = "samples of their own"
    return Plan(STAGE, parameters, (conversations,))


def estimate(recipe: Recipe, target: TargetInfo, store: ArtifactStore, conversations: ArtifactRef) -> float:
    """Seconds, from the conversations' sizes and measured rates."""
    tokens = _expected_tokens(recipe, store, conversations)
    return engine_seconds(recipe, target, engine_count(recipe, target, 64), tokens)


def run(recipe: Recipe, target: TargetInfo, store: ArtifactStore, conversations: ArtifactRef) -> ArtifactRef:
    responses = plan(recipe, target, conversations)

    def work(writer: ArtifactWriter) -> Mapping[str, Any]:
        with ExitStack() as stack:
            one_pass = extract_features.made_by_responses(recipe)
            features = _features_writer(recipe, target, store, writer.ref, stack) if one_pass else None
            summary = _Making(recipe, target, store, conversations, writer, features).run()
            if features is not None:
                # Before the responses: after a kill between the two, the next run has only to commit.
                spec = extract_features.feature_spec(recipe, target)
                features.commit(FeatureWriter(features, spec).finish())
        return summary

    return run_plan(responses, store, work)


def _features_writer(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, responses: ArtifactRef, stack: ExitStack
) -> ArtifactWriter | None:
    """The features artifact of the responses that are being made; None where it is whole already."""
    features = extract_features.plan(recipe, target, responses)
    writer = stack.enter_context(features.open(store))
    return None if features.find(store) else writer


class _Making:
    """One run of the stage: which parts are missing, and how a part that comes in is stored."""

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        store: ArtifactStore,
        conversations: ArtifactRef,
        writer: ArtifactWriter,
        features: ArtifactWriter | None,
    ) -> None:
        self._recipe, self._target, self._store = recipe, target, store
        self._writer = writer
        spec = extract_features.feature_spec(recipe, target)
        self._features = FeatureWriter(features, spec) if features is not None else None
        rows = read_rows(ConversationRow, store.local(conversations))
        self._planned: dict[int, dict[str, Planned]] = {}
        for each in plan_jobs(recipe, rows, Template.load(target)):
            self._planned.setdefault(each.job.part, {})[each.job.id] = each
        if not self._planned:
            raise ResponsesError(f"{conversations.uri} holds no conversation: nothing to answer")

    def run(self) -> Mapping[str, Any]:
        missing = self._missing()
        if len(missing) < len(self._planned):
            there = len(self._planned) - len(missing)
            logger.info("%d of %d parts are there from an earlier run", there, len(self._planned))
        took = self._make(missing) if missing else {}
        tally = Tally()
        for row in read_rows(ResponseRow, self._writer.folder):
            tally.add(row)
        quarantine = read_rows(QuarantineRow, self._writer.folder, "quarantine-*.parquet")
        reasons = [row.reason for row in quarantine]
        refused = [reason for reason in reasons if not reason.startswith(LATER)]
        self._check(tally, refused)
        counts = {"refused": len(refused), "refused_by": dict(Counter(reasons)), "parts": len(self._planned)}
        return {**tally.to_summary(), **counts, **took}

    def _missing(self) -> list[int]:
        there = {int(name[5:10]) for name in self._writer.parts("part-*.parquet")}
        if self._features is not None:
            there &= self._features.finished()
        return [number for number in self._planned if number not in there]

    def _make(self, missing: list[int]) -> Mapping[str, Any]:
        recipe = self._recipe
        planned = [each for number in missing for each in self._planned[number].values()]
        jobs = [each.job for each in planned if each.refused is None]
        # Parts in which no job can be begun never reach an engine.
        for number in {each.job.part for each in planned} - {job.part for job in jobs}:
            self._store_part(Part(number, [], [], [], []))
        capture = None
        if self._features is not None:
            capture = extract_features.capture_options(recipe, self._target)
            longest = recipe.data.max_prompt_tokens
            tokens = sum(len(job.token_ids) or longest + job.max_new_tokens for job in jobs)
            extract_features.check_room(recipe, self._target, self._store, tokens)
        with scratch(self._writer.folder) as folder:
            return run_engines(
                recipe,
                self._target,
                jobs,
                engine=recipe.responses.engine,
                capture=capture,
                folder=folder,
                on_part=self._store_part,
            ).to_summary()

    def _store_part(self, part: Part) -> None:
        """Features, then quarantine, then responses: whoever sees the last file sees all of the part."""
        planned = self._planned[part.number]
        rows = [response_row(planned[job], sample) for job, sample in zip(part.jobs, part.samples, strict=True)]
        if self._features is not None:
            pairs = zip(rows, part.arrays, strict=True)
            self._features.write_part(part.number, [feature_sample(row, arrays) for row, arrays in pairs])
        refused = [each.refused for each in planned.values() if each.refused] + list(part.refused)
        if refused:
            table = [quarantine_row(planned[each.id].conversation, each) for each in refused]
            self._writer.write_table(f"quarantine-{part.number:05d}.parquet", to_table(QuarantineRow, table))
        self._writer.write_table(f"part-{part.number:05d}.parquet", to_table(ResponseRow, rows))
        logger.info("part %d: %d samples, %d refused", part.number, len(rows), len(refused))

    def _check(self, tally: Tally, refused: list[str]) -> None:
        total = sum(tally.splits.values()) + len(refused)
        if not tally.splits["train"] or not tally.splits[HELDOUT]:
            raise ResponsesError(
                f"{total} conversations gave {tally.splits['train']} training and {tally.splits[HELDOUT]} "
                f"held-out answers ({len(refused)} refused): both are needed; see data.max_tokens"
            )
        if len(refused) > self._recipe.data.max_bad_share * total:
            raise ResponsesError(
                f"{len(refused)} of {total} conversations were refused, more than data.max_bad_share allows; "
                f"the commonest reason is {max(set(refused), key=refused.count)!r}"
            )


def _expected_tokens(recipe: Recipe, store: ArtifactStore, conversations: ArtifactRef) -> float:
    tokens = 0.0
    for row in read_rows(ConversationRow, store.local(conversations)):
        users = [message.content for message in row.messages if message.role == "user"]
        users = users[: recipe.data.max_turns]
        prompt = sum(len(text) for text in users) / CHARACTERS_PER_TOKEN
        if row.split == HELDOUT:
            answer = recipe.responses.heldout_max_new_tokens * FILLED_SHARE
            samples = len(recipe.responses.heldout_temperatures)
        else:
            answer, samples = recipe.responses.max_new_tokens * FILLED_SHARE, 1
        # Turn n reads everything before it again.
        turns = max(1, len(users))
        whole = prompt + turns * answer
        tokens += samples * min(turns * recipe.data.max_tokens, whole * (turns + 1) / 2)
    return tokens


make_responses = stage_task(STAGE, plan, run, estimate, retries=1)
