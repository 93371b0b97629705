"""The network of a PE: what its kernels go through to PEs that they do not reach by load and store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

from mori_triton import abi
from mori_triton.errors import DriverError, MoriError
from mori_triton.host.agreement import together
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.network import records
from mori_triton.host.network.fabric import Fabric, Links, Site
from mori_triton.host.peers import undo_all
from mori_triton.host.tables import Region

__all__ = ["Fabric", "Links", "Network", "Site"]


class Network:
    """Collective to create: every PE, same fabric. `address`: of the struct `Network`, for the device context.

    Raises:
        HeapError, NotSupported: on every PE, when one of them cannot; nothing is left.
    """

    def __init__(self, fabric: Fabric, site: Site) -> None:
        self.name = fabric.name
        self._site, self._driver = site, site.driver
        self._links: Links | None = fabric.open(site)
        self.provider = self._links.provider
        self.address = 0
        self._failure: MoriError | None = None
        try:
            together(site.bootstrap, f"the network over {self.name}", partial(self._write, self._links))
        except BaseException:
            # what all have heard of counts, not what then cannot be given back
            with contextlib.suppress(DriverError):
                self.close()
            raise

    def _write(self, links: Links) -> None:
        packed = records.pack_network(
            provider=links.provider,
            num_qp_per_pe=self._site.settings.num_qp_per_pe,
            queues=links.queues,
            ring=links.ring,
        )
        self.address = self._driver.alloc(len(packed), kind=MemoryKind.CACHED)
        self._driver.write(self.address, packed)

    def regions(self) -> list[Region]:
        """Everything that this PE's kernels touch on their way."""
        assert self._links is not None
        pe = self._site.pe
        return [Region(self.address, abi.NETWORK_SIZE, f"network of PE {pe}", pe), *self._links.regions]

    def check(self) -> None:
        """Raise what has gone wrong where no kernel could record it. Waits for nobody."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        if self._links is not None:
            self._links.check()

    def quiet(self) -> None:
        """Collective: return when what kernels of all PEs, which have ended, have posted is done.

        What went wrong on one PE is for its own `check`: its peers go on.
        """
        if self._links is not None:
            try:
                self._links.quiet()
            except MoriError as error:
                self._failure = error
            # cards of peers read and write this PE's memory until their own PEs have come here
            self._site.bootstrap.barrier(f"everything is done over {self.name}")

    def close(self) -> None:
        """Give everything back, after `quiet`, or when a world has failed. Local and idempotent."""
        links, self._links = self._links, None
        if links is not None:
            undo: list[Callable[[], None]] = [links.close]
            if self.address:
                undo.append(partial(self._driver.free, self.address))
            undo_all(undo)
