"""PEs of this process that reach each other through the proxy only, and kernels that go through it."""

from __future__ import annotations

import struct
from typing import Any

import torch

from mori_triton import abi, bitcode, emulator
from mori_triton.device.launch import launch
from mori_triton.host.proxy import Ring
from tests.device.pes import Pes

ARCH = "gfx1201"
ALL_FREE = 2**64 - 1
NETWORK = abi.CONTEXT_FIELDS["network"].offset // 8


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    library = str(bitcode.specialize(ARCH, provider="proxy"))
    return launch(kernel, grid, *args, extern_libs={abi.LIBRARY: library}, **options)


class FarPes(Pes):
    """PEs that reach each other through a ring only; `rings[pe]`, its memory made by hand."""

    def __init__(self, n: int, rings: list[Ring], **options: Any) -> None:
        far = [(pe, q) for pe in range(n) for q in range(n) if pe != q]
        super().__init__(n, ARCH, unreachable=far, **options)
        self.rings = rings
        self.networks = []
        for pe in range(n):
            raw = bytearray(abi.NETWORK_SIZE)
            struct.pack_into("<II", raw, 0, abi.PROVIDERS["proxy"], 1)
            struct.pack_into("<Q", raw, abi.NETWORK_FIELDS["ring"].offset, rings[pe].address)
            self.networks.append(torch.frombuffer(raw, dtype=torch.uint8))
            self.contexts[pe][NETWORK] = self.networks[pe].data_ptr()

    def _allow(self, number: int, pe: int) -> None:
        emulator.allow(number, self.contexts[pe].data_ptr(), abi.CONTEXT_BYTES, f"context of PE {pe}")
        emulator.allow(number, self.peers[pe].data_ptr(), 8 * self.n, f"peer bases of PE {pe}")
        emulator.allow(number, self.logs[pe].data_ptr(), abi.ERROR_LOG_SIZE, f"error log of PE {pe}")
        # nothing of any other PE
        emulator.allow(number, self.base(pe), self.heap_bytes, f"heap of PE {pe}")
        emulator.allow(number, self.networks[pe].data_ptr(), abi.NETWORK_SIZE, f"network of PE {pe}")
        ring = self.rings[pe]
        emulator.allow(number, ring.address, Ring.num_bytes(ring.entries, self.n), f"ring of PE {pe}")

    def all_free(self) -> bool:
        return all(ring.header.free_tickets == ALL_FREE for ring in self.rings)
