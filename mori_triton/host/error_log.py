"""A PE's error log: where its kernels record what went wrong, in memory that the host sees while they run.

A ring that only kernels append to (layout: `abi`, reading: `context`). The host keeps count of what it has taken, and
tells the kernels through one word how far they may go.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from mori_triton import abi
from mori_triton.host import context
from mori_triton.host.drivers.base import Driver, MemoryKind

# between the count of an error and the last word of its record
_RECORD_S = 0.01


class ErrorLog:
    """An empty log in fine-grained memory of `driver`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.address = driver.alloc(abi.ERROR_LOG_SIZE, kind=MemoryKind.FINE_GRAINED)
        self._view = driver.host_view(self.address, abi.ERROR_LOG_SIZE)
        self._view[:] = context.empty_error_log()
        count = abi.ERROR_LOG_FIELDS["count"].offset
        self._count = self._view[count : count + 8].cast("Q")
        self.num_taken = 0

    def pending(self) -> bool:
        """Whether an error has been recorded that nobody has taken. One look at memory, no waiting."""
        return self._count[0] != self.num_taken

    def take(self, describe: Callable[[int], str]) -> tuple[list[context.ErrorRecord], int]:
        """What has been recorded since the last call, and how many errors there were. `describe` names an address.

        Does not wait for kernels, which may be recording more: a record is written a moment after it is counted.
        """
        if not self.pending():
            return [], 0
        until = time.monotonic() + _RECORD_S
        while True:
            found = context.take_records(bytes(self._view), self.num_taken, describe)
            if found.complete or time.monotonic() > until:
                break
            time.sleep(0)
        new = found.total - self.num_taken
        self.num_taken = found.total
        # makes room for more
        limit = abi.ERROR_LOG_FIELDS["limit"].offset
        self._view[limit : limit + 8] = struct.pack("<Q", found.total + abi.ERROR_CAPACITY)
        return found.records, new

    def close(self) -> None:
        """Give the memory back."""
        # a view keeps it
        self._view = self._count = memoryview(b"")
        self._driver.free(self.address)
