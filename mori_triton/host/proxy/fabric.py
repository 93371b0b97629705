"""The proxy as a transport: kernels post to the ring, a host thread of their PE serves it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mori_triton.errors import DriverError, NotSupported
from mori_triton.host.agreement import together
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.network.fabric import Site
from mori_triton.host.proxy.proxy import Proxy
from mori_triton.host.proxy.ring import Ring
from mori_triton.host.proxy.ucp_api import Ucp
from mori_triton.host.tables import Region

# an operation's limit as a part of a kernel's wait: the loop, which knows the peer, is to speak first
_SHARE = 0.75


def unavailable() -> str | None:
    """Why there is no proxy here: where UCX was looked for and which package has it. None: there is."""
    try:
        Ucp()
    except DriverError as error:
        return str(error)
    return None


class ProxyFabric:
    """`network.fabric.Fabric`. `options`: UCX settings, as of `Proxy`. `entries`: slots of each PE's ring."""

    name = "proxy"
    heap_kind: MemoryKind | None = MemoryKind.FINE_GRAINED

    def __init__(self, options: Mapping[str, str] | None = None, *, entries: int = 1024) -> None:
        self._options, self._entries = dict(options or {}), entries

    def open(self, site: Site) -> ProxyLinks:
        """See `Fabric`."""
        return ProxyLinks(site, self._options, self._entries)


class ProxyLinks:
    """`network.fabric.Links` of one PE."""

    provider = "proxy"
    queues = 0

    def __init__(self, site: Site, options: Mapping[str, str], entries: int) -> None:
        self._driver = site.driver
        self._proxy: Proxy | None = None
        self.ring, num_bytes = together(site.bootstrap, "the proxy's ring", partial(self._ring, site, entries))
        self.regions: Sequence[Region] = [Region(self.ring, num_bytes, f"ring of the proxy of PE {site.pe}", site.pe)]
        try:
            self._proxy = Proxy(
                site.bootstrap,
                site.address,
                site.num_bytes,
                entries=entries,
                timeout_s=site.settings.wait_timeout_s * _SHARE,
                options=options,
                memory=self._driver.host_view(self.ring, num_bytes),
            )
        except BaseException:
            self.close()
            raise

    def _ring(self, site: Site, entries: int) -> tuple[int, int]:
        if site.driver.name != "cpu" and site.kind is not MemoryKind.FINE_GRAINED:
            raise NotSupported(
                f"the proxy on {site.driver.name}: want a heap in pinned host memory, since the host thread of a PE "
                f"carries out signals and atomics on its heap; got memory of the device ({site.kind.value})"
            )
        num_bytes = Ring.num_bytes(entries, site.n_pes)
        return site.driver.alloc(num_bytes, kind=MemoryKind.FINE_GRAINED), num_bytes

    def quiet(self) -> None:
        """See `Links`."""
        if self._proxy is not None:
            self._proxy.quiet()

    def check(self) -> None:
        """See `Links`. An error stays."""
        if self._proxy is not None:
            self._proxy.check()

    def close(self) -> None:
        """See `Links`."""
        proxy, self._proxy = self._proxy, None
        ring, self.ring = self.ring, 0
        try:
            if proxy is not None:
                proxy.close(failed=True)
        finally:
            if ring:
                self._driver.free(ring)
