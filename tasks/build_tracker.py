"""Follows one build for the tracker: a run for the build, a child for each stage that did work, the draft by
name.

In: the stages' plans as they come, then the finished artifacts. Out: the build's page. A build that found
everything in the store points at the run that made it; what a tracker missed while it was away is read off
the artifacts.
"""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import psutil

from storage.artifacts import ArtifactRef, ArtifactStore
from tasks.prepare_target import TargetInfo
from tasks.recipe import Recipe
from tasks.stage import Plan
from tasks.tracked_figures import Figure, acceptance_figures, flat, numbers
from tasks.tracking import Mlflow

ARTIFACT_TAG, RESULT_TAG, PROCESS_TAG = "draftline.artifact", "draftline.result", "draftline.process"
SCORE = "tau_walk_t0"
TRAINING_METRICS = "training/metrics.jsonl"
TAIL_SECONDS = 5.0
SHOWN = {".svg", ".png", ".html", ".md"}


class BuildTracker:
    """A context manager around a build. The build's run is opened with the first stage that does work."""

    def __init__(
        self,
        recipe: Recipe,
        target: TargetInfo,
        *,
        flow: str,
        name: str,
        page: str | None = None,
        parent: BuildTracker | None = None,
    ) -> None:
        """`name`: the run's name. `page`: where the orchestrator shows the same run. `parent`: what it is a part of."""
        self.recipe, self.target, self.flow, self.name, self.page = recipe, target, flow, name, page
        self.store = ArtifactStore(recipe.store.uri)
        self._parent = parent
        self._mlflow = Mlflow(recipe.tracking)
        self._plans: dict[str, Plan] = {}
        self._complete: set[str] = set()  # artifacts whose run has everything
        self._run: str | None = None

    def __enter__(self) -> BuildTracker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._run is not None:
            self._mlflow.try_again()
            self._mlflow.close_run(self._run, _status(error))

    def arm(self, recipe: Recipe, name: str) -> BuildTracker:
        """A part of this build with another recipe: its run is a child of this one's."""
        return BuildTracker(recipe, self.target, flow=self.flow, name=name, page=self.page, parent=self)

    @property
    def opened(self) -> bool:
        """Whether the tracker has a run of this build; not where an earlier one was pointed at."""
        return self._run is not None

    def planned(self, plan: Plan) -> None:
        """Every stage of the build, in order, before it runs or is skipped."""
        self._plans[_key(plan)] = plan

    @contextmanager
    def stage(self, plan: Plan) -> Iterator[None]:
        """Around a stage's work: its run, and the trainer's metrics as they are written."""
        self._mlflow.try_again()
        run = self._open_stage(plan)
        if run is None:
            yield
            return
        tail = MetricsTail(self._mlflow, run, plan.open(self.store).folder / TRAINING_METRICS)
        try:
            with tail:
                yield
        except BaseException as error:
            self._mlflow.close_run(run, _status(error))
            raise
        self._close_stage(run, plan, tail)

    def finish(self, result: ArtifactRef, *, acceptance: ArtifactRef | None = None) -> str | None:
        """Log what the build came to, and what was missed; returns its page, None where the tracker is off
        or away.
        """
        self._mlflow.try_again()
        if self._run is None and self._parent is None and (earlier := self._mlflow.find(RESULT_TAG, _key(result))):
            return self._mlflow.page(earlier)
        run = self._open_build()
        if run is None:
            return None
        for key, plan in self._plans.items():
            if key not in self._complete and self._mlflow.find(ARTIFACT_TAG, key) is None:
                self._log_missed(plan)
        figures = acceptance_figures(self.store.local(acceptance)) if acceptance else []
        self._mlflow.log(run, figures)
        for path in self._pages([ref for ref in (acceptance, result) if ref]):
            self._mlflow.log_file(run, path)
        if result.kind == "published":
            self._register(run, result, figures)
        if self._mlflow.down:
            return None
        self._mlflow.tag(run, RESULT_TAG, _key(result))
        return self._mlflow.page(run)

    def _open_build(self) -> str | None:
        if self._run is None:
            tags = {
                "mlflow.runName": self.name,
                "draftline.flow": self.flow,
                "draftline.recipe": self.recipe.name,
                "draftline.target": self.target.fingerprint,
                "draftline.tokenizer": self.target.tokenizer_fingerprint,
                "draftline.chat_template": self.target.template_hash,
            }
            tags |= {PROCESS_TAG: _this_process()} | ({"draftline.prefect": self.page} if self.page else {})
            self._mlflow.end_dead(PROCESS_TAG, _alive)
            parameters = flat(self.recipe.model_dump(mode="json", exclude={"name", "description"}))
            parent = self._parent._open_build() if self._parent else None
            self._run = self._mlflow.open_run(tags, parameters, parent=parent)
        return self._run

    def _open_stage(self, plan: Plan) -> str | None:
        build = self._open_build()
        if build is None:
            return None
        tags = {
            "mlflow.runName": f"{plan.stage.name} {self.recipe.name}",
            "draftline.stage": plan.stage.name,
            PROCESS_TAG: _this_process(),
        }
        tags |= {f"draftline.input.{ref.kind}": ref.fingerprint for ref in plan.inputs}
        self._mlflow.tag(build, f"draftline.{plan.stage.kind}", plan.fingerprint)
        return self._mlflow.open_run(tags, flat(plan.parameters), parent=build)

    def _close_stage(self, run: str, plan: Plan, tail: MetricsTail) -> None:
        """A finished stage's facts on its run. The tag that says everything is there comes last."""
        ref = plan.find(self.store)
        if ref is None:  # its work was done, and somebody deleted it since
            self._mlflow.close_run(run, "FAILED")
            return
        tail.finish(self.store.local(ref) / TRAINING_METRICS)
        manifest = self.store.manifest(ref)
        facts = [Figure("bytes", manifest.bytes), Figure("rows", manifest.rows), *numbers(manifest.summary)]
        self._mlflow.log(run, facts)
        self._mlflow.close_run(run, "FINISHED")
        self._mlflow.tag(run, ARTIFACT_TAG, _key(ref))
        if not self._mlflow.down:
            self._complete.add(_key(ref))

    def _log_missed(self, plan: Plan) -> None:
        """A stage that was done while the tracker was away, from its artifact."""
        if plan.find(self.store) and (run := self._open_stage(plan)):
            self._close_stage(run, plan, MetricsTail(self._mlflow, run, Path()))

    def _pages(self, refs: Iterable[ArtifactRef]) -> list[Path]:
        return [
            path for ref in refs for path in sorted(self.store.local(ref).iterdir()) if path.suffix in SHOWN
        ]

    def _register(self, run: str, published: ArtifactRef, figures: Iterable[Figure]) -> None:
        drafter = self.recipe.draft.drafter
        score = next((figure.value for figure in figures if figure.name == SCORE), None)
        if self.store.manifest(published).summary.get("suspicious"):
            score = None  # figures that may be wrong are not the best of any
        self._mlflow.register(
            run,
            f"{self.recipe.name}-{drafter}",
            self.store.local(published),
            kind=drafter,
            tags={ARTIFACT_TAG: _key(published), "draftline.target": self.target.fingerprint},
            score=score,
        )


class MetricsTail:
    """The trainer's metrics.jsonl into the tracker: every few seconds while it is entered, the rest at
    `finish`.

    Lines that the tracker did not take are sent again; a torn last line waits for its end. A run that goes on from a
    checkpoint first drops what a killed one wrote after it: then the file is read anew, and no record is sent twice.
    """

    def __init__(self, mlflow: Mlflow, run: str, path: Path) -> None:
        self._mlflow, self._run, self._path = mlflow, run, path
        self._read = 0  # bytes
        self._last = b""  # the line that ends there
        self._sent: set[tuple[str, int]] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="metrics-tail", daemon=True)

    def __enter__(self) -> MetricsTail:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()

    def finish(self, path: Path) -> None:
        """Send what is left, from the file under its final name."""
        self._path = path
        self._mlflow.try_again()
        self._send()

    def _follow(self) -> None:
        while not self._over.wait(TAIL_SECONDS):
            self._mlflow.try_again()  # a server that was restarted is found again in the middle of a training
            self._send()

    def _send(self) -> None:
        try:
            lines = self._new_lines()
        except OSError:  # not there yet, or moved to its final name just now
            return
        records = {(record.get("kind", ""), record["step"]): record for record in map(json.loads, lines)}
        new = {key: record for key, record in records.items() if key not in self._sent}
        self._mlflow.log(self._run, [figure for record in new.values() for figure in numbers(record)])
        if lines and not self._mlflow.down:
            self._sent |= new.keys()
            self._read += sum(map(len, lines))
            self._last = lines[-1]

    def _new_lines(self) -> list[bytes]:
        """Whole lines behind what was read; all of them where that is not what it was."""
        with self._path.open("rb") as file:
            file.seek(self._read - len(self._last))
            if file.read(len(self._last)) != self._last:
                self._read, self._last = 0, b""
                file.seek(0)
            data = file.read()
        return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def _key(thing: Plan | ArtifactRef) -> str:
    kind = thing.stage.kind if isinstance(thing, Plan) else thing.kind
    return f"{kind}/{thing.fingerprint}"


def _status(error: BaseException | None) -> str:
    if error is None:
        return "FINISHED"
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def _this_process() -> str:
    """Host, pid and start time: what tells this process from a later owner of its pid."""
    process = psutil.Process()
    return f"{platform.node()} {process.pid} {process.create_time():.0f}"


def _alive(name: str) -> bool:
    """Whether the named process lives. Of another host nothing is known: it may."""
    host, pid, created = name.rsplit(" ", 2)
    if host != platform.node():
        return True
    try:
        return abs(psutil.Process(int(pid)).create_time() - float(created)) < 2
    except psutil.NoSuchProcess:
        return False
