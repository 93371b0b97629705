"""What connects PEs that do not map each other's memory: the protocol, one implementation for each transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mori_triton.env import Settings
from mori_triton.host.bootstrap.base import Bootstrap
from mori_triton.host.drivers.base import Driver, MemoryKind
from mori_triton.host.tables import Region


@dataclass(frozen=True)
class Site:
    """A PE, as a fabric sees it."""

    bootstrap: Bootstrap
    driver: Driver
    address: int  # of its heap
    num_bytes: int  # of its heap, the same on all PEs
    kind: MemoryKind  # of its heap
    peers: tuple[int, ...]  # PEs that it does not reach by load and store; may be empty
    node: str  # what PEs of its node, and only they, have in common
    settings: Settings

    @property
    def pe(self) -> int:
        return self.bootstrap.pe

    @property
    def n_pes(self) -> int:
        return self.bootstrap.n_pes


class Links(Protocol):
    """What a fabric has made for one PE."""

    provider: str
    """Whose requests kernels write, of `abi.PROVIDERS`."""
    queues: int
    """Address of the table of `Queue` by `peer * num_qp_per_pe + at`, zeros where there is none; 0: no table."""
    ring: int
    """`Network.ring`."""

    @property
    def regions(self) -> Sequence[Region]:
        """Memory that kernels of this PE touch."""
        ...

    def quiet(self) -> None:
        """Return when what kernels, which have all ended, have posted is done. Raises what went wrong."""
        ...

    def check(self) -> None:
        """Raise what has gone wrong where no kernel could record it."""
        ...

    def close(self) -> None:
        """Give everything back; nobody uses it any more. Local and idempotent."""
        ...


class Fabric(Protocol):
    """A transport."""

    name: str

    @property
    def heap_kind(self) -> MemoryKind | None:
        """The only kind of memory that the heap may be; None: any."""
        ...

    def open(self, site: Site) -> Links:
        """Collective: every PE, same order.

        Raises:
            HeapError, NotSupported: on every PE, when one of them cannot; nothing is left.
        """
        ...
