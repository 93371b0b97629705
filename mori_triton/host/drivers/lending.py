"""What a GPU and RDMA devices lend each other: the GPU's memory as a dma-buf, doorbells and rings for its kernels."""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

from mori_triton.errors import DriverError
from mori_triton.host.drivers.allocation import Allocation

if TYPE_CHECKING:
    from mori_triton.host.drivers.gpu import Gpu

# what the kernel's page is on all machines with these GPUs; a dma-buf is of whole pages
_PAGE = 4096


def map_host(gpu: Gpu, address: int, num_bytes: int, registers: bool, failures: list[DriverError]) -> Allocation:
    """Let kernels reach pages of this process; where they see them. The mapping goes with the `Allocation`.

    `registers`: they are no memory, but registers of another device, which this process has mapped.
    """
    api, about = gpu.api, f"{num_bytes} bytes at {address:#x}"
    flags = api.HOST_REGISTER_PORTABLE | api.HOST_REGISTER_MAPPED | (api.HOST_REGISTER_IO if registers else 0)
    gpu.call("host_register", address, num_bytes, flags, about=about)
    give_back = partial(gpu.call, "host_unregister", address, about=about)
    try:
        seen = gpu.output("host_device_pointer", api.DevicePointer, address, 0, about=about)
    except DriverError:
        give_back()
        raise
    return Allocation(seen, num_bytes, give_back, failures, device_index=gpu.index)


def export_dma_buf(gpu: Gpu, owner: Allocation, address: int, least: int) -> int | None:
    """A descriptor of a dma-buf for all of `owner`, which the caller closes.

    None: this driver has none, `owner` does not begin at `address` and with a page, or there are not `least` bytes in
    whole pages. Of an address further in, AMD's descriptor would stand for the whole allocation, NVIDIA's would not.
    """
    num_bytes = owner.num_bytes // _PAGE * _PAGE
    if not gpu.library.has("dma_buf") or address != owner.address or address % _PAGE or num_bytes < least:
        return None
    descriptor = ctypes.c_int(-1)
    try:
        kind = gpu.api.MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        gpu.call("dma_buf", ctypes.addressof(descriptor), address, num_bytes, kind, 0)
    except DriverError:
        # the function is there with drivers and systems that have none; registering says what else is wrong
        return None
    return descriptor.value
