"""The descriptor ring in shared host memory, from the side of those who post: any number of threads at a time."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, NamedTuple

from mori_triton.errors import PeerTimeout, require
from mori_triton.host.proxy import layout
from mori_triton.host.proxy.engine import engine
from mori_triton.host.proxy.layout import Descriptor, ErrorKind, Op

MAX_ENTRIES = 1 << 20
_WORD = (1 << 64) - 1


class ErrorRecord(NamedTuple):
    """One operation that failed. `status` is UCX's, 0 where UCX had no part in it."""

    kind: ErrorKind
    op: Op | int
    pe: int
    operation: int
    remote: int
    num_bytes: int
    status: int
    elapsed_s: float


def descriptor(
    op: Op, pe: int, *, local: int = 0, remote: int = 0, num_bytes: int = 0, value: int = 0, extra: int = 0
) -> Descriptor:
    """One descriptor; `value` and `extra` may be negative, which is the same 64 bits."""
    return Descriptor(
        op=op, pe=pe, local=local, remote=remote, bytes=num_bytes, value=value & _WORD, extra=extra & _WORD
    )


class Ring:
    """`entries` slots of 64 bytes, all zero at first.

    Args:
        entries: a power of two; so many operations can be posted before the first of them is finished.
        n_pes: how many PEs there are.
        memory: where it lies, a writable buffer of `num_bytes(entries, n_pes)` bytes at a multiple of 64; None: new
            pages that child processes share.
    """

    def __init__(self, entries: int, n_pes: int = 1, memory: Any = None) -> None:
        sound = isinstance(entries, int) and 1 <= entries <= MAX_ENTRIES and entries & (entries - 1) == 0
        require(sound, "entries", f"a power of two up to {MAX_ENTRIES}", entries)
        self.entries, self._engine = entries, engine()
        size = self.num_bytes(entries, n_pes)
        self._memory = (ctypes.c_uint8 * size).from_buffer(mmap.mmap(-1, size) if memory is None else memory)
        self.address = ctypes.addressof(self._memory)
        require(self.address % 64 == 0, "memory", "an address that is a multiple of 64", hex(self.address))
        ctypes.memset(self.address, 0, size)
        self.header = layout.Ring.from_buffer(self._memory)
        self.header.version, self.header.entries, self.header.n_pes = layout.VERSION, entries, n_pes
        self.header.free_tickets = (1 << layout.TICKETS) - 1

    @staticmethod
    def num_bytes(entries: int, n_pes: int = 1) -> int:
        """Size of a ring."""
        ends = entries * ctypes.sizeof(Descriptor) + n_pes * ctypes.sizeof(layout.RingPeer)
        return ctypes.sizeof(layout.Ring) + ends

    def post(self, descriptors: ctypes.Array[Descriptor] | Descriptor, timeout_s: float) -> list[int]:
        """Post in order; the index of each. Waits while the ring is full.

        Raises:
            PeerTimeout: the ring stayed full for `timeout_s`; says how many were posted.
        """
        count = len(descriptors) if isinstance(descriptors, ctypes.Array) else 1
        indices = (ctypes.c_uint64 * count)()
        posted = self._engine.post(
            self.address, ctypes.addressof(descriptors), count, int(timeout_s * 1e9), ctypes.addressof(indices)
        )
        if posted < count:
            raise PeerTimeout(
                f"proxy: the ring of {self.entries} descriptors stayed full for {timeout_s:g} s; "
                f"{posted} of {count} were posted"
            )
        return list(indices)

    def wait(self, index: int, timeout_s: float) -> bool:
        """Wait until an operation is done; False when it failed. Raises `PeerTimeout` when it takes too long."""
        ended = self._engine.wait(self.address, index, int(timeout_s * 1e9))
        if ended == 2:
            raise PeerTimeout(f"proxy: operation {index} was not finished within {timeout_s:g} s")
        return ended == 0

    @property
    def in_flight(self) -> int:
        """How many operations are posted and not behind `head`."""
        return self.header.tail - self.header.head

    @property
    def num_errors(self) -> int:
        """How many operations have failed so far: one read."""
        return self.header.errors

    def errors(self) -> list[ErrorRecord]:
        """The records, oldest first; only the first `ERROR_RECORDS` failures have one."""
        count = min(self.header.errors, layout.ERROR_RECORDS)
        return [
            ErrorRecord(
                ErrorKind(r.kind),
                Op(r.op) if r.op in set(Op) else r.op,
                r.pe, r.index, r.remote, r.bytes, r.status, r.elapsed_ns * 1e-9,
            )
            for r in self.header.records[:count]
        ]  # fmt: skip
