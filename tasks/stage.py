"""What every stage shares: its plan (and so its fingerprint), and "find it, or make it".

In: a stage's name, version, the parameters that matter, the artifacts it reads. Out: one artifact's
reference.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from storage.artifacts import ArtifactRef, ArtifactStore, ArtifactWriter, fingerprint


@dataclass(frozen=True)
class Stage:
    """A kind of work. Raise `version` when the same parameters would give another result."""

    name: str
    kind: str
    version: int


@dataclass(frozen=True)
class Plan:
    """One piece of work, told apart from every other by `fingerprint`; making a plan does no work.

    `parameters` holds what changes the result and nothing else (no thread counts, no URLs), the target's, the
    tokenizer's and the chat template's fingerprints included where the stage depends on them.
    """

    stage: Stage
    parameters: Mapping[str, Any]
    inputs: tuple[ArtifactRef, ...] = ()

    @property
    def fingerprint(self) -> str:
        inputs = [ref.fingerprint for ref in self.inputs]
        return fingerprint(self.stage.name, self.stage.version, self.parameters, inputs)

    def find(self, store: ArtifactStore) -> ArtifactRef | None:
        """The finished artifact, or None."""
        return store.find(self.stage.kind, self.fingerprint)

    def open(self, store: ArtifactStore) -> ArtifactWriter:
        """A writer for this plan's artifact, with whatever parts an earlier, killed run left."""
        return store.writer(
            self.stage.kind,
            self.fingerprint,
            stage=self.stage.name,
            stage_version=self.stage.version,
            parameters=self.parameters,
            inputs=self.inputs,
        )


def run_plan(
    plan: Plan, store: ArtifactStore, work: Callable[[ArtifactWriter], Mapping[str, Any]]
) -> ArtifactRef:
    """The plan's artifact: the one that is there, or the one that `work` writes.

    `work` gets the writer, with the parts that a killed run left, and returns the manifest's summary;
    `seconds`, what this run of it took, is added (after a kill the last run's).
    """
    if found := plan.find(store):
        return found
    with plan.open(store) as writer:
        # Again, under the lock: a second build of the same plan waits here, then finds the first one's.
        if found := plan.find(store):
            return found
        started = time.monotonic()
        summary = work(writer)
        return writer.commit({**summary, "seconds": round(time.monotonic() - started, 1)})
