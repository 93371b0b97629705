"""The symmetric heap: one allocation per PE, mapped by the PEs that can reach it, handed out at equal offsets on all.

Also the owner of what its kernels know of it: `tables.PeTables`, the device context (`ctx`) and the error log.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mori_triton import abi
from mori_triton.errors import ArgumentError, DriverError, HeapError, StateError, require
from mori_triton.host import context
from mori_triton.host.agreement import agree
from mori_triton.host.allocator import Allocator, Block
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.peers import Peers, connect, tell, undo_all
from mori_triton.host.profile import Operation
from mori_triton.host.tables import PeTables, Region

if TYPE_CHECKING:
    import torch

DEFAULT_ALIGNMENT = 256
SYNC_NAME = "barrier_all sync words"
_SYNC_BYTES = abi.BARRIER_WORDS * 8


def _largest_power(num_bytes: int) -> int:
    """The largest power of two not above `num_bytes`: the widest alignment inside a heap of that size."""
    return 1 << (num_bytes.bit_length() - 1)


class SymmetricHeap:
    """Collective to create: every PE, same size.

    Args:
        num_bytes: size of this PE's heap, the same on all.
        kind: memory kind of the heap.
        timeout_s: limit of waits in kernels, written to the context; None: no limit.
        node: identity of this PE's node; peers on other nodes are not mapped.
        gpus_per_node: PEs `k*g` to `k*g+g-1` form a node of their own; None: as many as `node` says.
        reach_peers: False maps no peer at all.

    Raises:
        HeapError: on every PE, when PEs ask for different sizes or one of them cannot allocate or map.
    """

    def __init__(
        self,
        driver: Driver,
        bootstrap: Bootstrap,
        num_bytes: int,
        *,
        kind: MemoryKind = MemoryKind.UNCACHED,
        timeout_s: float | None = 30.0,
        node: str = "",
        gpus_per_node: int | None = None,
        reach_peers: bool = True,
    ) -> None:
        self.driver, self.bootstrap = driver, bootstrap
        self.pe, self.n_pes = bootstrap.pe, bootstrap.n_pes
        self.num_bytes, self.timeout_s = num_bytes, timeout_s
        self._num_mallocs = 0
        self._freed: dict[int, Block] = {}
        self._closed = False
        self._base = 0
        self._tables: PeTables | None = None
        self._peers: Peers | None = None
        mine = self._allocate(node, kind)
        try:
            self._connect(mine, gpus_per_node, reach_peers)
        except BaseException:
            self._release()
            raise

    # set-up

    def _allocate(self, node: str, kind: MemoryKind) -> dict[str, Any]:
        """This PE's part of the set-up; a failure is not raised but told to all, so that all fail together."""
        facts: dict[str, Any] = {"bytes": self.num_bytes, "node": node, "error": None}
        try:
            if not isinstance(self.num_bytes, int) or self.num_bytes < _SYNC_BYTES:
                raise HeapError(f"a heap of {self.num_bytes} bytes is too small: {SYNC_NAME} alone need {_SYNC_BYTES}")
            self._allocator = Allocator(self.num_bytes)
            alignment = max(4096, _largest_power(self.num_bytes))
            self._base = self.driver.alloc(self.num_bytes, kind=kind, alignment=alignment, exportable=True)
            self._tables = PeTables(self.driver, self.pe, self.n_pes)
            self._peers = Peers(self.driver, self.pe, self.n_pes, self._base, self.num_bytes, "heap", _SYNC_BYTES)
            facts |= self._peers.offer()
            # what every heap can promise: the largest power of two that divides its address
            facts["alignment"] = self._base & -self._base
        except (DriverError, HeapError, ArgumentError) as error:
            facts["error"] = str(error)
        return facts

    def _connect(self, mine: dict[str, Any], gpus_per_node: int | None, reach_peers: bool) -> None:
        others = tell(self.bootstrap, "heap", mine)
        self._max_alignment = min(_largest_power(self.num_bytes), *(facts["alignment"] for facts in others))
        offers = {}
        for peer, facts in enumerate(others):
            same_node = facts["node"] == mine["node"]
            if gpus_per_node is not None:
                same_node = same_node and peer // gpus_per_node == self.pe // gpus_per_node
            if same_node and reach_peers and peer != self.pe:
                offers[peer] = facts
        assert self._peers is not None
        # also the barrier that closes the set-up: nobody signals to words that their owner has yet to clear
        connect(self.bootstrap, "heap", self._peers, offers, self._write_tables)

    def _write_tables(self) -> None:
        assert self._tables is not None
        sync = self._allocator.allocate(_SYNC_BYTES, DEFAULT_ALIGNMENT, SYNC_NAME)
        assert sync is not None
        self.driver.memset(self._base + sync.offset, 0, sync.num_bytes)
        ticks = 0 if self.timeout_s is None else max(1, math.ceil(self.timeout_s * self.driver.ticks_per_second))
        self._tables.write(
            heap_base=self._base,
            heap_size=self.num_bytes,
            peer_bases=self._peer_bases,
            sync=self._base + sync.offset,
            timeout_ticks=ticks,
        )
        self.driver.synchronize()

    # allocation

    def malloc(self, num_bytes: int, alignment: int = DEFAULT_ALIGNMENT, name: str = "") -> int:
        """Address of `num_bytes` uninitialised bytes at the same offset on every PE; 0 for 0 bytes. Collective.

        Raises:
            HeapError: on every PE, when PEs differ in size, alignment, name or what they have allocated so far (lists
                each PE's value), or when the heap has no room. Nothing is changed.
            ArgumentError: size negative, alignment not a power of two or above what the heap's address allows.
        """
        self._check_open()
        name = name or f"allocation {self._num_mallocs}"
        call = {
            "size": num_bytes if isinstance(num_bytes, int) else repr(num_bytes),
            "alignment": alignment if isinstance(alignment, int) else repr(alignment),
            "name": name,
            "earlier mallocs": self._num_mallocs,
            "live allocations": self._live_text(),
        }
        self._num_mallocs += 1
        calls = [json.loads(data) for data in self.bootstrap.allgather(json.dumps(call).encode(), "symmetric malloc")]
        agree("symmetric malloc", calls)
        require(isinstance(num_bytes, int) and num_bytes >= 0, "num_bytes", "a size from 0 on", num_bytes)
        fits = isinstance(alignment, int) and alignment > 0 and alignment & (alignment - 1) == 0
        require(fits, "alignment", "a power of two", alignment)
        require(
            alignment <= self._max_alignment, "alignment", f"at most {self._max_alignment}, the heap's own", alignment
        )
        if num_bytes == 0:
            return 0
        block = self._allocator.allocate(num_bytes, alignment, name)
        if block is None:
            raise HeapError(self._exhausted(num_bytes, alignment, name))
        end = block.offset + block.extent
        self._freed = {offset: old for offset, old in self._freed.items() if not block.offset <= offset < end}
        return self._base + block.offset

    def free(self, address: int | None) -> None:
        """Give back what `malloc` returned; 0 and None are ignored.

        Local: every PE frees the same, in any order, before the next `malloc`, which checks it. Raises `HeapError` for
        anything else (double free, foreign or interior pointer), with no change.
        """
        self._check_open()
        if not address:
            return
        offset = address - self._base
        if offset in self._allocator.blocks:
            self._freed[offset] = self._allocator.release(offset)
            return
        if offset in self._freed:
            old = self._freed[offset]
            raise HeapError(
                f"free of {address:#x}: {old.name!r} ({old.num_bytes} bytes) has been freed before (double free)"
            )
        inside = self._allocator.find(offset)
        if inside is not None:
            raise HeapError(
                f"free of {address:#x}: it points {offset - inside.offset} bytes into {inside.name!r} "
                f"({inside.num_bytes} bytes from {self._base + inside.offset:#x}); free wants the start"
            )
        raise HeapError(
            f"free of {address:#x}: not from this heap's malloc; it is {self.describe(address)}, "
            f"and the heap of PE {self.pe} is {self.num_bytes} bytes from {self._base:#x}"
        )

    def tensor(self, shape: tuple[int, ...] | list[int], dtype: torch.dtype, name: str = "") -> torch.Tensor:
        """An uninitialised contiguous tensor, an allocation of its own. Collective; errors as `malloc`."""
        import torch

        require(isinstance(dtype, torch.dtype), "dtype", "a torch.dtype such as torch.float32", repr(dtype))
        sizes = isinstance(shape, (tuple, list)) and all(isinstance(size, int) and size >= 0 for size in shape)
        require(sizes, "shape", "a tuple of sizes from 0 on", repr(shape))
        address = self.malloc(math.prod(shape) * dtype.itemsize, max(DEFAULT_ALIGNMENT, dtype.itemsize), name)
        tensor = self.driver.tensor(address, tuple(shape), dtype)
        tensor.__symm_tensor__ = True  # type: ignore[attr-defined]
        return tensor

    def free_tensor(self, tensor: torch.Tensor) -> None:
        """Free the allocation that starts where `tensor` does. Errors as `free`; one of no elements is ignored."""
        self.free(tensor.data_ptr() if tensor.numel() else 0)

    # addresses

    @property
    def base(self) -> int:
        """Where this PE's heap starts."""
        return self._base

    @property
    def _own(self) -> PeTables:
        self._check_open()
        assert self._tables is not None
        return self._tables

    @property
    def ctx_address(self) -> int:
        """Address of the device context."""
        return self._own.address

    @property
    def ctx(self) -> torch.Tensor:
        """The device context as an int64 tensor, for kernels' first argument."""
        return self._own.ctx

    def set_network(self, address: int) -> None:
        """Tell kernels where this PE's `Network` is, before the first of them starts; 0: there is none."""
        self._own.set_network(address)

    @property
    def used_bytes(self) -> int:
        """Bytes taken from the heap, what barriers need included."""
        return self._allocator.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes left; the largest piece may be smaller."""
        return self._allocator.free_bytes

    def contains(self, address: int, num_bytes: int = 1) -> bool:
        """Whether the bytes lie in this PE's heap."""
        return self._base <= address and address + num_bytes <= self._base + self.num_bytes

    def reaches(self, pe: int) -> bool:
        """Whether this PE can load from and store to the heap of `pe`."""
        self._check_pe(pe)
        return self._peer_bases[pe] != 0

    def peer_address(self, address: int, pe: int) -> int:
        """Where this PE sees, in the heap of `pe`, what is at `address` in its own.

        0: outside the heap, or that PE is not reachable by load and store. `ArgumentError` if there is no such PE.
        """
        self._check_open()
        self._check_pe(pe)
        if not self.contains(address) or not self._peer_bases[pe]:
            return 0
        return self._peer_bases[pe] + (address - self._base)

    def peer_tensor(self, tensor: torch.Tensor, pe: int) -> torch.Tensor:
        """What `tensor`, symmetric or a view of such, is on `pe`: same shape and strides, over that PE's memory."""
        self._check_open()
        self._check_pe(pe)
        if tensor.numel() == 0:
            return tensor.new_empty(tensor.shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        inside = self.contains(tensor.data_ptr(), span * tensor.itemsize)
        require(inside, "tensor", f"memory of this PE's symmetric heap ({self.num_bytes} bytes from {self._base:#x})",
                f"{span * tensor.itemsize} bytes at {tensor.data_ptr():#x}")  # fmt: skip
        if not self.reaches(pe):
            raise StateError(
                f"PE {self.pe} cannot load from or store to PE {pe}: it is on another node, or P2P is disabled"
            )
        flat = self.driver.tensor(self.peer_address(tensor.data_ptr(), pe), (span,), tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride())

    def describe(self, address: int) -> str:
        """For an address in a heap this PE can reach "name+offset of PE p", else the number with a remark."""
        for pe, start in enumerate(self._peer_bases):
            if start and start <= address < start + self.num_bytes:
                block = self._allocator.find(address - start)
                if block is None:
                    return f"free heap memory +{address - start} of PE {pe}"
                inside = address - start - block.offset
                return f"{block.name}+{inside} of PE {pe}" if inside else f"{block.name} of PE {pe}"
        return f"{address:#x} (outside the symmetric heap)"

    def regions(self) -> list[Region]:
        """Everything this PE's kernels may touch besides their own arguments."""
        self._check_open()
        regions = [
            Region(base, self.num_bytes, f"symmetric heap of PE {pe}", pe)
            for pe, base in enumerate(self._peer_bases)
            if base
        ]
        return [*regions, *self._own.regions()]

    # what kernels write down

    def take_profile(self) -> tuple[list[Operation], int]:
        """What this PE's kernels have logged since the last call if they are a profiler build, and how many operations
        found no room. Waits for the device.
        """
        return self._own.profile.take()

    def errors_pending(self) -> bool:
        """Whether kernels of this PE have recorded an error that nobody has taken. One look at memory, no waiting."""
        return self._own.errors.pending()

    @property
    def errors_taken(self) -> int:
        """How many errors of this PE's kernels have been taken since the heap was opened, by whoever took them."""
        return self._own.errors.num_taken

    def take_errors(self) -> tuple[list[context.ErrorRecord], int]:
        """What kernels of this PE have recorded since the last call, and how many errors there were. Waits for none."""
        return self._own.errors.take(self.describe)

    def check_errors(self) -> None:
        """Raise what `context.error_of` makes of what this PE's kernels have recorded, if anything; clears it."""
        records, count = self.take_errors()
        if count:
            raise context.error_of(records, count)

    # end

    def disconnect(self) -> None:
        """Unmap the peers' memory; this PE's kernels must be done. Local and idempotent.

        To be called before the barrier that `close` wants: GPU libraries do not say what a peer's mapping is once the
        owner has freed the memory.
        """
        if self._peers is not None:
            self._peers.disconnect()

    def close(self) -> None:
        """Unmap everything. Local and idempotent; peers must be done with this PE's memory (put a barrier before)."""
        if not self._closed:
            self._closed = True
            self._release()

    @property
    def closed(self) -> bool:
        return self._closed

    def _release(self) -> None:
        undo: list[Callable[[], None]] = [self._peers.disconnect] if self._peers is not None else []
        undo += [self._tables.close] if self._tables is not None else []
        undo += [partial(self.driver.free, self._base)] if self._base else []
        self._tables, self._peers = None, None
        undo_all(undo)

    @property
    def _peer_bases(self) -> list[int]:
        return [0] * self.n_pes if self._peers is None else self._peers.bases

    # checks

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("the symmetric heap is closed: shmem was finalized")

    def _check_pe(self, pe: int) -> None:
        require(isinstance(pe, int) and 0 <= pe < self.n_pes, "pe", f"0 to {self.n_pes - 1}", pe)

    def _live_text(self) -> str:
        live = sorted((block.offset, block.num_bytes, block.name) for block in self._allocator.blocks.values())
        digest = zlib.crc32(repr(live).encode())
        return f"{len(live)} with {self._allocator.used_bytes} bytes (state {digest:08x})"

    def _exhausted(self, num_bytes: int, alignment: int, name: str) -> str:
        allocator = self._allocator
        megabytes = -(-(self.num_bytes + num_bytes + alignment - allocator.largest_free_bytes) // 2**20)
        advice = f'Ask for a larger heap: MORI_SHMEM_HEAP_SIZE={megabytes}M or heap_size="{megabytes}M"'
        return (
            f"the symmetric heap has no room for {name!r}: requested {num_bytes} bytes (alignment {alignment}), "
            f"free {allocator.free_bytes} bytes, largest free block {allocator.largest_free_bytes} bytes, "
            f"total {self.num_bytes} bytes on each PE. {advice if megabytes < 2**43 else 'No heap can be that large'}"
        )
