"""The feature store: what was written comes back to the bit, in place, or the damaged part is named."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from storage.artifacts import ArtifactStore
from storage.errors import StorageError
from storage.features import FeatureReader, FeatureWriter
from storage.folder import PartFolder
from storage.mapped import MappedParts
from tests.storage.feature_samples import HIDDEN, make_sample, make_spec, same, wide_file, write_features


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


@pytest.mark.parametrize("teacher", ["topk", "hidden"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "fp8_e4m3", "int8"])
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
    small = make_spec("fp8_e4m3", hidden_size=576, teacher_k=16)
    assert small.bytes_per_token == 3 * 576 + 3 * 4 + 16 * 6 + 4 + 4
    ref = write_features(store, small, [make_sample(number, small, tokens=300) for number in range(8)], name="bb")
    assert store.manifest(ref).summary["bytes_per_token"] < 2000


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


def test_a_stream_keeps_the_order_and_reads_a_bounded_way_ahead(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    spec = make_spec()
    samples = [make_sample(number, spec, tokens=50) for number in range(40)]
    reader = FeatureReader(store.local(write_features(store, spec, samples, per_part=4)))
    asked: list[int] = []
    read_ahead = MappedParts.read_ahead
    monkeypatch.setattr(MappedParts, "read_ahead", lambda self, *place: asked.append(place[1]) or read_ahead(self, *place))
    order = np.random.default_rng(1).permutation(40).tolist()
    for seen, sample in enumerate(reader.stream(order, ahead_bytes=5 * reader.size(0))):
        assert same(sample, samples[order[seen]])
        assert len(asked) <= seen + 9
    assert asked == [i % 4 for i in order[2:]]  # all but the first batch, which is read at once
    assert [sample.id for sample in reader.stream(order * 2)] == [samples[i].id for i in order * 2]
    assert len(asked) == 38  # what was verified is not asked for again
