"""From a recipe and what is known of the responses to the fills of its window, and to what is kept.

In: a recipe with a window, the rows of its responses. Out: a `Plan` of the training's fills; `Kept`, what the
features artifact holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from eagle3core.feed import Feed
from eagle3core.trainer import DRY_STEPS
from eagle3core.training_config import TrainingConfig
from storage.feature_spec import FeatureSpec
from storage.folder import PartFolder
from tasks.devices import cuda_devices
from tasks.documents import split_train
from tasks.recipe import Recipe
from tasks.streaming.fills import Schedule, WindowError
from tasks.streaming.rows import ROWS, Promised, kept_rows, rows_of

GB = 1e9
# What a sample costs beside its arrays (page headers, its row in the index), and a fill beside its samples.
SAMPLE_BYTES = 1024
FILL_BYTES = 16 << 10


@dataclass(frozen=True)
class Plan:
    """What training will ask for. documents: row numbers of the trainer's documents. tokens: of each."""

    documents: tuple[int, ...]
    tokens: tuple[int, ...]
    schedule: Schedule
    epochs: int


def plan_window(recipe: Recipe, spec: FeatureSpec, rows: pa.Table, kept_bytes: int, steps: int | None = None) -> Plan:
    """The fills of a whole training, from what is known before it.

    kept_bytes: of the window, taken for good. steps: of the run, where it has begun. Raises WindowError where the
    window is too small, ValueError where there is nothing to train on.
    """
    config = TrainingConfig.from_mapping(recipe.training.model_dump(mode="json"))
    documents = split_train(rows, recipe.data.train_share).train
    chosen = rows.take(pa.array(documents, pa.int64()))
    tokens = chosen["n_tokens"].to_pylist()
    source = Promised(tokens, chosen["n_supervised"].to_pylist())
    # As the worker's own feed, but for the packing, which has no say in the order.
    feed = Feed(source, config, torch.empty(0, dtype=torch.long), ranks=max(1, cuda_devices()))
    schedule = Schedule(
        feed.documents_of,
        [count * spec.bytes_per_token + SAMPLE_BYTES for count in tokens],
        room=round(window_bytes(recipe)) - kept_bytes - FILL_BYTES,
        steps=steps or min(feed.steps, config.max_steps or feed.steps),
        least=DRY_STEPS + 1 if config.max_cpu_minutes else 1,
    )
    if schedule.largest > schedule.room:
        needed = (schedule.largest + kept_bytes + FILL_BYTES) / GB
        raise WindowError(
            f"store.window_gb {recipe.store.window_gb:g} is too small: held-out features, kept to the end, take "
            f"{kept_bytes / GB:.3g} GB and one optimizer step reads {schedule.largest / GB:.3g} GB; set it to "
            f"{needed:.3g} at least, or lower training.tokens_per_batch"
        )
    return Plan(documents, tuple(tokens), schedule, config.epochs)


def window_bytes(recipe: Recipe) -> float:
    """Bytes that features may take. Raises ValueError where the recipe has no window."""
    if recipe.store.window_gb is None:
        raise ValueError(f"recipe {recipe.name} has no store.window_gb")
    return recipe.store.window_gb * GB


@dataclass(frozen=True)
class Kept:
    """What the features artifact holds where the rest is streamed. ids: of the samples; tokens: of all rows."""

    ids: frozenset[str]
    tokens: int
    supervised_tokens: int
    rows: int

    def to_summary(self) -> Mapping[str, Any]:
        """Beside the summary of what is there: training is of all rows."""
        return {
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "streamed_rows": self.rows - len(self.ids),
        }


def keep(recipe: Recipe, spec: FeatureSpec, folder: PartFolder, responses: Path) -> Kept:
    """Write down every row in `folder`, choose what is kept, and see that the window holds the rest in turns.

    Raises WindowError where it does not, ValueError where there is nothing to train on.
    """
    rows = rows_of(responses)
    kept = rows.take(pa.array(kept_rows(rows), pa.int64()))
    plan_window(recipe, spec, rows, size_of(kept, spec))
    folder.write_table(ROWS, rows)
    total = {name: pc.sum(rows[name]).as_py() for name in ("n_tokens", "n_supervised")}
    return Kept(frozenset(kept["id"].to_pylist()), total["n_tokens"], total["n_supervised"], len(rows))


def size_of(rows: pa.Table, spec: FeatureSpec) -> int:
    """Bytes that the features of these rows take on disk, at most."""
    return len(rows) * SAMPLE_BYTES + (pc.sum(rows["n_tokens"]).as_py() or 0) * spec.bytes_per_token
