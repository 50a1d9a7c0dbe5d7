"""The process that runs the target: `python -m tasks.engines.worker spec.json` answers jobs or reads text.

In: a WorkerSpec. Out: per finished part one safetensors file of arrays in the handover folder (where states
are captured) and one event with everything else; the parent makes the artifacts of it. Runs under any
Python that has the engine: no Prefect, MLflow or Parquet in here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tasks.engines.dialogue import Dialogue, given
from tasks.engines.requests import CaptureOptions, Engine, Finished, Job, Outcome, Request, Sample, WorkerSpec
from tasks.engines.teacher import TargetHead
from tasks.processes import emit
from tasks.quantised import LARGEST, quantise
from tasks.templates import Template

# A float16 has no -inf that survives a product with zero; this is its lowest, and its exp is 0.
NEVER = -65504.0


@dataclass(frozen=True)
class Waiting:
    """The teacher of one sample, to be filled in where `rows` is set; states: [rows that are set, H]."""

    rows: Tensor
    states: Tensor
    arrays: dict[str, Tensor]


class Packer:
    """States of one sample -> the arrays that are stored, by name.

    The teacher's matrix product is quick for many rows alone, so that several samples share it: what `pack` returned is whole
    after the next `complete`.
    """

    def __init__(self, capture: CaptureOptions, folder: Path) -> None:
        self._capture = capture
        # A hidden teacher is never quantised: the loss is made from it.
        self._dtype = torch.bfloat16 if capture.dtype in LARGEST else getattr(torch, capture.dtype)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self._head = TargetHead.load(folder, device) if capture.teacher == "topk" else None
        self._waiting: list[Waiting] = []

    def pack(self, sample: Sample, states: Tensor | None) -> dict[str, Tensor]:
        """`states`: [T-1, layers + 1, H], the last one before the target's final norm."""
        if states is None or len(states) != len(sample.token_ids) - 1:
            rows = "no" if states is None else len(states)
            raise RuntimeError(f"{sample.id}: {rows} rows of states for {len(sample.token_ids)} tokens")
        features, last = self._features(states[:, :-1]), states[:, -1]
        if self._head is None:
            return features | {"teacher_hidden": last.to(self._dtype).contiguous()}
        teacher = self._without_teacher(len(states))
        # Row t is the distribution of token t + 1: only those of tokens that the target wrote are ever a label.
        rows = torch.zeros(len(states), dtype=torch.bool)
        for start, end in sample.spans:
            rows[start - 1 : end - 1] = True
        self._waiting.append(Waiting(rows, last[rows], teacher))
        if sum(len(each.states) for each in self._waiting) >= self._head.chunk_rows:
            self.complete()
        return features | teacher

    def complete(self) -> None:
        """Fill in the teacher of all that was packed."""
        if self._head is None or not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        counts = [len(each.states) for each in waiting]
        top = self._head.top_k(torch.cat([each.states for each in waiting]), self._capture.teacher_k)
        log_probs = top.log_probs.clamp(min=NEVER).half()
        columns = {"teacher_ids": top.ids, "teacher_log_probs": log_probs, "teacher_rest": top.rest}
        for name, column in columns.items():
            for each, part in zip(waiting, column.split(counts), strict=True):
                each.arrays[name][each.rows] = part

    def _without_teacher(self, rows: int) -> dict[str, Tensor]:
        """The stored form of rows that are no label."""
        k = self._capture.teacher_k
        return {
            "teacher_ids": torch.arange(k, dtype=torch.int32).repeat(rows, 1),
            "teacher_log_probs": torch.full((rows, k), NEVER, dtype=torch.float16),
            "teacher_rest": torch.zeros(rows),
        }

    def _features(self, states: Tensor) -> dict[str, Tensor]:
        if self._capture.dtype in LARGEST:
            codes, scales = quantise(states, self._capture.dtype)
            return {"features": codes, "feature_scales": scales}
        return {"features": states.flatten(1).to(self._dtype)}


class Parts:
    """Collects outcomes until a part is whole; hands over its arrays, then the event that names them."""

    def __init__(self, spec: WorkerSpec, packer: Packer | None) -> None:
        self._handover = Path(spec.handover)
        self._packer = packer
        self._order: dict[int, list[str]] = {}
        for job in spec.jobs:
            self._order.setdefault(job.part, []).append(job.id)
        self._outcomes: dict[int, dict[str, Outcome]] = {part: {} for part in self._order}
        self._arrays: dict[int, dict[str, dict[str, Tensor]]] = {part: {} for part in self._order}

    def add(self, outcome: Outcome) -> None:
        part = outcome.job.part
        if self._packer is not None:
            for sample, states in zip(outcome.samples, outcome.states, strict=True):
                self._arrays[part][sample.id] = self._packer.pack(sample, states)
        self._outcomes[part][outcome.job.id] = replace(outcome, states=())
        if len(self._outcomes[part]) == len(self._order[part]):
            self._hand_over(part)

    def _hand_over(self, part: int) -> None:
        outcomes = self._outcomes.pop(part)
        arrays = self._arrays.pop(part)
        if self._packer is not None:
            self._packer.complete()
        ordered = [outcomes[name] for name in self._order[part]]
        samples = [(outcome.job.id, sample) for outcome in ordered for sample in outcome.samples]
        file = None
        if arrays:
            file = self._handover / f"{part:05d}.safetensors"
            named = {
                f"{i}.{name}": _bits(array)
                for i, (_, sample) in enumerate(samples)
                for name, array in arrays[sample.id].items()
            }
            save_file(named, file)
        refused = [asdict(outcome.refused) for outcome in ordered if outcome.refused]
        event = {
            "part": part,
            "samples": [asdict(sample) for _, sample in samples],
            "jobs": [job for job, _ in samples],
            "refused": refused,
        }
        emit({"kind": "part", **event, "arrays": str(file) if file else None})


def run(spec: WorkerSpec, engine: Engine) -> Progress:
    """Feed every job to the engine, a full batch at all times, and hand parts over as they become whole."""
    template = Template.load(spec.target)  # type: ignore[arg-type]  # the fields it reads are the same
    parts = Parts(spec, Packer(spec.capture, Path(spec.target.path)) if spec.capture else None)
    waiting = deque(spec.jobs)
    dialogues: dict[str, Dialogue] = {}
    reading: dict[str, Job] = {}
    counter = Progress()

    def advance(name: str) -> None:
        """Ask the next turn, or close the dialogue."""
        request = dialogues[name].next_request()
        if request is not None:
            engine.add(request)
        else:
            parts.add(dialogues.pop(name).outcome())

    while waiting or dialogues or reading:
        while waiting and len(dialogues) + len(reading) < engine.capacity:
            job = waiting.popleft()
            if job.token_ids and spec.capture is None:
                parts.add(given(job))  # there is nothing to find out about it
            elif job.token_ids:
                reading[job.id] = job
                engine.add(Request(job.id, job.token_ids))
            else:
                dialogues[job.id] = Dialogue(job, template, spec.max_tokens)
                advance(job.id)
        for finished in engine.step():
            counter.add(finished)
            if finished.id in reading:
                parts.add(given(reading.pop(finished.id), finished.states))
            else:
                dialogues[finished.id].take(finished)
                advance(finished.id)
    counter.report()
    return counter


class Progress:
    """New tokens and requests, reported now and then."""

    def __init__(self, every: float = 10.0) -> None:
        self._every = every
        self._start = self._said = time.monotonic()
        self.tokens = self.requests = 0

    def add(self, finished: Finished) -> None:
        self.tokens += len(finished.token_ids)
        self.requests += 1
        if time.monotonic() - self._said > self._every:
            self.report()

    def report(self) -> None:
        self._said = time.monotonic()
        seconds = self._said - self._start
        emit({"kind": "progress", "tokens": self.tokens, "requests": self.requests, "seconds":
        round(seconds, 3)})


def start_engine(spec: WorkerSpec) -> Engine:
    """The engine that the spec names. A capture asks for one layer more: the state before the final norm."""
    capture = spec.capture and CaptureOptions(
        (*spec.capture.layer_ids, _num_layers(Path(spec.target.path))),
        spec.capture.dtype,
        spec.capture.teacher,
        spec.capture.teacher_k,
    )
    if spec.options.engine == "huggingface":
        from tasks.engines.huggingface import HuggingFaceEngine

        return HuggingFaceEngine(spec.target, spec.options, capture)
    if spec.options.engine == "http":
        from tasks.engines.http import HttpEngine

        return HttpEngine(spec.target, spec.options, emit)
    from tasks.engines.vllm_engine import VllmEngine

    return VllmEngine(spec.target, spec.options, capture, Path(spec.handover))


def read_spec(path: str) -> WorkerSpec:
    return WorkerSpec.from_dict(json.loads(Path(path).read_text()))


def _num_layers(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text())
    return int(config.get("text_config", config)["num_hidden_layers"])


def _bits(array: Tensor) -> Tensor:
    """numpy knows no bfloat16: its bits travel as uint16."""
    return (array.view(torch.uint16) if array.dtype == torch.bfloat16 else array).contiguous()


def _main(path: str) -> None:
    began = time.monotonic()
    spec = read_spec(path)
    engine = start_engine(spec)
    emit({"kind": "started", "seconds": round(time.monotonic() - began, 3)})
    run(spec, engine)
    # Engines keep threads and distributed groups that make a clean exit slow; all that matters is on disk.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(sys.argv[1])
