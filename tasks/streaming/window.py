"""The window itself: extracts the fill that training needs next, and makes room for it first.

In: a recipe, the kept features, the draft's folder with its checkpoints. Out: for a step, a folder that holds
what training reads from there on, and up to which step.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from storage.artifacts import discard
from storage.features import FeatureSpec, FeatureWriter
from storage.folder import PartFolder
from storage.schemas import ResponseRow
from tasks.stage_task import spoken
from tasks.streaming.fills import Fill, Schedule
from tasks.streaming.plan import GB, Plan
from tasks.streaming.rows import read_responses

log = logging.getLogger(__name__)

# (folder for what is on its way, writer, rows by part) -> the engine's figures
Read = Callable[[Path, FeatureWriter, Mapping[int, Sequence[ResponseRow]]], Mapping[str, Any]]


@dataclass(frozen=True)
class Extraction:
    """One fill's extraction, a line of extraction.jsonl. tokens, bytes: of what was extracted in this run of it.

    start_seconds: until the engines were up; seconds: in all.
    """

    first: int
    until: int
    epoch: int
    documents: int
    tokens: int
    bytes: int
    start_seconds: float
    seconds: float


class Window:
    """The fills of one training, one at a time. `place`: their folder; nothing else may lie there."""

    def __init__(
        self,
        place: Path,
        record: Path,
        responses: Path,
        rows: pa.Table,
        spec: FeatureSpec,
        part_size: int,
        read: Read,
    ) -> None:
        """`record`: extraction.jsonl. `responses`, `rows`: the texts, and what is known of each. `read`: extracts."""
        self._place, self._record, self._responses = place, record, responses
        self._rows, self._spec, self._part_size, self._read = rows, spec, part_size, read
        self._epoch = 0

    def fill(self, plan: Plan, step: int) -> tuple[Path, Fill]:
        """The fill that training goes on with at `step`, extracted where it is not there yet. Every other is deleted."""
        fill = self._begun(plan.schedule, step) or plan.schedule.fill(step)
        folder = self._place / fill.name
        self._place.mkdir(parents=True, exist_ok=True)
        for other in self._place.iterdir():
            if other != folder:
                discard(other)
        folder.mkdir(exist_ok=True)
        parts = PartFolder(folder)
        parts.clean()
        features = FeatureWriter(parts, self._spec)
        missing = self._missing(plan, fill, features.finished())
        if missing:
            self._extract(plan, fill, missing, features)
        features.finish()
        return folder, fill

    def extractions(self) -> list[Extraction]:
        """What was extracted so far, by this run and by killed ones."""
        lines = self._record.read_text().splitlines(keepends=True) if self._record.exists() else []
        return [Extraction(**json.loads(line)) for line in lines if line.endswith("\n")]

    def to_summary(self) -> dict[str, Any]:
        done = self.extractions()
        return {
            "fills": len({(each.first, each.until) for each in done}),
            "extracted_tokens": sum(each.tokens for each in done),
            "extraction_seconds": round(sum(each.seconds for each in done), 1),
        }

    def _begun(self, schedule: Schedule, step: int) -> Fill | None:
        """A fill that an earlier run began and that serves this step."""
        for folder in self._place.glob("steps-*-*-*"):
            first, until = map(int, folder.name.split("-")[1:3])
            if first <= step < until <= schedule.steps:
                fill = schedule.between(first, until)
                if fill.name == folder.name and fill.bytes <= schedule.room:
                    return fill
        return None

    def _missing(self, plan: Plan, fill: Fill, done: set[int]) -> dict[int, list[int]]:
        """Row numbers of the fill's parts that are not there, by part."""
        rows = [plan.documents[i] for i in fill.documents]
        parts = range(0, len(rows), self._part_size)
        return {n: rows[start : start + self._part_size] for n, start in enumerate(parts) if n not in done}

    def _extract(self, plan: Plan, fill: Fill, missing: Mapping[int, Sequence[int]], features: FeatureWriter) -> None:
        self._say(plan, fill)
        started = time.monotonic()
        wanted: dict[int, list[str]] = {}
        ids, parts = self._rows["id"], self._rows["part"]
        for row in (row for part in missing.values() for row in part):
            wanted.setdefault(parts[row].as_py(), []).append(ids[row].as_py())
        found = read_responses(self._responses, wanted)
        rows = {number: [found[ids[row].as_py()] for row in part] for number, part in missing.items()}
        took = self._read(self._place, features, rows)
        tokens = sum(len(row.token_ids) for row in found.values())
        done = Extraction(
            fill.first,
            fill.until,
            fill.epoch,
            len(found),
            tokens,
            tokens * self._spec.bytes_per_token,
            round(took.get("engine_start_seconds", 0.0), 3),
            round(time.monotonic() - started, 3),
        )
        self._record.parent.mkdir(parents=True, exist_ok=True)
        with self._record.open("a") as file:
            file.write(json.dumps(asdict(done)) + "\n")

    def _say(self, plan: Plan, fill: Fill) -> None:
        """The fill; and where an epoch begins, what reading the target again will take at the measured rate."""
        if fill.epoch > max(1, self._epoch) and (done := self.extractions()):
            fills = [each for each in plan.schedule.fills(fill.first) if each.epoch == fill.epoch]
            tokens = [sum(plan.tokens[i] for i in each.documents) for each in fills]
            rate = sum(each.tokens for each in done) / max(1e-3, sum(each.seconds - each.start_seconds for each in done))
            seconds = sum(tokens) / rate + len(tokens) * done[-1].start_seconds
            log.info(
                "epoch %d of %d extracts again: %d fills, %s tokens, %s at the %s tokens/s measured so far",
                fill.epoch, plan.epochs, len(tokens), f"{sum(tokens):,}", spoken(seconds), f"{rate:,.0f}",
            )  # fmt: skip
        self._epoch = fill.epoch
        log.info(
            "window: %d samples, at most %.2f GB, for steps %d to %d of %d",
            len(fill.documents), fill.bytes / GB, fill.first + 1, fill.until, plan.schedule.steps,
        )  # fmt: skip
