"""What an experiment is, as a recipe says it: arms, a budget that they share, seeds.

In: the recipe's `experiments` section. Out: frozen sections; tasks/experiment/arms.py turns them into recipes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

COMPARE, ABLATE, SCALE = "compare_drafters", "ablate_draft", "scale_data"

Share = Annotated[float, Field(gt=0, le=1)]
# Of every section of a recipe: unknown keys are refused, and nothing changes once it is read.
STRICT = ConfigDict(extra="forbid", frozen=True)


class Arm(BaseModel):
    """One draft of an experiment: a name, and what it changes in the recipe."""

    model_config = STRICT

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .,+-]*$")
    set: dict[str, Any] = Field({}, description="Dotted keys, for example {draft.drafter: eagle3, training.ttt_steps: 5}")


class Budget(BaseModel):
    """What every arm may spend on training; exactly one of them, or none where the arms' own settings hold."""

    model_config = STRICT

    steps: Annotated[int, Field(ge=1)] | None = Field(None, description="Optimizer steps")
    tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Tokens of documents passed")
    cpu_minutes: Annotated[float, Field(gt=0)] | None = Field(None, description="CPU minutes of training steps")

    @model_validator(mode="after")
    def _one_at_most(self) -> Budget:
        if sum(each is not None for each in (self.steps, self.tokens, self.cpu_minutes)) > 1:
            raise ValueError("one budget for all: give steps, tokens or cpu_minutes, not several of them")
        return self


class Experiment(BaseModel):
    """arms: in the order in which the page and the claims name them; the last is what the others are held against."""

    model_config = STRICT

    arms: list[Arm] = []
    set: dict[str, Any] = Field({}, description="Dotted keys that every arm shares, laid over the recipe first")
    budget: Budget = Budget()
    seeds: list[int] = Field([0, 1, 2], min_length=1, description="Training seeds of every arm")
    trees: bool = Field(True, description="Measure evaluation.tree's trees beside chains, where a drafter has one")
    bootstrap: Annotated[int, Field(ge=1)] = Field(1000, description="Resamples of the prompts")


class CompareDrafters(Experiment):
    """Any drafters at one budget; each is held against the last."""

    arms: list[Arm] = Field(
        [
            Arm(name="SpS", set={"draft.drafter": "sps"}),
            Arm(name="EAGLE-1", set={"draft.drafter": "eagle1"}),
            Arm(name="EAGLE-2", set={"draft.drafter": "eagle2"}),
            Arm(name="DFlash", set={"draft.drafter": "dflash"}),
            Arm(name="EAGLE-3", set={"draft.drafter": "eagle3"}),
            Arm(name="EAGLE-3.1", set={"draft.drafter": "eagle3.1"}),
        ]
    )


class AblateDraft(Experiment):
    """From the weakest arm to the strongest; each step is a claim."""

    arms: list[Arm] = Field(
        [
            Arm(name="EAGLE-2", set={"draft.drafter": "eagle2"}),
            Arm(name="EAGLE-2, no constraint", set={"draft.drafter": "eagle2-ttt"}),
            Arm(name="EAGLE-3", set={"draft.drafter": "eagle3"}),
        ]
    )


class ScaleData(Experiment):
    """The first arm against the last, on rising shares of the same answers; a smaller share lies within every larger
    one.
    """

    arms: list[Arm] = Field(
        [
            Arm(name="EAGLE", set={"draft.drafter": "eagle1"}),
            Arm(name="EAGLE-3", set={"draft.drafter": "eagle3"}),
        ]
    )
    shares: list[Share] = Field([0.125, 0.25, 0.5, 1.0], min_length=2)
    between_seeds: list[int] = Field([0], min_length=1, description="Seeds of the shares between the first and the last")
    trees: bool = False

    @model_validator(mode="after")
    def _rising(self) -> ScaleData:
        if any(later <= earlier for earlier, later in zip(self.shares, self.shares[1:], strict=False)):
            raise ValueError(f"shares {self.shares} must rise")
        return self


class Experiments(BaseModel):
    """What the flows of these names do with a recipe."""

    model_config = STRICT

    compare_drafters: CompareDrafters = CompareDrafters()
    ablate_draft: AblateDraft = AblateDraft()
    scale_data: ScaleData = ScaleData()
