"""Imports run one way: flows -> tasks -> {eagle3core, storage}; the core needs torch and safetensors only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINT = Path(sys.executable).parent / "lint-imports"


def imported(package: str) -> set[str]:
    """Top-level names that a package's files import, wherever in the file."""
    names: set[str] = set()
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names.add(node.module.split(".")[0])
    return names


def test_the_contract_of_import_linter_is_kept():
    found = subprocess.run([LINT, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_core_imports_torch_safetensors_and_the_standard_library():
    assert imported("eagle3core") - set(sys.stdlib_module_names) <= {
        "torch",
        "safetensors",
        "eagle3core",
        "triton",
    }


def test_storage_knows_no_torch():
    assert not imported("storage") & {"torch", "eagle3core", "tasks", "flows", "transformers"}


def test_one_file_knows_mlflow():
    users = [
        path.relative_to(ROOT).as_posix()
        for package in ("flows", "tasks", "storage", "eagle3core")
        for path in (ROOT / package).rglob("*.py")
        if any(
            line.lstrip().startswith(("import mlflow", "from mlflow"))
            for line in path.read_text().splitlines()
        )
    ]
    assert users == ["tasks/tracking.py"]


@pytest.mark.parametrize("module", ["tasks.stage_task", "tasks.build_vocabulary"])
def test_importing_a_stage_does_not_import_the_orchestrator(module: str):
    code = f"import sys, {module}; assert not {{'prefect', 'mlflow'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
