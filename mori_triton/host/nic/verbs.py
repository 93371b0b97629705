"""A device that is open: its protection domain, memory that it may reach, and the states of its queue pairs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from mori_triton.errors import DriverError, StateError, require
from mori_triton.host.nic import verbs_api as api
from mori_triton.host.nic.libraries import RdmaLibrary

# what peers do to memory of the heap, and what answers to reads and atomics need
ACCESS = api.ACCESS_LOCAL_WRITE | api.ACCESS_REMOTE_WRITE | api.ACCESS_REMOTE_READ | api.ACCESS_REMOTE_ATOMIC


@dataclass(frozen=True)
class Region:
    """Memory that a device may reach: `num_bytes` from `address` on, which is also what peers call it by."""

    address: int
    num_bytes: int
    lkey: int
    rkey: int


class OpenDevice:
    """An open device with one protection domain. What is made of it is given back by `close`, last first.

    Args:
        library: `libraries.open_verbs()`.
        name: as in sysfs.

    Raises:
        StateError: there is no such device, or this process may not use it; the message names those there are.
        DriverError: the library failed.
    """

    def __init__(self, library: RdmaLibrary, name: str) -> None:
        self.library, self.name = library, name
        self._undo: list[Callable[[], object]] = []
        self._regions: dict[Region, object] = {}
        self.context = self._open()
        self._undo.append(partial(library.call, "close_device", self.context, about=name))
        try:
            self.pd = library.call("alloc_pd", self.context, about=name)
        except DriverError:
            self.close()
            raise
        self._undo.append(partial(library.call, "dealloc_pd", self.pd, about=name))

    def _open(self) -> api.Context:
        count = ctypes.c_int()
        try:
            listed = self.library.call("get_device_list", ctypes.byref(count))
        except DriverError as error:
            # a kernel without RDMA
            raise StateError(f"libibverbs ({self.library.path}) shows no device {self.name}: {error}") from error
        try:
            names = []
            for at in range(count.value):
                found = self.library.call("get_device_name", listed[at])
                if found is not None and found.decode() == self.name:
                    return self.library.call("open_device", listed[at], about=self.name)
                names.append("?" if found is None else found.decode())
        finally:
            self.library.call("free_device_list", listed)
        raise StateError(
            f"libibverbs ({self.library.path}) shows no device {self.name}, there are: {', '.join(names) or 'none'}. "
            "In a container, /dev/infiniband has to be there; the card's provider library too"
        )

    def owns(self, undo: Callable[[], object]) -> None:
        """`close` calls this before it gives back what was made before."""
        self._undo.append(undo)

    def attributes(self) -> api.DeviceAttr:
        """What the device can do."""
        out = api.DeviceAttr()
        self.library.call("query_device", self.context, ctypes.byref(out), about=self.name)
        return out

    def port(self, number: int) -> api.PortAttr:
        """How a port is. Raises `StateError` unless it is up."""
        require(0 < number < 256, "number", "1 to 255", number)
        out = api.PortAttr()
        self.library.call("query_port", self.context, number, ctypes.byref(out), about=f"{self.name} port {number}")
        if out.state != api.PORT_ACTIVE:
            raise StateError(f"{self.name} port {number} is not up: its state is {out.state}, want {api.PORT_ACTIVE}")
        return out

    def register(self, address: int, num_bytes: int) -> Region:
        """Let the device and peers reach memory of this process, or of a GPU whose driver lends it to RDMA devices."""
        about = f"{num_bytes} bytes at {address:#x} for {self.name}"
        made = self.library.call("reg_mr", self.pd, address, num_bytes, ACCESS, about=about)
        return self._keep(made, address, num_bytes)

    def register_dma_buf(self, descriptor: int, offset: int, address: int, num_bytes: int) -> Region:
        """The same for memory that a dma-buf stands for: from `offset` of it on, called by `address`."""
        about = f"{num_bytes} bytes at {address:#x}, {offset} into a dma-buf, for {self.name}"
        made = self.library.call("reg_dmabuf_mr", self.pd, offset, num_bytes, address, descriptor, ACCESS, about=about)
        return self._keep(made, address, num_bytes)

    def _keep(self, made: ctypes._Pointer[api.Mr], address: int, num_bytes: int) -> Region:
        region = Region(address, num_bytes, made.contents.lkey, made.contents.rkey)
        self._regions[region] = made
        return region

    def deregister(self, region: Region) -> None:
        """Nobody may reach it any more."""
        if region not in self._regions:
            raise StateError(f"{self.name}: {region.num_bytes} bytes at {region.address:#x} are not registered")
        self.library.call("dereg_mr", self._regions.pop(region), about=self.name)

    def close(self) -> None:
        """Give everything back. Raises the first error after the rest has been. Idempotent."""
        failures = []
        regions = [partial(self.deregister, region) for region in self._regions]
        undo, self._undo = self._undo, []
        # queue pairs first: the device may be writing
        made, base = undo[2:], undo[:2]
        calls: list[Callable[[], object]] = [*reversed(made), *regions, *reversed(base)]
        for call in calls:
            try:
                call()
            except DriverError as error:
                failures.append(error)
        if failures:
            raise failures[0]
