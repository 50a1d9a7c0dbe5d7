"""Reads every byte of a store against its checksums, and takes damaged files out on request.

In: a store. Out: one line for each damaged file; with --repair its artifact goes back to being finished
parts, of which the next build makes only the missing ones. `python -m storage.check STORE [--repair]`
"""

from __future__ import annotations

import argparse
import sys

from storage.artifacts import ArtifactStore
from storage.errors import StorageError


def main(arguments: list[str]) -> int:
    """Exit code 0: all whole (or repaired); 1: damage found."""
    parser = argparse.ArgumentParser(
        prog="python -m storage.check", description="Verify every file of a store."
    )
    parser.add_argument("store", help="local folder or object-store URL")
    parser.add_argument(
        "--repair", action="store_true", help="take damaged files out, so that they are made again"
    )
    options = parser.parse_args(arguments)
    store, bad = ArtifactStore(options.store), 0
    references = store.list()
    for ref in references:
        try:
            damaged = store.damage(ref)
            for name, reason in damaged.items():
                print(f"{ref.kind}/{ref.fingerprint}/{name}: {reason}")
            if damaged and options.repair:
                store.repair(ref, list(damaged))
                print(f"{ref.kind}/{ref.fingerprint}: taken out; run the build again to make it whole")
        except StorageError as error:
            print(error, file=sys.stderr)
            damaged = {"": ""}
        bad += bool(damaged)
    print(f"{len(references)} artifacts, {bad} damaged")
    return 1 if bad and not options.repair else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
