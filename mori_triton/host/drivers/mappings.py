"""Memory of a GPU made apart from its address (virtual memory management), so that a file descriptor stands for it.

Each function undoes what it has done when a later step fails.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

from mori_triton.errors import DriverError

if TYPE_CHECKING:
    from mori_triton.host.drivers.gpu import Gpu


class Mapping(NamedTuple):
    """Memory (`handle`) of `num_bytes` that is mapped at `address`."""

    handle: int
    address: int
    num_bytes: int


def create(gpu: Gpu, num_bytes: int, allocation_type: int) -> Mapping:
    """New memory, at least `num_bytes`, that this GPU may access and that can be exported."""
    api = gpu.api
    wanted = api.MemAllocationProp(type=allocation_type, location=_location(gpu))
    wanted.requestedHandleTypes = api.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    granule = gpu.output("map_granularity", ctypes.c_size_t, ctypes.byref(wanted), api.GRANULARITY_MINIMUM)
    extent = -(-num_bytes // granule) * granule
    handle = gpu.output("map_create", api.MapHandle, extent, ctypes.byref(wanted), 0, about=f"{extent} bytes")
    return _map(gpu, handle, extent)


def export(gpu: Gpu, handle: int) -> int:
    """A file descriptor for memory. The caller closes it."""
    descriptor = ctypes.c_int(-1)
    kind = gpu.api.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    gpu.call("map_export", ctypes.addressof(descriptor), handle, kind, 0)
    return descriptor.value


def import_(gpu: Gpu, descriptor: int, num_bytes: int) -> Mapping:
    """Map `num_bytes` of memory of another process that a descriptor stands for, which may be closed then."""
    with gpu.descriptor_argument(descriptor) as argument:
        kind = gpu.api.MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        handle = gpu.output("map_import", gpu.api.MapHandle, argument, kind, about=f"{num_bytes} bytes")
    return _map(gpu, handle, num_bytes)


def allow(gpu: Gpu, address: int, num_bytes: int) -> None:
    """Let this GPU load from and store to a mapping of this process."""
    wanted = gpu.api.MemAccessDesc(location=_location(gpu), flags=gpu.api.MEM_ACCESS_FLAGS_PROT_READWRITE)
    about = f"{num_bytes} bytes at {address:#x}"
    gpu.call("map_access", address, num_bytes, ctypes.byref(wanted), 1, about=about)


def destroy(gpu: Gpu, mapping: Mapping) -> None:
    """Unmap, and give back address and memory. The first error is raised when all has been tried."""
    about, failures = f"{mapping.num_bytes} bytes at {mapping.address:#x}", []
    # unlike free, unmap does not wait for kernels that are running
    for key, *arguments in (
        ("synchronize",),
        ("unmap", mapping.address, mapping.num_bytes),
        ("map_unreserve", mapping.address, mapping.num_bytes),
        ("map_release", mapping.handle),
    ):
        try:
            gpu.call(key, *arguments, about=about)
        except DriverError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _map(gpu: Gpu, handle: int, num_bytes: int) -> Mapping:
    address = mapped = 0
    about = f"{num_bytes} bytes"
    try:
        address = gpu.output("map_reserve", gpu.api.DevicePointer, num_bytes, 0, 0, 0, about=about)
        gpu.call("map", address, num_bytes, 0, handle, 0, about=about)
        mapped = address
        allow(gpu, address, num_bytes)
    except DriverError:
        if mapped:
            gpu.call("unmap", address, num_bytes)
        if address:
            gpu.call("map_unreserve", address, num_bytes)
        gpu.call("map_release", handle)
        raise
    return Mapping(handle, address, num_bytes)


def _location(gpu: Gpu) -> ctypes.Structure:
    return gpu.api.MemLocation(type=gpu.api.MEM_LOCATION_TYPE_DEVICE, id=gpu.index)
