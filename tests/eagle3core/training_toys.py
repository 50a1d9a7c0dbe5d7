"""A small training run that several tests share, and a program that runs it in a process that can be killed
or joined by others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from ttt_oracle import make_document, make_draft

from eagle3core.batch import Document
from eagle3core.trainer import Trainer
from eagle3core.training_config import TrainingConfig

CONFIG: dict[str, Any] = {
    "ttt_steps": 3,
    "ttt_ramp": [[0, 1], [4, 3]],
    "tokens_per_batch": 60,
    "accumulate": 2,
    "epochs": 2,
    "lr": 1e-2,
    "anchor_share": 0.7,
    "evaluate_every": 4,
    "checkpoint_every": 3,
    "seed": 3,
}


class Memory:
    """Documents in memory as a source."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = list(documents)
        self.lengths = [len(document.token_ids) for document in documents]
        self.supervised_counts = [int(document.supervised.sum()) for document in documents]

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, i: int) -> Document:
        return self.documents[i]


def documents(count: int, first: int = 0) -> list[Document]:
    return [make_document(18 + i % 7, torch.arange(18 + i % 7) >= 7, seed=first + i) for i in range(count)]


def make_trainer(
    folder: Path, on_event=lambda event: None, source: Memory | None = None, **changes: Any
) -> Trainer:
    config = TrainingConfig.from_mapping({**CONFIG, **changes})
    heldout = documents(3, 100)
    return Trainer(
        make_draft(draft_vocabulary=23),
        config,
        source or Memory(documents(24)),
        heldout,
        folder,
        on_event=on_event,
    )


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.draft.state_dict().items()}


def join(rank: int, count: int, meeting: str) -> None:
    """Two processes of one machine meet in a file: no port is taken."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=count)


if __name__ == "__main__":
    # argv: folder, config changes as JSON, and for several ranks: rank, count, meeting file. Prints a line an
    # event, so that
    # a test can kill it where it likes; ranks also leave the gradients of their first step and their last
    # weights.
    torch.set_num_threads(1)
    folder, changes = Path(sys.argv[1]), json.loads(sys.argv[2])
    trainer = None
    if len(sys.argv) > 3:
        join(int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
        from eagle3core.distributed import whole

        trainer = make_trainer(folder, **changes)
        trainer._backward(trainer.feed.step(0))
        named = [(name, p) for name, p in trainer.draft.named_parameters() if p.requires_grad]
        torch.save({name: whole(p.grad) for name, p in named}, f"{folder}.gradients-{sys.argv[3]}")
        trainer.optimizer.zero_grad()
    trainer = trainer or make_trainer(
        folder, lambda event: print(event.kind, event.step, flush=True), **changes
    )
    trainer.run()
    if len(sys.argv) > 3:
        torch.save({name: whole(p) for name, p in named}, f"{folder}.weights-{sys.argv[3]}")
        torch.distributed.destroy_process_group()
