"""PEs for tests of the device library: heaps, contexts and error logs laid out by hand after `abi`, one emulated device
each.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from mori_triton import abi, emulator
from mori_triton.emulator import device as devices

SENTINEL = 0xA5
GUARD = 256  # bytes around what a test copies


def pack(fields: dict[str, abi.Field], size: int, values: dict[str, int]) -> bytearray:
    """A struct of `abi` from its fields' values."""
    data = bytearray(size)
    for name, value in values.items():
        offset, kind = fields[name]
        struct.pack_into({"u32": "<I", "i32": "<i", "u64": "<Q"}[kind], data, offset, value)
    return data


def unpack(fields: dict[str, abi.Field], data: bytes) -> dict[str, int]:
    """The fields of a struct of `abi`."""
    return {
        name: struct.unpack_from({"u32": "<I", "i32": "<i", "u64": "<Q"}[kind], data, offset)[0]
        for name, (offset, kind) in fields.items()
    }


class Pes:
    """`n` PEs on emulated devices. `unreachable`: pairs (from, to) without a mapping. `timeout_s`: limit of a wait."""

    def __init__(self, n: int, arch: str, *, heap_bytes: int = 1 << 16, timeout_s: float = 20.0, unreachable=()):
        self.n, self.arch, self.heap_bytes = n, arch, heap_bytes
        # 4096 bytes: heaps start aligned as on a GPU
        self.heaps = [self._memory(heap_bytes) for _ in range(n)]
        for heap in self.heaps:
            heap.fill_(SENTINEL)
            heap[: 8 * abi.BARRIER_WORDS] = 0
        self.logs = [self._memory(abi.ERROR_LOG_SIZE) for _ in range(n)]
        self.peers = [
            torch.tensor([0 if (pe, q) in unreachable else self.base(q) for q in range(n)], dtype=torch.int64)
            for pe in range(n)
        ]
        self.contexts = []
        for pe in range(n):
            self.clear_log(pe)
            values = {
                "version": abi.ABI_VERSION,
                "pe": pe,
                "n_pes": n,
                "heap_base": self.base(pe),
                "heap_size": heap_bytes,
                "peer_bases": self.peers[pe].data_ptr(),
                "sync": self.base(pe),
                "errors": self.logs[pe].data_ptr(),
                "timeout_ticks": int(timeout_s * 1e8),
            }
            raw = pack(abi.CONTEXT_FIELDS, abi.CONTEXT_BYTES, values)
            self.contexts.append(torch.frombuffer(raw, dtype=torch.int64))

    @staticmethod
    def _memory(num_bytes: int) -> torch.Tensor:
        raw = torch.zeros(num_bytes + 4096, dtype=torch.uint8)
        start = -raw.data_ptr() % 4096
        return raw[start : start + num_bytes]

    def base(self, pe: int) -> int:
        return self.heaps[pe].data_ptr()

    def view(self, pe: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the heap of `pe`."""
        return self.heaps[pe][offset : offset + count * dtype.itemsize].view(dtype)

    def clear_log(self, pe: int) -> None:
        head = struct.pack("<QQ", 0, abi.ERROR_CAPACITY)
        self.logs[pe].zero_()
        self.logs[pe][:16] = torch.frombuffer(bytearray(head), dtype=torch.uint8)

    def records(self, pe: int) -> list[dict[str, int]]:
        """What the PE's error log holds."""
        data = bytes(self.logs[pe].numpy())
        count = struct.unpack_from("<Q", data)[0]
        size, first = abi.ERROR_RECORD_SIZE, abi.ERROR_LOG_FIELDS["records"].offset
        return [
            unpack(abi.ERROR_RECORD_FIELDS, data[first + i * size : first + (i + 1) * size])
            for i in range(min(count, abi.ERROR_CAPACITY))
        ]

    def count(self, pe: int) -> int:
        return int(self.logs[pe][:8].view(torch.int64)[0])

    def _allow(self, number: int, pe: int) -> None:
        emulator.allow(number, self.contexts[pe].data_ptr(), abi.CONTEXT_BYTES, f"context of PE {pe}")
        emulator.allow(number, self.peers[pe].data_ptr(), 8 * self.n, f"peer bases of PE {pe}")
        emulator.allow(number, self.logs[pe].data_ptr(), abi.ERROR_LOG_SIZE, f"error log of PE {pe}")
        for q in range(self.n):
            emulator.allow(number, self.base(q), self.heap_bytes, f"heap of PE {q}")

    @contextmanager
    def current(self, pe: int = 0) -> Iterator[torch.Tensor]:
        """Launches of this thread run as `pe`; yields its context."""
        active = emulator.activate(self.arch)
        found = devices.acquire(self.arch, 1)
        try:
            self._allow(found[0].number, pe)
            emulator.set_device(found[0].number)
            yield self.contexts[pe]
        finally:
            emulator.set_device(None)
            devices.release(found)
            active.deactivate()

    def run(self, program: Callable[[int, torch.Tensor], Any]) -> list[Any]:
        """`program(pe, ctx)` on one thread a PE, at the same time."""
        active = emulator.activate(self.arch)
        found = devices.acquire(self.arch, self.n)
        results: list[Any] = [None] * self.n
        errors: list[BaseException] = []

        def body(pe: int) -> None:
            emulator.set_device(found[pe].number)
            try:
                results[pe] = program(pe, self.contexts[pe])
            except BaseException as e:
                errors.append(e)

        try:
            for pe in range(self.n):
                self._allow(found[pe].number, pe)
            threads = [threading.Thread(target=body, args=(pe,)) for pe in range(self.n)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            devices.release(found)
            active.deactivate()
        if errors:
            raise errors[0]
        return results


def pattern(num_bytes: int, seed: int) -> np.ndarray:
    """Random bytes that never equal the sentinel."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 255, num_bytes, dtype=np.uint8)
    data[data == SENTINEL] = 255
    return data
