"""Sets and maps of 64-bit keys in a few bytes each: a Python set of a million takes 70 MB, this one 16.

In: keys that are hashes already, so that their low bits say where they go. Out: whether a key is new, or the value
that it had first.
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

    def add(self, key: int) -> bool:
        """Whether `key` is new; it is there from now on."""
        return self._take(key or 1) is not None

    def _take(self, key: int) -> int | None:
        """The slot that a new key was put in; None where it was there."""
        place = self._find(key)
        if self._slots[place] != _FREE:
            return None
        if 3 * (self._count + 1) > 2 * len(self._slots):
            self._grow()
            place = self._find(key)
        self._slots[place] = key
        self._count += 1
        return place

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


class KeyedValues(Keys):
    """A 64-bit value beside every key."""

    def __init__(self) -> None:
        super().__init__()
        self._values = _zeros(_FIRST_SLOTS)

    def setdefault(self, key: int, value: int) -> int:
        """The key's value; `value` where the key is new."""
        key = key or 1
        place = self._take(key)
        if place is None:
            return self._values[self._find(key)]
        self._values[place] = value
        return value

    def _grow(self) -> None:
        slots, values = self._slots, self._values
        super()._grow()
        self._values = _zeros(len(self._slots))
        for key, value in zip(slots, values, strict=True):
            if key != _FREE:
                self._values[self._find(key)] = value


def _zeros(count: int) -> array[int]:
    return array("Q", bytes(8 * count))
