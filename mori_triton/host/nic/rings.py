"""GPU memory for the rings of queue pairs, and how a card is told of it: by a dma-buf, else by its address."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mori_triton.errors import DriverError
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.nic.verbs import OpenDevice

_PAGE = 4096
PAGE_SIZES = 2**64 - _PAGE  # every one that a card may cut a dma-buf into, as bits
# for several queue pairs: memory that may be exported is of whole 2 MiB
_BLOCK_BYTES = 16 << 20
NO_DMA_BUF = "no dma-buf for it"

Made = TypeVar("Made")


def unreachable(error: DriverError, how: object) -> DriverError:
    """Registering memory of a GPU by its address has failed; `how`: why there was no other way."""
    return DriverError(
        f"{error}; memory of a GPU wants a driver that exports dma-bufs ({how}), or a kernel module that lets RDMA "
        "devices reach it (NVIDIA: nvidia-peermem)"
    )


@dataclass(frozen=True)
class Ring:
    """Whole pages that begin at `address`, `num_bytes` of which are wanted; `offset`: where in the dma-buf."""

    address: int
    num_bytes: int
    offset: int

    @property
    def page_bytes(self) -> int:
        """What of it a dma-buf is registered for."""
        return -(-self.num_bytes // _PAGE) * _PAGE


class RingMemory:
    """Rings of a device's queue pairs, until the device is closed. Several queue pairs share a block of memory.

    Args:
        driver: of the GPU that will post.
    """

    def __init__(self, device: OpenDevice, driver: Driver) -> None:
        self._device, self._driver = device, driver
        # the newest block: where it begins, what of it is taken, where it ends
        self._block = self._at = self._end = 0

    @contextmanager
    def take(self, sizes: Sequence[int]) -> Iterator[tuple[list[Ring], int | None]]:
        """Zeroed rings of these sizes, one behind the other, and a dma-buf of them, which is closed afterwards.

        None: there is none. What is made by it has to be made within, since some libraries only note the descriptor.
        """
        offsets, num_bytes = [], 0
        for size in sizes:
            offsets.append(num_bytes)
            num_bytes += -(-size // _PAGE) * _PAGE
        address = self._take(num_bytes)
        descriptor = self._driver.export_dma_buf(self._block, self._end - self._block)
        start = address - self._block
        try:
            yield [Ring(address + at, size, start + at) for at, size in zip(offsets, sizes, strict=True)], descriptor
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def _take(self, num_bytes: int) -> int:
        if self._end - self._at < num_bytes:
            block = max(num_bytes, _BLOCK_BYTES)
            # smaller ones that may not be exported share pages, and a dma-buf, with other memory
            self._block = self._driver.alloc(block, kind=MemoryKind.UNCACHED, alignment=_PAGE, exportable=True)
            self._at, self._end = self._block, self._block + block
            self._device.owns(partial(self._driver.free, self._block))
        address, self._at = self._at, self._at + num_bytes
        return address


def register(by_dma_buf: Callable[[], Made] | None, by_address: Callable[[], Made], lacks: str) -> Made:
    """What the first way that works makes. `by_dma_buf`: None if there is no such way, for the reason `lacks`.

    Raises:
        DriverError: neither does; the message says why.
    """
    how: object = lacks
    if by_dma_buf is not None:
        try:
            return by_dma_buf()
        except DriverError as error:
            # a library or a kernel that is older than dma-bufs for rings
            how = error
    try:
        return by_address()
    except DriverError as error:
        raise unreachable(error, how) from error
