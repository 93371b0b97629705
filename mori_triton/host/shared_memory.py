"""Symmetric memory beside the heap: one allocation of its own per PE, of a kind of its own, mapped by the peers.

Made by `PeState.share`. What lies in it has the same offset on every PE, and `bases` is what a kernel needs to get from
one PE's address to another's. The heap is for everything that fits its kind; this is for what must not be of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mori_triton.errors import DriverError
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.peers import Peers, connect, tell, undo_all
from mori_triton.host.tables import Region


class SharedMemory:
    """Collective to create: every PE, same size and name. Zeroed.

    Args:
        num_bytes: size on each PE.
        kind: memory kind.
        reached: by PE, whether this one maps its memory; the same answer on both sides.
        name: what it is, for errors and reports.

    Raises:
        HeapError: on every PE, when PEs ask for different sizes or one of them cannot allocate or map.
    """

    def __init__(
        self,
        driver: Driver,
        bootstrap: Bootstrap,
        num_bytes: int,
        *,
        kind: MemoryKind,
        reached: Sequence[bool],
        name: str,
    ) -> None:
        self.num_bytes, self.name = num_bytes, name
        self._driver = driver
        self._peers: Peers | None = None
        self.base = 0
        # called by `close`, before the memory goes
        self.hide: Callable[[], None] | None = None
        facts: dict[str, Any] = {"bytes": num_bytes, "error": None}
        try:
            self.base = driver.alloc(num_bytes, kind=kind, exportable=True)
            self._peers = Peers(driver, bootstrap.pe, bootstrap.n_pes, self.base, num_bytes, name)
            facts |= self._peers.offer()
        except DriverError as error:
            facts["error"] = str(error)
        try:
            others = tell(bootstrap, name, facts)
            offers = {pe: facts for pe, facts in enumerate(others) if reached[pe] and pe != bootstrap.pe}
            assert self._peers is not None
            connect(bootstrap, name, self._peers, offers, driver.synchronize)
        except BaseException:
            self.close()
            raise

    @property
    def bases(self) -> list[int]:
        """Where this PE sees each PE's memory, its own included; 0: it does not."""
        return [] if self._peers is None else self._peers.bases

    def regions(self) -> list[Region]:
        """What kernels of this PE may touch."""
        return [
            Region(base, self.num_bytes, f"{self.name} of PE {pe}", pe) for pe, base in enumerate(self.bases) if base
        ]

    def disconnect(self) -> None:
        """Unmap the peers' memory; this PE's kernels must be done. To be called before the barrier that `close` wants,
        as `SymmetricHeap.disconnect`. Idempotent.
        """
        if self._peers is not None:
            self._peers.disconnect()

    def close(self) -> None:
        """Unmap everything and give the memory back. Local and idempotent; peers must be done with it."""
        hide, self.hide = self.hide, None
        if hide is not None:
            hide()
        undo: list[Callable[[], None]] = [self._peers.disconnect] if self._peers is not None else []
        undo += [partial(self._driver.free, self.base)] if self.base else []
        self._peers, self.base = None, 0
        undo_all(undo)
