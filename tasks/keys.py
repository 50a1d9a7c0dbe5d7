"""A set of 64-bit keys in a few bytes each: a Python set of a million takes 70 MB, this one 16.

In: keys that are hashes already, so that their low bits say where they go. Out: whether a key is new, or there.
"""

from __future__ import annotations

from array import array

_FIRST_SLOTS = 1 << 10
_FREE = 0


class Keys:
    """Open addressing with linear probing, at most two thirds full. A key of 0 counts as 1."""

    def __init__(self) -> None:
        self._slots = _zeros(_FIRST_SLOTS)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, key: int) -> bool:
        return self._slots[self._find(key or 1)] != _FREE

    def add(self, key: int) -> bool:
        """Whether `key` is new; it is there from now on."""
        if key in self:
            return False
        if 3 * (self._count + 1) > 2 * len(self._slots):
            self._grow()
        self._slots[self._find(key or 1)] = key or 1
        self._count += 1
        return True

    def _find(self, key: int) -> int:
        """The slot of `key`, or the free one where it belongs."""
        slots, mask = self._slots, len(self._slots) - 1
        place = key & mask
        while slots[place] not in (key, _FREE):
            place = (place + 1) & mask
        return place

    def _grow(self) -> None:
        old = self._slots
        self._slots = _zeros(2 * len(old))
        for key in old:
            if key != _FREE:
                self._slots[self._find(key)] = key


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))
