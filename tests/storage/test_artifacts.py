"""The artifact store: whole artifacts or none, one writer at a time, nothing trusted that is not verified."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.artifacts import ArtifactRef, ArtifactStore, fingerprint
from storage.errors import DamagedPart, StorageError

FINGERPRINT = "0123456789abcdef0123"


def write(
    store: ArtifactStore, name: str = FINGERPRINT, text: str = "hello", kind: str = "draft"
) -> ArtifactRef:
    with store.writer(kind, name, stage="make", stage_version=1, parameters={"a": (1, 2)}) as writer:
        writer.write_text("text/hello.txt", text)
        writer.write_table("part-00000.parquet", pa.table({"x": [1, 2, 3]}))
        return writer.commit({"rows": 3})


def open_writer(store: ArtifactStore):
    return store.writer("draft", FINGERPRINT, stage="make", stage_version=1, parameters={})


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


def test_fingerprint_depends_on_every_part_and_not_on_key_order():
    base = fingerprint("s", 1, {"a": 1, "b": [1, 2]}, ["x"])
    assert base == fingerprint("s", 1, {"b": (1, 2), "a": 1}, ["x"])
    assert len(base) == 20 and int(base, 16) >= 0
    others = {
        fingerprint("t", 1, {"a": 1, "b": [1, 2]}, ["x"]),
        fingerprint("s", 2, {"a": 1, "b": [1, 2]}, ["x"]),
        fingerprint("s", 1, {"a": 1, "b": [2, 1]}, ["x"]),
        fingerprint("s", 1, {"a": 1, "b": [1, 2]}, ["y"]),
    }
    assert len(others | {base}) == 5


def test_fingerprint_refuses_what_has_no_canonical_form():
    with pytest.raises(StorageError, match="stage s"):
        fingerprint("s", 1, {"a": float("nan")}, [])
    with pytest.raises(StorageError, match="stage s"):
        fingerprint("s", 1, {"a": object()}, [])


def test_a_committed_artifact_is_found_with_its_manifest(store: ArtifactStore):
    assert store.find("draft", FINGERPRINT) is None
    ref = write(store)
    assert store.find("draft", FINGERPRINT) == ref
    assert ArtifactRef.from_dict(json.loads(json.dumps(ref.to_dict()))) == ref
    manifest = store.manifest(ref)
    assert (manifest.stage, manifest.stage_version, manifest.summary) == ("make", 1, {"rows": 3})
    assert manifest.parameters == {"a": [1, 2]}
    assert set(manifest.files) == {"text/hello.txt", "part-00000.parquet"}
    assert manifest.files["text/hello.txt"].bytes == 5
    assert manifest.files["part-00000.parquet"].rows == 3 == manifest.rows
    assert (store.local(ref) / "text/hello.txt").read_text() == "hello"
    assert sorted(path.name for path in store.root.joinpath("draft").iterdir()) == [FINGERPRINT]


def test_manifests_come_with_the_newest_first(store: ArtifactStore):
    for name in ("bb", "cc", "aa"):
        write(store, name)
        time.sleep(0.002)  # a manifest's time is in milliseconds
    write(store, "dd", kind="features")
    assert [manifest.fingerprint for manifest in store.manifests("draft")] == ["aa", "cc", "bb"]
    assert store.manifests("published") == []


def test_inputs_survive_a_move_of_the_store(store: ArtifactStore, tmp_path: Path):
    first = write(store)
    with store.writer("other", "aa", stage="s", stage_version=1, parameters={}, inputs=[first]) as writer:
        writer.commit({})
    store.root.rename(tmp_path / "moved")
    moved = ArtifactStore(str(tmp_path / "moved"))
    (source,) = moved.manifest(moved.find("other", "aa")).inputs
    assert (moved.local(source) / "text/hello.txt").exists()


def test_an_error_keeps_finished_parts_for_the_next_run(store: ArtifactStore):
    with pytest.raises(ZeroDivisionError), open_writer(store) as writer:
        writer.write_table("part-00000.parquet", pa.table({"x": [1]}))
        with writer.create("part-00001.parquet") as file:
            file.write(b"half")
            raise ZeroDivisionError
    assert store.find("draft", FINGERPRINT) is None and store.list() == []
    with open_writer(store) as writer:
        assert writer.parts() == ["part-00000.parquet"]
        assert [path.name for path in writer.folder.glob(".tmp-*")] == []
        writer.commit({})
    assert store.list() == [ArtifactRef("draft", FINGERPRINT, f"{store.root}/draft/{FINGERPRINT}")]


def test_leaving_without_work_leaves_no_folder(store: ArtifactStore):
    with open_writer(store):
        pass
    assert list(store.root.joinpath("draft").iterdir()) == []
    write(store)
    with open_writer(store):
        assert store.find("draft", FINGERPRINT)
    assert sorted(path.name for path in store.root.joinpath("draft").iterdir()) == [FINGERPRINT]


def test_a_finished_part_that_changed_before_the_next_run_is_made_again(store: ArtifactStore):
    with open_writer(store) as writer:
        for number in range(3):
            writer.write_table(f"part-{number:05}.parquet", pa.table({"x": [number]}))
    damaged = writer.folder / "part-00001.parquet"
    data = bytearray(damaged.read_bytes())
    data[6] ^= 1
    damaged.write_bytes(data)
    with open_writer(store) as writer:
        assert writer.parts() == ["part-00000.parquet", "part-00002.parquet"]


def test_commit_refuses_a_part_that_changed_under_it(store: ArtifactStore):
    with open_writer(store) as writer:
        writer.write_text("a.txt", "abc")
    (writer.folder / "a.txt").write_text("abd")
    with open_writer(store) as writer, pytest.raises(StorageError, match="changed after it was written"):
        writer.commit({})
    assert store.find("draft", FINGERPRINT) is None


@pytest.mark.parametrize("name", ["../x", "/x", "", ".hidden", "a/../../x"])
def test_names_stay_inside_the_folder(store: ArtifactStore, name: str):
    with open_writer(store) as writer, pytest.raises(StorageError, match="cannot name a file"):
        writer.write_text(name, "x")


def test_a_second_writer_waits_and_finds_the_first_ones_artifact(store: ArtifactStore):
    order = []

    def second() -> None:
        with open_writer(store):
            order.append("second in")
            assert store.find("draft", FINGERPRINT)

    with open_writer(store) as writer:
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first done")
        writer.write_text("a.txt", "a")
        writer.commit({})
    thread.join(10)
    assert order == ["first done", "second in"]
    assert sorted(path.name for path in store.root.joinpath("draft").iterdir()) == [FINGERPRINT]


def test_many_processes_make_one_artifact_once(store: ArtifactStore, tmp_path: Path):
    code = """
        import sys, os, time
        from storage.artifacts import ArtifactStore
        store = ArtifactStore(sys.argv[1])
        with store.writer("draft", "aa", stage="s", stage_version=1, parameters={}) as writer:
            if not store.find("draft", "aa"):
                open(sys.argv[2], "a").write("made\\n")
                time.sleep(0.1)
                writer.write_text("a.txt", "a")
                writer.commit({})
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(store.root), str(tmp_path / "log")]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0] * 4
    assert (tmp_path / "log").read_text() == "made\n"


KILLED_WRITER = """
    import sys, pyarrow as pa
    from storage.artifacts import ArtifactStore
    store = ArtifactStore(sys.argv[1])
    with store.writer("draft", "aa", stage="s", stage_version=1, parameters={}) as writer:
        done = set(writer.parts())
        for number in range(40):
            name = f"part-{number:05}.parquet"
            if name not in done:
                rows = range(number * 5000, number * 5000 + 5000)
                writer.write_table(name, pa.table({"x": pa.array(rows)}))
            print(number, flush=True)
        writer.commit({"parts": 40})
"""


def test_a_killed_writer_loses_nothing_and_the_next_goes_on(store: ArtifactStore):
    command = [sys.executable, "-c", textwrap.dedent(KILLED_WRITER), str(store.root)]
    folder = store.root / "draft" / ".partial-aa"
    kept: dict[str, int] = {}
    for moment in (1, 7, 16, 31):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout
        for line in process.stdout:
            if int(line) >= moment:
                break
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        assert store.find("draft", "aa") is None
        now = {path.name: path.stat().st_ino for path in folder.glob("part-*.parquet")}
        assert len(now) > moment
        assert now | kept == now  # what was finished is the same file still
        kept = now
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    ref = store.find("draft", "aa")
    assert ref and store.damage(ref) == {}
    parts = store.local(ref).glob("*.parquet")
    table = pa.concat_tables(pq.read_table(path) for path in parts)
    assert sorted(table["x"].to_pylist()) == list(range(200_000))
    assert {path.name: path.stat().st_ino for path in store.local(ref).glob("part-*.parquet")} | kept == {
        path.name: path.stat().st_ino for path in store.local(ref).glob("part-*.parquet")
    }


def test_damage_is_named_and_repair_keeps_the_rest(store: ArtifactStore):
    ref = write(store)
    folder = store.local(ref)
    assert store.damage(ref) == {}
    (folder / "text/hello.txt").write_text("hellO")
    part = folder / "part-00000.parquet"
    assert store.damage(ref) == {"text/hello.txt": "its checksum does not agree"}
    part.write_bytes(part.read_bytes()[:-1])
    assert "bytes where" in store.damage(ref)["part-00000.parquet"]
    part.unlink()
    assert store.damage(ref)["part-00000.parquet"] == "it is missing"
    store.repair(ref, ["part-00000.parquet"])
    assert store.find("draft", FINGERPRINT) is None
    with open_writer(store) as writer:
        assert writer.parts("text/*") == ["text/hello.txt"]


@pytest.mark.parametrize("position", range(0, 400, 37))
def test_a_flipped_byte_in_the_manifest_is_caught(store: ArtifactStore, position: int):
    ref = write(store)
    path = store.local(ref) / "manifest.json"
    data = bytearray(path.read_bytes())
    while chr(data[position]).isspace():  # layout is not content
        position += 1
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=r"manifest\.json is damaged"):
        store.manifest(ref)


def test_delete_and_list(store: ArtifactStore):
    refs = [write(store, name, kind=kind) for kind, name in [("a", "01"), ("a", "02"), ("b", "01")]]
    assert store.list() == refs
    assert store.list("a") == refs[:2]
    assert store.list("none") == []
    store.delete(refs[0])
    store.delete(refs[0])
    assert store.list() == refs[1:]
    with pytest.raises(StorageError, match="run its stage again"):
        store.manifest(refs[0])


def test_a_full_disk_is_one_clear_line_and_leaves_the_store_readable(store: ArtifactStore):
    ref = write(store, "aa")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with open_writer(store) as writer:
            writer.write_bytes("small.bin", b"x" * 1000)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
            with pytest.raises(StorageError, match=r"disk full while writing .*big\.parquet") as caught:
                writer.write_table("big.parquet", pa.table({"x": [os.urandom(1000) for _ in range(1000)]}))
            assert "\n" not in str(caught.value)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert store.damage(ref) == {} and store.list() == [ref]
    with open_writer(store) as writer:
        assert writer.parts("*") == ["small.bin"]


def test_damaged_part_survives_a_pickle():
    import pickle

    error = pickle.loads(pickle.dumps(DamagedPart(Path("a/b"), "gone")))
    assert error.path == Path("a/b") and "gone" in str(error)
