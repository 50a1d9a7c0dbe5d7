"""What an artifact says about itself: `manifest.json`, written last, checked against its own checksum when
read.

In: an artifact's facts. Out: `ArtifactRef` (travels between stages) and `Manifest` (stays with the files).
"""

from __future__ import annotations

import getpass
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any

import xxhash

from storage.errors import StorageError
from storage.folder import FileRecord

MANIFEST = "manifest.json"
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ArtifactRef:
    """One artifact: what is it, which one, where. All that travels between stages."""

    kind: str
    fingerprint: str
    uri: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, str]) -> ArtifactRef:
        return cls(value["kind"], value["fingerprint"], value["uri"])


@dataclass(frozen=True)
class Manifest:
    """An artifact's origin and content. `created` is UTC, ISO 8601; `files` maps names to size, checksum and
    rows.
    """

    ref: ArtifactRef
    stage: str
    stage_version: int
    parameters: Mapping[str, Any]
    inputs: tuple[ArtifactRef, ...]
    summary: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    created: str
    host: str
    user: str
    schema_version: int = field(default=SCHEMA_VERSION)

    @property
    def kind(self) -> str:
        return self.ref.kind

    @property
    def fingerprint(self) -> str:
        return self.ref.fingerprint

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.files.values())

    @property
    def rows(self) -> int:
        """Rows of all Parquet files together."""
        return sum(record.rows or 0 for record in self.files.values())

    @classmethod
    def now(cls, ref: ArtifactRef, **facts: Any) -> Manifest:
        """A manifest made here and now by this user."""
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        return cls(ref, created=created, host=platform.node(), user=_user(), **facts)

    def to_bytes(self) -> bytes:
        """JSON for people and tools; its last key is the checksum of the rest."""
        body = {
            "schema_version": self.schema_version,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "stage": self.stage,
            "stage_version": self.stage_version,
            "created": self.created,
            "host": self.host,
            "user": self.user,
            "rows": self.rows,
            "bytes": self.bytes,
            # Where a store lies is no part of what it holds: it may be moved or copied.
            "inputs": [{"kind": ref.kind, "fingerprint": ref.fingerprint} for ref in self.inputs],
            "parameters": self.parameters,
            "summary": self.summary,
            "files": {name: asdict(record) for name, record in self.files.items()},
        }
        try:
            return json.dumps(
                body | {"checksum": _checksum(body)}, indent=1, ensure_ascii=False, allow_nan=False
            ).encode()
        except (TypeError, ValueError) as error:
            raise StorageError(
                f"{self.kind} {self.fingerprint}: its manifest has no JSON form: {error}"
            ) from None


def read_manifest(data: bytes, ref: ArtifactRef) -> Manifest:
    """Parse the manifest of the artifact `ref`. Raises StorageError where it is damaged or of another
    version.
    """
    where = f"{ref.uri}/{MANIFEST}"
    try:
        body = json.loads(data)
        told = body.pop("checksum")
        if told != _checksum(body):
            raise ValueError("its checksum does not agree")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{where} is damaged ({error}): remove that folder, its stage makes it again"
        ) from None
    if body["schema_version"] != SCHEMA_VERSION:
        raise StorageError(
            f"{where} has schema version {body['schema_version']}, this program reads {SCHEMA_VERSION}"
        )
    base = ref.uri.removesuffix(f"/{ref.kind}/{ref.fingerprint}")
    inputs = ((each["kind"], each["fingerprint"]) for each in body["inputs"])
    return Manifest(
        ref,
        stage=body["stage"],
        stage_version=body["stage_version"],
        parameters=body["parameters"],
        inputs=tuple(ArtifactRef(kind, name, f"{base}/{kind}/{name}") for kind, name in inputs),
        summary=body["summary"],
        files={name: FileRecord(**record) for name, record in body["files"].items()},
        created=body["created"],
        host=body["host"],
        user=body["user"],
        schema_version=body["schema_version"],
    )


def _checksum(body: Mapping[str, Any]) -> str:
    # Over canonical text: the file may be laid out anew, its content may not change.
    return xxhash.xxh3_64_hexdigest(
        json.dumps(body, sort_keys=True, ensure_ascii=False, allow_nan=False).encode()
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "unknown"
