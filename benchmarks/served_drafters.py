"""Every drafter of the comparison in vLLM: the target's own text at T = 0, and the server's acceptance beside ours.

In: a recipe whose `compare-drafters` was run (its drafts, their acceptance, the held-out answers). Out: a table, two lines a
drafter; the floor is every greedy answer the same, and every position's rate in our interval (T = 0) or agreeing (T = 1).
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from benchmarks.harness import Column, arguments, print_table, write_results
from eagle3core.drafters import DRAFTERS
from flows import dag
from storage.artifacts import ArtifactRef, ArtifactStore
from tasks import check_serving
from tasks.experiment.arms import ArmRun, arm_runs, capture_union
from tasks.prepare_target import TargetInfo, prepare_target
from tasks.recipe import load_recipe
from tasks.stage_task import NotBuiltError, StageTask


def serve(run: ArmRun, target: TargetInfo, store: ArtifactStore) -> list[dict[str, Any]]:
    """The serving check of one arm's draft: a row for each temperature. Raises NotBuiltError where there is no draft."""
    began = time.monotonic()

    def do(stage: StageTask, *inputs: ArtifactRef) -> ArtifactRef:
        return stage.existing(run.recipe, target, *inputs)

    trained = dag.train(do)
    acceptance = dag.prove(do, trained, serving=False).acceptance
    ref = check_serving.run(run.recipe, target, store, trained.draft, acceptance, trained.responses)
    seconds = time.monotonic() - began
    summary = json.loads(store.file(ref, check_serving.SUMMARY).read_text())
    return [
        {
            "arm": run.arm,
            "method": DRAFTERS[run.recipe.draft.drafter].method,
            "temperature": check["temperature"],
            "same": f"{check['identical']} of {check['prompts']}" if check["temperature"] == 0 else None,
            "served": [each["value"] for each in check["served"]["survival"]],
            "ours": [row["ours"]["value"] for row in check["agreement"]],
            "right": all(row["inside" if check["temperature"] == 0 else "explained"] for row in check["agreement"]),
            "seconds": seconds,
        }
        for check in summary["checks"]
        if check["method"] == check_serving.DRAFT
    ]


def rates(values: list[float]) -> str:
    return " ".join(f"{value:.3f}" for value in values)


COLUMNS = [
    Column("drafter", "arm"), Column("vLLM's method", "method"), Column("T", "temperature", "{:g}"),
    Column("same text", "same"), Column("served, position 1, 2, ...", "served_text"), Column("ours", "ours_text"),
    Column("each agrees", "right"), Column("seconds", "seconds", "{:.0f}"),
]  # fmt: skip


def main() -> None:
    parser = arguments("served_drafters", __doc__.splitlines()[0])
    parser.add_argument("--recipe", default="smollm2-135m", help="a recipe whose compare-drafters was run")
    parser.add_argument("--store", help="its store, where it is not the recipe's own")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts at each temperature")
    options = parser.parse_args()
    changes: dict[str, Any] = {"serving.prompts": 2 if options.quick else options.prompts, "serving.baselines": []}
    recipe = load_recipe(options.recipe, changes | ({"store.uri": options.store} if options.store else {}))
    target, store = prepare_target(recipe), ArtifactStore(recipe.store.uri)
    runs = capture_union(arm_runs("compare_drafters", recipe), target)
    first = [run for run in runs if run.seed == runs[0].seed]
    rows: list[dict[str, Any]] = []
    for run in first[-1:] if options.quick else first:
        try:
            rows += serve(run, target, store)
        except NotBuiltError:
            raise SystemExit(f"{run.label} is not in {store.root}: run compare-drafters first") from None
        lines = [row | {"served_text": rates(row["served"]), "ours_text": rates(row["ours"])} for row in rows]
        print_table(COLUMNS, lines)
        write_results("served_drafters", rows, options)


if __name__ == "__main__":
    sys.exit(main())
