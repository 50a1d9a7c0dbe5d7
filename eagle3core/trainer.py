"""The training loop: steps, checkpoints, in-training acceptance, the best draft so far.

In: a draft, documents, a folder. Out: `folder`/best (servable), checkpoint/ (to resume from), metrics.jsonl,
and a callback for whoever watches. It knows no tracker, no store and no recipe.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3core.acceptance import Response, summarise
from eagle3core.batch import Document
from eagle3core.checkpoint import Progress, load_checkpoint, save_checkpoint
from eagle3core.distributed import Ranks, gradients_stay_local, sum_over_ranks, unwrap, whole_parameters, wrap
from eagle3core.drafters import drafter_of
from eagle3core.drafters.interface import Draft
from eagle3core.estimate import estimate
from eagle3core.feed import DocumentSource, Feed, StepBatches
from eagle3core.optimizer import clip_gradients, learning_rate, make_optimizer, set_learning_rate
from eagle3core.packing import draft_id_table
from eagle3core.teacher import TargetHead
from eagle3core.training_config import TrainingConfig

DRY_STEPS = 2  # steps measured per TTT length where max_cpu_minutes has to become a number of steps


@dataclass(frozen=True)
class TrainingEvent:
    """kind: "step", "evaluation", "checkpoint" or "end". step: optimizer steps done. metrics: numbers, and
    lists by TTT step or draft position.
    """

    kind: str
    step: int
    total_steps: int
    metrics: Mapping[str, Any]


@dataclass(frozen=True)
class TrainingResult:
    """best: folder of the draft with the highest held-out tau (the last one where nothing is held out;
    best_tau is then 0).
    """

    steps: int
    best_step: int
    best_tau: float
    best: Path


class Trainer:
    """`run()` trains to the end, going on from the newest checkpoint in `folder`.

    draft: weights as they start; moved to `device`. heldout: documents that choose the best checkpoint, by
    their simulated acceptance length with chains of `draft_length` (default: ttt_steps). dtype: of the GEMMs;
    default bfloat16 on CUDA, float32 elsewhere.
    """

    def __init__(
        self,
        draft: Draft,
        config: TrainingConfig,
        documents: DocumentSource,
        heldout: Sequence[Document],
        folder: Path,
        target_head: TargetHead | None = None,
        on_event: Callable[[TrainingEvent], None] = lambda event: None,
        *,
        draft_length: int | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        self.device = torch.device(device)
        self._drafter = drafter_of(draft)
        config = self._drafter.settings(draft, config)
        self.config, self.heldout, self.folder = config, heldout, folder
        self.target_head = target_head.to(self.device) if target_head else None
        self.draft_length = draft_length or config.ttt_steps
        self.ranks = Ranks.current()
        self._notify = on_event
        dtype = dtype or (torch.bfloat16 if self.device.type == "cuda" else torch.float32)
        self._unroll = self._drafter.unroll(
            dtype, compiled=config.compile, recompute=config.activation_checkpointing
        )
        draft.to(self.device)
        # Packing is on the CPU; only the batch travels.
        self.feed = Feed(
            documents,
            config,
            draft_id_table(draft.t2d.cpu()),
            self.target_head,
            self.ranks.rank,
            self.ranks.count,
            self._drafter.view,
        )
        trainee = self._drafter.trainee(draft, config, self._unroll)
        self.module = wrap(trainee, config.sharding, self.device)
        self.draft = unwrap(self.module).draft
        self.optimizer = make_optimizer(self.module, config.betas, config.weight_decay)
        if config.deterministic:
            torch.use_deterministic_algorithms(True)

    def run(self, until: int | None = None) -> TrainingResult:
        """To the end, or to optimizer step `until`, where a checkpoint is left that the next run goes on from.

        Raises CheckpointError where `folder` holds another run's checkpoint.
        """
        progress = load_checkpoint(self._checkpoints, self.draft, self.optimizer, self._binding)
        if progress is None:
            progress = Progress(step=0, total_steps=self._total_steps())
        self._cut_metrics(progress.step)
        stop = min(progress.total_steps, until or progress.total_steps)
        waited = time.perf_counter()
        for batches in self.feed.stream(progress.step, stop):
            waited = time.perf_counter() - waited
            metrics = self.train_step(batches, progress.step, progress.total_steps)
            progress = replace(progress, step=progress.step + 1)
            self._emit("step", progress, {**metrics, "wait_seconds": waited})
            last = progress.step == progress.total_steps
            if progress.step % self.config.evaluate_every == 0 or last:
                progress = self._evaluate(progress)
            if progress.step % self.config.checkpoint_every == 0 or progress.step == stop:
                self._checkpoint(progress)
            waited = time.perf_counter()
        if progress.step == progress.total_steps:
            self._emit("end", progress, {"best_step": progress.best_step, "best_tau": progress.best_tau})
        return TrainingResult(progress.step, progress.best_step, progress.best_tau, self._best)

    def train_step(self, batches: StepBatches, step: int, total: int) -> dict[str, Any]:
        """One optimizer step over this rank's batches and every other rank's; returns its figures."""
        config, start = self.config, time.perf_counter()
        rate = learning_rate(step, total, config.lr, config.schedule, config.warmup_share)
        set_learning_rate(self.optimizer, rate)
        sums = self._backward(batches)
        grad_norm = clip_gradients(self.module.parameters(), config.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        labels, losses, hits, alpha = sum_over_ranks(sums, self.device).tolist()
        mean = lambda values: [value / max(1.0, count) for value, count in zip(values, labels, strict=True)]
        return {
            "loss": sum(config.step_decay**i * value for i, value in enumerate(mean(losses))),
            "step_loss": mean(losses),
            "accuracy": mean(hits),
            "overlap": mean(alpha),
            "labels": sum(labels),
            "lr": rate,
            "grad_norm": grad_norm,
            "seconds": time.perf_counter() - start,
        }

    def _backward(self, batches: StepBatches) -> Tensor:
        """Gradients of the step; returns [4, N]: labels, losses, hits, alpha, summed over this rank's
        batches.
        """
        counts = sum_over_ranks(batches.counts, self.device)
        sums = torch.zeros(4, batches.ttt_steps, device=self.device)
        for number, batch in enumerate(batches.batches):
            with gradients_stay_local(self.module, number + 1 < len(batches.batches)):
                result = self.module(None if batch is None else batch.to(self.device), counts)
                # DDP and FSDP average over ranks; the counts are of all ranks already, so the sum is wanted.
                (result.loss * self.ranks.count).backward()
            if batch is not None:
                sums += torch.stack([result.labels, result.losses, result.hits, result.alpha])
        return sums

    def _total_steps(self) -> int:
        """Optimizer steps of the run: the least that epochs, max_steps and max_cpu_minutes allow."""
        config = self.config
        total = min(self.feed.steps, config.max_steps or self.feed.steps)
        if config.max_cpu_minutes is None:
            return total
        costs = {
            steps: self._measure(steps) for steps in {config.ttt_steps_at(step) for step in range(total)}
        }
        left, step = 60 * config.max_cpu_minutes, 0
        while step < total and left >= costs[config.ttt_steps_at(step)]:
            left -= costs[config.ttt_steps_at(step)]
            step += 1
        # Every rank must stop at the same step: the mean of what they measured.
        return max(1, int(sum_over_ranks(torch.tensor(float(step)), self.device) / self.ranks.count))

    def _measure(self, ttt_steps: int) -> float:
        """CPU seconds of an optimizer step with `ttt_steps`, from steps whose gradients are thrown away; the
        first one warms up.
        """
        seconds = 0.0
        for number in range(DRY_STEPS + 1):
            start = time.process_time()
            self._backward(self.feed.step(number, ttt_steps))
            self.optimizer.zero_grad()
            seconds += (time.process_time() - start) if number else 0.0
        return seconds / DRY_STEPS

    def _evaluate(self, progress: Progress) -> Progress:
        """In-training acceptance; keeps the draft if it is the best so far. Without held-out documents the
        latest is.
        """
        start, best = time.perf_counter(), progress
        with whole_parameters(unwrap(self.module)):
            if self.ranks.first and self.heldout:
                metrics = self._acceptance()
                if metrics["tau"] > progress.best_tau:
                    best = replace(progress, best_step=progress.step, best_tau=metrics["tau"])
                self._emit("evaluation", best, {**metrics, "evaluation_seconds": time.perf_counter() - start})
            elif not self.heldout:
                best = replace(progress, best_step=progress.step)
            if self.ranks.first and best.best_step == progress.step:
                self._drafter.save(self.draft, self._best)
        return best

    def _acceptance(self) -> dict[str, Any]:
        """Simulated greedy drafting of the held-out documents: tau of the walk, survival per draft position
        both ways.
        """
        responses = [Response(document.id) for document in self.heldout]
        result = estimate(
            self.draft,
            self.heldout,
            responses,
            self.draft_length,
            unroll=self._unroll,
            target_head=self.target_head,
        )
        walk, anchor = (summarise(rounds, resamples=2) for rounds in (result.walk, result.anchor))
        return {
            "tau": walk.tau_micro.value,
            "tau_anchor": anchor.tau_micro.value,
            # Positions that no document is long enough to reach have no rate (nan), and leave the list.
            "survival": [rate.value for rate in walk.survival if rate.denominator],
            "survival_anchor": [rate.value for rate in anchor.survival if rate.denominator],
        }

    def _checkpoint(self, progress: Progress) -> None:
        start = time.perf_counter()
        save_checkpoint(self._checkpoints, self.draft, self.optimizer, progress, self._binding)
        self._emit("checkpoint", progress, {"checkpoint_seconds": time.perf_counter() - start})

    @property
    def _checkpoints(self) -> Path:
        return self.folder / "checkpoint"

    @property
    def _best(self) -> Path:
        return self.folder / "best"

    @property
    def _binding(self) -> dict[str, Any]:
        """What a resumed run must have in common with this one: the configuration, the ranks, and the amount
        of data.
        """
        return {**self.config.binding(), "ranks": self.ranks.count, "steps_in_data": self.feed.steps}

    def _emit(self, kind: str, progress: Progress, metrics: Mapping[str, Any]) -> None:
        if not self.ranks.first:
            return
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": progress.step, **metrics}) + "\n")
        self._notify(TrainingEvent(kind, progress.step, progress.total_steps, metrics))

    def _cut_metrics(self, step: int) -> None:
        """Drop what a killed run wrote after the checkpoint that this one goes on from."""
        if not self.ranks.first:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
        path.write_text("".join(kept))
