"""The only file that knows MLflow: one parent run per build, a child per stage that did work, the best draft
by name.

In: a recipe, the stages' plans as they come, the finished artifacts. Out: runs, metrics, plots, a registered
model. A build never waits for MLflow and never fails with it: whatever it missed is read off the artifacts
by a later build.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.recipe import Recipe
from tasks.recipe import Tracking as TrackingSettings
from tasks.stage import Plan
from tasks.tracked_figures import Figure, acceptance_figures, flat, numbers, redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

    from tasks.prepare_target import TargetInfo

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

PAGE = "http://127.0.0.1:5000"  # where `make ui` shows a database's runs
BEST = "best"
ARTIFACT_TAG, RESULT_TAG, TAU_TAG = "draftline.artifact", "draftline.result", "draftline.tau_walk_t0"
TRAINING_METRICS = "training/metrics.jsonl"
TAIL_SECONDS = 5.0
BATCH = 900  # MLflow takes 1,000 metrics and 100 parameters in one call
PLOTS = {".svg", ".png", ".html", ".md"}


class BuildTracker:
    """Follows one build; a context manager. With tracking.enabled false it does nothing.

    The parent run is opened with the first stage that does work. A build that found everything in the store
    opens none: it points at the run that made it.
    """

    def __init__(
        self, recipe: Recipe, target: TargetInfo, *, flow: str, name: str, page: str | None = None
    ) -> None:
        """`name`: the run's name. `page`: where the orchestrator shows this run."""
        self.recipe, self.target, self.flow, self.name, self.page = recipe, target, flow, name, page
        self.store = ArtifactStore(recipe.store.uri)
        self._mlflow = _Mlflow(recipe.tracking)
        self._plans: dict[str, Plan] = {}
        self._told: set[str] = set()  # artifacts whose child run is complete
        self._parent: str | None = None

    def __enter__(self) -> BuildTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._parent is not None:
            status = "FINISHED" if error is None else "FAILED" if isinstance(error, Exception) else "KILLED"
            self._mlflow.call(lambda client: client.set_terminated(self._parent, status))

    def planned(self, plan: Plan, *, cached: bool) -> None:
        """Every stage of the build, in order, before it runs or is skipped."""
        self._plans[_key(plan.stage.kind, plan.fingerprint)] = plan

    @contextmanager
    def stage(self, plan: Plan) -> Iterator[None]:
        """Around a stage's work: its child run, and the trainer's metrics as they are written."""
        self._mlflow.try_again()
        started = time.time()
        run = self._open_child(plan, started)
        with _Tail(self._mlflow, run, plan.open(self.store).folder / TRAINING_METRICS) as tail:
            try:
                yield
            except BaseException as error:
                self._close(run, "FAILED" if isinstance(error, Exception) else "KILLED")
                raise
            ref = plan.find(self.store)
        if ref is not None and run is not None:
            tail.finish(self.store.local(ref) / TRAINING_METRICS)
            self._tell(run, ref)
            self._close(run, "FINISHED")

    def finish(self, result: ArtifactRef, *, acceptance: ArtifactRef | None = None) -> str | None:
        """Log what the build came to and what MLflow missed; returns the run's page, None where there is
        none.
        """
        self._mlflow.try_again()
        earlier = None if self._parent else self._find(RESULT_TAG, _key(result.kind, result.fingerprint))
        if earlier is not None:
            return self._page(earlier)
        parent = self._open_parent()
        if parent is None:
            return None
        for key, plan in self._plans.items():
            if key not in self._told and self._find(ARTIFACT_TAG, key) is None:
                self._catch_up(plan)
        figures = acceptance_figures(self.store.local(acceptance)) if acceptance else []
        self._mlflow.log(parent, figures)
        for ref in filter(None, (acceptance, result)):
            self._log_plots(parent, self.store.local(ref))
        if result.kind == "published":
            self._register(parent, result, figures)
        self._mlflow.call(
            lambda client: client.set_tag(parent, RESULT_TAG, _key(result.kind, result.fingerprint))
        )
        return None if self._mlflow.down else self._page(parent)

    # -- runs
    # ---------------------------------------------------------------------------------------------------

    def _open_parent(self) -> str | None:
        if self._parent is None:
            tags = {
                "mlflow.runName": self.name,
                "draftline.flow": self.flow,
                "draftline.recipe": self.recipe.name,
                "draftline.target": self.target.fingerprint,
                "draftline.tokenizer": self.target.tokenizer_fingerprint,
                "draftline.chat_template": self.target.template_hash,
                **({"draftline.prefect": self.page} if self.page else {}),
            }
            parameters = flat(self.recipe.model_dump(mode="json", exclude={"name", "description"}))
            self._parent = self._mlflow.open_run(tags, parameters)
        return self._parent

    def _open_child(self, plan: Plan, started: float) -> str | None:
        parent = self._open_parent()
        if parent is None:
            return None
        tags = {
            "mlflow.parentRunId": parent,
            "mlflow.runName": f"{plan.stage.name} {self.recipe.name}",
            "draftline.stage": plan.stage.name,
            **{f"draftline.input.{ref.kind}": ref.fingerprint for ref in plan.inputs},
        }
        self._mlflow.call(
            lambda client: client.set_tag(parent, f"draftline.{plan.stage.kind}", plan.fingerprint)
        )
        return self._mlflow.open_run(tags, flat(plan.parameters), started)

    def _tell(self, run: str, ref: ArtifactRef) -> None:
        """A finished artifact's facts, on its stage's run; the tag that says so comes last."""
        manifest = self.store.manifest(ref)
        facts = [Figure("bytes", manifest.bytes), Figure("rows", manifest.rows), *numbers(manifest.summary)]
        self._mlflow.log(run, facts)
        key = _key(ref.kind, ref.fingerprint)
        self._mlflow.call(lambda client: client.set_tag(run, ARTIFACT_TAG, key))
        if not self._mlflow.down:
            self._told.add(key)

    def _catch_up(self, plan: Plan) -> None:
        """A stage that was done while MLflow was away: its run, from its artifact."""
        ref = plan.find(self.store)
        run = self._open_child(plan, time.time()) if ref else None
        if ref is not None and run is not None:
            _Tail(self._mlflow, run, self.store.local(ref) / TRAINING_METRICS).read()
            self._tell(run, ref)
            self._close(run, "FINISHED")

    def _close(self, run: str | None, status: str) -> None:
        if run is not None:
            self._mlflow.call(lambda client: client.set_terminated(run, status))

    def _find(self, tag: str, value: str) -> str | None:
        """The newest run that carries the tag."""
        runs = self._mlflow.call(
            lambda client: client.search_runs(
                [self._mlflow.experiment], f"tags.`{tag}` = '{value}'", max_results=1
            )
        )
        return runs[0].info.run_id if runs else None

    def _page(self, run: str) -> str:
        base = self.recipe.tracking.uri if self.recipe.tracking.uri.startswith("http") else PAGE
        return redacted(f"{base}/#/experiments/{self._mlflow.experiment}/runs/{run}")

    # -- files and the registered model
    # ---------------------------------------------------------------------------

    def _log_plots(self, run: str, folder: Path) -> None:
        for path in sorted(folder.iterdir()):
            if path.suffix in PLOTS:
                self._mlflow.call(lambda client, path=path: client.log_artifact(run, str(path)))

    def _register(self, run: str, published: ArtifactRef, figures: Iterable[Figure]) -> None:
        """The draft as a version of the recipe's registered model; the alias moves where tau rose."""
        name = f"{self.recipe.name}-{self.recipe.draft.drafter}"
        tau = next((figure.value for figure in figures if figure.name == "tau_walk_t0"), None)
        tags = {
            TAU_TAG: "" if tau is None else f"{tau:.6f}",
            ARTIFACT_TAG: _key(published.kind, published.fingerprint),
        }
        folder = self.store.local(published)

        def register(client: MlflowClient) -> None:
            from mlflow.exceptions import MlflowException

            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(
                    name, description=f"Draft models for {redacted(self.recipe.target.model)}"
                )
            model = client.create_logged_model(
                self._mlflow.experiment,
                name="draft",
                source_run_id=run,
                model_type=self.recipe.draft.drafter,
                tags=tags,
            )
            client.log_model_artifacts(model.model_id, str(folder))
            model = client.finalize_logged_model(model.model_id, "READY")
            version = client.create_model_version(
                name, model.artifact_location, run_id=run, tags=tags, model_id=model.model_id
            )
            try:
                best = client.get_model_version_by_alias(name, BEST).tags.get(TAU_TAG)
            except MlflowException:
                best = None
            if tau is not None and (not best or tau > float(best)):
                client.set_registered_model_alias(name, BEST, version.version)
                logger.info("MLflow: %s version %s is the best so far, tau %.2f", name, version.version, tau)

        self._mlflow.call(register)


class _Mlflow:
    """MLflow's client, or its absence: after a failure every call is skipped until `try_again`."""

    def __init__(self, settings: TrackingSettings) -> None:
        self.settings = settings
        self.down = not settings.enabled
        self.experiment = ""
        self._client: MlflowClient | None = None
        self._warned = False

    def try_again(self) -> None:
        self.down = not self.settings.enabled

    def call(self, action: Callable[[MlflowClient], Value]) -> Value | None:
        """What `action` returns; None where MLflow is away, which is said once."""
        if self.down:
            return None
        try:
            if self._client is None:
                self._client = self._connect()
            return action(self._client)
        except Exception as error:  # whatever tracking does, the build goes on
            self.down = True
            if not self._warned:
                reason = redacted(" ".join(str(error).split()))[:200]
                logger.warning(
                    "MLflow at %s is away (%s): the build goes on; a later build logs what this one misses",
                    redacted(self.settings.uri),
                    reason,
                )
                self._warned = True
            logger.debug("MLflow failed", exc_info=True)
            return None

    def open_run(
        self, tags: Mapping[str, str], parameters: Mapping[str, Any], started: float | None = None
    ) -> str | None:
        """A new run with its parameters; its id is passed on in every later call."""

        def action(client: MlflowClient) -> str:
            from mlflow.entities import Param

            start_ms = int((started or time.time()) * 1000)
            run = client.create_run(
                self.experiment, start_time=start_ms, tags={k: redacted(str(v)) for k, v in tags.items()}
            )
            pairs = [Param(key, redacted(str(value))[:500]) for key, value in parameters.items()]
            for first in range(0, len(pairs), 100):
                client.log_batch(run.info.run_id, params=pairs[first : first + 100])
            return run.info.run_id

        return self.call(action)

    def log(self, run: str | None, figures: Iterable[Figure]) -> None:
        """Metrics in batches: 1,000 at once cost what ten single ones do."""
        figures = list(figures)
        if run is None or not figures:
            return

        def action(client: MlflowClient) -> None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            metrics = [Metric(figure.name, figure.value, now, figure.step) for figure in figures]
            for first in range(0, len(metrics), BATCH):
                client.log_batch(run, metrics=metrics[first : first + BATCH])

        self.call(action)

    def _connect(self) -> MlflowClient:
        # Read by MLflow at call time. Its defaults wait four minutes for a dead server, and report home.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.WARNING)
        from mlflow import MlflowClient

        client = MlflowClient(self.settings.uri)
        experiment = client.get_experiment_by_name(self.settings.experiment)
        if experiment is None:
            remote = self.settings.uri.startswith("http")  # a server decides itself where artifacts lie
            location = None if remote else Path(self.settings.artifacts).absolute().as_uri()
            self.experiment = client.create_experiment(self.settings.experiment, artifact_location=location)
        else:
            self.experiment = experiment.experiment_id
        return client


class _Tail:
    """The trainer's metrics.jsonl into MLflow: every few seconds while the stage runs, the rest at its end.
    """

    def __init__(self, mlflow: _Mlflow, run: str | None, path: Path) -> None:
        self._mlflow, self._run, self._path = mlflow, run, path
        self._offset = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metrics-tail", daemon=True)

    def __enter__(self) -> _Tail:
        if self._run is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def finish(self, path: Path) -> None:
        """Log what is left; the file is now under the artifact's final name."""
        self._path = path
        self.read()

    def read(self) -> None:
        """Log every whole line that has not been logged."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            return
        figures = [figure for line in whole.splitlines() for figure in numbers(json.loads(line))]
        self._mlflow.log(self._run, figures)
        if not self._mlflow.down:
            self._offset += len(whole)

    def _follow(self) -> None:
        while not self._over.wait(TAIL_SECONDS):
            self.read()


def _key(kind: str, fingerprint: str) -> str:
    return f"{kind}/{fingerprint}"
