"""The structs that host and device share, in bytes: the device context of a PE and its error log (hip_src/context.h).

Packing and reading only; which memory they live in is the heap's business.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mori_triton.errors import KernelFault, MoriError, PeerTimeout
from mori_triton.wait_sites import wait_site_name

VERSION = 1
CONTEXT_BYTES = 128
BARRIER_WORDS = 64
ERROR_CAPACITY = 15

# version, pe, n_pes, flags, heap base, heap size, peer bases, sync, errors, timeout in ticks, reserved
_CONTEXT = struct.Struct("<IiiIQQQQQQQ")
_LOG = struct.Struct("<QQ")
# kind, pe, peer, tag, address, expected, seen, compare
_RECORD = struct.Struct("<IiiiQQQI20x")
ERROR_LOG_BYTES = _LOG.size + ERROR_CAPACITY * _RECORD.size

WAIT_TIMEOUT, OUT_OF_RANGE = 1, 2
COMPARE = {1: "==", 2: "!=", 3: ">", 4: ">=", 5: "<", 6: "<="}


def pack_context(
    *,
    pe: int,
    n_pes: int,
    heap_base: int,
    heap_bytes: int,
    peer_bases: int,
    sync: int,
    errors: int,
    timeout_ticks: int,
) -> bytes:
    """The device context, `CONTEXT_BYTES` long; addresses are the device's."""
    fields = (VERSION, pe, n_pes, 0, heap_base, heap_bytes, peer_bases, sync, errors, timeout_ticks, 0)
    return _CONTEXT.pack(*fields).ljust(CONTEXT_BYTES, b"\0")


def empty_error_log() -> bytes:
    """An error log that holds nothing, `ERROR_LOG_BYTES` long."""
    return _LOG.pack(0, ERROR_CAPACITY).ljust(ERROR_LOG_BYTES, b"\0")


@dataclass(frozen=True)
class ErrorRecord:
    """What a kernel wrote before it ended early. `where` names the address; `tag` says which wait it was."""

    kind: int
    pe: int
    peer: int
    tag: int
    address: int
    expected: int
    seen: int
    compare: int
    where: str

    def __str__(self) -> str:
        if self.kind == WAIT_TIMEOUT:
            peer = f" for PE {self.peer}" if self.peer >= 0 else ""
            wanted = f"{COMPARE.get(self.compare, '?')} {self.expected}"
            return f"{wait_site_name(self.tag)} on PE {self.pe}, waiting{peer}: {self.where} expected {wanted}, saw {self.seen}"
        if self.kind == OUT_OF_RANGE:
            name = wait_site_name(self.tag)
            return f"{name} on PE {self.pe}, to PE {self.peer}: {self.where}: want {self.expected}, got {self.seen} (out of range)"
        return f"{wait_site_name(self.tag)} on PE {self.pe}: error of unknown kind {self.kind}, {self.where}"


def unpack_error_log(log: bytes, describe) -> tuple[list[ErrorRecord], int]:
    """Records of a log and how many errors came in all (more than the log holds, perhaps). `describe(address)` names one."""
    count, capacity = _LOG.unpack_from(log)
    records = []
    for i in range(min(count, capacity, ERROR_CAPACITY)):
        kind, pe, peer, tag, address, expected, seen, compare = _RECORD.unpack_from(log, _LOG.size + i * _RECORD.size)
        records.append(ErrorRecord(kind, pe, peer, tag, address, expected, seen, compare, describe(address)))
    return records, count


def error_of(records: list[ErrorRecord], num_errors: int) -> MoriError:
    """The exception for what a log held: `KernelFault` if anything was out of range, else `PeerTimeout`."""
    lines = [str(record) for record in records]
    if num_errors > len(records):
        lines.append(f"and {num_errors - len(records)} more")
    fault = any(record.kind != WAIT_TIMEOUT for record in records)
    head = "a kernel went out of range" if fault else "a wait in a kernel reached its limit"
    text = "\n  ".join([f"{head}:", *lines])
    return KernelFault(text) if fault else PeerTimeout(text)
