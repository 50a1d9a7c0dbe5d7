"""How a draft is trained, as one frozen dataclass whose names are the recipe's.

In: the recipe's `training` section as a mapping. Out: `TrainingConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from eagle3core.losses import LOSSES
from eagle3core.optimizer import SCHEDULES

# What a resumed run may change: none of these has a say in any weight.
FREE_ON_RESUME = frozenset(
    {"checkpoint_every", "evaluate_every", "threads", "compile", "activation_checkpointing", "sharding"}
)


@dataclass(frozen=True)
class TrainingConfig:
    """ttt_ramp: (optimizer step, TTT steps) pairs, rising: from that step on so many; before the first pair
    and where empty, ttt_steps.

    tokens_per_batch: tokens of documents in one bin. accumulate: bins a rank takes for one optimizer step.
    max_cpu_minutes: CPU time of the training steps; turned once, by measuring, into a number of steps that
    the checkpoint remembers. anchor_share: share of chains that go past step 0. sharding: how several ranks
    share the work. deterministic: refuse kernels whose sums have no fixed order.
    """

    ttt_steps: int = 7
    ttt_ramp: tuple[tuple[int, int], ...] = ()
    step_decay: float = 0.8
    loss: str = "ce"
    epochs: int = 1
    max_steps: int | None = None
    max_cpu_minutes: float | None = None
    tokens_per_batch: int = 4096
    accumulate: int = 1
    lr: float = 5e-5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip: float = 0.5
    warmup_share: float = 0.03
    schedule: str = "cosine"
    anchor_share: float = 1.0
    compile: bool = False
    activation_checkpointing: bool = False
    deterministic: bool = False
    sharding: str = "ddp"
    checkpoint_every: int = 100
    evaluate_every: int = 200
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        # JSON and YAML have lists only; a resumed config must equal the one it was made from.
        object.__setattr__(self, "ttt_ramp", tuple((int(step), int(steps)) for step, steps in self.ttt_ramp))
        object.__setattr__(self, "betas", tuple(self.betas))
        _choice("loss", self.loss, LOSSES)
        _choice("schedule", self.schedule, SCHEDULES)
        _choice("sharding", self.sharding, ("ddp", "fsdp"))
        if list(self.ttt_ramp) != sorted(self.ttt_ramp):
            raise ValueError(f"ttt_ramp {self.ttt_ramp}: optimizer steps must rise")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> TrainingConfig:
        """Raises ValueError naming a key that is not known."""
        unknown = sorted(values.keys() - {field.name for field in fields(cls)})
        if unknown:
            raise ValueError(f"training: unknown keys {', '.join(unknown)}")
        return cls(**values)

    def ttt_steps_at(self, step: int) -> int:
        """TTT steps at optimizer step `step`."""
        steps = self.ttt_steps
        for start, number in self.ttt_ramp:
            if step >= start:
                steps = number
        return steps

    def binding(self) -> dict[str, Any]:
        """What a resumed run must not change."""
        values = {name: value for name, value in asdict(self).items() if name not in FREE_ON_RESUME}
        return {**values, "ttt_ramp": [list(pair) for pair in self.ttt_ramp], "betas": list(self.betas)}


def _choice(name: str, value: str, known: Any) -> None:
    if value not in known:
        raise ValueError(f"training.{name}: {value!r} is not known; known: {', '.join(known)}")
