"""The command line: overrides, one line for every error, an exit code that is not 0."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flows import look
from flows.command import exit_with, main, one_line
from flows.services import ServiceError
from storage.errors import StorageError
from tasks.recipe import Recipe


def exit_code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    return exit_.value.code


def test_overrides_are_read_as_yaml_and_reach_the_recipe(monkeypatch: pytest.MonkeyPatch):
    seen: list[Recipe] = []
    monkeypatch.setattr(look, "plan", seen.append)
    changes = ["--set", "training.lr=1e-4", "draft.fc_norm=false", "--set", "training.betas=[0.8, 0.9]"]
    assert exit_code(["plan", "smollm2-135m", *changes]) == 0
    assert (seen[0].training.lr, seen[0].draft.fc_norm, seen[0].training.betas) == (1e-4, False, (0.8, 0.9))


@pytest.mark.parametrize("what", ["build-draft", "plan"])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonesuch"], "no recipe 'nonesuch'"),
        (["smollm2-135m", "--set", "training.lr"], "write it as key=value"),
        (["smollm2-135m", "--set", "training.lr=[1"], "not a YAML value"),
        (["smollm2-135m", "--set", "training.speed=3"], "training.speed"),
    ],
)
def test_a_wrong_word_is_one_line_on_stderr(
    what: str, words: list[str], said: str, capsys: pytest.CaptureFixture
):
    assert exit_code([what, *words]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert said in lines[0]


def test_our_errors_speak_for_themselves_and_others_point_at_the_log():
    assert one_line(StorageError("disk full while writing x")) == "disk full while writing x"
    assert one_line(ServiceError("port 4200 is taken")) == "port 4200 is taken"
    assert one_line(OSError(28, "No space left on device")).endswith("No space left on device")
    text = one_line(KeyError("weights"))
    assert text.startswith("unexpected KeyError: 'weights' (the traceback is in ")


def test_an_interrupt_says_that_the_same_command_goes_on(capsys: pytest.CaptureFixture):
    def work() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as exit_:
        exit_with(work)
    assert exit_.value.code == 130
    assert "goes on where" in capsys.readouterr().err


def test_the_real_command_fails_in_one_line_before_anything_is_started():
    found = subprocess.run(
        [sys.executable, "-m", "flows", "build-draft", "nonesuch"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1
    assert found.stdout == ""
    assert len(found.stderr.splitlines()) == 1
    assert "smollm2-135m" in found.stderr
