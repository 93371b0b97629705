"""The proxy as a transport, without kernels: what a PE gets, what is refused, and how failures are put into words."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import pytest

from mori_triton import abi, env
from mori_triton.errors import DriverError, NotSupported, PeerTimeout
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers.base import MemoryKind
from mori_triton.host.drivers.cpu import CpuDriver
from mori_triton.host.network import Site
from mori_triton.host.proxy import Op, layout, status, ucp_api
from mori_triton.host.proxy.fabric import ProxyFabric, ProxyLinks, unavailable
from tests.host.proxy.programs import run_threads
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu

HEAP = 1 << 16


def site_of(bootstrap, driver, heap: int, peers, settings, kind: MemoryKind = MemoryKind.FINE_GRAINED) -> Site:
    return Site(
        bootstrap=bootstrap, driver=driver, address=heap, num_bytes=HEAP, kind=kind, peers=peers, node="here",
        settings=settings,
    )  # fmt: skip


def together(n_pes: int, program: Callable[[Site, ProxyLinks], None], timeout_s: float = 30.0) -> None:
    """`program` on every PE, each a thread with a heap of its own."""
    group = ThreadGroup(n_pes, timeout_s=30)
    settings = dataclasses.replace(env.snapshot(), wait_timeout_s=timeout_s)

    def one(pe: int) -> None:
        driver, bootstrap = CpuDriver(), group.bootstrap(pe)
        heap = driver.alloc(HEAP)
        peers = tuple(q for q in range(n_pes) if q != pe)
        site = site_of(bootstrap, driver, heap, peers, settings)
        links = ProxyFabric({"TLS": "sm,self"}, entries=8).open(site)
        try:
            program(site, links)
            links.quiet()
            bootstrap.barrier("done")
        finally:
            links.close()
            driver.close()

    run_threads([lambda pe=pe: one(pe) for pe in range(n_pes)])


@needs_ucx
def test_kernels_are_given_the_ring_and_may_touch_all_of_it() -> None:
    def program(site: Site, links: ProxyLinks) -> None:
        assert (links.provider, links.queues) == ("proxy", 0)
        (region,) = links.regions
        assert (region.address, region.pe) == (links.ring, site.pe)
        header = layout.Ring.from_address(links.ring)
        assert (header.version, header.entries, header.n_pes) == (layout.VERSION, 8, 2)
        assert header.free_tickets == 2**64 - 1
        assert region.num_bytes == ctypes.sizeof(layout.Ring) + 8 * 64 + 2 * 8
        # as a kernel would: signals of the peer's first word
        slot = layout.Descriptor.from_address(links.ring + ctypes.sizeof(layout.Ring))
        slot.op, slot.ticket, slot.pe, slot.bytes, slot.value = Op.FETCH_ADD, 5, 1 - site.pe, 8, 7
        header.tail = 1
        slot.ready = 1
        links.quiet()
        assert header.tickets[4].done == 1
        site.bootstrap.barrier("added")
        assert site.driver.read(site.address, 8) == (7).to_bytes(8, "little")
        links.check()

    together(2, program)


@needs_ucx
def test_what_failed_outside_of_kernels_is_raised_and_stays() -> None:
    def program(site: Site, links: ProxyLinks) -> None:
        if site.pe == 0:
            assert links._proxy is not None
            links._proxy.timeout_s = 0.3
            links._proxy._state.timeout_ns = int(0.3e9)
        site.bootstrap.barrier("limits are set")
        if site.pe == 1:
            # this PE's thread is gone: it takes nothing any more
            assert links._proxy is not None
            links._proxy.close(failed=True)
        site.bootstrap.barrier("one is gone")
        if site.pe == 0:
            slot = layout.Descriptor.from_address(links.ring + ctypes.sizeof(layout.Ring))
            slot.op, slot.pe, slot.bytes, slot.value = Op.ADD, 1, 8, 7
            layout.Ring.from_address(links.ring).tail = 1
            slot.ready = 1
            for _ in range(2):
                with pytest.raises(PeerTimeout, match=r"QUIET of 0 bytes at heap offset 0 of PE 1 .*timeout"):
                    links.quiet()
                with pytest.raises(PeerTimeout, match="ADD of 8 bytes at heap offset 0 of PE 1"):
                    links.check()
        site.bootstrap.barrier("seen")
        links.close()

    together(2, program)


def test_without_ucx_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise DriverError("UCX cannot be loaded: libucp.so.0: no such file")

    monkeypatch.setattr("mori_triton.host.proxy.fabric.Ucp", missing)
    assert unavailable() == "UCX cannot be loaded: libucp.so.0: no such file"
    monkeypatch.undo()
    assert ucp_api.SONAME in (unavailable() or ucp_api.SONAME)


def test_a_heap_that_the_cpu_cannot_touch_is_refused() -> None:
    class Gpu(CpuDriver):
        name = "hip"

    driver = Gpu()
    heap = driver.alloc(HEAP)
    site = site_of(ThreadGroup(1).bootstrap(0), driver, heap, (), env.snapshot(), MemoryKind.UNCACHED)
    with pytest.raises(NotSupported, match=r"proxy on hip: want a heap in pinned host memory.*uncached"):
        ProxyFabric().open(site)


@pytest.mark.parametrize(
    ("reason", "op", "text", "timeout"),
    [
        (1 << 8, Op.PUT, "PUT refused: no such operation", False),
        (2 << 8 | 256 - 3, Op.GET, "GET failed: UCX status -3 (input/output error)", False),
        (2 << 8 | 256 - 25, Op.QUIET, "QUIET failed: UCX status -25 (connection reset by the peer)", True),
        (2 << 8 | 256 - 45, Op.ADD, "ADD failed: UCX status -45 (link or endpoint failed)", True),
        (3 << 8 | 256 - 80, Op.FLUSH, "FLUSH not finished within the proxy's limit", True),
        (2 << 8 | 256 - 99, 77, "operation code 77 failed: UCX status -99", False),
    ],
)
def test_what_kernels_record_is_put_into_words(reason: int, op: int, text: str, timeout: bool) -> None:
    assert status.describe(reason, op).startswith(text)
    assert status.is_timeout(reason) is timeout
    assert abi.PROVIDERS["proxy"] == 4
