"""How a PE comes to see the heaps of its peers: handles, and a check that what was mapped is what was meant."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from mori_triton.errors import DriverError
from mori_triton.host.drivers.base import Driver

_MARK_BYTES = 16


class Peers:
    """`bases[pe]`: where this PE sees the heap of `pe`; 0: it does not reach it.

    Args:
        base: address of this PE's heap, exportable memory of `driver`.
        num_bytes: its size, the same on all PEs.
        first_free: bytes at its start that are somebody's from the outset.
    """

    def __init__(self, driver: Driver, pe: int, n_pes: int, base: int, num_bytes: int, first_free: int) -> None:
        self._driver, self._base = driver, base
        self.bases = [base if other == pe else 0 for other in range(n_pes)]
        self._imports: list[int] = []
        # at both ends of what nobody uses yet, if there is room
        fits = num_bytes >= first_free + 2 * _MARK_BYTES
        self._marked = [first_free, num_bytes - _MARK_BYTES] if fits else []

    def offer(self) -> dict[str, Any]:
        """What the peers are to be told. Puts a mark into this PE's heap by which they know it."""
        mark = os.urandom(_MARK_BYTES)
        for offset in self._marked:
            self._driver.write(self._base + offset, mark)
        return {"handle": self._driver.export_handle(self._base).hex(), "mark": mark.hex()}

    def map(self, peer: int, offer: dict[str, Any]) -> None:
        """Map the heap of `peer`. Raises `DriverError` if that fails, or succeeds with other memory than that PE's."""
        base = self._driver.import_handle(bytes.fromhex(offer["handle"]))
        self._imports.append(base)
        for offset in self._marked:
            if self._driver.read(base + offset, _MARK_BYTES) != bytes.fromhex(offer["mark"]):
                what = f"what was mapped at {base:#x} as the heap of PE {peer}"
                raise DriverError(f"{what} is not that PE's memory {offset} bytes from its start")
        self.bases[peer] = base

    def settle(self) -> None:
        """All PEs have mapped what they want, or failed to."""
        self._driver.end_export(self._base)
        for offset in self._marked:
            self._driver.memset(self._base + offset, 0, _MARK_BYTES)

    def disconnect(self) -> None:
        """Unmap the peers' heaps; `bases` still says where they were. Idempotent."""
        imports, self._imports = self._imports, []
        undo_all([partial(self._driver.close_import, base) for base in imports])


def undo_all(calls: list[Callable[[], None]]) -> None:
    """Make all calls; the first `DriverError` is raised after the last."""
    failures = []
    for call in calls:
        try:
            call()
        except DriverError as error:
            failures.append(error)
    if failures:
        raise failures[0]
