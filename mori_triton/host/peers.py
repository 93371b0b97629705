"""How a PE comes to see memory of its peers: handles, and a check that what was mapped is what was meant."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from mori_triton.errors import DriverError
from mori_triton.host.agreement import agree, all_fine
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.drivers.base import Driver

_MARK_BYTES = 16


class Peers:
    """`bases[pe]`: where this PE sees the allocation of `pe`; 0: it does not reach it.

    Args:
        base: address of this PE's allocation, exportable memory of `driver`.
        num_bytes: its size, the same on all PEs.
        what: its name in errors.
        first_free: bytes at its start that are somebody's from the outset.
    """

    def __init__(
        self, driver: Driver, pe: int, n_pes: int, base: int, num_bytes: int, what: str, first_free: int = 0
    ) -> None:
        self._driver, self._base, self._what = driver, base, what
        self.bases = [base if other == pe else 0 for other in range(n_pes)]
        self._imports: list[int] = []
        # at both ends of what nobody uses yet, if there is room
        fits = num_bytes >= first_free + 2 * _MARK_BYTES
        self._marked = [first_free, num_bytes - _MARK_BYTES] if fits else []

    def offer(self) -> dict[str, Any]:
        """What the peers are to be told. Puts a mark into this PE's memory by which they know it."""
        mark = os.urandom(_MARK_BYTES)
        for offset in self._marked:
            self._driver.write(self._base + offset, mark)
        return {"handle": self._driver.export_handle(self._base).hex(), "mark": mark.hex()}

    def map(self, peer: int, offer: dict[str, Any]) -> None:
        """Map the memory of `peer`. Raises `DriverError` if that fails, or succeeds with other memory than that one."""
        base = self._driver.import_handle(bytes.fromhex(offer["handle"]))
        self._imports.append(base)
        for offset in self._marked:
            if self._driver.read(base + offset, _MARK_BYTES) != bytes.fromhex(offer["mark"]):
                what = f"what was mapped at {base:#x} as the {self._what} of PE {peer}"
                raise DriverError(f"{what} is not that PE's memory {offset} bytes from its start")
        self.bases[peer] = base

    def settle(self) -> None:
        """All PEs have mapped what they want, or failed to."""
        self._driver.end_export(self._base)
        for offset in self._marked:
            self._driver.memset(self._base + offset, 0, _MARK_BYTES)

    def disconnect(self) -> None:
        """Unmap the peers' memory; `bases` still says where they were. Idempotent."""
        imports, self._imports = self._imports, []
        undo_all([partial(self._driver.close_import, base) for base in imports])


def tell(bootstrap: Bootstrap, what: str, mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Every PE's facts of its own part of the symmetric `what`. Collective.

    Args:
        mine: "bytes", the size asked for; "error", why it could not be had, or None; what `Peers.offer` returned, and
            what else the peers are to know.

    Raises:
        HeapError: on every PE, when sizes differ or one has an error.
    """
    others = [json.loads(facts) for facts in bootstrap.allgather(json.dumps(mine).encode(), f"{what} set-up")]
    agree(f"{what} set-up", [{f"{what} size": facts["bytes"]} for facts in others])
    all_fine([facts["error"] for facts in others], f"the symmetric {what}")
    return others


def connect(
    bootstrap: Bootstrap, what: str, peers: Peers, offers: dict[int, dict[str, Any]], ready: Callable[[], None]
) -> None:
    """Map the memory of the peers in `offers`, then call `ready`, which may raise `DriverError` too. Collective.

    Also the barrier that closes the set-up: nobody writes to memory before its owner is `ready`.

    Raises:
        HeapError: on every PE, when one could not map or get ready.
    """
    problem = None
    try:
        for peer, offer in offers.items():
            peers.map(peer, offer)
        ready()
    except DriverError as error:
        problem = str(error)
    problems = bootstrap.allgather(json.dumps(problem).encode(), f"{what} set-up, peers mapped")
    # nobody uses that memory before a call that waits for this PE
    peers.settle()
    all_fine([json.loads(text) for text in problems], f"the symmetric {what}")


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
