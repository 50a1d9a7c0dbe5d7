"""A compact table of keys does what a set does, at any size, in a fraction of its memory."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tasks.keys import Keys

# Few low bits that differ: keys crowd into the same slots, the table's own worst case.
crowded = st.builds(lambda high, low: high << 32 | low, st.integers(0, 50), st.integers(1, 3))


@given(st.lists(crowded | st.integers(1, 2**64 - 1), max_size=300))
def test_keys_are_a_set(added):
    keys, plain = Keys(), set()
    for key in added:
        assert (key in keys) == (key in plain)
        assert keys.add(key) == (key not in plain)
        plain.add(key)
    assert len(keys) == len(plain)


def test_nothing_is_forgotten_when_the_table_grows():
    draw = random.Random(0)
    added = [draw.getrandbits(64) or 1 for _ in range(20_000)]
    keys = Keys()
    assert all([keys.add(key) for key in added]) and not any([keys.add(key) for key in added])
    assert all(key in keys for key in added) and len(keys) == len(added)
    assert keys._slots.itemsize * len(keys._slots) <= 24 * len(added)


def test_zero_is_a_key_like_any_other():
    keys = Keys()
    assert keys.add(0) and not keys.add(0) and len(keys) == 1
