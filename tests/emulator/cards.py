"""A network card for tests of the emulator: `WeakMemory.dma` from Python, and an agent that puts bytes somewhere."""

from __future__ import annotations

import ctypes

import numpy as np

from mori_triton.emulator.weak import WeakMemory

_u64, _ptr = ctypes.c_uint64, ctypes.c_void_p
_READ = ctypes.CFUNCTYPE(None, _ptr, _u64, _u64, _ptr)
_WRITE = ctypes.CFUNCTYPE(None, _ptr, _u64, _u64, ctypes.c_char_p)
_ATOMIC = ctypes.CFUNCTYPE(_u64, _ptr, _u64, ctypes.c_uint32, _u64, _u64)


class Dma:
    """The accesses of a PE's card."""

    def __init__(self, weak: WeakMemory, pe: int) -> None:
        self._context, read, write, atomic = weak.dma(pe)
        self._read, self._write, self._atomic = _READ(read), _WRITE(write), _ATOMIC(atomic)

    def read(self, address: int, num_bytes: int) -> bytes:
        out = ctypes.create_string_buffer(num_bytes)
        self._read(self._context, address, num_bytes, out)
        return out.raw

    def write(self, address: int, data: bytes) -> None:
        self._write(self._context, address, len(data), data)

    def add(self, address: int, value: int) -> int:
        return self._atomic(self._context, address, 0, value, 0)

    def swap_if(self, address: int, compare: int, value: int) -> int:
        return self._atomic(self._context, address, 1, value, compare)


class Card:
    """Once `doorbell[0]` is set: copies `source` to `target` in pieces that the seed chooses, then sets `flag[0]`."""

    def __init__(self, weak: WeakMemory, pe: int, doorbell, source, target, flag) -> None:
        weak.set_home(doorbell.ctypes.data, doorbell.nbytes, weak.card(pe))
        self.dma = Dma(weak, pe)
        self.doorbell, self.source, self.target, self.flag = doorbell, source, target, flag
        self.at, self.finished = 0, False

    def pending(self) -> bool:
        return not self.finished and bool(self.doorbell[0])

    def step(self, word: int) -> bool:
        left = self.source.nbytes - self.at
        if left:
            # any number of bytes, so that pieces begin and end within words
            num = min(left, 1 + word % 100)
            self.dma.write(self.target.ctypes.data + self.at, self.dma.read(self.source.ctypes.data + self.at, num))
            self.at += num
        else:
            self.dma.write(self.flag.ctypes.data, np.int32(1).tobytes())
            self.finished = True
        return True

    def describe(self) -> list[str]:
        return [f"the card has moved {self.at} of {self.source.nbytes} bytes"]
