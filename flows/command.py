"""The flows' command line: a recipe's name and `--set key=value`, one clear line for every error.

In: arguments. Out: the flow, run here; exit code 0 where it came through, 1 where it failed, 130 where
interrupted. The checks that need no Prefect come before the seconds that its import and its server take.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import yaml

from tasks.recipe import Recipe, RecipeError, load_recipe

OURS = ("flows.", "tasks.", "storage.", "eagle3core.")


def parser(module: str) -> argparse.ArgumentParser:
    """A recipe, and overrides of it."""
    made = argparse.ArgumentParser(prog=f"python -m {module}")
    made.add_argument("recipe", help="a recipe's name, or the path of a YAML file")
    made.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="another value for one of the recipe's keys, for example training.lr=1e-4; may be repeated",
    )
    return made


def run_flow(flow_name: str) -> NoReturn:
    """Run the flow as the command line asks, and exit."""
    module = f"flows.{flow_name.replace('-', '_')}"
    arguments = parser(module).parse_args()

    def run(_: Recipe) -> None:
        from tasks.logs import quiet_console

        # By its own name, not as __main__: what Prefect stores of it has to be found again.
        flow = getattr(importlib.import_module(module), module.removeprefix("flows."))
        quiet_console()
        _ensure_server()
        flow(recipe=load_recipe(arguments.recipe), overrides=dict(map(_override, arguments.set)))

    run_plain(run, arguments)


def run_plain(work: Callable[[Recipe], None], arguments: argparse.Namespace) -> NoReturn:
    """Call `work` with the recipe as overridden, and exit; an error is one line on stderr."""
    os.environ.setdefault("DO_NOT_TRACK", "true")  # read by the libraries when they are imported
    try:
        work(load_recipe(arguments.recipe, dict(map(_override, arguments.set))))
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
    return f"unexpected {type(error).__name__}: {text.splitlines()[0]} (the traceback is in {_log_file()})"


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


def _log_file() -> str:
    from tasks.logs import last_log_file

    return str(last_log_file() or "no log: nothing had started yet")


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    logging.shutdown()
    sys.exit(code)
