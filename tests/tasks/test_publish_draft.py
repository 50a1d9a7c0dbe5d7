"""Publishing: what a user takes away, and what the command line of the report does."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from storage.artifacts import ArtifactStore
from tasks.evaluation import SUMMARY, Evaluation
from tasks.model_card import headline, serve_commands
from tasks.publish_draft import plan, run
from tasks.report.__main__ import main
from tasks.report.data import gather
from tasks.report.serving import read_serving, serving_suspicion
from tests.tasks.report_samples import make_evaluation, make_report, make_serving, serving_summary


@pytest.fixture(scope="module")
def made(small_build):
    """The build's parts, a serving check that kept its promise, and the published draft."""
    build = small_build
    store, draft, acceptance = build.store, build.draft, build.acceptance
    with store.writer(
        "serving", "s" * 20, stage="check-serving", stage_version=1, parameters={}, inputs=[draft, acceptance]
    ) as writer:
        writer.write_json("summary.json", serving_summary(make_serving(make_evaluation())))
        serving = writer.commit({})
    published = run(build.recipe, build.target, store, draft, acceptance, serving)
    return build.recipe, build.target, store, draft, acceptance, serving, published


def test_the_folder_is_what_a_server_loads_and_a_person_reads(made):
    _, _, store, draft, _, _, published = made
    folder = store.local(published)
    for name in ("model.safetensors", "config.json"):
        assert (folder / name).read_bytes() == (store.local(draft) / "draft" / name).read_bytes()
    names = {path.name for path in folder.iterdir()}
    expected = {"model.safetensors", "config.json", "README.md", "report.html", "curves.svg", "curves.png"}
    assert names == {*expected, "manifest.json"}


def test_the_card_says_the_run_s_own_figures(made):
    recipe, target, store, _, acceptance, _, published = made
    card = (store.local(published) / "README.md").read_text()
    front, text = card.split("---\n", 2)[1:]
    assert yaml.safe_load(front)["tags"] == ["speculative-decoding", "eagle3", "draft-model"]
    for figures in Evaluation.read(store.local(acceptance)).figures:
        assert f"| temperature {figures.temperature:g} | {figures.walk.tau_micro.value:.2f} " in text
    assert "messages (nowhere.jsonl), answered by the target itself" in text
    command = re.search(r"vllm serve (\S+) --speculative-config '(.*)'", text)
    assert command[1] == target.model
    assert json.loads(command[2]) == {
        "method": "eagle3", "model": published.uri, "num_speculative_tokens": recipe.evaluation.chain_length,
    }  # fmt: skip


def test_the_report_names_every_ancestor(made):
    _, _, store, draft, acceptance, serving, published = made
    report = gather(store, draft, acceptance, serving)
    kinds = [row.kind for row in report.lineage]
    assert kinds == ["responses", "features", "vocabulary", "draft", "acceptance", "serving"]
    page = (store.local(published) / "report.html").read_text()
    assert all(row.fingerprint in page for row in report.lineage)
    assert report.training.steps == store.manifest(draft).summary["steps"]


def test_a_draft_without_serving_check_is_published_too(made):
    recipe, target, store, draft, acceptance, _, published = made
    ref = run(recipe, target, store, draft, acceptance)
    assert ref != published
    assert "was not part of this build" in (store.local(ref) / "report.html").read_text()
    assert plan(recipe, target, draft, acceptance).fingerprint == ref.fingerprint


def test_a_draft_that_is_too_good_is_flagged_everywhere(made, tmp_path: Path):
    recipe, target, store, draft, acceptance, *_ = made
    other = ArtifactStore(str(tmp_path / "store"))
    shutil.copytree(store.root, other.root, ignore=lambda folder, names: {"published"} & set(names))
    file = other.local(acceptance) / SUMMARY
    evaluation = json.loads(file.read_text())
    for figures in evaluation["figures"]:
        for rate in figures["walk"]["survival"]:
            rate["value"] = 1.0
    file.write_text(json.dumps(evaluation))
    ref = run(recipe, target, other, draft, acceptance)
    assert "leaks" in other.manifest(ref).summary["suspicious"]
    for name in ("README.md", "report.html"):
        assert "Do not serve this draft" in (other.local(ref) / name).read_text()


def test_a_server_that_breaks_the_promise_is_named():
    serving = make_serving(make_evaluation())
    assert serving_suspicion(serving) is None
    check = serving.checks[0]
    broken = dataclasses.replace(check.agreement[1], inside=False, explained=False)
    broken_check = dataclasses.replace(check, agreement=(broken,))
    assert "position 2" in serving_suspicion(dataclasses.replace(serving, checks=(broken_check,)))


@pytest.mark.parametrize(("gaps", "named"), [((0.001, 0.1), False), ((0.001, 2.5), True), ((None,), True)])
def test_a_tie_may_fall_otherwise_but_nothing_else_may(tmp_path: Path, gaps: tuple, named: bool):
    serving = make_serving(make_evaluation())
    (tmp_path / "summary.json").write_text(json.dumps(serving_summary(serving, gaps)))
    message = serving_suspicion(read_serving(tmp_path))
    assert ("1 greedy answers differ" in message) if named else message is None


def test_a_serving_check_survives_json(tmp_path: Path):
    serving = make_serving(make_evaluation())
    (tmp_path / "summary.json").write_text(json.dumps(serving_summary(serving), allow_nan=False))
    found = read_serving(tmp_path)
    assert serving_summary(found) == serving_summary(serving)


def test_commands_quote_the_chain_length():
    commands = serve_commands("org/target", "/drafts/x", 5)
    assert "--speculative-num-steps 5" in commands.sglang
    assert "--speculative-num-draft-tokens 6" in commands.sglang
    assert '"num_speculative_tokens": 5' in commands.vllm


def test_the_headline_says_both_temperatures():
    assert headline(make_report()).count("tokens per target pass") == 2


def test_the_command_line_lists_reports_and_compares(
    made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, _, store, draft, *_ = made
    assert main([store.uri]) == 0
    assert draft.fingerprint in capsys.readouterr().out
    out = tmp_path / "one.html"
    assert main([store.uri, draft.fingerprint[:8], "--out", str(out)]) == 0
    assert "Acceptance per draft position" in out.read_text()
    assert main([store.uri, draft.fingerprint, draft.fingerprint, "--out", str(out)]) == 0
    assert "2 drafts side by side" in out.read_text()
    assert main([store.uri, "nothing-like-it"]) == 1
    assert "no draft begins with" in capsys.readouterr().err
