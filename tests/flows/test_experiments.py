"""The experiments' flows: what arms share is done once, what is wrong is said before any work, a page and runs are left."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flows import look
from flows.ablate_draft import ablate_draft
from flows.command import main
from flows.compare_drafters import compare_drafters
from flows.scale_data import scale_data
from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.experiment.arms import arm_runs
from tasks.outcome import outcome_of
from tasks.recipe import Recipe, RecipeError, build_recipe, load_recipe, recipe_names
from tests.flows.fake_stages import TARGET, FakeStage
from tests.flows.test_flows import calls, run

Stages = dict[str, FakeStage]

SLOW, FAST = {"name": "slow", "set": {"training.lr": 1e-4}}, {"name": "fast", "set": {"training.lr": 1e-3}}
SHARED = ("prepare_conversations", "make_responses", "extract_features", "build_vocabulary")


def arms_of(kind: str, arms: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    changes = {"arms": arms or [SLOW, FAST], **more}
    return {f"experiments.{kind}.{name}": value for name, value in changes.items()}


def made(flow: Any, recipe: Recipe, overrides: dict[str, Any]) -> ArtifactRef:
    """The flow's result; `run` asks the server for its tasks as well, which takes seconds."""
    return flow(recipe=recipe, overrides=overrides)


def test_what_the_arms_have_in_common_is_done_once(stages: Stages, recipe: Recipe):
    page, _, tasks = run(ablate_draft, recipe, arms_of("ablate_draft", seeds=[0, 1]))
    done = calls(stages)
    assert {name: done[name] for name in SHARED} == dict.fromkeys(SHARED, 1)
    assert (done["train_draft"], done["evaluate_draft"], done["measure_trees"]) == (4, 4, 4)
    assert done["publish_draft"] == done["check_serving"] == 0
    assert page.kind == "experiment"
    assert sum(task.name.startswith("make-responses") for task in tasks) == 1
    assert {task.name for task in tasks if task.name.startswith("train-draft")} == {
        f"train-draft smollm2-135m.{arm}.s{seed}" for arm in ("slow", "fast") for seed in (0, 1)
    }


def test_features_are_captured_for_the_union_of_what_the_arms_read(stages: Stages, recipe: Recipe):
    few = {"name": "few", "set": {"draft.layer_ids": [1, 2, 4]}}
    made(compare_drafters, recipe, arms_of("compare_drafters", [few, FAST], seeds=[0]))
    store = ArtifactStore(recipe.store.uri)
    (features,) = store.list("features")
    # Of a target with four layers the default draft reads 1, 2 and 3.
    assert store.manifest(features).parameters["layers"] == [1, 2, 3, 4]


def test_the_same_experiment_again_does_nothing_and_a_new_arm_only_its_own(stages: Stages, recipe: Recipe):
    first = made(compare_drafters, recipe, arms_of("compare_drafters", seeds=[0]))
    again = made(compare_drafters, recipe, arms_of("compare_drafters", seeds=[0]))
    assert again == first
    assert calls(stages)["train_draft"] == 2
    third = {"name": "third", "set": {"training.lr": 5e-3}}
    made(compare_drafters, recipe, arms_of("compare_drafters", [SLOW, FAST, third], seeds=[0]))
    assert calls(stages)["train_draft"] == 3
    assert calls(stages)["make_responses"] == 1


def test_arms_that_are_the_same_draft_train_it_once(stages: Stages, recipe: Recipe):
    twin = {"name": "twin", "set": {"training.lr": 1e-4}}
    made(compare_drafters, recipe, arms_of("compare_drafters", [SLOW, twin], seeds=[0]))
    assert calls(stages)["train_draft"] == 1


def test_scaling_trains_each_arm_on_every_share_and_repeats_the_ends(stages: Stages, recipe: Recipe):
    page = made(scale_data, recipe, arms_of("scale_data", shares=[0.25, 0.5, 1.0], seeds=[0, 1]))
    done = calls(stages)
    assert done["train_draft"] == 2 * (2 + 1 + 2)
    assert done["make_responses"] == done["build_vocabulary"] == 1
    assert done["measure_trees"] == 0
    says = [claim["says"] for claim in ArtifactStore(recipe.store.uri).manifest(page).summary["claims"]]
    assert "fast gains at least 2 times what slow gains from 1x to 4x the data" in says


def test_the_page_is_left_beside_the_table_and_the_claims_are_said_at_the_end(stages: Stages, recipe: Recipe):
    page = made(compare_drafters, recipe, arms_of("compare_drafters", seeds=[0, 1]))
    folder = ArtifactStore(recipe.store.uri).local(page)
    assert "fast accepts more than slow (chain, T = 0)" in (folder / "report.html").read_text()
    assert (folder / "table.md").read_text().startswith("| arm |")
    lines = outcome_of(recipe, TARGET, ArtifactStore(recipe.store.uri), page, None, None).lines()
    assert any(line.endswith(": fast accepts more than slow (chain, T = 0)") for line in lines)
    assert any(line.endswith("report.html") for line in lines)


def test_a_plan_counts_every_experiments_drafts_and_what_is_to_go(
    stages: Stages, recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(look, "prepare_target", lambda recipe: TARGET)
    monkeypatch.setattr(look, "page", lambda *_: [])
    stages["train_draft"].seconds = 60
    arms = arms_of("ablate_draft", seeds=[0, 1]) | arms_of("compare_drafters", seeds=[0, 1, 2])
    both = build_recipe(recipe.model_dump(mode="json"), arms)

    def lines() -> dict[str, str]:
        look.plan(both)
        return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "drafts" in line)

    assert lines()["ablate-draft"] == "4 drafts, 4 to train; about 4 min to go"
    made(ablate_draft, both, {})
    done = lines()
    assert done["ablate-draft"] == "4 drafts, 0 to train; all there"
    assert done["compare-drafters"] == "6 drafts, 2 to train; about 2 min to go"
    stages["train_draft"].seconds = math.nan  # as long as its inputs are not there
    assert lines()["compare-drafters"].endswith(", and 2 stages whose time is known later")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": [SLOW]}, "ablate_draft: 1 arms; an experiment compares two or more"),
        ({"arms": [SLOW, SLOW]}, "two arms are named 'slow'"),
        ({"arms": [SLOW, {"name": "x", "set": {"training.speed": 3}}]}, "arm 'x': training.speed"),
        ({"arms": [SLOW, {"name": "x", "set": {"training.lr": -1}}]}, "arm 'x': training.lr"),
        ({"arms": [SLOW, {"name": "x", "set": {"data.heldout": 3}}]}, "arm 'x' may not set data.heldout"),
        ({"arms": [SLOW, {"name": "x", "set": {"training.seed": 3}}]}, "seeds are the experiment's"),
        ({"arms": [SLOW, {"name": "x", "set": {"training.epochs": 3}}], "budget": {"steps": 9}}, "the budget is the same"),
        ({"arms": [SLOW, FAST], "budget": {"steps": 9, "tokens": 9}}, "one budget for all"),
        ({"arms": [SLOW, FAST], "seeds": [1, 1]}, "name one twice"),
        ({"arms": [SLOW, FAST], "set": {"data.max_turns": 0}}, "ablate_draft.set: data.max_turns"),
    ],
)
def test_a_wrong_arm_is_said_with_recipe_arm_and_key(changes: dict[str, Any], said: str):
    named = {f"experiments.ablate_draft.{name}": value for name, value in changes.items()}
    with pytest.raises(RecipeError, match=said) as error:
        arm_runs("ablate_draft", load_recipe("smollm2-135m", named))
    assert "smollm2-135m" in str(error.value)


def test_a_wrong_arm_stops_before_any_stage(stages: Stages, recipe: Recipe):
    with pytest.raises(RecipeError, match=r"experiments\.ablate_draft: arm 'x': training\.lr"):
        made(ablate_draft, recipe, arms_of("ablate_draft", [SLOW, {"name": "x", "set": {"training.lr": -1}}]))
    assert set(calls(stages).values()) == {0}


def test_the_command_line_refuses_a_wrong_arm_before_it_starts_anything(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_:
        main(["scale-data", "smollm2-135m", "--set", "experiments.scale_data.arms=[{name: one}]"])
    assert exit_.value.code == 1
    assert "1 arms" in capsys.readouterr().err


def test_arms_become_recipes_with_budget_seed_and_a_name_of_their_own():
    changes = arms_of("compare_drafters", budget={"tokens": 51_200}, set={"training.schedule": "constant"}, seeds=[4, 5])
    runs = arm_runs("compare_drafters", load_recipe("smollm2-135m", changes))
    assert [run.label for run in runs] == ["slow, seed 4", "slow, seed 5", "fast, seed 4", "fast, seed 5"]
    assert {run.recipe.training.max_steps for run in runs} == {100}  # bins of 512 tokens
    assert {run.recipe.training.schedule for run in runs} == {"constant"}
    assert [run.recipe.training.seed for run in runs] == [4, 5, 4, 5]
    assert runs[3].recipe.name == "smollm2-135m.fast.s5"
    assert runs[3].recipe.training.lr == 1e-3


@pytest.mark.parametrize("kind", ["compare_drafters", "ablate_draft", "scale_data"])
@pytest.mark.parametrize("name", recipe_names())
def test_the_experiments_of_every_recipe_that_ships_are_valid(name: str, kind: str):
    recipe = load_recipe(name)
    arms = [arm.name for arm in getattr(recipe.experiments, kind).arms]
    runs = arm_runs(kind, recipe)
    assert list(dict.fromkeys(run.arm for run in runs)) == arms
    assert len({run.recipe.name for run in runs}) == len(runs)
