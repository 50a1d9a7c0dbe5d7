"""The page index in bulk is the page index field by field, and nonsense is refused."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.page_index import decode_pages, encode_pages
from storage.thrift import Field, Kind, encode

PAGES = st.lists(st.tuples(st.integers(0, 1 << 50), st.integers(1, (1 << 31) - 1), st.integers(0, 1 << 40)), max_size=40)


def by_field(pages: list[tuple[int, int, int]]) -> bytes:
    locations = [
        [Field(1, Kind.I64, offset), Field(2, Kind.I32, size), Field(3, Kind.I64, row)] for offset, size, row in pages
    ]
    return encode([Field(1, Kind.LIST, locations)])


@settings(deadline=None)
@given(PAGES)
def test_pages_are_written_as_thrift_writes_them_and_come_back(pages):
    data = encode_pages(pages)
    assert data == by_field(pages)
    assert [tuple(page) for page in decode_pages(data).tolist()] == pages


def test_fields_that_follow_the_pages_are_none_of_our_business():
    locations = [[Field(1, Kind.I64, 4), Field(2, Kind.I32, 9), Field(3, Kind.I64, 0)]]
    data = encode([Field(1, Kind.LIST, locations), Field(2, Kind.LIST, [7, 300], Kind.I64)])
    assert decode_pages(data).tolist() == [[4, 9, 0]]


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_nonsense_is_a_value_error_or_a_table(data):
    with suppress(ValueError):
        assert decode_pages(data).dtype == np.int64


def test_cut_off_is_a_value_error():
    data = encode_pages([(row << 20, 1 << 18, row) for row in range(20)])
    for size in range(len(data) - 1):
        with pytest.raises(ValueError, match="not an offset index"):
            decode_pages(data[:size])
