"""Compact key tables do what a set and a dict do, at any size, in a fraction of their memory."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.keys import KeyedValues, Keys

# Few low bits that differ: keys crowd into the same slots, the table's own worst case.
crowded = st.builds(lambda high, low: high << 32 | low, st.integers(0, 50), st.integers(1, 3))


@given(st.lists(crowded | st.integers(1, 2**64 - 1), max_size=300))
def test_keys_are_a_set(added):
    keys, plain = Keys(), set()
    for key in added:
        assert keys.add(key) == (key not in plain)
        plain.add(key)
    assert len(keys) == len(plain)


@given(st.lists(st.tuples(crowded, st.integers(0, 2**64 - 1)), max_size=300))
def test_keyed_values_are_a_dict(pairs):
    table, plain = KeyedValues(), {}
    for key, value in pairs:
        assert table.setdefault(key, value) == plain.setdefault(key, value)


@pytest.mark.parametrize("kind", [Keys, KeyedValues])
def test_nothing_is_forgotten_when_the_table_grows(kind):
    draw = random.Random(0)
    keys = [draw.getrandbits(64) or 1 for _ in range(20_000)]
    table = kind()
    if kind is Keys:
        assert all([table.add(key) for key in keys]) and not any([table.add(key) for key in keys])
        assert table._slots.itemsize * len(table._slots) <= 24 * len(keys)
    else:
        assert [table.setdefault(key, key ^ 5) for key in keys] == [key ^ 5 for key in keys]
        assert [table.setdefault(key, 0) for key in keys] == [key ^ 5 for key in keys]
    assert len(table) == len(keys)


def test_zero_is_a_key_like_any_other():
    keys = Keys()
    assert keys.add(0) and not keys.add(0) and len(keys) == 1
