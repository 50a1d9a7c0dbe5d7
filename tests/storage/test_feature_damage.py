"""The feature store under damage: any flipped byte, cut, lost part, kill or full disk is caught, and made good again."""

from __future__ import annotations

import mmap
import os
import resource
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from storage.artifacts import ArtifactStore
from storage.errors import DamagedPart, StorageError
from storage.features import FeatureReader, FeatureWriter
from storage.folder import PartFolder
from storage.kernel import populate
from tests.storage.feature_samples import make_sample, make_spec, same, wide_file, write_features


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path / "store"))


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
    for position in np.random.default_rng(0).permutation(len(whole))[:300]:
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
    whole, reader = path.read_bytes(), FeatureReader(path.parent)
    for name in ("token_ids", "features", "teacher_ids", "teacher_log_probs", "teacher_rest"):
        raw = getattr(samples[0], name).tobytes()
        start = whole.index(raw)
        for position in range(start, start + len(raw)):
            write_at(path, position, whole[position] ^ 0x10)  # in place: the reader's mapping sees it
            with pytest.raises(DamagedPart, match="row 0 does not agree with its checksum"):
                reader.read(0)
            write_at(path, position, whole[position])
    assert same(reader.read(0), samples[0])


def write_at(path: Path, position: int, value: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(bytes([value]))


def test_a_part_that_is_cut_while_it_is_mapped_is_named_and_does_not_end_the_process(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec, tokens=200) for number in range(8)]
    folder = store.local(write_features(store, spec, samples))
    reader = FeatureReader(folder)
    assert same(reader.read(0), samples[0])
    os.truncate(wide_file(folder), 4096)
    for number in (0, 5):  # one that was verified, one that nobody has touched
        with pytest.raises(DamagedPart, match="its size changed while it was in use"):
            reader.read(number)


def test_bytes_that_the_file_no_longer_has_are_an_error_and_not_the_end(tmp_path: Path):
    # Between the look at the size and the first touch only the kernel's answer is left to tell.
    path = tmp_path / "part"
    path.write_bytes(bytes(1 << 16))
    with path.open("rb") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    populate(memory, 5000, 1 << 16)
    os.truncate(path, 4096)
    with pytest.raises(OSError, match="cannot be read"):
        populate(memory, 5000, 1 << 16)


def test_a_part_that_another_takes_the_place_of_is_named(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(16)]
    folder = store.local(write_features(store, spec, samples))
    reader = FeatureReader(folder, mapped_bytes=1)  # a part is let go once it was read
    assert same(reader.read(0), samples[0])
    other = wide_file(folder).with_name("other")
    other.write_bytes(wide_file(folder).read_bytes())
    os.replace(other, wide_file(folder))
    with pytest.raises(DamagedPart, match="it was changed while it was in use"):
        reader.read(0)
    assert same(reader.read(8), samples[8])


def test_a_stream_names_a_damaged_part_when_its_turn_comes_and_may_be_left(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec) for number in range(12)]
    folder = store.local(write_features(store, spec, samples, per_part=4))
    wide_file(folder, 1).unlink()
    stream = FeatureReader(folder).stream([0, 1, 5, 8])
    assert [same(next(stream), samples[i]) for i in (0, 1)] == [True, True]
    with pytest.raises(DamagedPart, match=r"part-00001\.parquet is damaged: it is missing"):
        next(stream)
    stream = FeatureReader(folder).stream([0, 1, 2, 3])
    next(stream)
    stream.close()


def test_a_full_disk_leaves_a_readable_store_that_the_next_run_finishes(store: ArtifactStore):
    spec = make_spec()
    samples = [make_sample(number, spec, tokens=40) for number in range(16)]
    large = [replace(make_sample(99, spec, tokens=2000), id="large")]  # its part alone does not fit
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # at it a write fails as on a full disk
        with pytest.raises(StorageError, match=r"disk full while writing .*part-00002"):
            write_features(store, spec, samples + large)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    partial = store.root / "features" / ".partial-aa"
    assert sorted(path.name for path in partial.iterdir() if not path.name.startswith(".")) == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    writer = FeatureWriter(PartFolder(partial), spec)
    writer.finish()
    assert read_all(partial, samples) == (16, [])
    (partial / "index.parquet").unlink()
    kept = wide_file(partial).stat().st_ino
    folder = store.local(write_features(store, spec, samples + large))
    assert read_all(folder, samples + large) == (17, []) and wide_file(folder).stat().st_ino == kept


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
