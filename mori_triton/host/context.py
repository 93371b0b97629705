"""The structs that host and device share, as bytes: the device context of a PE and its error log (layout: `abi`).

Packing and reading only; which memory they live in is the heap's business.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mori_triton import abi
from mori_triton.errors import KernelFault, MoriError, PeerTimeout, ReceiveOverflow
from mori_triton.wait_sites import wait_site_name

# `expected` of a refused atomic or signal whose operation code does not exist
_UNKNOWN_OPERATION = 2**64 - 1
_FORMATS = {"u32": "I", "i32": "i", "u64": "Q"}


def _put(buffer: bytearray, at: int, field: abi.Field, value: int) -> None:
    struct.pack_into("<" + _FORMATS[field.type], buffer, at + field.offset, value)


def _get(buffer: bytes, at: int, field: abi.Field) -> int:
    return struct.unpack_from("<" + _FORMATS[field.type], buffer, at + field.offset)[0]


def pack_context(
    *,
    pe: int,
    n_pes: int,
    heap_base: int,
    heap_size: int,
    peer_bases: int,
    sync: int,
    errors: int,
    timeout_ticks: int,
) -> bytes:
    """The device context, `abi.CONTEXT_BYTES` long. Addresses are the device's; 0 ticks: waits have no limit."""
    buffer = bytearray(abi.CONTEXT_BYTES)
    values = {"version": abi.ABI_VERSION, "pe": pe, "n_pes": n_pes, "heap_base": heap_base, "heap_size": heap_size}
    values |= {"peer_bases": peer_bases, "sync": sync, "errors": errors, "timeout_ticks": timeout_ticks}
    for name, value in values.items():
        _put(buffer, 0, abi.CONTEXT_FIELDS[name], value)
    return bytes(buffer)


def empty_error_log() -> bytes:
    """An error log that holds nothing and of which nothing was taken, `abi.ERROR_LOG_SIZE` long."""
    buffer = bytearray(abi.ERROR_LOG_SIZE)
    _put(buffer, 0, abi.ERROR_LOG_FIELDS["limit"], abi.ERROR_CAPACITY)
    return bytes(buffer)


@dataclass(frozen=True)
class ErrorRecord:
    """What a kernel recorded; the fields of `abi.ERROR_RECORD_FIELDS`. `where` names `address`."""

    kind: int
    pe: int
    peer: int
    tag: int
    address: int
    expected: int
    seen: int
    compare: int
    where: str

    @property
    def timed_out(self) -> bool:
        """Whether a wait reached its limit."""
        return self.kind == abi.ERROR_WAIT_TIMEOUT

    @property
    def overflowed(self) -> bool:
        """Whether more rows came than there is room for."""
        return self.kind == abi.ERROR_OVERFLOW

    def __str__(self) -> str:
        site = f"{wait_site_name(self.tag)} on PE {self.pe}"
        if self.timed_out:
            peer = f" waiting for PE {self.peer}" if self.peer >= 0 else " waiting"
            sign = abi.COMPARE_SIGNS.get(self.compare, "?")
            return f"{site}{peer}: {self.where}, expected {sign} {self.expected}, saw {self.seen}"
        if self.overflowed:
            return (
                f"{wait_site_name(self.tag)}: PE {self.pe} was sent {self.seen} rows, {self.seen - self.expected} more "
                f"than its receive buffers hold (R = {self.expected}); they were dropped"
            )
        if self.kind == abi.ERROR_REFUSED:
            what = "an unknown operation" if self.expected == _UNKNOWN_OPERATION else f"{self.expected} bytes"
            why = (
                ""
                if self.expected == _UNKNOWN_OPERATION
                else " (no such PE, not mapped, outside the heap, or misaligned)"
            )
            return f"PE {self.pe}, to PE {self.peer}: {self.where}: {what} refused{why}"
        return f"{site}: error of unknown kind {self.kind} at {self.where}"


class Taken(NamedTuple):
    """What `take_records` found: the records by age, the count of the log, whether every record was whole."""

    records: list[ErrorRecord]
    total: int
    complete: bool


def take_records(log: bytes, taken: int, describe: Callable[[int], str]) -> Taken:
    """The records of a log after the first `taken` errors. Kernels may be writing to it.

    There may have been more errors than records, `total - taken` in all: what found the ring full was dropped. A record
    that is not whole yet is left out, and `complete` False: look again. Once done, the host writes the log's `limit`:
    `total + abi.ERROR_CAPACITY`.

    Args:
        log: a copy of the log, `abi.ERROR_LOG_SIZE` bytes.
        taken: `total` when it was taken last.
        describe: names an address.
    """
    count = _get(log, 0, abi.ERROR_LOG_FIELDS["count"])
    records = []
    slots = range(taken, min(count, taken + abi.ERROR_CAPACITY))
    for slot in slots:
        at = abi.ERROR_LOG_FIELDS["records"].offset + slot % abi.ERROR_CAPACITY * abi.ERROR_RECORD_SIZE
        fields = {name: _get(log, at, field) for name, field in abi.ERROR_RECORD_FIELDS.items()}
        # stored last, so the rest is there too
        if fields.pop("sequence") == (slot + 1) % 2**32:
            records.append(ErrorRecord(**fields, where=describe(fields["address"])))
    return Taken(records, count, len(records) == len(slots))


def unpack_error_log(log: bytes, describe: Callable[[int], str]) -> tuple[list[ErrorRecord], int]:
    """The records of a log that nothing was taken of, and how many errors there were in all, which may be more."""
    records, count, _ = take_records(log, 0, describe)
    return records, count


def error_of(records: list[ErrorRecord], num_errors: int) -> MoriError:
    """The exception for what a log held, with a line for each record.

    Records may be of several kinds; the gravest names the exception: `KernelFault` if an operation was refused (code or
    arguments are wrong), else `PeerTimeout` if a wait reached its limit (a round did not take place), else
    `ReceiveOverflow` (a round took place, rows are missing). `KernelFault` too when no record is left to say.
    """
    lines = [str(record) for record in records]
    if num_errors > len(records):
        lines.append(f"and {num_errors - len(records)} more")
    if not all(record.timed_out or record.overflowed for record in records) or not records:
        return KernelFault("\n  ".join(["a kernel asked for what cannot be served:", *lines]))
    if any(record.timed_out for record in records):
        return PeerTimeout("\n  ".join(["a wait in a kernel reached its limit:", *lines]))
    return ReceiveOverflow("\n  ".join(["more rows came than there is room for:", *lines]))
