"""Host collectives between the PEs of one world: the protocol, and what its implementations share.

Every call is collective: all PEs, same order. Each carries its kind and number, so PEs that are in different calls get
an error naming both instead of waiting for ever, and every wait has a limit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from mori_triton.errors import ArgumentError, StateError


@runtime_checkable
class Bootstrap(Protocol):
    """Raises `PeerTimeout` naming the PEs that are missing or dead, `StateError` when PEs are in different calls."""

    pe: int
    n_pes: int
    timeout_s: float

    def allgather(self, data: bytes, what: str = "allgather") -> list[bytes]:
        """Every PE's data, indexed by PE; sizes may differ."""
        ...

    def broadcast(self, data: bytes, root: int = 0, what: str = "broadcast") -> bytes:
        """The root's data on every PE; the others' is ignored."""
        ...

    def barrier(self, what: str = "barrier") -> None:
        """Returns when every PE has called it."""
        ...

    def close(self) -> None:
        """This PE takes part in nothing more. Idempotent, not collective; peers that still wait for it get an error."""
        ...


class Collectives:
    """Base of the implementations: everything on top of one exchange of bytes among all PEs."""

    def __init__(self, pe: int, n_pes: int, timeout_s: float) -> None:
        check_rank(pe, n_pes)
        self.pe, self.n_pes, self.timeout_s = pe, n_pes, timeout_s
        self._sequence = 0
        # two threads of one PE in a collective would be two orders; one after the other is an order
        self._lock = threading.Lock()

    def allgather(self, data: bytes, what: str = "allgather") -> list[bytes]:
        return self._call(what, bytes(data))

    def broadcast(self, data: bytes, root: int = 0, what: str = "broadcast") -> bytes:
        if not 0 <= root < self.n_pes:
            raise ArgumentError(f"root: want 0 to {self.n_pes - 1}, got {root}")
        return self._call(f"{what} from PE {root}", bytes(data) if self.pe == root else b"")[root]

    def barrier(self, what: str = "barrier") -> None:
        self._call(what, b"")

    def _call(self, what: str, data: bytes) -> list[bytes]:
        with self._lock:
            sequence = self._sequence
            self._sequence += 1
            return self._exchange(sequence, what, data)

    def _exchange(self, sequence: int, what: str, data: bytes) -> list[bytes]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def check_rank(pe: int, n_pes: int) -> None:
    """Raise `ArgumentError` unless 0 <= pe < n_pes."""
    if not isinstance(n_pes, int) or n_pes < 1:
        raise ArgumentError(f"nranks: want at least 1, got {n_pes!r}")
    if not isinstance(pe, int) or not 0 <= pe < n_pes:
        raise ArgumentError(f"rank: want 0 to {n_pes - 1}, got {pe!r}")


def pe_list(pes: Iterable[int]) -> str:
    """ "PE 3" or "PEs 1, 2"."""
    ordered = sorted(pes)
    return ("PE " if len(ordered) == 1 else "PEs ") + ", ".join(map(str, ordered))


def check_same_call(calls: dict[int, str]) -> None:
    """Raise `StateError` unless every PE is in the same call; `calls` maps PE to what it called."""
    if len(set(calls.values())) > 1:
        each = "; ".join(f"PE {pe}: {what}" for pe, what in sorted(calls.items()))
        raise StateError(
            f"the PEs are in different collective calls ({each}); every PE must make the same calls in the same order"
        )
