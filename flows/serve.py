"""One process that offers every recipe's deployments and runs what is asked for, one at a time.

`python -m flows.serve` serves; `python -m flows.serve --register` only makes the deployments known to the
server. A recipe added to recipes/ is deployed by starting this again.
"""

from __future__ import annotations

import asyncio
import sys
from datetime import timedelta

from prefect.automations import Automation
from prefect.client.schemas.objects import StateType
from prefect.deployments.runner import RunnerDeployment
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.runner import Runner

from flows.ablate_draft import ablate_draft
from flows.build_draft import build_draft
from flows.compare_drafters import compare_drafters
from flows.evaluate_draft import evaluate_draft
from flows.regenerate_data import regenerate_data
from flows.scale_data import scale_data
from flows.services import ServiceError, prefect_url, require_server
from tasks.recipe import RecipeError, load_recipe, recipe_names

FLOWS = (build_draft, regenerate_data, evaluate_draft, compare_drafters, ablate_draft, scale_data)
ZOMBIES = "draftline: runs that fell silent have crashed"
SILENCE = timedelta(seconds=90)  # three heartbeats of prefect.toml's 30 s


def deployments() -> list[RunnerDeployment]:
    """One deployment per flow and recipe; its parameters are the recipe's full values, so a form shows them
    all.
    """
    made = []
    for name in recipe_names():
        recipe = load_recipe(name)
        for flow in FLOWS:
            made.append(
                flow.to_deployment(
                    name,
                    parameters={"recipe": recipe.model_dump(mode="json"), "overrides": {}},
                    description=f"{flow.description or ''}\n\n{recipe.description}".strip(),
                    tags=[name],
                )
            )
    return made


def make_zombie_automation() -> None:
    """Have the server mark a run Crashed whose machine died with its worker: nobody is left to report it."""
    heartbeat = "prefect.flow-run.heartbeat"
    ends = {f"prefect.flow-run.{state}" for state in ("Completed", "Failed", "Cancelled", "Crashed")}
    automation = Automation(
        name=ZOMBIES,
        trigger=EventTrigger(
            after={heartbeat},
            expect={heartbeat, *ends},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=SILENCE,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED, message="No heartbeat: it was killed with its worker."
            )
        ],
    )
    try:
        Automation.read(name=ZOMBIES)
    except ValueError:
        automation.create()


def register() -> None:
    """Make every deployment and the zombie automation known to the server."""
    require_server()
    make_zombie_automation()
    for deployment in deployments():
        deployment.apply()
        print(f"{deployment.flow_name}/{deployment.name}")
    print(f"deployed to {prefect_url()}. `make worker` runs what is asked for, for example by")
    print("  prefect deployment run build-draft/smollm2-135m")


def serve() -> None:
    """Offer the deployments until ended; SIGTERM and Ctrl-C cancel the run in progress."""
    require_server()
    make_zombie_automation()
    offered = deployments()
    runner = Runner(name="draftline", limit=1)
    for deployment in offered:
        runner.add_deployment(deployment)
    print(
        f"worker ready: {len(offered)} deployments, one run at a time; {prefect_url()} shows them", flush=True
    )
    asyncio.run(runner.start())


def main() -> int:
    """The command line; returns the exit code."""
    try:
        register() if sys.argv[1:] == ["--register"] else serve()
    except (ServiceError, RecipeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("worker stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
