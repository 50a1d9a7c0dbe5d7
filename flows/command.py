"""The command line: a flow or a look at one, a recipe, `--set key=value`; one clear line for every error.

In: arguments. Out: the flow, run here; exit code 0 where it came through, 1 where it failed, 130 where
interrupted. What needs no Prefect is checked before the seconds that its import and its server take.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import yaml

from tasks.recipe import Recipe, RecipeError, load_recipe

EXPERIMENTS = ("compare-drafters", "ablate-draft", "scale-data")
FLOWS = ("build-draft", "regenerate-data", "evaluate-draft", *EXPERIMENTS)
LOOKS = ("plan", "report")
OURS = ("flows.", "tasks.", "storage.", "eagle3core.")


def main(words: list[str] | None = None) -> NoReturn:
    """Do what the command line asks, and exit."""
    arguments = _parser().parse_args(words)
    os.environ.setdefault("DO_NOT_TRACK", "true")  # read by the libraries when they are imported
    exit_with(lambda: _command(arguments.what)(arguments.recipe, dict(map(_override, arguments.set))))


def exit_with(work: Callable[[], None]) -> NoReturn:
    """Call `work` and exit; an error is one line on stderr."""
    try:
        work()
    except KeyboardInterrupt:
        _fail("interrupted; the same command goes on where this one stopped", code=130)
    except Exception as error:
        _fail(one_line(error))
    sys.exit(0)


def one_line(error: BaseException) -> str:
    """What went wrong, for a person: our own errors speak for themselves, others are named and point at the
    log.
    """
    text = str(error).strip() or type(error).__name__
    if type(error).__module__.startswith(OURS) or isinstance(error, OSError):
        return text
    from tasks.logs import last_log_file

    where = last_log_file() or "no log: nothing had started yet"
    return f"unexpected {type(error).__name__}: {text.splitlines()[0]} (the traceback is in {where})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m flows", description="Run a flow here, or look at what it would do."
    )
    parser.add_argument("what", choices=[*FLOWS, *LOOKS])
    parser.add_argument("recipe", help="a recipe's name, or the path of a YAML file")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="another value for one of the recipe's keys, for example training.lr=1e-4; may be repeated",
    )
    return parser


def _command(what: str) -> Callable[[str, Mapping[str, Any]], None]:
    if what in FLOWS:
        return lambda recipe, overrides: _run_flow(what.replace("-", "_"), recipe, overrides)
    return lambda recipe, overrides: _look(what, load_recipe(recipe, overrides))


def _run_flow(name: str, recipe: str, overrides: Mapping[str, Any]) -> None:
    checked = load_recipe(recipe, overrides)
    if name.replace("_", "-") in EXPERIMENTS:
        from tasks.experiment.arms import arm_runs

        arm_runs(name, checked)
    from tasks.logs import quiet_console

    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    quiet_console()
    _ensure_server()
    flow(recipe=load_recipe(recipe), overrides=dict(overrides))


def _look(what: str, recipe: Recipe) -> None:
    from flows import look

    getattr(look, what)(recipe)


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set {text!r}: write it as key=value, for example training.lr=1e-4")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"--set {text!r}: {value!r} is not a YAML value") from None


def _ensure_server() -> None:
    from flows.services import prefect_url, server_is_up, start_server

    if not server_is_up():
        start_server()
        notice = f"started the Prefect server: {prefect_url()} shows this run, `make down` ends it"
        print(notice, file=sys.stderr)


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
