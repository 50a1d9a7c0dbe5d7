"""SQL over a store, what is still needed, and removing what is not."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from storage import catalog as catalog_command
from storage import check, gc
from storage.artifacts import ArtifactRef, ArtifactStore
from storage.catalog import QUESTIONS, VIEWS, Catalog
from storage.errors import StorageError
from storage.lineage import Lineage, Use
from storage.locking import file_lock
from storage.schemas import AcceptanceRow, ConversationRow, Message, QuarantineRow, to_table
from tests.storage.feature_samples import make_sample, make_spec, write_features

LATER = time.time() + 10 * 86400


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "it's a store"))


def put(
    store: ArtifactStore, kind: str, name: str, *inputs: ArtifactRef, version: int = 1, **tables
) -> ArtifactRef:
    parameters = {"recipe": tables.pop("recipe", "r")}
    with store.writer(
        kind, name, stage=kind, stage_version=version, parameters=parameters, inputs=inputs
    ) as writer:
        writer.write_text("note.txt", name)
        for file, table in tables.items():
            writer.write_table(f"{file}.parquet", table)
        return writer.commit({"name": name})


def build(
    store: ArtifactStore, name: str, data: ArtifactRef, publish: bool = True, version: int = 1
) -> ArtifactRef:
    rows = [AcceptanceRow("walk", f"p{i}", ("math", "code")[i % 2], 0.0, i, 5, i % 4) for i in range(8)]
    draft = put(store, "draft", f"draft{name}", data, recipe=name, version=version)
    acceptance = put(
        store, "acceptance", f"acc{name}", draft, recipe=name, rows=to_table(AcceptanceRow, rows)
    )
    return put(store, "published", f"pub{name}", draft, acceptance, recipe=name) if publish else acceptance


def conversations(store: ArtifactStore, name: str = "c1", version: int = 1) -> ArtifactRef:
    row = ConversationRow("1", "sharegpt", "train", "", (Message("user", "hi"),))
    table = to_table(ConversationRow, [row])
    refused = to_table(QuarantineRow, [QuarantineRow("2", "sharegpt", "empty", "")])
    tables = {"part-00000": table, "part-00001": table, "quarantine": refused}
    return put(store, "conversations", name, version=version, **tables)


def test_every_view_answers_on_an_empty_store(store: ArtifactStore):
    catalog = Catalog(store)
    for name in [*VIEWS, *QUESTIONS, "artifacts", "inputs", "lineage", "files"]:
        assert catalog.query(f"select * from {name}").num_rows == 0, name


def test_the_ready_questions(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(10)]
    features = write_features(store, spec, samples)
    build(store, "a", features)
    build(store, "b", features)
    catalog = Catalog(store)
    builds = catalog.query("select draft, kind, fingerprint, rows from builds order by draft").to_pylist()
    assert [each["draft"] for each in builds] == ["drafta", "draftb"]
    assert {(each["kind"], each["fingerprint"]) for each in builds} == {("features", "aa")}
    answer = catalog.query(
        "select * exclude created from acceptance_by_category where draft = 'draftb'"
    ).to_pylist()
    by_category = {row["category"]: (row["rounds"], row["first_accepted"], row["tau"]) for row in answer}
    assert by_category == {"math": (4, 0.5, 2.0), "code": (4, 1.0, 3.0)}
    (train,) = catalog.query("select * from tokens_by_source where split = 'train'").to_pylist()
    assert train["tokens"] == sum(len(each.token_ids) for each in samples if each.split == "train")
    assert train["samples"] == 8 and train["source"] == "sharegpt"


def test_views_read_the_files_that_are_theirs(store: ArtifactStore):
    conversations(store)
    catalog = Catalog(store)
    assert (
        catalog.query("select id, fingerprint from conversations").to_pylist()
        == [{"id": "1", "fingerprint": "c1"}] * 2
    )
    assert catalog.query("select reason, fingerprint from quarantine").to_pylist() == [
        {"reason": "empty", "fingerprint": "c1"}
    ]
    with pytest.raises(StorageError, match=r"SQL: .*nothing"):
        catalog.query("select * from nothing")


def test_what_is_used_superseded_broken_and_orphaned(store: ArtifactStore):
    old = conversations(store, "c1", version=1)
    time.sleep(0.005)
    new = conversations(store, "c2", version=2)
    build(store, "old", old)
    other = put(store, "conversations", "c3", recipe="other")
    build(store, "a", new)
    build(store, "b", other, publish=False)
    lost = put(store, "conversations", "c4", recipe="lost")
    build(store, "lost", lost)
    store.delete(lost)
    lineage = Lineage.of(store.manifest(ref) for ref in store.list())
    assert lineage.use(("conversations", "c1")) is Use.SUPERSEDED
    assert lineage.use(("conversations", "c2")) is Use.USED
    assert lineage.use(("published", "puba")) is Use.USED
    assert lineage.use(("acceptance", "accb")) is Use.ORPHANED
    assert lineage.use(("conversations", "c3")) is Use.ORPHANED
    assert lineage.use(("draft", "draftlost")) is Use.BROKEN
    assert lineage.ancestors(("published", "puba")) == {
        ("draft", "drafta"),
        ("acceptance", "acca"),
        ("conversations", "c2"),
    }


def test_an_experiments_drafts_are_in_use_though_none_is_published(store: ArtifactStore):
    build(store, "a", conversations(store), publish=False)
    (acceptance,) = store.list("acceptance")
    put(store, "experiment", "page", acceptance)
    lineage = Lineage.of(store.manifest(ref) for ref in store.list())
    assert {lineage.use(key) for key in lineage.manifests} == {Use.USED}


def test_work_done_again_by_a_newer_upstream_supersedes_the_whole_line(store: ArtifactStore):
    build(store, "a", conversations(store, "c1", version=1))
    time.sleep(0.005)
    new = conversations(store, "c2", version=2)
    draft = put(store, "draft", "draft2", new, recipe="a")
    lineage = Lineage.of(store.manifest(ref) for ref in store.list())
    assert lineage.use(("draft", "drafta")) is Use.SUPERSEDED
    assert lineage.use((draft.kind, draft.fingerprint)) is Use.ORPHANED  # not published yet


def test_gc_asks_and_removes_only_what_is_not_used(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    build(store, "a", conversations(store))
    build(store, "b", put(store, "conversations", "c9", recipe="x"), publish=False)
    assert gc.main([str(store.root)]) == 0  # all of it is young
    assert "nothing to remove" in capsys.readouterr().out
    arguments = [str(store.root), "--days=-1"]
    monkeypatch.setattr("builtins.input", lambda question: "n")
    assert gc.main(arguments) == 0
    assert "nothing removed" in capsys.readouterr().out and store.find("draft", "draftb")
    monkeypatch.setattr("builtins.input", lambda question: "y")
    assert gc.main(arguments) == 0
    assert "removed 3 items" in capsys.readouterr().out
    assert [(ref.kind, ref.fingerprint) for ref in store.list()] == [
        ("acceptance", "acca"),
        ("conversations", "c1"),
        ("draft", "drafta"),
        ("published", "puba"),
    ]


def test_gc_without_anybody_to_ask_removes_nothing(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    ref = conversations(store)

    def nobody(question: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", nobody)
    assert gc.main([str(store.root), "--days=-1"]) == 1
    assert store.find(ref.kind, ref.fingerprint)


def test_gc_takes_leftovers_but_not_from_a_writer_at_work(store: ArtifactStore):
    for name in ("01", "02"):
        with (
            pytest.raises(RuntimeError),
            store.writer("x", name, stage="s", stage_version=1, parameters={}) as writer,
        ):
            writer.write_text("a.txt", "abc")
            raise RuntimeError
    os.mkdir(store.root / "x" / ".trash-00")
    found = {each.name: each for each in gc.candidates(store, now=LATER)}
    assert set(found) == {"x/.partial-01", "x/.partial-02", "x/.trash-00"}
    assert found["x/.partial-01"].bytes > 3
    with file_lock(store.root / "x" / ".lock-01", "x"), pytest.raises(StorageError, match="being made"):
        gc.remove(store, found["x/.partial-01"])
    for each in found.values():
        gc.remove(store, each)
    assert list((store.root / "x").iterdir()) == []


def test_check_names_damage_and_repairs(store: ArtifactStore, capsys: pytest.CaptureFixture):
    ref = conversations(store)
    assert check.main([str(store.root)]) == 0
    (store.local(ref) / "part-00001.parquet").unlink()
    assert check.main([str(store.root)]) == 1
    assert "conversations/c1/part-00001.parquet: it is missing" in capsys.readouterr().out
    assert check.main([str(store.root), "--repair"]) == 0
    assert store.find(ref.kind, ref.fingerprint) is None
    with store.writer(ref.kind, ref.fingerprint, stage="s", stage_version=1, parameters={}) as writer:
        assert writer.parts() == ["part-00000.parquet", "quarantine.parquet"]


def test_the_command_answers_lists_and_refuses(store: ArtifactStore, capsys: pytest.CaptureFixture):
    conversations(store)
    assert catalog_command.main([str(store.root), "select kind, rows from artifacts"]) == 0
    assert "conversations" in capsys.readouterr().out
    assert catalog_command.main([str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "acceptance_by_category" in out and "artifacts: kind, fingerprint" in out
    assert catalog_command.main([str(store.root), "selec"]) == 1
    assert capsys.readouterr().err.startswith("SQL: ")
    assert catalog_command.main([]) == 2
