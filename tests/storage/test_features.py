"""The feature store: what was written comes back to the bit, in place, or the damaged part is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.artifacts import ArtifactStore
from storage.errors import DamagedPart, StorageError
from storage.features import FeatureReader, FeatureWriter
from storage.folder import PartFolder
from tests.storage.feature_samples import HIDDEN, make_sample, make_spec, same, wide_file, write_features


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.mark.parametrize("teacher", ["topk", "hidden"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_samples_come_back_to_the_bit(store: ArtifactStore, dtype: str, teacher: str):
    spec = make_spec(dtype, teacher)
    samples = [make_sample(number, spec) for number in range(20)]
    ref = write_features(store, spec, samples)
    reader = FeatureReader(store.local(ref))
    assert reader.spec == spec and len(reader) == 20
    for number in np.random.default_rng(0).permutation(20):
        assert same(reader.read(int(number)), samples[number])
    assert reader.index["n_tokens"].to_pylist() == [len(sample.token_ids) for sample in samples]
    assert reader.index["n_supervised"].to_pylist() == [
        sum(end - start for start, end in sample.spans) for sample in samples
    ]
    manifest = store.manifest(ref)
    assert manifest.summary["rows"] == 20 and manifest.summary["parts"] == 3
    assert manifest.summary["tokens"] == sum(len(sample.token_ids) for sample in samples)


def test_a_read_copies_nothing_and_is_aligned(store: ArtifactStore):
    spec = make_spec()
    reader = FeatureReader(store.local(write_features(store, spec, [make_sample(n, spec) for n in range(9)])))
    for number in range(9):
        sample, again = reader.read(number), reader.read(number)
        for name in ("token_ids", "features", "teacher_ids", "teacher_log_probs", "teacher_rest"):
            array = getattr(sample, name)
            assert not array.flags.owndata and not array.flags.writeable
            assert array.ctypes.data % 64 == 0
            assert array.ctypes.data == getattr(again, name).ctypes.data


def test_arrays_outlive_the_reader(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(4)]
    reader = FeatureReader(store.local(write_features(store, spec, samples, per_part=1)), mapped_bytes=1)
    read = [reader.read(number) for number in range(4)]
    del reader
    assert all(same(left, right) for left, right in zip(read, samples, strict=True))


def test_threads_read_at_the_same_time(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(40)]
    reader = FeatureReader(store.local(write_features(store, spec, samples, per_part=4)), mapped_bytes=20_000)
    order = [int(i) for i in np.random.default_rng(1).integers(0, 40, 400)]
    with ThreadPoolExecutor(4) as pool:
        assert all(
            same(sample, samples[i]) for i, sample in zip(order, pool.map(reader.read, order), strict=True)
        )


def test_other_tools_read_the_parts(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("storage.features.ROW_GROUP_BYTES", 20_000)  # several row groups
    spec = make_spec()
    samples = [make_sample(number, spec, tokens=30 + number) for number in range(20)]
    folder = store.local(write_features(store, spec, samples, per_part=20))
    file = pq.ParquetFile(wide_file(folder), page_checksum_verification=True)
    assert 1 < file.num_row_groups < 20
    table = file.read()
    assert table["features"].to_pylist() == [sample.features.tobytes() for sample in samples]
    assert table["id"].to_pylist() == [sample.id for sample in samples]
    rows = duckdb.sql(
        f"select id, category, n_tokens, octet_length(features), octet_length(teacher_rest) "
        f"from '{wide_file(folder)}' order by n_tokens"
    ).fetchall()
    assert rows == [
        (each.id, each.category, len(each.token_ids), each.features.nbytes, each.teacher_rest.nbytes)
        for each in samples
    ]
    total = duckdb.sql(f"select sum(n_tokens) from '{folder}/index.parquet'").fetchall()
    assert total == [(sum(len(sample.token_ids) for sample in samples),)]


@pytest.mark.parametrize("options", [{"compression": "zstd"}, {"compression": "none"}, {"row_group_size": 3}])
def test_a_part_that_another_tool_wrote_anew_is_read_all_the_same(store: ArtifactStore, options: dict):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(8)]
    folder = store.local(write_features(store, spec, samples))
    pq.write_table(pq.read_table(wide_file(folder)), wide_file(folder), **options)
    reader = FeatureReader(folder)
    assert all(same(reader.read(number), samples[number]) for number in (5, 0, 7, 3))


def test_files_say_what_they_hold(store: ArtifactStore):
    spec = make_spec()
    folder = store.local(write_features(store, spec, [make_sample(0, spec)]))
    for path in (wide_file(folder), folder / "index.parquet"):
        text = pq.read_schema(path).metadata[b"draftline.features"].decode()
        for word in (
            "schema_version",
            "hf-hidden-states",
            "[2, 15, 27]",
            "bfloat16",
            "topk",
            "target",
            "tokenizer",
        ):
            assert word in text


def test_bytes_per_token_are_what_they_cost(store: ArtifactStore):
    spec = make_spec(hidden_size=576, teacher_k=16)
    assert spec.bytes_per_token == 3 * 576 * 2 + 16 * 6 + 4 + 4
    ref = write_features(store, spec, [make_sample(number, spec, tokens=300) for number in range(8)])
    assert store.manifest(ref).summary["bytes_per_token"] < 3600


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"features": np.zeros((3, 3 * HIDDEN), np.float32)},
            r"features is float32\[3, 48\], not uint16\[9, 48\]",
        ),
        ({"teacher_ids": None}, "teacher_ids is nothing"),
        ({"token_ids": np.zeros(10, np.int64)}, "token_ids is int64"),
        ({"token_ids": np.zeros(1, np.int32)}, "need at least 2"),
        ({"spans": [(3, 11)]}, "do not lie in its 10 tokens"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused(tmp_path: Path, changes: dict, message: str):
    spec = make_spec()
    writer = FeatureWriter(PartFolder(tmp_path), spec)
    with pytest.raises(StorageError, match=message):
        writer.write_part(0, [make_sample(0, spec), replace(make_sample(1, spec, tokens=10), **changes)])
    assert writer.finished() == set() and list(tmp_path.glob("*.parquet")) == []


def test_a_value_larger_than_parquet_allows_is_refused(tmp_path: Path):
    spec = make_spec(hidden_size=8192)
    huge = replace(make_sample(0, make_spec(), tokens=10), token_ids=np.zeros(50_000, np.int32))
    with pytest.raises(StorageError, match="50000 tokens are more than a Parquet value can hold"):
        FeatureWriter(PartFolder(tmp_path), spec).write_part(0, [huge])


def test_doubled_samples_and_mixed_specs_are_refused(tmp_path: Path):
    spec = make_spec()
    writer = FeatureWriter(PartFolder(tmp_path), spec)
    writer.write_part(0, [make_sample(0, spec)])
    writer.write_part(1, [make_sample(0, spec)])
    with pytest.raises(StorageError, match="1 samples are there twice, sample-0"):
        writer.finish()
    other = make_spec(target_fingerprint="another")
    writer.write_part(1, [make_sample(1, spec)])
    with pytest.raises(StorageError, match="another feature spec"):
        FeatureWriter(PartFolder(tmp_path), other).finish()


def test_an_empty_store_is_a_store(store: ArtifactStore):
    reader = FeatureReader(store.local(write_features(store, make_spec(), [])))
    assert len(reader) == 0
    with pytest.raises(IndexError):
        reader.read(0)


def read_all(folder: Path, samples: list) -> tuple[int, list[DamagedPart]]:
    """How many rows came back right; a wrong row fails at once."""
    reader, right, refused = FeatureReader(folder), 0, []
    for number, sample in enumerate(samples):
        try:
            assert same(reader.read(number), sample), "a wrong row"
            right += 1
        except DamagedPart as error:
            refused.append(error)
    return right, refused


def test_any_flipped_byte_is_caught_and_never_gives_a_wrong_row(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec, tokens=6) for number in range(4)]
    ref = write_features(store, spec, samples, per_part=2)
    path = wide_file(store.local(ref), 1)
    whole = path.read_bytes()
    for position in np.random.default_rng(0).permutation(len(whole))[:600]:
        data = bytearray(whole)
        data[position] ^= 1 << (position % 8)
        path.write_bytes(data)
        _, refused = read_all(store.local(ref), samples)
        assert all(error.path == path for error in refused)
    assert store.damage(ref) == {"part-00001.parquet": "its checksum does not agree"}
    path.write_bytes(whole)
    assert read_all(store.local(ref), samples) == (4, [])


def test_every_byte_of_a_value_is_covered(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(0, spec, tokens=6)]
    path = wide_file(store.local(write_features(store, spec, samples)))
    whole = path.read_bytes()
    for name in ("token_ids", "features", "teacher_ids", "teacher_log_probs", "teacher_rest"):
        raw = getattr(samples[0], name).tobytes()
        start = whole.index(raw)
        for position in range(start, start + len(raw)):
            data = bytearray(whole)
            data[position] ^= 0x10
            path.write_bytes(data)
            with pytest.raises(DamagedPart, match="row 0 does not agree with its checksum"):
                FeatureReader(path.parent).read(0)


def test_truncated_and_missing_parts_are_named_and_made_again(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(24)]
    folder = store.local(write_features(store, spec, samples))
    whole = wide_file(folder, 1).read_bytes()
    kept = {number: wide_file(folder, number).stat().st_ino for number in (0, 2)}
    for size in (len(whole) - 1, len(whole) // 2, 10, 0):
        wide_file(folder, 1).write_bytes(whole[:size])
        right, refused = read_all(folder, samples)
        assert right == 16 and {error.path for error in refused} == {wide_file(folder, 1)}
    wide_file(folder, 1).unlink()
    with pytest.raises(DamagedPart, match=r"part-00001\.parquet is damaged: it is missing"):
        FeatureReader(folder).read(8)
    ref = store.find("features", "aa")
    store.repair(ref, list(store.damage(ref)))
    assert store.find("features", "aa") is None
    write_features(store, spec, samples)
    assert read_all(folder, samples) == (24, [])
    assert {number: wide_file(folder, number).stat().st_ino for number in (0, 2)} == kept


def test_a_damaged_index_is_caught_when_the_reader_is_made(store: ArtifactStore):
    spec = make_spec()
    path = store.local(write_features(store, spec, [make_sample(0, spec)])) / "index.parquet"
    whole = path.read_bytes()
    for position in range(0, len(whole), 97):
        data = bytearray(whole)
        data[position] ^= 4
        path.write_bytes(data)
        with pytest.raises(DamagedPart, match=r"index\.parquet is damaged"):
            FeatureReader(path.parent)


KILLED = """
    import sys
    sys.path.insert(0, sys.argv[2])
    from tests.storage.feature_samples import *
    spec = make_spec(hidden_size=256)
    print("start", flush=True)
    samples = [make_sample(number, spec, tokens=200) for number in range(60)]
    write_features(ArtifactStore(sys.argv[1]), spec, samples, per_part=4)
"""


def test_a_writer_killed_at_any_moment_leaves_what_the_next_run_finishes(store: ArtifactStore):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(store.root), str(Path(__file__).parents[2])]
    for delay in (0.02, 0.05, 0.08, 0.11):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spec = make_spec(hidden_size=256)
    ref = store.find("features", "aa")
    assert store.damage(ref) == {}
    samples = [make_sample(number, spec, tokens=200) for number in range(60)]
    assert read_all(store.local(ref), samples) == (60, [])
    assert [path.name for path in (store.root / "features").iterdir()] == ["aa"]


@pytest.mark.slow
def test_twenty_kills_at_random_moments_lose_nothing(store: ArtifactStore):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(store.root), str(Path(__file__).parents[2])]
    random, kills = np.random.default_rng(0), 0
    while kills < 20:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        try:
            process.wait(random.uniform(0, 0.15))
            store.delete(store.find("features", "aa"))  # it was quick enough to finish: from the start again
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
            kills += 1
        process.stdout.close()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    spec = make_spec(hidden_size=256)
    samples = [make_sample(number, spec, tokens=200) for number in range(60)]
    assert read_all(store.local(store.find("features", "aa")), samples) == (60, [])
