"""The stage over real servers on loopback: one is killed in the middle, one prompt breaks whoever is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from storage.schemas import QuarantineRow, ResponseRow, read_rows
from tasks import make_responses
from tasks.engines import worker
from tasks.engines.http import ATTEMPTS, HttpEngine
from tasks.engines.requests import EngineOptions, Job, Request, TargetFiles, WorkerSpec
from tasks.engines.servers import ServerError
from tasks.templates import Template
from tests.tasks.completion_server import END, ServerProcess, answer_to
from tests.tasks.tiny_build import tiny_build
from tests.tiny_target import make_tiny_target

TRAIN, HELDOUT = 40, 3


@contextmanager
def servers(*started: ServerProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for server in started:
            server.kill()


def test_one_of_two_servers_killed_half_way_costs_nothing_and_the_summary_says_so(tmp_path: Path, caplog):
    one, two = (ServerProcess(tmp_path / f"{name}.log", 0.2) for name in ("one", "two"))

    def kill_half_way() -> None:
        while two.asked < 8:
            time.sleep(0.01)
        two.kill()

    with servers(one, two):
        killer = threading.Thread(target=kill_half_way)
        killer.start()
        http = {"responses.engine": "http", "responses.servers": [one.url, two.url], "responses.max_num_seqs": 4}
        build = tiny_build(tmp_path, train=TRAIN, heldout=HELDOUT, **http, **{"data.max_turns": 1})
        ref = make_responses.run(build.recipe, build.target, build.store, build.conversations)
        killer.join()
    folder, summary = build.store.local(ref), build.store.manifest(ref).summary
    rows = list(read_rows(ResponseRow, folder))
    assert list(read_rows(QuarantineRow, folder, "quarantine-*.parquet")) == []
    ids = [row.id for row in rows]
    expected = {f"c/{i}" for i in range(TRAIN)} | {
        f"c/{i}@{t:g}" for i in range(TRAIN, TRAIN + HELDOUT) for t in (0.0, 1.0)
    }
    assert (set(ids), len(ids), summary["refused"]) == (expected, len(expected), 0)
    for row in rows:
        (span,) = row.spans
        assert list(row.token_ids[span.start : span.end]) == answer_to(row.token_ids[: span.start])
    first, second = ({each["server"]: each for each in summary["servers"]}[url] for url in (one.url, two.url))
    assert first["answered"] + second["answered"] == len(expected)
    assert 0 < second["answered"] < first["answered"]
    assert (first["up"], first["failed"], first["times_away"]) == (True, 0, 0)
    assert (second["up"], second["times_away"]) == (False, 1) and second["failed"] >= 1 and second["error"]
    assert any("is away" in record.message and two.url in record.message for record in caplog.records)


def test_a_prompt_that_breaks_its_server_is_set_aside_after_some_tries_and_the_rest_is_answered(
    tmp_path: Path, monkeypatch
):
    folder = make_tiny_target(tmp_path / "target")
    target = TargetFiles(str(folder), "float32", (END,), (folder / "chat_template.jinja").read_text(), {}, False)
    hostile = Template.load(target).tokenizer("zz", add_special_tokens=False).input_ids[0]
    asked = [[{"role": "user", "content": "zz" if i % 5 == 0 else f"abc {i}"}] for i in range(20)]
    jobs = [Job(f"j{i}", i // 10, asked[i], 0.0, 12) for i in range(20)]
    events: list[dict] = []
    monkeypatch.setattr(worker, "emit", events.append)
    one = ServerProcess(tmp_path / "one.log", 0.0, hostile)
    with servers(one):
        options = EngineOptions("http", 4, 256, 0.3, None, 1, False, 0, servers=(one.url,))
        engine = HttpEngine(target, options, say=events.append, longest_rest=0.01)
        worker.run(WorkerSpec(target, options, None, jobs, 160, str(tmp_path)), engine)
    parts = [event for event in events if event["kind"] == "part"]
    refused = [each for part in parts for each in part["refused"]]
    assert sorted(each["id"] for each in refused) == ["j0", "j10", "j15", "j5"]
    assert all(each["reason"] == "no answer" and "broken by this prompt" in each["detail"] for each in refused)
    assert sum(len(part["samples"]) for part in parts) == 16
    last = [event for event in events if event["kind"] == "server"][-1]
    assert (last["up"], last["answered"], last["failed"]) == (True, 16, 4 * ATTEMPTS)
    assert one.asked == 16 + 4 * ATTEMPTS


def test_a_server_that_comes_back_is_asked_again(tmp_path: Path):
    target = TargetFiles("/nowhere", "float32", (END,), "", {}, False)
    one = ServerProcess(tmp_path / "one.log", 0.0)
    port = int(one.url.split(":")[2].split("/")[0])
    said: list[dict] = []
    options = EngineOptions("http", 2, 256, 0.3, None, 1, False, 0, servers=(one.url,))
    engine = HttpEngine(target, options, say=said.append, longest_rest=0.05)
    one.kill()
    for i in range(4):
        engine.add(Request(str(i), [5, i], max_new_tokens=8))
    time.sleep(0.2)
    again = ServerProcess(tmp_path / "one.log", 0.0, port=port)
    with servers(again):
        done: dict[str, list[int]] = {}
        while len(done) < 4:
            done |= {each.id: each.token_ids for each in engine.step()}
    assert done == {str(i): answer_to([5, i]) for i in range(4)}
    assert [event["up"] for event in said][:3] == [True, False, True]


def test_when_no_server_answers_any_more_the_run_stops_and_says_so(tmp_path: Path):
    target = TargetFiles("/nowhere", "float32", (END,), "", {}, False)
    one = ServerProcess(tmp_path / "one.log", 0.0)
    options = EngineOptions("http", 2, 256, 0.3, None, 1, False, 0, servers=(one.url,))
    engine = HttpEngine(target, options, longest_rest=0.05, patience=0.5)
    one.kill()
    engine.add(Request("a", [5], max_new_tokens=8))
    with pytest.raises(ServerError, match=r"none has answered .*start them, and give the same command again"):
        engine.step()
    with pytest.raises(ServerError, match=r"none of .* answers .*start them first"):
        HttpEngine(target, options, longest_rest=0.05)
