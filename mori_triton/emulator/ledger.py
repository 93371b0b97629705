"""Byte ledger: how much the kernels of each PE load, store and update atomically in the memory of each PE.

Every launch on a device that has a ledger gets counters of its own. The memory functions add to them
(hip_src/emulator/ledger.h), and they are summed when somebody asks. Whose memory an address is, the world says as a
launch starts.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from mori_triton.errors import require

KINDS = ("load", "store", "atomic")
# (low, high, PE) of memory that belongs to a PE
Owned = Iterable[tuple[int, int, int]]


class _Ledger(ctypes.Structure):
    """`Ledger` of ledger.h."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("ranges", "num_ranges", "counts", "nobody")]


class Traffic(NamedTuple):
    """How much was accessed.

    operations: accesses of single lanes. bytes: lanes of one instruction that access the same address count once.
    messages: an instruction's lanes in order, in runs of consecutive addresses, cut at multiples of 256 bytes. Every
    lane's atomic is a message and has bytes of its own.
    """

    operations: int
    bytes: int
    messages: int


class Entry(NamedTuple):
    """What one kernel of PE `src` did in memory of PE `dst`, in all its launches.

    dst: the PE that has allocated the memory; None: memory that no PE's heap or op has, such as a kernel's own tensors.
    kind: "load", "store" or "atomic". For the last three see `Traffic`.
    """

    kernel: str
    src: int
    dst: int | None
    kind: str
    operations: int
    bytes: int
    messages: int


class LaunchCounts:
    """The counters of one launch, uint64 `[num_pes + 1, kinds, 3]`; the last row is memory that belongs to no PE.

    `address` is what the LEDGER word of its waves becomes; this must live until the launch has ended.
    """

    def __init__(self, kernel: str, pe: int, owned: Owned, num_pes: int) -> None:
        self.kernel, self.pe = kernel, pe
        self.counts = np.zeros((num_pes + 1, len(KINDS), 3), np.uint64)
        self._ranges = np.array(sorted(owned), np.uint64).reshape(-1, 3)
        self._ledger = _Ledger(self._ranges.ctypes.data, len(self._ranges), self.counts.ctypes.data, num_pes)
        self.address = ctypes.addressof(self._ledger)


class ByteLedger:
    """Loads, stores and atomics by (PE whose kernel it is, PE whose memory it is); see `Entry` for what is counted.

    Numbers of a launch are complete when it has ended. Waits count every time they look, so how often they load depends
    on the order of things; what a kernel moves does not.
    """

    def __init__(self, num_pes: int) -> None:
        require(num_pes >= 1, "num_pes", "at least 1", num_pes)
        self.num_pes = num_pes
        self._lock = threading.Lock()
        self._launches: list[LaunchCounts] = []

    def open(self, kernel: str, *, pe: int, owned: Callable[[], Owned]) -> LaunchCounts:
        """Counters for a launch of `pe`'s that is about to start; owned() says whose memory is whose now."""
        launch = LaunchCounts(kernel, pe, owned(), self.num_pes)
        with self._lock:
            self._launches.append(launch)
        return launch

    def clear(self) -> None:
        """Forget every launch so far."""
        with self._lock:
            self._launches = []

    def entries(self) -> list[Entry]:
        """Everything that is not 0, by kernel in the order of first launches, then src, dst and kind."""
        sums: dict[tuple[str, int], np.ndarray] = {}
        with self._lock:
            launches = list(self._launches)
        for launch in launches:
            key = launch.kernel, launch.pe
            sums[key] = sums[key] + launch.counts if key in sums else launch.counts.copy()
        order = {kernel: place for place, kernel in enumerate(dict.fromkeys(kernel for kernel, _ in sums))}
        return [
            Entry(kernel, src, None if dst == self.num_pes else dst, kind, *map(int, sums[kernel, src][dst, k]))
            for kernel, src in sorted(sums, key=lambda key: (order[key[0]], key[1]))
            for dst in range(self.num_pes + 1)
            for k, kind in enumerate(KINDS)
            if sums[kernel, src][dst, k].any()
        ]

    def total(
        self, src: int | None = None, dst: int | None = None, kind: str | None = None, *, kernel: str | None = None
    ) -> Traffic:
        """The sum over PEs and kinds; an argument that is None: all of them. Memory that belongs to no PE is left out.

        kernel: the name of one. Raises `ArgumentError` for a PE or a kind that there is not.
        """
        for name, pe in (("src", src), ("dst", dst)):
            require(pe is None or 0 <= pe < self.num_pes, name, f"a PE below {self.num_pes}", pe)
        require(kind in (None, *KINDS), "kind", " or ".join(KINDS), repr(kind))
        found = [
            entry
            for entry in self.entries()
            if entry.dst is not None
            and src in (None, entry.src)
            and dst in (None, entry.dst)
            and kind in (None, entry.kind)
            and kernel in (None, entry.kernel)
        ]
        return Traffic(*(sum(getattr(entry, name) for entry in found) for name in Traffic._fields))

    def bytes(
        self, src: int | None = None, dst: int | None = None, kind: str | None = None, *, kernel: str | None = None
    ) -> int:
        """Bytes that kernels of `src` accessed in memory of `dst`; see `total`."""
        return self.total(src, dst, kind, kernel=kernel).bytes

    def table(self) -> str:
        """All entries as a table in Markdown."""
        head = ("kernel", "PE", "memory of PE", "kind", "operations", "bytes", "messages")
        rows = [
            (e.kernel, str(e.src), "none" if e.dst is None else str(e.dst), e.kind, *(f"{n:,}" for n in e[4:]))
            for e in self.entries()
        ]
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
        right = [i not in (0, 3) for i in range(len(head))]

        def line(cells: Iterable[str]) -> str:
            padded = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(cells, widths, right, strict=True))
            return f"| {' | '.join(padded)} |"

        rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
        return "\n".join([line(head), line(rule), *map(line, rows)])

    _repr_markdown_ = table
