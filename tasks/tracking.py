"""The only file that knows MLflow: runs, metrics, files and registered models, none of which can hold up a
build.

In: a recipe's tracking settings, then plain names, texts and numbers. Out: run ids and page addresses, or
None while MLflow is away.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tasks.recipe import Tracking
from tasks.tracked_figures import Figure, redacted

if TYPE_CHECKING:
    from mlflow import MlflowClient

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

PAGE = "http://127.0.0.1:5000"  # where `make ui` shows a database's runs
BEST = "best"
KIND = "custom_model_development"  # which of its two faces the page shows
SCORE_TAG = "draftline.tau_walk_t0"
METRICS_A_CALL, PARAMETERS_A_CALL = 1000, 100  # MLflow's limits
LONGEST_VALUE = 500


class Mlflow:
    """MLflow, or its absence: after a failure every call is skipped, at no cost, until `try_again`.

    Runs are always named by their id: MLflow's own notion of the current run is one per thread.
    """

    def __init__(self, settings: Tracking) -> None:
        self.settings = settings
        self.down = not settings.enabled
        self.experiment = ""
        self._client: MlflowClient | None = None
        self._warned = False

    def try_again(self) -> None:
        """Let the next call find out whether MLflow is back."""
        self.down = not self.settings.enabled

    def open_run(
        self, tags: Mapping[str, str], parameters: Mapping[str, str], *, parent: str | None = None
    ) -> str | None:
        """A new run's id. Parameters longer than MLflow shows are cut."""

        def action(client: MlflowClient) -> str:
            from mlflow.entities import Param

            named = {key: redacted(value) for key, value in tags.items()}
            named |= {"mlflow.parentRunId": parent} if parent else {}
            run = client.create_run(self.experiment, tags=named).info.run_id
            pairs = [Param(key, redacted(value)[:LONGEST_VALUE]) for key, value in parameters.items()]
            for first in range(0, len(pairs), PARAMETERS_A_CALL):
                client.log_batch(run, params=pairs[first : first + PARAMETERS_A_CALL])
            return run

        return self._call(action)

    def close_run(self, run: str, status: str) -> None:
        """`status`: FINISHED, FAILED or KILLED."""
        self._call(lambda client: client.set_terminated(run, status))

    def tag(self, run: str, name: str, value: str) -> None:
        self._call(lambda client: client.set_tag(run, name, redacted(value)))

    def log(self, run: str, figures: Iterable[Figure]) -> None:
        """Metrics in batches: 1,000 at once take what ten single ones do."""
        figures = list(figures)

        def action(client: MlflowClient) -> None:
            from mlflow.entities import Metric

            now = int(time.time() * 1000)
            metrics = [Metric(figure.name, figure.value, now, figure.step) for figure in figures]
            for first in range(0, len(metrics), METRICS_A_CALL):
                client.log_batch(run, metrics=metrics[first : first + METRICS_A_CALL])

        if figures:
            self._call(action)

    def log_file(self, run: str, path: Path) -> None:
        self._call(lambda client: client.log_artifact(run, str(path)))

    def find(self, tag: str, value: str) -> str | None:
        """The newest run that carries the tag."""
        runs = self._call(
            lambda client: client.search_runs([self.experiment], f"tags.`{tag}` = '{value}'", max_results=1)
        )
        return runs[0].info.run_id if runs else None

    def end_dead(self, tag: str, alive: Callable[[str], bool]) -> None:
        """Close every run that says it is running while its process, named by `tag`, is gone."""

        def action(client: MlflowClient) -> None:
            running = client.search_runs([self.experiment], "attributes.status = 'RUNNING'")
            for run in running:
                process = run.data.tags.get(tag)
                if process is not None and not alive(process):
                    client.set_terminated(run.info.run_id, "KILLED")

        self._call(action)

    def page(self, run: str) -> str:
        """The run's address in the browser."""
        base = self.settings.uri if self.settings.uri.startswith("http") else PAGE
        return redacted(f"{base.rstrip('/')}/#/experiments/{self.experiment}/runs/{run}")

    def register(
        self, run: str, name: str, folder: Path, *, kind: str, tags: Mapping[str, str], score: float | None
    ) -> None:
        """`folder` as a new version of the registered model `name`; the alias "best" moves where the score
        rose.
        """

        def action(client: MlflowClient) -> None:
            labels = dict(tags) | ({SCORE_TAG: f"{score:.6f}"} if score is not None else {})
            if not client.search_registered_models(f"name = '{name}'"):
                client.create_registered_model(name)
            # A plain artifact cannot be registered in MLflow 3: it has to be a logged model.
            model = client.create_logged_model(
                self.experiment, name="draft", source_run_id=run, model_type=kind, tags=labels
            )
            client.log_model_artifacts(model.model_id, str(folder))
            model = client.finalize_logged_model(model.model_id, "READY")
            version = client.create_model_version(
                name, model.artifact_location, run_id=run, tags=labels, model_id=model.model_id
            )
            best = _best_score(client, name)
            if score is not None and (best is None or score > best):
                client.set_registered_model_alias(name, BEST, version.version)
                logger.info(
                    "MLflow: %s version %s is the best so far, tau %.2f", name, version.version, score
                )

        self._call(action)

    def _call(self, action: Callable[[MlflowClient], Value]) -> Value | None:
        """What `action` returns; None where MLflow is away, which is said once."""
        if self.down:
            return None
        try:
            if self._client is None:
                self._client = self._connect()
            return action(self._client)
        except Exception as error:  # whatever goes wrong in tracking, the build goes on
            self.down = True
            logger.debug("MLflow failed", exc_info=True)
            if not self._warned:
                reason = redacted(" ".join(str(error).split()))[:200]
                where = redacted(self.settings.uri)
                logger.warning(
                    "MLflow at %s is away: the build goes on, the next one logs what this one misses (%s)",
                    where,
                    reason,
                )
                self._warned = True
            return None

    def _connect(self) -> MlflowClient:
        # MLflow reads these when it calls. Its defaults wait four minutes for a dead server, and report home.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("DO_NOT_TRACK", "true")
        from mlflow import MlflowClient

        for name in ("alembic", "mlflow.store.db.utils"):
            logging.getLogger(name).setLevel(logging.WARNING)
        client = MlflowClient(self.settings.uri)
        experiment = client.get_experiment_by_name(self.settings.experiment)
        if experiment is not None:
            self.experiment = experiment.experiment_id
            return client
        # A server decides itself where artifacts lie; a database needs to be told.
        remote = self.settings.uri.startswith("http")
        location = None if remote else Path(self.settings.artifacts).absolute().as_uri()
        self.experiment = client.create_experiment(
            self.settings.experiment, artifact_location=location, tags={"mlflow.experimentKind": KIND}
        )
        return client


def _best_score(client: MlflowClient, name: str) -> float | None:
    from mlflow.exceptions import MlflowException

    try:
        return float(client.get_model_version_by_alias(name, BEST).tags[SCORE_TAG])
    except (MlflowException, KeyError):  # no alias yet
        return None
