"""An experiment's arms as whole recipes, checked before any work.

In: a recipe and the name of one of its experiments. Out: `ArmRun`s, one a trained draft. Arms may differ in how a
draft is made, never in what it is measured on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tasks.experiment.settings import Arm, Budget, Experiment, ScaleData
from tasks.extract_features import draft_layer_ids
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe, RecipeError, build_recipe

# What an arm may change. All else (target, answers, held-out prompts, the way of measuring) is the experiment's.
OWN = ("draft.", "training.", "vocabulary.")
BUDGET_KEYS = ("training.max_steps", "training.max_cpu_minutes", "training.epochs")
ENOUGH_EPOCHS = 100  # so that the budget ends the training and not the data


@dataclass(frozen=True)
class ArmRun:
    """One draft that is to be trained and measured. share: of the experiment's training conversations."""

    arm: str
    share: float
    seed: int
    recipe: Recipe

    @property
    def label(self) -> str:
        """For lists: the arm, its share where it is not all, its seed."""
        return f"{self.arm}{'' if self.share == 1 else f', {self.share:.4g} of the data'}, seed {self.seed}"


def arm_runs(kind: str, recipe: Recipe) -> list[ArmRun]:
    """Every run of the recipe's experiment `kind`, arm by arm.

    Raises RecipeError naming the recipe, the arm and the key that is wrong.
    """
    experiment: Experiment = getattr(recipe.experiments, kind)
    where = f"recipe {recipe.name}: experiments.{kind}"
    _check_names(experiment, where)
    # An arm is a recipe without experiments: they do not nest. All arms read the same features, so these stay whole.
    changes = {**experiment.set, "store.window_gb": None}
    base = build_recipe(recipe.model_dump(mode="json", exclude={"experiments"}), changes, where=f"{where}.set")
    budget = _budget(experiment.budget, base)
    shares = experiment.shares if isinstance(experiment, ScaleData) else [1.0]
    runs = []
    for arm in experiment.arms:
        _check_keys(arm, budget, where)
        for share in shares:
            for seed in _seeds(experiment, share):
                changes = {**arm.set, **budget, "training.seed": seed, "name": _slug(recipe.name, arm.name, share, seed)}
                changes["data.train_share"] = share * base.data.train_share
                made = build_recipe(base.model_dump(mode="json"), changes, where=f"{where}: arm {arm.name!r}")
                runs.append(ArmRun(arm.name, share, seed, made))
    return runs


def capture_union(runs: Sequence[ArmRun], target: TargetInfo) -> list[ArmRun]:
    """The runs with one set of captured layers for all: each draft reads its own among them."""
    own = [draft_layer_ids(run.recipe, target) for run in runs]
    union = sorted({layer for layers in own for layer in layers})
    united = []
    for run, layers in zip(runs, own, strict=True):
        changes = {"features.layer_ids": union, "draft.layer_ids": list(layers)}
        made = build_recipe(run.recipe.model_dump(mode="json"), changes, where=f"arm {run.arm!r}")
        united.append(replace(run, recipe=made))
    return united


def _check_names(experiment: Experiment, where: str) -> None:
    names = [arm.name for arm in experiment.arms]
    if len(names) < 2:
        raise RecipeError(f"{where}: {len(names)} arms; an experiment compares two or more: list them under arms")
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{where}: two arms are named {double[0]!r}: give each its own name")
    if len(set(experiment.seeds)) < len(experiment.seeds):
        raise RecipeError(f"{where}: seeds {experiment.seeds} name one twice: a draft is no replicate of itself")


def _check_keys(arm: Arm, budget: dict[str, Any], where: str) -> None:
    for key in arm.set:
        if not key.startswith(OWN):
            raise RecipeError(
                f"{where}: arm {arm.name!r} may not set {key}: arms differ in {', '.join(OWN)}; what all share goes under set"
            )
        if key == "training.seed":
            raise RecipeError(f"{where}: arm {arm.name!r} may not set training.seed: seeds are the experiment's")
        if budget and key in BUDGET_KEYS:
            raise RecipeError(f"{where}: arm {arm.name!r} sets {key}, but the budget is the same for all arms")


def _budget(budget: Budget, base: Recipe) -> dict[str, Any]:
    steps = budget.steps
    if budget.tokens is not None:
        steps = max(1, budget.tokens // (base.training.tokens_per_batch * base.training.accumulate))
    if steps is None and budget.cpu_minutes is None:
        return {}
    return {
        "training.max_steps": steps,
        "training.max_cpu_minutes": budget.cpu_minutes,
        "training.epochs": ENOUGH_EPOCHS,
    }


def _seeds(experiment: Experiment, share: float) -> list[int]:
    if isinstance(experiment, ScaleData) and share not in (experiment.shares[0], experiment.shares[-1]):
        return experiment.between_seeds
    return experiment.seeds


def _slug(recipe: str, arm: str, share: float, seed: int) -> str:
    """A recipe's name for lists of runs and drafts: lower case, no blanks."""
    words = "".join(each if each.isalnum() or each in ".-" else "-" for each in arm.lower())
    return f"{recipe}.{words}{'' if share == 1 else f'.x{share:.4g}'}.s{seed}"
