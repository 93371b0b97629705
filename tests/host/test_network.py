"""The structs of a network as bytes; where its heap is; errors of which all PEs hear; its end."""

from __future__ import annotations

import dataclasses
import gc
import struct
import threading
from pathlib import Path

import pytest

from mori_triton import abi, env
from mori_triton.errors import DriverError, HeapError, NetworkError, NotSupported, PeerTimeout, StateError
from mori_triton.host import state
from mori_triton.host.agreement import together
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver, MemoryKind
from mori_triton.host.drivers import cpu as cpu_driver
from mori_triton.host.network import choose, records
from mori_triton.host.network.choose import open_network
from mori_triton.host.nic import agree, soft_hca
from mori_triton.host.proxy import fabric as proxy_fabric
from tests.host.fake_gpu import fake_driver
from tests.host.noted_network import NotedFabric, NotedLinks, each, same, site_of
from tests.host.worlds import SETTINGS, error_of, run_threads

pytestmark = pytest.mark.cpu


def test_network_struct() -> None:
    packed = records.pack_network(provider="ionic", num_qp_per_pe=4, queues=0x1122334455667788, ring=0x99)
    assert packed == struct.pack("<IIQQ", 3, 4, 0x1122334455667788, 0x99) + bytes(40)


def test_queue_struct() -> None:
    """Each field at the byte that hip_src/network.h says, and nothing else; a queue that is none is all zero."""
    at = {
        "sq": (0, 8), "cq": (8, 8), "record": (16, 8), "doorbell": (24, 8), "doorbell_value": (32, 8),
        "cq_doorbell": (40, 8), "cq_doorbell_value": (48, 8), "psn_table": (56, 8), "number": (64, 4),
        "num_wqes": (68, 4), "num_cqes": (72, 4), "num_psns": (76, 4), "lkey": (80, 4), "rkey": (84, 4),
        "results_lkey": (88, 4), "mtu": (92, 4), "remote_base": (96, 8), "remote_bytes": (104, 8), "results": (112, 8),
        "ready": (120, 8), "reserved": (128, 8), "psn": (136, 8), "posted": (192, 8), "ringing": (200, 8),
        "done": (256, 8), "consumed": (264, 8), "polling": (272, 8), "error": (280, 8),
    }  # fmt: skip
    values = {
        name: int.from_bytes(bytes([nth + 1] * size), "little") for nth, (name, (_, size)) in enumerate(at.items())
    }
    want = bytearray(3 * 320)
    for name, (offset, size) in at.items():
        want[320 + offset : 320 + offset + size] = values[name].to_bytes(size, "little")
    want[320 + 288 : 320 + 296] = b"\xff" * 8
    assert records.pack_queues([None, values, None]) == bytes(want)
    assert records.unpack_queue(bytes(want), 1) == values | {"free_results": 2**64 - 1}
    assert set(records.unpack_queue(bytes(want), 2).values()) == {0}


def test_what_stands_in_several_places() -> None:
    assert choose.CARDS == tuple(agree.LIBRARIES) == tuple(soft_hca.PROVIDERS)
    assert set(env.TRANSPORTS) == {"auto", *abi.PROVIDERS} - {"any"}
    assert {name: code for name, code in abi.PROVIDERS.items() if name != "any"} == {
        "mlx5": 1, "bnxt_re": 2, "ionic": 3, "proxy": 4, "p2p": 5,
    }  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- heaps


def test_a_heap_in_other_memory(tmp_path: Path) -> None:
    """A GPU's heap is given up for one that the transport can do with; on the CPU there is no other."""
    moved = []

    class Gpu(CpuDriver):
        name = "hip"

    def program(driver):
        def on(pe, bootstrap):
            site = site_of(pe, bootstrap, driver=driver())

            def move(kind):
                moved.append(kind)
                return dataclasses.replace(site, kind=kind, num_bytes=8192)

            fabric = NotedFabric()
            fabric.heap_kind = MemoryKind.FINE_GRAINED
            open_network(site, move, fabric, tmp_path)
            return fabric.sites[0].kind, fabric.sites[0].num_bytes

        return each(2, on)

    assert program(CpuDriver) == [(MemoryKind.UNCACHED, 4096)] * 2
    assert moved == []
    assert program(Gpu) == [(MemoryKind.FINE_GRAINED, 8192)] * 2
    assert moved == [MemoryKind.FINE_GRAINED] * 2


@pytest.mark.parametrize("kind", ["cuda", "hip"])
def test_the_proxy_on_gpus_has_its_heap_in_pinned_memory(kind: str, monkeypatch) -> None:
    """It is given up for such a one once the transport is known; PEs of a process still map each other's."""
    fabric = NotedFabric("proxy")
    fabric.heap_kind = MemoryKind.FINE_GRAINED
    monkeypatch.setattr(proxy_fabric, "ProxyFabric", lambda: fabric)
    group, (first, gpus) = ThreadGroup(3, timeout_s=5.0), fake_driver(kind, 0)
    drivers = [first, *(fake_driver(kind, 1, gpus=gpus)[0] for _ in range(2))]
    settings = dataclasses.replace(SETTINGS, gpus_per_node=2, transport="proxy", heap_bytes=4 << 20)

    def program(pe: int):
        here = state.open_state(group.bootstrap(pe), drivers[pe], settings)
        where = here.heap.base in gpus.memory["host"], [here.heap.reaches(peer) for peer in range(3)]
        here.bootstrap.barrier()
        here.close()
        return where

    assert run_threads(3, program) == [(True, [pe // 2 == peer // 2 for peer in range(3)]) for pe in range(3)]
    assert {site.kind for site in fabric.sites} == {MemoryKind.FINE_GRAINED}
    assert [site.peers for site in sorted(fabric.sites, key=lambda site: site.pe)] == [(2,), (2,), (0, 1)]
    gc.collect()
    assert not any(gpus.memory.values())


def test_pinned_heaps_of_other_processes_are_not_mapped(monkeypatch) -> None:
    monkeypatch.setattr(state, "process_identity", lambda: threading.current_thread().name)
    fabric = NotedFabric()
    fabric.heap_kind = MemoryKind.FINE_GRAINED
    group, (first, gpus) = ThreadGroup(2, timeout_s=5.0), fake_driver("cuda", 0)
    drivers = [first, fake_driver("cuda", 1, gpus=gpus)[0]]

    def program(pe: int):
        here = state.open_state(group.bootstrap(pe), drivers[pe], SETTINGS, fabric=fabric)
        reached = [here.heap.reaches(peer) for peer in range(2)]
        here.bootstrap.barrier()
        here.close()
        return reached

    assert run_threads(2, program) == [[True, False], [False, True]]


# ------------------------------------------------------------------------------------------------------------ agreement


def test_the_same_error_on_all() -> None:
    def on(raised):
        def program(pe, bootstrap):
            def part():
                if pe in raised:
                    raise raised[pe]
                return pe * 10

            return together(bootstrap, "the thing", part)

        return each(3, program)

    assert on({}) == [0, 10, 20]
    error = same(on({1: DriverError("no room")}))
    assert (type(error), str(error)) == (HeapError, "the thing could not be set up (PE 1: no room)")
    error = same(on({1: NotSupported("no atomics"), 2: NotSupported("no dma-buf")}))
    assert (type(error), str(error)) == (
        NotSupported, "the thing could not be set up (PE 1: no atomics; PE 2: no dma-buf)",
    )  # fmt: skip
    assert type(same(on({0: NotSupported("no atomics"), 2: StateError("down")}))) is HeapError


# ------------------------------------------------------------------------------------------------------------- life


class NotedDriver(CpuDriver):
    def __init__(self, log: list) -> None:
        super().__init__()
        self.log = log

    def synchronize(self) -> None:
        self.log.append("device idle")

    def free(self, address: int) -> None:
        self.log.append("free")
        super().free(address)

    def close_import(self, address: int) -> None:
        self.log.append("unmap")
        super().close_import(address)


def world_of(n: int, fabric, program, log=None, **settings):
    group = ThreadGroup(n, timeout_s=5.0)
    chosen = dataclasses.replace(SETTINGS, gpus_per_node=1, **settings)

    def run(pe: int):
        driver = CpuDriver() if log is None or pe else NotedDriver(log)
        here = state.open_state(group.bootstrap(pe), driver, chosen, fabric=fabric)
        return program(here)

    return run_threads(n, run)


def test_the_end_of_a_pe() -> None:
    """The device is idle, then all PEs' networks are; then nobody's memory is used any more."""
    fabric, log = NotedFabric(), []

    def program(here: state.PeState) -> str:
        assert here.driver.read(here.heap.ctx_address + 64, 8) == struct.pack("<Q", here.network.address)
        assert here.driver.read(here.network.address, 8) == struct.pack("<II", 4, 4)
        if here.pe == 0:
            log.clear()
        here.bootstrap.barrier()
        here.close()
        here.close()
        return here.provider

    fabric.log = log
    assert world_of(2, fabric, program, log) == ["proxy"] * 2
    first, own = log.index("device idle"), log.index("free")
    assert first < log.index("quiet")
    assert max(log.index("quiet"), log.index("quiet of a peer")) < log.index("unmap" if "unmap" in log else "check")
    assert log.index("check") < log.index("close network") < own


def test_no_network_in_the_context() -> None:
    def program(here: state.PeState) -> str:
        assert here.driver.read(here.heap.ctx_address + 64, 8) == bytes(8)
        here.close()
        return here.provider

    assert world_of(2, None, program, transport="p2p") == ["p2p"] * 2


def num_mappings() -> int:
    gc.collect()
    return len(cpu_driver._live)


def test_a_network_that_fails_leaves_nothing() -> None:
    class Broken(NotedFabric):
        def open(self, site):
            return together(site.bootstrap, "the network over noted", lambda: self.part(site))

        def part(self, site):
            if site.pe == 1:
                raise DriverError("no room for a queue")
            return NotedLinks(self.log, site)

    before = num_mappings()

    def opens(here):
        pytest.fail("it cannot open")

    with pytest.raises(HeapError, match=r"the network over noted could not be set up \(PE 1: no room for a queue\)"):
        world_of(2, Broken(), opens)
    assert num_mappings() == before


def test_a_pe_that_leaves_is_named_by_those_that_wait_for_its_network() -> None:
    def program(here: state.PeState):
        if here.pe == 1:
            here.close(failed=True)
            return None
        return error_of(here.close)

    error, _ = world_of(2, NotedFabric(), program)
    assert isinstance(error, PeerTimeout)
    assert "everything is done over noted" in str(error)
    assert "PE 1 left" in str(error)


def test_what_one_pe_has_left_undone_is_told_to_that_pe_alone() -> None:
    class Failing(NotedLinks):
        def quiet(self) -> None:
            if self.site.pe == 1:
                raise NetworkError("request 3 has failed")

    class Fabric(NotedFabric):
        def open(self, site):
            return Failing(self.log, site)

    before = num_mappings()
    errors = world_of(2, Fabric(), lambda here: error_of(here.close))
    assert errors[0] is None
    assert (type(errors[1]), str(errors[1])) == (NetworkError, "request 3 has failed")
    del errors
    assert num_mappings() == before
