"""The page tells what became of the data: refusals, cuts, servers that went away."""

from __future__ import annotations

import dataclasses

from storage.manifest import ArtifactRef, Manifest
from tasks.engines.requests import ServerCount
from tasks.report.made_of import notes
from tasks.report.page import render
from tests.tasks.report_samples import make_report


def manifest(kind: str, **summary) -> Manifest:
    facts = {"stage": "make", "stage_version": 1, "parameters": {}, "inputs": (), "files": {}}
    return Manifest.now(ArtifactRef(kind, "0" * 20, ""), summary=summary, **facts)


def conversations(**changes) -> Manifest:
    source = {"source": "sharegpt", "rows": 1200, "sampled": 20, "mended": 7, "refused": {}, "cut_off": 0}
    return manifest("conversations", sources=[{**source, **changes}], overlaps_evaluation=0)


def responses(**changes) -> Manifest:
    counts = {"samples": 40, "finish_reasons": {"stop": 40}, "runaway": {}, "refused": 0, "refused_by": {}}
    return manifest("responses", **{**counts, **changes})


def test_rows_are_accounted_for_with_the_commonest_reasons_first():
    (line,) = notes(conversations(refused={"no_user_turn": 2, "duplicate": 1100}))
    assert line.startswith("sharegpt: 1,200 rows read, 20 taken")
    assert line.endswith("1,102 refused (duplicate 1,100, no user turn 2)")


def test_a_file_that_was_cut_off_is_told():
    assert "cut off" in notes(conversations(cut_off=1))[1]


def test_answers_that_were_cut_ran_away_or_never_came():
    cut, none = notes(
        responses(finish_reasons={"length": 9, "stop": 31}, runaway={"T=0": 3}, refused=2, refused_by={"no answer": 2})
    )
    assert cut == "9 of 40 answers were cut at their limit, 3 ran away"
    assert none == "2 prompts got no answer (no answer 2)"
    assert notes(responses()) == ()


def test_answers_of_the_data_are_told_from_the_targets():
    (line,) = notes(responses(finish_reasons={"given": 30, "stop": 10}))
    assert line == "30 answers are the data's own, 10 are the target's"


def test_a_server_that_went_away_is_told_with_its_last_words():
    gone = ServerCount("http://127.0.0.1:8001/v1", 12, 3, 1, False, "connection refused")
    there = ServerCount("http://127.0.0.1:8000/v1", 28, 0, 0, True, "")
    lines = notes(responses(servers=[dataclasses.asdict(gone), dataclasses.asdict(there)]))
    assert lines[0].startswith("http://127.0.0.1:8001/v1 answered 12; 3 attempts failed")
    assert "connection refused" in lines[0] and lines[0].endswith("went away once and was not there at the end")
    assert lines[1] == "http://127.0.0.1:8000/v1 answered 28"


def test_the_page_holds_them_and_other_artifacts_tell_nothing():
    assert notes(manifest("features")) == ()
    report = make_report()
    told = dataclasses.replace(report.lineage[0], notes=("17 rows <refused>",))
    assert "17 rows &lt;refused&gt;" in render(dataclasses.replace(report, lineage=(told,)))
