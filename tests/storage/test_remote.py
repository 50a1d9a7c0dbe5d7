"""The same store on objects: fsspec's memory file system, and a real S3 server on loopback where moto is
installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest

from storage.artifacts import ArtifactStore
from storage.catalog import Catalog
from storage.errors import StorageError
from storage.features import FeatureReader
from tests.storage.feature_samples import make_sample, make_spec, same, write_features


@pytest.fixture(params=["memory", "s3"])
def uri(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "memory":
        yield "memory://bucket/store"
        fsspec.filesystem("memory").store.clear()
        return
    moto = pytest.importorskip("moto.server", reason="moto is not installed: no S3 server to test against")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    # The process keeps one set of buckets whatever server asks: a name of its own for every test.
    bucket = f"bucket-{uuid4().hex}"
    fsspec.get_filesystem_class("s3").clear_instance_cache()  # an earlier test's client asks an earlier server
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
    yield f"s3://{bucket}/store"
    server.stop()


def test_what_one_machine_writes_another_reads(uri: str, tmp_path: Path):
    here, there = ArtifactStore(uri, tmp_path / "here"), ArtifactStore(uri, tmp_path / "there")
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(12)]
    assert there.find("features", "aa") is None and there.list() == []
    ref = write_features(here, spec, samples)
    assert ref.uri == f"{uri}/features/aa"
    assert there.find("features", "aa") == ref and there.list() == [ref] == there.list("features")
    assert there.manifest(ref) == here.manifest(ref)
    catalog = Catalog(there)  # fetches the narrow file alone
    assert catalog.query("select count(*) as rows from features").to_pylist() == [{"rows": 12}]
    assert not list((tmp_path / "there").rglob("part-*.parquet"))
    reader = FeatureReader(there.local(ref))
    assert all(same(reader.read(number), samples[number]) for number in range(12))
    assert there.damage(ref) == {}


def test_a_copy_that_was_damaged_here_is_fetched_again(uri: str, tmp_path: Path):
    spec = make_spec()
    writer, store = ArtifactStore(uri, tmp_path / "a"), ArtifactStore(uri, tmp_path / "b")
    ref = write_features(writer, spec, [make_sample(0, spec)])
    part = store.local(ref) / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    assert set(store.damage(ref)) == {"part-00000.parquet"}
    store.repair(ref, ["part-00000.parquet"])
    assert store.damage(ref) == {}


def test_an_object_that_arrives_damaged_is_refused(uri: str, tmp_path: Path):
    spec = make_spec()
    writer, store = ArtifactStore(uri, tmp_path / "a"), ArtifactStore(uri, tmp_path / "b")
    ref = write_features(writer, spec, [make_sample(0, spec)])
    store.remote.write("features/aa/part-00000.parquet", b"nonsense")
    with pytest.raises(StorageError, match=r"part-00000\.parquet arrived damaged"):
        store.local(ref)
    assert not (tmp_path / "b" / "features" / "aa").exists()


def test_delete_removes_every_object(uri: str, tmp_path: Path):
    spec = make_spec()
    store = ArtifactStore(uri, tmp_path / "a")
    ref = write_features(store, spec, [make_sample(0, spec)])
    store.delete(ref)
    assert store.find("features", "aa") is None and store.list() == []
    with pytest.raises(StorageError, match="run its stage again"):
        store.local(ref)


def test_an_unknown_protocol_is_one_clear_line():
    with pytest.raises(StorageError, match="cannot open the store nothing://x"):
        ArtifactStore("nothing://x")
