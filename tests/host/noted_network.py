"""A network that notes what is done with it, and PEs that open one."""

from __future__ import annotations

import dataclasses

from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver, MemoryKind
from mori_triton.host.network.fabric import Site
from tests.host.worlds import SETTINGS, run_threads


class NotedLinks:
    provider = "proxy"
    queues = ring = 0

    def __init__(self, log: list, site: Site) -> None:
        self.log, self.site, self.regions = log, site, []

    def quiet(self) -> None:
        self.log.append("quiet" if self.site.pe == 0 else "quiet of a peer")

    def check(self) -> None:
        if self.site.pe == 0:
            self.log.append("check")

    def close(self) -> None:
        if self.site.pe == 0:
            self.log.append("close network")


class NotedFabric:
    heap_kind = None

    def __init__(self, name: str = "noted") -> None:
        self.name, self.log, self.sites = name, [], []

    def open(self, site: Site) -> NotedLinks:
        self.sites.append(site)
        return NotedLinks(self.log, site)


def each(n: int, program):
    """`program(pe, bootstrap)` on n PEs; results, or errors, by PE."""
    group = ThreadGroup(n, timeout_s=5.0)

    def run(pe: int):
        try:
            return program(pe, group.bootstrap(pe))
        except Exception as error:
            return error

    return run_threads(n, run)


def site_of(pe: int, bootstrap, *, driver=None, far=True, **settings) -> Site:
    chosen = dataclasses.replace(SETTINGS, **settings)
    peers = tuple(other for other in range(bootstrap.n_pes) if far and other != pe)
    driver = driver or CpuDriver()
    return Site(bootstrap, driver, driver.alloc(4096), 4096, MemoryKind.UNCACHED, peers, "node", chosen)


def same(results) -> Exception:
    """The one error that all PEs have raised."""
    assert all(isinstance(result, Exception) for result in results), results
    assert len({(type(result), str(result)) for result in results}) == 1, results
    return results[0]
