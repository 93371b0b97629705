"""Structs that host and device share, as bytes: fields by name, laid out as `abi` says."""

from __future__ import annotations

import struct
from collections.abc import Mapping

from mori_triton import abi

_FORMATS = {"u32": "I", "i32": "i", "u64": "Q"}


def pack(fields: Mapping[str, abi.Field], num_bytes: int, values: Mapping[str, int]) -> bytes:
    """A struct of `num_bytes`; what `values` does not name is zero."""
    buffer = bytearray(num_bytes)
    for name, value in values.items():
        struct.pack_into("<" + _FORMATS[fields[name].type], buffer, fields[name].offset, value)
    return bytes(buffer)


def unpack(fields: Mapping[str, abi.Field], data: bytes, at: int = 0) -> dict[str, int]:
    """All fields of the struct that starts `at` bytes into `data`."""
    return {
        name: struct.unpack_from("<" + _FORMATS[field.type], data, at + field.offset)[0]
        for name, field in fields.items()
    }
