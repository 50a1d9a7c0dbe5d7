"""`python -m tasks.report STORE FINGERPRINT...`: the report of one draft, or several side by side.

In: a store and fingerprints (or unique beginnings) of drafts. Out: an HTML file, whose place is printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from storage.artifacts import ArtifactRef, ArtifactStore
from storage.errors import StorageError
from tasks.report.compare import render_comparison
from tasks.report.data import DraftReport, gather
from tasks.report.page import render


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.report", description="One draft's report, or several compared."
    )
    parser.add_argument("store", help="the artifact store: a folder or an object-store URL")
    parser.add_argument(
        "drafts", nargs="*", help="fingerprints of drafts, or their beginnings; none: list what is there"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("report.html"), help="the file to write (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    store = ArtifactStore(options.store)
    try:
        if not options.drafts:
            print(listing(store))
            return 0
        reports = [find_report(store, name) for name in options.drafts]
        options.out.write_text(render(reports[0]) if len(reports) == 1 else render_comparison(reports))
    except (StorageError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.out.absolute())
    return 0


def find_report(store: ArtifactStore, name: str) -> DraftReport:
    """The report of the draft whose fingerprint begins with `name`. Raises ValueError where it is not one
    draft.
    """
    found = [ref for ref in store.list("draft") if ref.fingerprint.startswith(name)]
    if len(found) != 1:
        there = "several drafts begin" if found else "no draft begins"
        raise ValueError(f"{there} with {name!r} in {store.uri}; there are: {listing(store)}")
    acceptance = made_of(store, "acceptance", found[0])
    if acceptance is None:
        raise ValueError(f"draft {found[0].fingerprint} was never evaluated: run the evaluate-draft flow")
    return gather(store, found[0], acceptance, made_of(store, "serving", found[0]))


def made_of(store: ArtifactStore, kind: str, draft: ArtifactRef) -> ArtifactRef | None:
    """The newest artifact of `kind` that was made of `draft`."""
    return next((manifest.ref for manifest in store.manifests(kind) if draft in manifest.inputs), None)


def listing(store: ArtifactStore) -> str:
    """Every draft, newest first: fingerprint, recipe, validation tau."""
    lines = [f"{m.fingerprint}  {m.created[:16]}  {m.summary.get('recipe', '')}" for m in store.manifests("draft")]
    return "\n".join(lines) or "no draft at all"


if __name__ == "__main__":
    sys.exit(main())
