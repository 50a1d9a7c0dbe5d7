"""Order and read-ahead: set by seed and data alone, complete, resumable, bounded."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.artifacts import ArtifactStore
from storage.features import FeatureReader
from storage.order import reading_order, shard
from storage.prefetch import prefetch
from tests.storage.feature_samples import make_sample, make_spec, same, write_features

LENGTHS = st.lists(st.integers(1, 2048), max_size=200)


@settings(deadline=None)
@given(LENGTHS, st.integers(0, 2**63), st.integers(0, 50), st.integers(1, 20))
def test_an_order_holds_every_sample_once(lengths, seed, epoch, bucket):
    order = reading_order(lengths, seed, epoch, bucket)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert np.array_equal(order, reading_order(lengths, seed, epoch, bucket))


def test_seeds_and_epochs_give_other_orders():
    orders = {tuple(reading_order([5] * 50, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


def test_the_order_is_the_same_on_every_machine():
    assert reading_order([3] * 8, seed=7, epoch=1).tolist() == [3, 1, 6, 2, 5, 4, 0, 7]


def test_buckets_hold_like_lengths_in_shuffled_order():
    lengths = np.random.default_rng(0).integers(64, 2048, 800)
    order = reading_order(lengths, seed=1, bucket=8)
    spread = [np.ptp(lengths[order[start : start + 8]]) for start in range(0, 800, 8)]
    means = [lengths[order[start : start + 8]].mean() for start in range(0, 800, 8)]
    assert np.mean(spread) < 40
    assert abs(np.corrcoef(means, np.arange(100))[0, 1]) < 0.3


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 5), st.integers(0, 60))
def test_ranks_share_an_order_and_any_number_of_them_resumes_it(count, ranks, position):
    order = reading_order([1] * count, seed=3)
    shards = [shard(order, rank, ranks, position) for rank in range(ranks)]
    assert len({len(each) for each in shards}) == 1
    together = np.stack(shards, axis=1).reshape(-1)
    assert np.array_equal(together, order[position:][: len(together)])
    assert len(order[position:]) - len(together) < ranks


def test_prefetch_keeps_the_sequence_whatever_the_threads():
    def read(number: int) -> int:
        time.sleep((number % 3) * 0.001)
        return number * 10

    numbers = np.random.default_rng(0).permutation(60).tolist()
    for threads in (1, 2, 7):
        assert list(prefetch(numbers, read, lambda _: 1, threads)) == [number * 10 for number in numbers]


def test_bytes_in_flight_are_bounded():
    lock, now, most = threading.Lock(), [0], [0]

    def read(number: int) -> int:
        with lock:
            now[0] += 10
            most[0] = max(most[0], now[0])
        return number

    for _ in prefetch(range(50), read, lambda _: 10, threads=4, in_flight_bytes=35):
        time.sleep(0.002)
        with lock:
            now[0] -= 10
    # Three samples ahead, and the one that the consumer holds.
    assert 20 <= most[0] <= 40


def test_a_sample_larger_than_the_bound_is_read_all_the_same():
    assert list(prefetch(range(3), lambda n: n, lambda _: 100, in_flight_bytes=1)) == [0, 1, 2]


def test_an_error_comes_where_its_sample_would_have():
    def read(number: int) -> int:
        if number == 2:
            raise KeyError(number)
        return number

    stream = prefetch(range(5), read, lambda _: 1, threads=3)
    assert [next(stream), next(stream)] == [0, 1]
    with pytest.raises(KeyError):
        next(stream)


def test_leaving_early_stops_the_threads():
    before = threading.active_count()
    stream = prefetch(range(10**9), lambda n: n, lambda _: 1, in_flight_bytes=8)
    next(stream)
    stream.close()
    assert threading.active_count() == before


def test_a_store_is_read_ahead(tmp_path: Path):
    store, spec = ArtifactStore(str(tmp_path)), make_spec()
    samples = [make_sample(number, spec) for number in range(30)]
    reader = FeatureReader(store.local(write_features(store, spec, samples)))
    order = reading_order(reader.index["n_tokens"].to_pylist(), seed=0, bucket=4)
    read = prefetch(order.tolist(), reader.read, reader.size, in_flight_bytes=30_000)
    assert all(same(sample, samples[number]) for sample, number in zip(read, order, strict=True))
