"""Removes what nobody needs any more, after asking.

In: a store. Out: superseded, broken and orphaned artifacts, and what killed runs left, listed with their
size and deleted on "y" (or with --yes). `python -m storage.gc STORE [--yes] [--days N]`
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from storage.artifacts import ArtifactStore, discard
from storage.errors import StorageError
from storage.lineage import Lineage, Use
from storage.locking import file_lock
from storage.manifest import ArtifactRef

# A build in progress has published nothing yet: what is younger than this is left alone.
DAYS = 1.0


@dataclass(frozen=True)
class Candidate:
    """Something that may go: an artifact (`ref`), or a folder that a killed run left (`folder`)."""

    name: str
    why: str
    bytes: int
    ref: ArtifactRef | None = None
    folder: Path | None = None


def candidates(store: ArtifactStore, days: float = DAYS, now: float | None = None) -> list[Candidate]:
    """What may go and is at least `days` old, the largest first. A damaged manifest is a StorageError, not
    garbage.
    """
    before = (time.time() if now is None else now) - days * 86400
    lineage = Lineage.of(store.manifest(ref) for ref in store.list())
    found = []
    for key, manifest in lineage.manifests.items():
        use = lineage.use(key)
        if use is not Use.USED and datetime.fromisoformat(manifest.created).timestamp() < before:
            found.append(Candidate("/".join(key), use, manifest.bytes, ref=manifest.ref))
    for folder in store.root.glob("*/.*-*"):
        if folder.is_dir() and folder.stat().st_mtime < before:
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            found.append(
                Candidate(f"{folder.parent.name}/{folder.name}", "left by a killed run", size, folder=folder)
            )
    return sorted(found, key=lambda each: (-each.bytes, each.name))


def remove(store: ArtifactStore, candidate: Candidate) -> None:
    """Delete it. Raises StorageError where a writer is at work on it."""
    if candidate.ref:
        store.delete(candidate.ref)
    elif candidate.folder and candidate.folder.name.startswith(".partial-"):
        fingerprint = candidate.folder.name.removeprefix(".partial-")
        with file_lock(candidate.folder.with_name(f".lock-{fingerprint}"), candidate.name, wait=False):
            discard(candidate.folder)
    elif candidate.folder:
        shutil.rmtree(candidate.folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m storage.gc", description="Remove what no published draft needs."
    )
    parser.add_argument("store", help="local folder or object-store URL")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--days", type=float, default=DAYS, help="leave alone what is younger (default %(default)s)"
    )
    options = parser.parse_args(arguments)
    try:
        store = ArtifactStore(options.store)
        found = candidates(store, options.days)
        if not found:
            print("nothing to remove")
            return 0
        for each in found:
            print(f"{each.bytes:>16,}  {each.why:<20}  {each.name}")
        total = f"{len(found)} items, {sum(each.bytes for each in found):,} bytes"
        if not options.yes and input(f"delete {total}? [y/N] ").strip().lower() not in {"y", "yes"}:
            print("nothing removed")
            return 0
        for each in found:
            remove(store, each)
        print(f"removed {total}")
    except StorageError as error:
        print(error, file=sys.stderr)
        return 1
    except EOFError:
        print("\nnothing removed: no answer (use --yes where nobody can be asked)", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
