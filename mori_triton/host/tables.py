"""What a PE's kernels know of their world, in memory of its device: context, table of peers, logs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from mori_triton import abi
from mori_triton.errors import DriverError
from mori_triton.host import context
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.error_log import ErrorLog
from mori_triton.host.peers import undo_all
from mori_triton.host.profile import ProfileLog

if TYPE_CHECKING:
    import torch


class Region(NamedTuple):
    """Memory that kernels of a PE may touch: `pe` is the PE whose memory it is."""

    address: int
    num_bytes: int
    name: str
    pe: int


class PeTables:
    """The tables of PE `pe`, empty. Raises `DriverError` if there is no memory for them."""

    def __init__(self, driver: Driver, pe: int, n_pes: int) -> None:
        self._driver, self._pe, self._n_pes = driver, pe, n_pes
        self._ctx: torch.Tensor | None = None
        self._num_bytes = abi.CONTEXT_BYTES + n_pes * 8
        self.address = driver.alloc(self._num_bytes, kind=MemoryKind.CACHED)
        undo: list[Callable[[], None]] = [partial(driver.free, self.address)]
        try:
            self.errors = ErrorLog(driver)
            undo.append(self.errors.close)
            self.profile = ProfileLog(driver, pe)
        except DriverError:
            undo_all(undo)
            raise

    def write(
        self, *, heap_base: int, heap_size: int, peer_bases: Sequence[int], sync: int, timeout_ticks: int
    ) -> None:
        """Fill them. Addresses are the device's; 0 ticks: waits have no limit."""
        bases = self.address + abi.CONTEXT_BYTES
        packed = context.pack_context(
            pe=self._pe,
            n_pes=self._n_pes,
            heap_base=heap_base,
            heap_size=heap_size,
            peer_bases=bases,
            sync=sync,
            errors=self.errors.address,
            timeout_ticks=timeout_ticks,
            profile=self.profile.address,
        )
        self._driver.write(self.address, packed)
        self._driver.write(bases, struct.pack(f"<{self._n_pes}Q", *peer_bases))

    def set_network(self, address: int) -> None:
        """Where this PE's `Network` is, 0: there is none; kernels that run do not look again."""
        self._driver.write(self.address + abi.CONTEXT_FIELDS["network"].offset, struct.pack("<Q", address))

    @property
    def ctx(self) -> torch.Tensor:
        """The context as an int64 tensor."""
        if self._ctx is None:
            import torch

            self._ctx = self._driver.tensor(self.address, (abi.CONTEXT_BYTES // 8,), torch.int64)
        return self._ctx

    def regions(self) -> list[Region]:
        """What kernels may touch."""
        return [
            Region(self.address, self._num_bytes, f"context of PE {self._pe}", self._pe),
            Region(self.errors.address, abi.ERROR_LOG_SIZE, f"error log of PE {self._pe}", self._pe),
            Region(self.profile.address, self.profile.num_bytes, f"profile of PE {self._pe}", self._pe),
        ]

    def close(self) -> None:
        """Give the memory back."""
        self._ctx = None
        undo_all([partial(self._driver.free, self.address), self.errors.close, self.profile.close])
