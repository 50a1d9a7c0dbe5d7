"""Stages that take no time: each writes one small file that says what it was made from.

A stage's call count, a failure on demand and a wait are there for tests of what surrounds the stages.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.evaluation import ROWS, SUMMARY
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe, load_recipe
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import StageTask, stage_task
from tests.tasks.experiment_samples import make_rows
from tests.tasks.report_samples import K, make_evaluation

TARGET = TargetInfo(
    model="tiny",
    path="/nowhere",
    revision=None,
    fingerprint="target0",
    tokenizer_fingerprint="tokenizer0",
    template_hash="template0",
    chat_template="",
    config={"hidden_size": 8, "num_hidden_layers": 4, "vocab_size": 32},
    eos_token_ids=(1,),
    dtype="float32",
)


SUMMARIES: dict[str, dict[str, object]] = {
    "draft": {"parameters": 10, "documents": 3, "steps": 5},
    "trees": {"nodes": 60, "depth": 8, "chain_ms_per_token": 1.5, "tree_ms_per_round": 20.0},
}


class FakeStage:
    """`work` may be replaced, `summary` added to; `calls` counts how often it ran. Training writes metrics,
    evaluation its summary.
    """

    def __init__(self, name: str, kind: str, seconds: float = 0.0) -> None:
        self.stage = Stage(name=name, kind=kind, version=1)
        self.calls = 0
        self.seconds = seconds
        self.summary: dict[str, object] = {"samples": 7, **SUMMARIES.get(kind, {})}
        self.work: Callable[[ArtifactWriter], None] = self._write

    def plan(self, recipe: Recipe, target: TargetInfo, *inputs: ArtifactRef) -> Plan:
        training = {"lr": recipe.training.lr, "seed": recipe.training.seed, "share": recipe.data.train_share}
        own = {"draft": training, "features": {"layers": recipe.features.layer_ids}}.get(self.stage.kind, {})
        return Plan(self.stage, {**own, "target": target.fingerprint}, inputs)

    def estimate(
        self, recipe: Recipe, target: TargetInfo, store: ArtifactStore, *inputs: ArtifactRef
    ) -> float:
        return self.seconds

    def run(
        self, recipe: Recipe, target: TargetInfo, store: ArtifactStore, *inputs: ArtifactRef
    ) -> ArtifactRef:
        def work(writer: ArtifactWriter) -> dict[str, object]:
            self.calls += 1
            self.work(writer)
            return self.summary

        return run_plan(self.plan(recipe, target, *inputs), store, work)

    def task(self) -> StageTask:
        return stage_task(self.stage, self.plan, self.run, self.estimate)

    def _write(self, writer: ArtifactWriter) -> None:
        writer.write_text("made.txt", self.stage.name)
        if self.stage.kind == "draft":
            write_metrics(writer, 3)
        if self.stage.kind == "acceptance":
            writer.write_text(SUMMARY, json.dumps(make_evaluation().to_dict()))
        if self.stage.kind in ("acceptance", "trees"):
            rng = np.random.default_rng(int(writer.ref.fingerprint[:8], 16))
            mode = "walk" if self.stage.kind == "acceptance" else "tree"
            writer.write_table(ROWS, make_rows([0.5] * K, rng, prompts=6, mode=mode))
        if self.stage.kind == "published":
            writer.write_text("report.html", "<p>report</p>")


def write_metrics(writer: ArtifactWriter, steps: int) -> None:
    lines = [
        json.dumps({"step": step, "loss": 1 / step, "accuracy": [0.5, 0.4]}) for step in range(1, steps + 1)
    ]
    path = writer.path("training/metrics.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines))


def fake_recipe(folder: Path, **changes: object) -> Recipe:
    """The default recipe with its store and tracking in `folder`; tracking is off unless `changes` say
    otherwise.
    """
    overrides = {
        "store.uri": str(folder / "store"),
        "tracking.uri": f"sqlite:///{folder}/mlflow.db",
        "tracking.artifacts": str(folder / "mlartifacts"),
        "tracking.enabled": False,
    }
    return load_recipe("smollm2-135m", overrides | changes)
