"""The stage that trains a draft.

In: features and a vocabulary. Out: a draft artifact: draft/ (model.safetensors and config.json as servers
load them) and training/ (metrics.jsonl, best/, checkpoint/). The work is `tasks.train_worker`'s, in a process
of its own, one for each GPU. A killed run leaves its checkpoints in the artifact's partial folder; the next
run goes on from the newest. With `store.window_gb` training goes in legs, over the features that are there
(tasks/streaming).
"""

from __future__ import annotations

import logging
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from eagle3core.config import DraftConfig
from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter
from tasks.prepare_target import TargetInfo
from tasks.processes import cores, device_lock, run_worker
from tasks.recipe import Recipe
from tasks.scratch import scratch
from tasks.stage import Plan, Stage, run_plan
from tasks.stage_task import duration, stage_task
from tasks.streaming.costs import streaming_seconds

log = logging.getLogger(__name__)

STAGE = Stage(name="train-draft", kind="draft", version=1)

DRAFT_FOLDER, TRAINING_FOLDER = "draft", "training"
SAY_EVERY = 15.0  # seconds between two progress lines
# What a change of these leaves as it is: how fast, how often saved, never what is learnt.
NO_RESULT = {"threads", "checkpoint_every"}

# The trainer's memory. Large tensors in huge pages: 3 to 5 % off a step on a CPU. Kept out of malloc's heap they go back
# to the system when freed, where the heap would keep up to 60 MB of holes.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}

# Multiply-adds per second of a training step, measured: 2 cores at 40e9 each with SmolLM2's draft; a
# data-centre GPU in bf16 at the 8B shape.
CPU_RATE, GPU_RATE = 40e9, 2e14
START_SECONDS = 20.0


@dataclass(frozen=True)
class TrainingSpec:
    """What the worker is told; JSON-able.

    draft, training: the recipe's sections. chain_length: the best checkpoint is chosen by the tau of such
    chains. train_share: of the training conversations. window, until: of one leg over streamed features, the
    folder of what it reads and the optimizer step to stop at.
    """

    target: dict[str, Any]
    features: str
    vocabulary: str
    folder: str
    draft: dict[str, Any]
    training: dict[str, Any]
    chain_length: int
    train_share: float = 1.0
    window: str = ""
    until: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def plan(recipe: Recipe, target: TargetInfo, features: ArtifactRef, vocabulary: ArtifactRef) -> Plan:
    parameters = {
        "training": recipe.training.model_dump(mode="json", exclude=NO_RESULT),
        "draft": recipe.draft.identity(),
        # The best checkpoint is chosen by chains of this length.
        "chain_length": recipe.evaluation.chain_length,
        "target": target.identity(),
    }
    if recipe.data.train_share < 1:
        parameters["train_share"] = recipe.data.train_share
    return Plan(STAGE, parameters, (features, vocabulary))


def estimate(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, features: ArtifactRef, vocabulary: ArtifactRef
) -> float:
    """Seconds, from the supervised tokens, the draft's size and the device's rate; `max_cpu_minutes` caps
    it.
    """
    import torch

    training = recipe.training
    summary = store.manifest(features).summary
    size = store.manifest(vocabulary).summary["size"]
    steps = training.epochs * -(-summary["tokens"] // (training.tokens_per_batch * training.accumulate))
    share = min(1.0, (training.max_steps or steps) / steps)
    chains = share * training.epochs * summary["supervised_tokens"]
    gpus = torch.cuda.device_count()
    threads = training.threads or cores()
    rate = gpus * GPU_RATE if gpus else threads * CPU_RATE
    seconds = chains * training.ttt_steps * multiply_adds(target, size) / rate
    if training.max_cpu_minutes is not None and not gpus:
        seconds = min(seconds, 60 * training.max_cpu_minutes / threads)
    if recipe.store.window_gb is not None:
        seconds += streaming_seconds(recipe, target, summary["tokens"], share * training.epochs)
    return START_SECONDS + seconds


def multiply_adds(target: TargetInfo, draft_vocab_size: int) -> float:
    """Of one chain's TTT step, forward and backward: three times the weights it meets."""
    config = DraftConfig.from_target(target.config.get("text_config", target.config), draft_vocab_size)
    hidden, heads = config.hidden_size, config.num_attention_heads * config.head_dim
    attention = 2 * hidden * (heads + 2 * config.num_key_value_heads * config.head_dim) + heads * hidden
    return 3.0 * (attention + 3 * hidden * config.intermediate_size + hidden * draft_vocab_size)


def run(
    recipe: Recipe, target: TargetInfo, store: ArtifactStore, features: ArtifactRef, vocabulary: ArtifactRef
) -> ArtifactRef:
    spec = TrainingSpec(
        target=target.to_dict(),
        features=str(store.local(features)),
        vocabulary=str(store.local(vocabulary)),
        folder="",
        draft=recipe.draft.identity(),
        training=recipe.training.model_dump(mode="json"),
        chain_length=recipe.evaluation.chain_length,
        train_share=recipe.data.train_share,
    )

    def work(writer: ArtifactWriter) -> dict[str, Any]:
        leg = lambda window="", until=None: _leg(writer, replace(spec, window=str(window), until=until))
        folder = writer.folder / TRAINING_FOLDER
        if any((folder / "checkpoint").glob("step-*")):
            log.info("going on from the checkpoint of an earlier run")
        if recipe.store.window_gb is None:
            return _finish(writer, leg(), recipe.name)
        from tasks.streaming.legs import train_in_legs

        result = train_in_legs(recipe, target, store, features, writer.folder, folder, leg)
        return _finish(writer, result, recipe.name)

    return run_plan(plan(recipe, target, features, vocabulary), store, work)


def _leg(writer: ArtifactWriter, spec: TrainingSpec) -> dict[str, Any]:
    """Train to the spec's step, or to the end; what the worker came to."""
    progress = _Progress()
    folder = writer.folder / TRAINING_FOLDER
    with device_lock(), scratch(writer.folder) as place:
        run_worker(
            "tasks.train_worker",
            {**spec.to_dict(), "folder": str(folder)},
            folder=place,
            env=ENVIRONMENT,
            on_event=progress,
        )
    return progress.result


def _finish(writer: ArtifactWriter, result: dict[str, Any], recipe: str) -> dict[str, Any]:
    """The best draft under its name; the manifest's summary."""
    shutil.copytree(Path(result["best"]), writer.folder / DRAFT_FOLDER, dirs_exist_ok=True)
    log.info(
        "best checkpoint: step %d of %d, validation tau %.3f",
        result["best_step"],
        result["steps"],
        result["best_tau"],
    )
    return {
        "recipe": recipe,
        **{name: value for name, value in result.items() if name not in ("kind", "best")},
    }


class _Progress:
    """The worker's events as log lines, one every `SAY_EVERY` seconds; keeps the result."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self._first: tuple[int, float] | None = None
        self._said = 0.0

    def __call__(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        match event["kind"]:
            case "result":
                self.result = event
            case "evaluation":
                survival = " ".join(f"{value:.2f}" for value in event["survival"])
                log.info("step %d: validation tau %.3f, survival %s", event["step"], event["tau"], survival)
            case "step":
                self._first = self._first or (event["step"], now)
                if now - self._said >= SAY_EVERY:
                    self._said = now
                    self._say(event, now)

    def _say(self, event: dict[str, Any], now: float) -> None:
        first, since = self._first or (event["step"], now)
        done, total = event["step"], event["total_steps"]
        bar = "#" * round(20 * done / total)
        left = ""
        if done > first:
            left = f", about {duration((total - done) * (now - since) / (done - first))} left"
        # Of the first TTT step: the sum over steps jumps where a ramp adds one.
        first_step = event["step_loss"][0], event["accuracy"][0]
        log.info("[%-20s] step %d of %d, loss %.3f, accuracy %.3f%s", bar, done, total, *first_step, left)


train_draft = stage_task(STAGE, plan, run, estimate)
