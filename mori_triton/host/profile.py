"""What a profiler build of the device library logs of a PE's operations, and a trace of it for Chrome or Perfetto.

Kernels log once they are linked with `bitcode.specialize(target, profiler=True)`; others leave the log alone. The log
(layout: `abi`, `hip_src/profile.h`) is read between kernels, not while they run.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from mori_triton import abi
from mori_triton.host.drivers.base import Driver, MemoryKind

# 320 KiB
_CAPACITY = 8192
_COUNT, _CAPACITY_AT, _RECORDS = (abi.PROFILE_LOG_FIELDS[name].offset for name in ("count", "capacity", "records"))
_RECORD = struct.Struct("<QQQIiQ")


class Operation(NamedTuple):
    """One operation of one program: `name` as it is exported, `peer` -1 if there are several or none."""

    pe: int
    program: int
    name: str
    peer: int
    num_bytes: int
    start_us: float
    end_us: float


class ProfileLog:
    """The log of PE `pe`, empty, in fine-grained memory of `driver`, with room for `capacity` operations."""

    def __init__(self, driver: Driver, pe: int, capacity: int = _CAPACITY) -> None:
        self._driver, self._pe, self._capacity = driver, pe, capacity
        self.num_bytes = _RECORDS + capacity * abi.PROFILE_RECORD_SIZE
        self.address = driver.alloc(self.num_bytes, kind=MemoryKind.FINE_GRAINED)
        self._view = driver.host_view(self.address, self.num_bytes)
        self._view[:_RECORDS] = bytes(_RECORDS)
        struct.pack_into("<Q", self._view, _CAPACITY_AT, capacity)

    def take(self) -> tuple[list[Operation], int]:
        """The operations since the last call, by start, and how many found no room. Waits for the device."""
        self._driver.synchronize()
        (count,) = struct.unpack_from("<Q", self._view, _COUNT)
        stored = min(count, self._capacity)
        found = [self._operation(_RECORDS + i * abi.PROFILE_RECORD_SIZE) for i in range(stored)]
        struct.pack_into("<Q", self._view, _COUNT, 0)
        return sorted(found, key=lambda operation: operation.start_us), count - stored

    def _operation(self, at: int) -> Operation:
        start, end, num_bytes, symbol, peer, program = _RECORD.unpack_from(self._view, at)
        us = 1e6 / self._driver.ticks_per_second
        name = abi.symbol_name(symbol) or f"symbol {symbol:#x}"
        return Operation(self._pe, program, name, peer, num_bytes, start * us, end * us)

    def close(self) -> None:
        """Give the memory back."""
        # a view keeps it
        self._view = memoryview(b"")
        self._driver.free(self.address)


def write_chrome_trace(path: Path | str, operations: Iterable[Operation]) -> None:
    """A file for chrome://tracing or ui.perfetto.dev: a process for each PE, a row for each program.

    Time begins with the first operation. PEs of one host share a clock; those of others are shifted against it.
    """
    operations = list(operations)
    first = min((operation.start_us for operation in operations), default=0.0)
    events: list[dict[str, Any]] = [
        {"name": "process_name", "ph": "M", "pid": pe, "args": {"name": f"PE {pe}"}}
        for pe in sorted({operation.pe for operation in operations})
    ]
    events += [
        {
            "name": operation.name.removeprefix(f"{abi.LIBRARY}_"),
            "ph": "X",
            "pid": operation.pe,
            "tid": operation.program,
            "ts": operation.start_us - first,
            "dur": operation.end_us - operation.start_us,
            "args": {"peer": operation.peer, "bytes": operation.num_bytes},
        }
        for operation in operations
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))
