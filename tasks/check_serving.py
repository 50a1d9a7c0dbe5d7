"""The stage that lets a real server prove the draft: vLLM loads the folder, answers held-out prompts, counts.

In: a draft, its acceptance, the responses. Out: a serving artifact, summary.json (`ServingCheck`s and a
verdict) and counters.parquet. At T = 0 the answers must be token for token those without speculation, and the
server's acceptance at every position must lie in our interval on the same prompts; at T > 0 both sides
sampled their own text, so the two intervals are held against each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow.parquet as pq

from eagle3core.acceptance import Rounds, ServerCounters, compare, from_counters, summarise
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from storage.schemas import AcceptanceRow, ResponseRow, ServingRow, from_table, read_rows, to_table
from tasks.engines.pool import engine_count
from tasks.engines.rates import START_SECONDS, engine_seconds
from tasks.engines.serve_pool import methods_of, near_ties, serve, serve_specs
from tasks.engines.serve_requests import DRAFT, PLAIN, Served
from tasks.evaluation import ROWS, without_nan
from tasks.evaluation_sets import expected_heldout
from tasks.prepare_target import TargetInfo
from tasks.promise import Promised, promised_rounds
from tasks.recipe import Recipe
from tasks.report.serving import SUMMARY, ServingCheck, serving_to_dict
from tasks.samples import HELDOUT
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import stage_task
from tasks.train_draft import DRAFT_FOLDER

logger = logging.getLogger(__name__)

STAGE = Stage(name="check-serving", kind="serving", version=2)

COUNTERS = "counters.parquet"
# What a token costs with a draft, over one without: measured on a CPU, which pays for every token that it verifies.
SPECULATION_COST = 2.0


class ServingError(RuntimeError):
    """The check could not be made; the message says what is missing."""


@dataclass(frozen=True)
class Divergence:
    """A greedy answer that speculation changed: the first other token, and how near the target was to a tie.

    `gap`: log-probability of the plain answer's token there less that of the runner-up.
    """

    prompt_id: str
    position: int
    gap: float


def plan(
    recipe: Recipe, target: TargetInfo, draft: ArtifactRef, acceptance: ArtifactRef, responses: ArtifactRef
) -> Plan:
    parameters = {
        "target": target.identity(),
        "draft_length": recipe.evaluation.chain_length,
        "temperatures": list(recipe.responses.heldout_temperatures),
        "prompts": recipe.serving.prompts,
        "max_new_tokens": recipe.serving.max_new_tokens,
        "baselines": list(recipe.serving.baselines),
    }
    return Plan(STAGE, parameters, (draft, acceptance, responses))


def estimate(
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    draft: ArtifactRef,
    acceptance: ArtifactRef,
    responses: ArtifactRef,
) -> float:
    """Seconds: engine starts, then every prompt at every temperature with every method."""
    methods = methods_of(recipe)
    prompts = min(recipe.serving.prompts, expected_heldout(recipe)) * len(recipe.responses.heldout_temperatures)
    answer = recipe.serving.max_new_tokens * (len(methods) - 1 + SPECULATION_COST)  # one of them has a draft
    tokens = prompts * (recipe.data.max_prompt_tokens / 2 * len(methods) + answer)
    engines = engine_count(recipe, target, len(methods))
    work = engine_seconds(recipe, target, engines, tokens) - START_SECONDS
    return -(-len(methods) // engines) * START_SECONDS + work


def run(
    recipe: Recipe,
    target: TargetInfo,
    store: ArtifactStore,
    draft: ArtifactRef,
    acceptance: ArtifactRef,
    responses: ArtifactRef,
) -> ArtifactRef:
    def work(writer: ArtifactWriter) -> Mapping[str, Any]:
        promised = choose_prompts(recipe, read_rows(ResponseRow, store.local(responses)))
        specs = serve_specs(recipe, target, str(store.local(draft) / DRAFT_FOLDER), promised)
        with scratch(writer.folder) as place:
            served = serve(recipe, target, specs, place)
            if parted := parted_prompts(served):
                served = with_gaps(served, serve(recipe, target, [near_ties(specs, parted)], place))
        rows = list(from_table(AcceptanceRow, pq.read_table(store.local(acceptance) / ROWS)))
        return _write(recipe, writer, promised, served, rows)

    return run_plan(plan(recipe, target, draft, acceptance, responses), store, work)


def choose_prompts(recipe: Recipe, rows: Any) -> dict[float, list[Promised]]:
    """By temperature: the first `serving.prompts` held-out responses that have at least two answer tokens."""
    chosen: dict[float, list[Promised]] = {}
    for row in rows:
        if row.split != HELDOUT:
            continue
        promised = Promised(row, recipe.serving.max_new_tokens)
        those = chosen.setdefault(row.temperature, [])
        if len(those) < recipe.serving.prompts and len(promised.answer_token_ids) > 1:
            those.append(promised)
    if not any(chosen.values()):
        raise ServingError("the responses hold no held-out answer of two tokens: raise data.heldout or name evaluation.sets")
    return chosen


def _write(
    recipe: Recipe,
    writer: ArtifactWriter,
    promised: Mapping[float, Sequence[Promised]],
    served: Sequence[Served],
    rows: Sequence[AcceptanceRow],
) -> Mapping[str, Any]:
    plain = {each.temperature: each for each in served if each.method == PLAIN}
    divergences = {
        f"{each.method} T={each.temperature:g}": diverging(each, plain[each.temperature])
        for each in served
        if each.method != PLAIN and each.temperature == 0
    }
    checks = []
    for each in sorted(served, key=lambda each: (each.temperature, each.method)):
        if each.method == PLAIN:
            continue
        name = f"{each.method} T={each.temperature:g}"
        identical = len(each.answers) - len(divergences[name]) if name in divergences else None
        ours = None
        if each.method == DRAFT:
            those = promised[each.temperature]
            ours = promised_rounds(rows, those, each.temperature, recipe.evaluation.chain_length)
        checks.append(check(each, identical, ours, recipe.evaluation.bootstrap))
    verdict = judge(checks)
    methods = [_figures(each, promised[each.temperature]) for each in served]
    summary = {
        **serving_to_dict(checks),
        "verdict": verdict,
        "methods": methods,
        "divergences": {name: [asdict(each) for each in those] for name, those in divergences.items()},
    }
    writer.write_table(COUNTERS, to_table(ServingRow, [row for each in served for row in counter_rows(each)]))
    writer.write_json(SUMMARY, without_nan(summary))
    for line, holds in verdict.items():
        level, word = (logging.INFO, "yes") if holds else (logging.WARNING, "NO")
        logger.log(level, "serving check: %s: %s", line, word)
    return without_nan({"verdict": verdict, "methods": methods})


def check(served: Served, identical: int | None, ours: Rounds | None, resamples: int) -> ServingCheck:
    """One method at one temperature. Without a promise (`ours`) every decoding round counts, drafted or not.

    That is what makes ngram comparable: it drafts only where the text repeats itself, and vLLM's counters
    leave the other rounds out.
    """
    rounds = served.drafts if ours is not None else served.rounds
    summary = from_counters(ServerCounters(rounds, served.drafted, tuple(served.accepted)))
    agreement = tuple(compare(summarise(ours, resamples=resamples), summary)) if ours is not None else ()
    return ServingCheck(
        served.method, served.temperature, len(served.answers), identical, summary, agreement
    )


def diverging(served: Served, plain: Served) -> list[Divergence]:
    """Where greedy answers with and without speculation part."""
    found = []
    for name, expected in plain.answers.items():
        got = served.answers[name]
        if got != expected:
            pairs = zip(got, expected, strict=False)
            position = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(got), len(expected)))
            gaps = plain.gaps.get(name, [])
            found.append(Divergence(name, position, gaps[position] if position < len(gaps) else float("nan")))
    return found


def parted_prompts(served: Sequence[Served]) -> set[str]:
    """Prompts whose greedy answer some way of speculating changed."""
    plain = next((each for each in served if (each.method, each.temperature) == (PLAIN, 0.0)), None)
    others = [each for each in served if each.method != PLAIN and each.temperature == 0]
    return {found.prompt_id for each in others if plain for found in diverging(each, plain)}


def with_gaps(served: Sequence[Served], again: Sequence[Served]) -> list[Served]:
    """The plain greedy run with the gaps that a second one found."""
    gaps = again[0].gaps
    plain = (PLAIN, 0.0)
    return [replace(each, gaps=gaps) if (each.method, each.temperature) == plain else each for each in served]


def judge(checks: Sequence[ServingCheck]) -> dict[str, bool]:
    """What was to be proved, and whether it holds."""
    verdict = {}
    for each in (each for each in checks if each.method == DRAFT):
        if each.temperature == 0:
            verdict["greedy answers are those without speculation"] = each.identical == each.prompts
            verdict["every position lies in our interval at T=0"] = all(row.inside for row in each.agreement)
        else:
            agree = all(row.explained for row in each.agreement)
            verdict[f"every position agrees within both intervals at T={each.temperature:g}"] = agree
    return verdict


def counter_rows(served: Served) -> list[ServingRow]:
    """vLLM's counters as rows, one a position; a server drafts its full length every time it drafts."""
    return [
        ServingRow(served.method, served.temperature, position, served.drafts, served.drafts, accepted)
        for position, accepted in enumerate(served.accepted, 1)
    ]


def _figures(served: Served, promised: Sequence[Promised]) -> dict[str, Any]:
    """Speed and tau of one engine; tau counts decoding rounds, the bonus token included."""
    stored = {each.response.conversation_id: each.answer_token_ids for each in promised}
    decoded = served.tokens - len(served.answers)
    return {
        "method": served.method,
        "temperature": served.temperature,
        "prompts": len(served.answers),
        "tokens": served.tokens,
        "seconds": round(served.seconds, 2),
        "tokens_per_second": round(served.tokens / served.seconds, 1) if served.seconds else 0.0,
        "rounds": served.rounds,
        "tau": decoded / served.rounds if served.rounds else float("nan"),
        "as_stored": sum(served.answers[name] == answer for name, answer in stored.items()),
    }


check_serving = stage_task(STAGE, plan, run, estimate)
