"""The flows' command line: a recipe's name and `--set key=value`, one clear line for every error.

In: arguments. Out: the flow, run here; exit code 0 where it came through, 1 where it failed, 130 where
interrupted. The checks that need no Prefect come before the seconds that its import and server take.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from typing import Any, NoReturn

import yaml

from tasks.recipe import RecipeError, load_recipe

OURS = ("flows.", "tasks.", "storage.", "eagle3core.")


def run_command(flow_name: str) -> NoReturn:
    """Run the flow as the command line asks, and exit."""
    arguments = _arguments(flow_name)
    try:
        overrides = dict(_override(text) for text in arguments.set)
        load_recipe(arguments.recipe, overrides)
        recipe = load_recipe(arguments.recipe)
    except RecipeError as error:
        _fail(str(error))
    os.environ.setdefault("DO_NOT_TRACK", "true")  # read by the libraries when they are imported
    try:
        flow = _load(flow_name)
        _start_server()
        flow(recipe=recipe, overrides=overrides)
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
    return f"unexpected {type(error).__name__}: {text.splitlines()[0]} (the whole traceback is {_log_file()})"


def _arguments(flow_name: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m flows.{flow_name.replace('-', '_')}")
    parser.add_argument("recipe", help="a recipe's name, or the path of a YAML file")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="KEY=VALUE",
        help="another value for one of the recipe's keys, for example training.lr=1e-4; may be repeated",
    )
    return parser.parse_args()


def _override(text: str) -> tuple[str, Any]:
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise RecipeError(f"--set {text!r}: write it as key=value, for example training.lr=1e-4")
    try:
        return key, yaml.safe_load(value)
    except yaml.YAMLError:
        raise RecipeError(f"--set {text!r}: {value!r} is not a YAML value") from None


def _load(flow_name: str) -> Any:
    from tasks.logs import quiet_console

    name = flow_name.replace("-", "_")
    flow = getattr(importlib.import_module(f"flows.{name}"), name)
    quiet_console()
    return flow


def _start_server() -> None:
    from flows.services import prefect_url, server_is_up, start_server

    if not server_is_up():
        start_server()
        print(
            f"started the Prefect server, {prefect_url()} shows this run; `make down` ends it",
            file=sys.stderr,
        )


def _log_file() -> str:
    files = [
        handler.baseFilename
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.FileHandler)
    ]
    return f"in {files[-1]}" if files else "not in a log: nothing had started yet"


def _fail(message: str, code: int = 1) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(code)
