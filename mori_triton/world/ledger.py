"""`LocalWorld.byte_ledger`: which ledger a run of a world writes to."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mori_triton.emulator.ledger import ByteLedger
from mori_triton.errors import StateError, require
from mori_triton.world.run import running

if TYPE_CHECKING:
    from mori_triton.world.local import LocalWorld

# those that the calling thread is inside of, the innermost last
_open: contextvars.ContextVar[tuple[tuple[LocalWorld, ByteLedger], ...]] = contextvars.ContextVar("ledgers", default=())


@contextlib.contextmanager
def byte_ledger(world: LocalWorld) -> Iterator[ByteLedger]:
    """See `LocalWorld.byte_ledger`."""
    require(world.device == "cpu", "device", '"cpu" to count bytes: only the emulated device can', repr(world.device))
    if running() is not None:
        raise StateError("byte_ledger: call it around run(program), not in the program")
    ledger = ByteLedger(world.n)
    token = _open.set((*_open.get(), (world, ledger)))
    try:
        yield ledger
    finally:
        _open.reset(token)


def ledger_of(world: LocalWorld) -> ByteLedger | None:
    """The innermost ledger of this world that the calling thread is inside of."""
    return next((ledger for of, ledger in reversed(_open.get()) if of is world), None)
