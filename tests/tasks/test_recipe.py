"""Recipes: what ships is valid, what is wrong is refused in one line that names the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.recipe import Recipe, RecipeError, build_recipe, load_recipe, recipe_names

SHIPPED = ["deepseek-r1-llama-8b", "llama31-8b", "llama33-70b", "smollm2-135m", "vicuna-13b"]


def test_five_recipes_ship_and_each_is_named_as_its_file():
    assert recipe_names() == SHIPPED
    assert [load_recipe(name).name for name in SHIPPED] == SHIPPED


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "smollm2-135m"])
def test_the_papers_numbers_are_in_the_papers_recipes(name: str):
    recipe = load_recipe(name)
    training = recipe.training
    assert (training.lr, training.betas, training.clip, training.ttt_steps) == (5e-5, (0.9, 0.95), 0.5, 7)
    assert recipe.vocabulary.size == 32000
    assert recipe.evaluation.tree.depth == 8
    kinds = [source.kind for source in recipe.data.sources]
    assert kinds[:2] == ["sharegpt", "ultrachat"]
    assert ("openthoughts-math" in kinds) == name.startswith("deepseek")


def test_tree_sizes_follow_the_targets_size():
    nodes = {name: load_recipe(name).evaluation.tree.nodes for name in SHIPPED}
    assert (nodes["llama31-8b"], nodes["vicuna-13b"], nodes["llama33-70b"]) == (60, 50, 48)


def test_an_override_reaches_its_key_and_leaves_the_rest():
    base = load_recipe("smollm2-135m")
    changed = load_recipe("smollm2-135m", {"training.lr": 1e-4, "evaluation.tree.nodes": 48})
    assert changed.training.lr == 1e-4
    assert changed.evaluation.tree.nodes == 48
    assert changed.model_copy(update={"training": base.training, "evaluation": base.evaluation}) == base


def test_a_recipe_survives_json_as_a_deployments_parameters_do():
    for name in SHIPPED:
        recipe = load_recipe(name)
        assert build_recipe(recipe.model_dump(mode="json")) == recipe


def test_a_name_stands_for_the_recipe():
    assert Recipe.model_validate("llama31-8b") == load_recipe("llama31-8b")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"training.learning_rate": 1e-4}, ["training.learning_rate", "not permitted"]),
        ({"training.lr": -1}, ["training.lr", "greater than 0", "-1"]),
        ({"training.lr": "fast"}, ["training.lr", "number", "'fast'"]),
        ({"responses.engine": "magic"}, ["responses.engine", "'vllm'"]),
        ({"data.sources": []}, ["data.sources", "at least 1"]),
        ({"data.max_tokens": 4096}, ["data.max_tokens 4096", "target.max_model_len 1024"]),
        ({"data.max_prompt_tokens": 512}, ["data.max_prompt_tokens", "no answer fits"]),
        ({"responses.engine": "http"}, ["responses.servers"]),
        ({"training.lr.deep": 1}, ["training.lr.deep", "lr is not a section"]),
        ({"draft.drafter": "eagle9"}, ["draft.drafter", "'eagle3'"]),
        ({"draft.options": {"blok": 4}}, ["draft.options.blok is not known", "none"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_file_and_key(change: dict, said: list[str]):
    with pytest.raises(RecipeError) as error:
        load_recipe("smollm2-135m", change)
    message = str(error.value)
    assert "\n" not in message
    assert "smollm2-135m.yaml" in message
    for part in said:
        assert part in message


def test_an_unknown_recipe_names_those_that_there_are():
    with pytest.raises(RecipeError, match=r"no recipe 'nonesuch'.*smollm2-135m"):
        load_recipe("nonesuch")


@pytest.mark.parametrize("text", ["a: [1, 2", "- just\n- a list", "", "name: x"])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, text: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)
