"""The artifact store: immutable folders `<store>/<kind>/<fingerprint>/`, each with a manifest of what it is
and holds.

In: a store's URI (local folder, or an object store through fsspec). Out: references to whole artifacts, and
writers that leave either a whole artifact or finished parts for the next run. Nothing here knows what the
files mean.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from storage.errors import StorageError, disk_errors
from storage.folder import FileRecord, PartFolder, sync_folder, why_damaged
from storage.locking import file_lock
from storage.manifest import MANIFEST, ArtifactRef, Manifest, read_manifest
from storage.remote import Remote, is_remote

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


def fingerprint(stage: str, version: int, parameters: Mapping[str, Any], inputs: Sequence[str]) -> str:
    """20 hex digits that tell this piece of work from every other: sha256 over canonical JSON.

    Raises StorageError where a parameter has no JSON form (NaN included): a fingerprint must not depend on a
    repr.
    """
    content = {"stage": stage, "version": version, "parameters": parameters, "inputs": list(inputs)}
    try:
        canonical = json.dumps(
            content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
    except (TypeError, ValueError) as error:
        raise StorageError(f"stage {stage}: its parameters cannot be fingerprinted: {error}") from None
    return hashlib.sha256(canonical.encode()).hexdigest()[:20]


@dataclass(frozen=True)
class ArtifactStore:
    """Whole artifacts by kind and fingerprint.

    A local folder holds them itself. For an object store `cache` (default: a folder per store under the
    user's cache) holds fetched copies and what is being written; the manifest is sent last, so an artifact
    is there whole or not at all.
    """

    uri: str
    cache: Path | None = None
    root: Path = field(init=False, repr=False)
    remote: Remote | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if is_remote(self.uri):
            remote = Remote(self.uri)
            object.__setattr__(self, "remote", remote)
            root = self.cache or remote.default_cache()
        else:
            root = Path(self.uri.removeprefix("file://")).expanduser()
        object.__setattr__(self, "root", root.absolute())

    def find(self, kind: str, fingerprint: str) -> ArtifactRef | None:
        """The artifact, where it is whole (its manifest is there)."""
        ref = self.reference(kind, fingerprint)
        whole = (
            self.remote.exists(f"{kind}/{fingerprint}/{MANIFEST}")
            if self.remote
            else (self._folder(ref) / MANIFEST).is_file()
        )
        return ref if whole else None

    def reference(self, kind: str, fingerprint: str) -> ArtifactRef:
        """What the reference to this artifact is, there or not."""
        for name in (kind, fingerprint):
            if not _NAME.fullmatch(name):
                raise StorageError(f"{name!r} cannot be a kind or fingerprint: letters, digits, - and _ only")
        base = self.remote.uri if self.remote else str(self.root)
        return ArtifactRef(kind, fingerprint, f"{base}/{kind}/{fingerprint}")

    def manifest(self, ref: ArtifactRef) -> Manifest:
        """What the artifact is made of. Raises StorageError where it is gone or its manifest is damaged."""
        where = f"{ref.kind}/{ref.fingerprint}/{MANIFEST}"
        try:
            data = self.remote.read(where) if self.remote else (self.root / where).read_bytes()
        except FileNotFoundError:
            raise StorageError(
                f"no artifact {ref.kind}/{ref.fingerprint} in {self.uri}: run its stage again"
            ) from None
        return read_manifest(data, self.reference(ref.kind, ref.fingerprint))

    def writer(
        self,
        kind: str,
        fingerprint: str,
        *,
        stage: str,
        stage_version: int,
        parameters: Mapping[str, Any],
        inputs: Sequence[ArtifactRef] = (),
    ) -> ArtifactWriter:
        """A context manager that writes this artifact, going on from the parts an earlier run left."""
        ref = self.reference(kind, fingerprint)
        return ArtifactWriter(self, ref, stage, stage_version, dict(parameters), tuple(inputs))

    def local(self, ref: ArtifactRef) -> Path:
        """The artifact's folder on this machine; from an object store it is fetched once and verified."""
        folder = self._folder(ref)
        if (folder / MANIFEST).is_file():
            return folder
        manifest = self.manifest(ref)
        if self.remote is None:
            return folder
        with file_lock(self._lock_path(ref), f"{ref.kind} {ref.fingerprint}"):
            if not (folder / MANIFEST).is_file():
                self._fetch(ref, manifest, folder)
        return folder

    def file(self, ref: ArtifactRef, name: str) -> Path:
        """One file of the artifact on this machine; from an object store that file alone is fetched, once."""
        folder = self._folder(ref)
        if self.remote is None or (folder / MANIFEST).is_file():
            return folder / name
        record = self.manifest(ref).files[name]
        single = self.root / ref.kind / ".files" / ref.fingerprint
        if why_damaged(single / name, record):
            with disk_errors(single):
                self.remote.fetch(f"{ref.kind}/{ref.fingerprint}", [name], single)
            self._refuse_damage(ref, single, {name: record})
        return single / name

    def list(self, kind: str | None = None) -> list[ArtifactRef]:
        """Every whole artifact, of one kind or of all, in a stable order."""
        if self.remote:
            pairs = self.remote.artifacts(kind)
        else:
            kinds = [kind] if kind else _visible_folders(self.root)
            pairs = [(each, name) for each in kinds for name in _visible_folders(self.root / each)]
            pairs = [pair for pair in pairs if self.root.joinpath(*pair, MANIFEST).is_file()]
        return [self.reference(*pair) for pair in sorted(pairs)]

    def manifests(self, kind: str) -> Sequence[Manifest]:
        """Of every whole artifact of a kind, the newest first."""
        return sorted(map(self.manifest, self.list(kind)), key=lambda manifest: manifest.created, reverse=True)

    def delete(self, ref: ArtifactRef) -> None:
        """Remove an artifact: at once from sight, then its bytes. Not there is fine."""
        with file_lock(self._lock_path(ref), f"{ref.kind} {ref.fingerprint}"):
            if self.remote:
                self.remote.delete(f"{ref.kind}/{ref.fingerprint}", first=MANIFEST)
            discard(self._folder(ref))

    def damage(self, ref: ArtifactRef) -> dict[str, str]:
        """Read every byte of the artifact; the names of missing or altered files, each with what is wrong."""
        manifest, folder = self.manifest(ref), self.local(ref)
        reasons = {name: why_damaged(folder / name, record) for name, record in manifest.files.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    def repair(self, ref: ArtifactRef, damaged: Sequence[str]) -> None:
        """Take `damaged` files out and turn the artifact back into finished parts: its stage makes only
        those again.
        """
        if self.remote:  # the copy here is what was damaged; the objects are fetched again
            discard(self._folder(ref))
            return
        with file_lock(self._lock_path(ref), f"{ref.kind} {ref.fingerprint}"):
            folder, partial = self._folder(ref), self._partial(ref)
            discard(partial)
            (folder / MANIFEST).unlink()
            for name in damaged:
                (folder / name).unlink(missing_ok=True)
            os.rename(folder, partial)

    def _fetch(self, ref: ArtifactRef, manifest: Manifest, folder: Path) -> None:
        assert self.remote is not None
        fetched = folder.with_name(f".fetch-{ref.fingerprint}")
        shutil.rmtree(fetched, ignore_errors=True)
        with disk_errors(fetched):
            self.remote.fetch(f"{ref.kind}/{ref.fingerprint}", [*manifest.files, MANIFEST], fetched)
        self._refuse_damage(ref, fetched, manifest.files)
        discard(folder)
        os.rename(fetched, folder)

    def _refuse_damage(self, ref: ArtifactRef, folder: Path, files: Mapping[str, FileRecord]) -> None:
        for name, record in files.items():
            if reason := why_damaged(folder / name, record):
                shutil.rmtree(folder)
                raise StorageError(
                    f"{ref.uri}/{name} arrived damaged ({reason}): try again, or delete the artifact"
                )

    def _folder(self, ref: ArtifactRef) -> Path:
        return self.root / ref.kind / ref.fingerprint

    def _partial(self, ref: ArtifactRef) -> Path:
        return self.root / ref.kind / f".partial-{ref.fingerprint}"

    def _lock_path(self, ref: ArtifactRef) -> Path:
        return self.root / ref.kind / f".lock-{ref.fingerprint}"


class ArtifactWriter(PartFolder):
    """Makes one artifact in `<store>/<kind>/.partial-<fingerprint>/`, alone: a second writer waits at `with`.

    Left without `commit` (an error, a kill) the finished parts stay for the next writer; an empty folder
    does not.
    """

    def __init__(
        self,
        store: ArtifactStore,
        ref: ArtifactRef,
        stage: str,
        stage_version: int,
        parameters: Mapping[str, Any],
        inputs: tuple[ArtifactRef, ...],
    ) -> None:
        super().__init__(store._partial(ref))
        self.store, self.ref = store, ref
        self.stage, self.stage_version, self.parameters, self.inputs = (
            stage,
            stage_version,
            parameters,
            inputs,
        )
        self._held = ExitStack()

    def __enter__(self) -> ArtifactWriter:
        with disk_errors(self.folder):
            self._held.enter_context(
                file_lock(self.store._lock_path(self.ref), f"{self.ref.kind} {self.ref.fingerprint}")
            )
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clean()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held:
            finished = self.store.find(self.ref.kind, self.ref.fingerprint) is not None
            if self.folder.exists() and (finished or not _has_files(self.folder)):
                discard(self.folder)

    def commit(self, summary: Mapping[str, Any]) -> ArtifactRef:
        """Checksum every file, write the manifest, and put the whole folder under its final name."""
        if found := self.store.find(self.ref.kind, self.ref.fingerprint):
            return found
        manifest = Manifest.now(
            self.ref,
            stage=self.stage,
            stage_version=self.stage_version,
            parameters=self.parameters,
            inputs=self.inputs,
            summary=dict(summary),
            files=self.records(),
        )
        if self.store.remote:
            where = f"{self.ref.kind}/{self.ref.fingerprint}"
            self.store.remote.send(self.folder, list(manifest.files), where)
            self.store.remote.write(f"{where}/{MANIFEST}", manifest.to_bytes())
        self._put_in_place(manifest)
        logger.info(
            "%s %s: %d files, %s bytes",
            self.ref.kind,
            self.ref.fingerprint,
            len(manifest.files),
            f"{manifest.bytes:,}",
        )
        return self.ref

    def _put_in_place(self, manifest: Manifest) -> None:
        final = self.store._folder(self.ref)
        discard(final)  # a folder without a manifest: someone took it apart by hand
        self.write_bytes(MANIFEST, manifest.to_bytes())
        self.journal_path.unlink(missing_ok=True)
        for folder in [self.folder, *(path for path in self.folder.rglob("*") if path.is_dir())]:
            sync_folder(folder)
        os.rename(self.folder, final)
        sync_folder(final.parent)


def discard(folder: Path) -> None:
    """Remove a folder so that a kill in the middle leaves no half of it under its name."""
    if not folder.exists():
        return
    trash = folder.with_name(f".trash-{secrets.token_hex(4)}")
    os.rename(folder, trash)
    shutil.rmtree(trash)


def _has_files(folder: Path) -> bool:
    return any(path.is_file() and not path.name.startswith(".") for path in folder.rglob("*"))


def _visible_folders(folder: Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
