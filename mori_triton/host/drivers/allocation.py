"""Memory of a GPU with a lifetime: it goes back when its last holder is gone, a driver, a tensor or a host view."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from mori_triton.errors import DriverError


class Allocation:
    """`num_bytes` from `address`.

    Args:
        release: gives the memory back; called once. It must not hold this object.
        failures: where an error of `release` goes, since whoever drops the last reference cannot be told.
        handle: what the driver keeps with it, 0 for memory that is no mapping.
        device_index: the device it is on.
    """

    def __init__(
        self,
        address: int,
        num_bytes: int,
        release: Callable[[], None],
        failures: list[DriverError],
        *,
        handle: int = 0,
        device_index: int = 0,
    ) -> None:
        self.address, self.num_bytes = address, num_bytes
        self.handle, self.device_index = handle, device_index
        # of the host, pinned
        self.on_host = False
        # by which other drivers of this process find it; 0: they do not
        self.number = 0
        # at the end of the process the system takes all of it, and libraries may be half gone
        weakref.finalize(self, _release, release, failures).atexit = False

    def contains(self, address: int, num_bytes: int = 1) -> bool:
        return self.address <= address and address + num_bytes <= self.address + self.num_bytes


def _release(release: Callable[[], None], failures: list[DriverError]) -> None:
    try:
        release()
    except DriverError as error:
        failures.append(error)
