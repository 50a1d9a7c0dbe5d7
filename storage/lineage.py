"""Which artifacts came from which, and which nobody needs any more.

In: the manifests of a store. Out: ancestors, and for each artifact whether it is in use, superseded or
orphaned.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from storage.manifest import Manifest

# What builds and experiments are made for: whatever led to one of these is in use.
FINAL_KINDS = frozenset({"published", "experiment"})

Key = tuple[str, str]


class Use(StrEnum):
    """`used`: a published draft or an experiment came from it, or it is one. `superseded`: the same work was done again by a
    newer version of a stage. `broken`: something it was made from is gone. `orphaned`: nothing published
    came from it (yet).
    """

    USED = "used"
    SUPERSEDED = "superseded"
    BROKEN = "broken"
    ORPHANED = "orphaned"


@dataclass(frozen=True)
class Lineage:
    """All manifests of a store, by (kind, fingerprint)."""

    manifests: dict[Key, Manifest]

    @classmethod
    def of(cls, manifests: Iterable[Manifest]) -> Lineage:
        return cls({key(manifest): manifest for manifest in manifests})

    def ancestors(self, start: Key) -> set[Key]:
        """Everything an artifact was made from, directly or not; what is gone from the store is among it."""
        if start not in self._ancestors:
            manifest = self.manifests.get(start)
            inputs = {(ref.kind, ref.fingerprint) for ref in manifest.inputs} if manifest else set()
            self._ancestors[start] = inputs.union(*(self.ancestors(each) for each in inputs))
        return self._ancestors[start]

    def use(self, artifact: Key) -> Use:
        """What an artifact of the store is good for."""
        if artifact in self._superseded:
            return Use.SUPERSEDED
        if any(each not in self.manifests for each in self.ancestors(artifact)):
            return Use.BROKEN
        return Use.USED if artifact in self._used else Use.ORPHANED

    @cached_property
    def _superseded(self) -> set[Key]:
        # The same work: equal kind, stage and parameters on inputs that are the same work in turn, whatever
        # the version.
        newest: dict[str, Manifest] = {}
        for manifest in sorted(self.manifests.values(), key=lambda each: each.created):
            newest[self._work(key(manifest))] = manifest
        return {each for each in self.manifests if key(newest[self._work(each)]) != each}

    @cached_property
    def _used(self) -> set[Key]:
        final = {each for each in self.manifests if each[0] in FINAL_KINDS and each not in self._superseded}
        return final.union(*(self.ancestors(each) for each in final))

    @cached_property
    def _ancestors(self) -> dict[Key, set[Key]]:
        return {}

    @cached_property
    def _works(self) -> dict[Key, str]:
        return {}

    def _work(self, artifact: Key) -> str:
        if artifact not in self._works:
            manifest = self.manifests.get(artifact)
            if manifest is None:
                self._works[artifact] = artifact[1]
            else:
                inputs = [self._work((ref.kind, ref.fingerprint)) for ref in manifest.inputs]
                text = json.dumps(
                    [manifest.kind, manifest.stage, manifest.parameters, inputs], sort_keys=True
                )
                self._works[artifact] = hashlib.sha256(text.encode()).hexdigest()
        return self._works[artifact]


def key(manifest: Manifest) -> Key:
    return manifest.kind, manifest.fingerprint
