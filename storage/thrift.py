"""Thrift's compact protocol, as much of it as Parquet's metadata is written in.

In: structs as lists of fields. Out: bytes; and bytes back to dicts by field id. Source: the Apache Thrift
compact protocol specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple


class Kind(IntEnum):
    """Type codes of the compact protocol."""

    TRUE = 1
    FALSE = 2
    BYTE = 3
    I16 = 4
    I32 = 5
    I64 = 6
    DOUBLE = 7
    BINARY = 8
    LIST = 9
    STRUCT = 12


class Field(NamedTuple):
    """One field of a struct: an int, bytes or text, or for a STRUCT its fields; a list has `items` for its
    elements.
    """

    id: int
    kind: Kind
    value: Any
    items: Kind = Kind.STRUCT


def encode(fields: Sequence[Field]) -> bytes:
    """A struct. Fields come in rising order of their ids."""
    out = bytearray()
    last = 0
    for field in fields:
        delta = field.id - last
        if 0 < delta <= 15:
            out.append(delta << 4 | field.kind)
        else:
            out.append(field.kind)
            out += varint(_zigzag(field.id))
        out += _encode_value(field.kind, field.value, field.items)
        last = field.id
    out.append(0)
    return bytes(out)


def decode(data: bytes | memoryview) -> dict[int, Any]:
    """The struct at the start of `data`, by field id; nested ones are dicts, text stays bytes.

    Raises ValueError where the bytes are not a struct (cut off, or of unknown types).
    """
    try:
        return _Decoder(data).struct()
    except (IndexError, RecursionError) as error:
        raise ValueError(f"not a Thrift struct: {error}") from None


def _encode_value(kind: Kind, value: Any, items: Kind) -> bytes:
    if kind in (Kind.I16, Kind.I32, Kind.I64):
        return varint(_zigzag(value))
    if kind is Kind.BINARY:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        return varint(len(raw)) + raw
    if kind is Kind.STRUCT:
        return encode(value)
    if kind is Kind.LIST:
        size = len(value)
        head = bytes([size << 4 | items]) if size < 15 else bytes([0xF0 | items]) + varint(size)
        return head + b"".join(_encode_value(items, each, Kind.STRUCT) for each in value)
    raise ValueError(f"no encoding for {kind!r}")


def _zigzag(value: int) -> int:
    return value << 1 ^ value >> 63


def varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first; negative numbers as 64 bits."""
    value &= 0xFFFFFFFFFFFFFFFF
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Decoder:
    def __init__(self, data: bytes | memoryview) -> None:
        self._data = data
        self._at = 0

    def struct(self) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        last = 0
        while head := self._byte():
            last = last + (head >> 4) if head >> 4 else self._signed()
            fields[last] = self._value(head & 0x0F)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in (Kind.TRUE, Kind.FALSE):
            return kind == Kind.TRUE
        if kind == Kind.BYTE:
            return self._byte()
        if kind in (Kind.I16, Kind.I32, Kind.I64):
            return self._signed()
        if kind == Kind.DOUBLE:
            return self._bytes(8)
        if kind == Kind.BINARY:
            return self._bytes(self._unsigned())
        if kind == Kind.STRUCT:
            return self.struct()
        if kind == Kind.LIST:
            head = self._byte()
            size = head >> 4 if head >> 4 != 15 else self._unsigned()
            if size > len(self._data) - self._at:
                raise ValueError("not a Thrift struct: a list is longer than the data")
            items = head & 0x0F
            # In a list a boolean is a byte of its own.
            return [
                self._byte() if items in (Kind.TRUE, Kind.FALSE) else self._value(items) for _ in range(size)
            ]
        raise ValueError(f"not a Thrift struct: type {kind}")

    def _byte(self) -> int:
        value = self._data[self._at]
        self._at += 1
        return value

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise IndexError("cut off")
        self._at += size
        return bytes(self._data[self._at - size : self._at])

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 0x80:
            value |= (byte & 0x7F) << shift
            shift += 7
        return value | byte << shift

    def _signed(self) -> int:
        value = self._unsigned()
        return value >> 1 ^ -(value & 1)
