"""The compact protocol: what is written is read, and nonsense is refused rather than believed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.thrift import Field, Kind, decode, encode

INTEGERS = st.integers(-(1 << 63), (1 << 63) - 1)
SCALARS = st.one_of(
    st.tuples(st.just(Kind.I64), INTEGERS), st.tuples(st.just(Kind.BINARY), st.binary(max_size=300))
)


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 3000), SCALARS, max_size=20))
def test_scalars_survive(values):
    fields = [Field(key, *values[key]) for key in sorted(values)]
    assert decode(encode(fields)) == {key: value for key, (_, value) in values.items()}


@settings(deadline=None)
@given(st.lists(INTEGERS, max_size=40), st.lists(st.binary(max_size=5), max_size=20))
def test_nested_structs_and_lists_survive(numbers, texts):
    inner = [Field(1, Kind.LIST, numbers, Kind.I64), Field(40, Kind.LIST, texts, Kind.BINARY)]
    data = encode([Field(2, Kind.STRUCT, inner), Field(3, Kind.LIST, [inner, inner])])
    expected = {1: numbers, 40: texts}
    assert decode(data) == {2: expected, 3: [expected, expected]}


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_nonsense_is_a_value_error_or_a_struct(data):
    with suppress(ValueError):
        assert isinstance(decode(data), dict)


def test_cut_off_is_a_value_error():
    data = encode([Field(1, Kind.BINARY, b"x" * 20), Field(2, Kind.I64, 1 << 40)])
    for size in range(len(data)):
        with pytest.raises(ValueError, match="not a Thrift struct"):
            decode(data[:size])
