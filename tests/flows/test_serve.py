"""Deployments: every flow for every recipe, each with a form that is filled in, refused where a value is
wrong.
"""

from __future__ import annotations

import pytest
from prefect.client.orchestration import get_client

from flows.serve import deployments, make_zombie_automation, register
from tasks.recipe import load_recipe, recipe_names


def test_every_flow_has_a_deployment_for_every_recipe():
    names = {f"{deployment.flow_name}/{deployment.name}" for deployment in deployments()}
    assert names == {
        f"{flow}/{recipe}"
        for flow in ("build-draft", "regenerate-data", "evaluate-draft", "compare-drafters", "ablate-draft", "scale-data")
        for recipe in recipe_names()
    }


def test_a_deployments_parameters_are_the_recipes_full_values():
    by_name = {
        deployment.name: deployment for deployment in deployments() if deployment.flow_name == "build-draft"
    }
    for name in recipe_names():
        assert by_name[name].parameters["recipe"] == load_recipe(name).model_dump(mode="json")
    assert by_name["llama31-8b"].parameters["recipe"]["training"]["lr"] == 5e-5


def test_deploying_twice_leaves_each_once_and_the_server_refuses_wrong_values(
    prefect_server: None, monkeypatch: pytest.MonkeyPatch
):
    from prefect.exceptions import PrefectHTTPStatusError

    monkeypatch.setattr("flows.serve.require_server", lambda: None)
    monkeypatch.setattr("flows.serve.recipe_names", lambda: ["smollm2-135m"])
    register()
    register()
    with get_client(sync_client=True) as client:
        assert len(client.read_deployments()) == 6
        deployment = client.read_deployment_by_name("build-draft/smollm2-135m")
        wrong = load_recipe("smollm2-135m").model_dump(mode="json")
        wrong["training"]["learning_rate"] = 1e-4
        with pytest.raises(PrefectHTTPStatusError, match="learning_rate"):
            client.create_flow_run_from_deployment(deployment.id, parameters={"recipe": wrong})


def test_the_zombie_automation_is_made_once(prefect_server: None):
    from prefect.automations import Automation

    from flows.serve import ZOMBIES

    make_zombie_automation()
    make_zombie_automation()
    assert Automation.read(name=ZOMBIES).name == ZOMBIES
