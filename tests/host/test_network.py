"""The structs of a network as bytes; which transport PEs come to, by what is asked for and what there is; its end."""

from __future__ import annotations

import dataclasses
import gc
import struct
import threading
import warnings
from pathlib import Path

import pytest

from mori_triton import abi, env
from mori_triton.env import DeviceFilter
from mori_triton.errors import DriverError, HeapError, NetworkError, NotSupported, PeerTimeout, StateError
from mori_triton.host import state
from mori_triton.host.agreement import together
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver, MemoryKind
from mori_triton.host.drivers import cpu as cpu_driver
from mori_triton.host.network import cards as real_cards
from mori_triton.host.network import choose, records
from mori_triton.host.network.choose import open_network
from mori_triton.host.network.fabric import Site
from mori_triton.host.nic import agree, soft_hca
from mori_triton.host.proxy import fabric as proxy_fabric
from tests.host.fake_gpu import fake_driver
from tests.host.nic.sysfs_trees import BROADCOM, MELLANOX, Node
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


# ----------------------------------------------------------------------------------------------------------- transports


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


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch):
    """The proxy is a double; `proxy.missing[pe]` is why a PE has none."""
    fabric = NotedFabric("proxy")
    fabric.missing = None
    monkeypatch.setattr(proxy_fabric, "ProxyFabric", lambda: fabric)
    monkeypatch.setattr(proxy_fabric, "unavailable", lambda: fabric.missing)
    return fabric


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A node with these cards, whose libraries can be opened; a function that adds one."""
    node = Node(tmp_path)
    for name in ("open_verbs", "open_provider"):
        monkeypatch.setattr(agree, name, lambda *_: None)

    def add(name: str, vendor: int = MELLANOX) -> None:
        node.nic(
            name, f"pci0000:00/0000:{len(list((tmp_path / 'class/infiniband').iterdir())) + 1:02x}:00.0", vendor=vendor
        )

    add.root = tmp_path
    return add


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


def opened(n: int, root: Path, fabric=None, **settings):
    def program(pe: int, bootstrap):
        own = {name: value[pe] if isinstance(value, list) else value for name, value in settings.items()}
        return open_network(site_of(pe, bootstrap, **own), lambda kind: pytest.fail("no other heap"), fabric, root)

    return each(n, program)


def same(results) -> Exception:
    assert all(isinstance(result, Exception) for result in results), results
    assert len({(type(result), str(result)) for result in results}) == 1, results
    return results[0]


def test_no_network_where_none_is_wanted(tmp_path: Path, proxy) -> None:
    assert opened(1, tmp_path, transport="mlx5") == [None]
    assert opened(2, tmp_path, far=False) == [None, None]
    assert opened(2, tmp_path, far=False, transport="proxy") == [None, None]
    assert opened(2, tmp_path, transport="p2p") == [None, None]
    assert opened(2, tmp_path, NotedFabric(), transport="p2p") == [None, None]
    assert proxy.sites == []


def test_all_take_part_where_one_cannot_reach_another(tmp_path: Path, proxy) -> None:
    networks = opened(3, tmp_path, transport="proxy", far=[False, False, True])
    assert [network.name for network in networks] == ["proxy"] * 3
    assert sorted(site.peers for site in proxy.sites) == [(), (), (0, 1)]


def test_pes_that_want_different_things(tmp_path: Path) -> None:
    error = same(opened(3, tmp_path, transport=["p2p", "auto", "p2p"]))
    assert isinstance(error, HeapError)
    assert "choice of transport: the PEs differ in transport (PE 0: p2p; PE 1: auto; PE 2: p2p)" in str(error)
    error = same(opened(2, tmp_path, num_qp_per_pe=[4, 2]))
    assert "the PEs differ in queue pairs to each PE (PE 0: 4; PE 1: 2)" in str(error)


def test_falling_back_to_the_proxy_warns_once(tmp_path: Path, proxy) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        networks = opened(3, tmp_path)
    assert [network.name for network in networks] == ["proxy"] * 3
    (warning,) = said
    assert warning.category is RuntimeWarning
    text = str(warning.message)
    assert text.startswith("no network card is used (on every PE: no RDMA device with a link that is up: no device)")
    assert "proxy" in text
    assert "slower" in text
    assert "MORI_TRITON_TRANSPORT=proxy asks for that" in text


def test_the_proxy_when_asked_for_warns_of_nothing(tmp_path: Path, proxy) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert opened(2, tmp_path, transport="proxy")[0].provider == "proxy"


def test_neither_cards_nor_ucx(tmp_path: Path, proxy) -> None:
    proxy.missing = "UCX cannot be loaded: libucp.so.0: no such file. Debian: libucx0"
    error = same(opened(2, tmp_path))
    assert isinstance(error, HeapError)
    for part in ("no network cards (on every PE: no RDMA device", "no proxy (on every PE: UCX cannot be loaded",
                 "Debian: libucx0", "MORI_TRITON_TRANSPORT=p2p"):  # fmt: skip
        assert part in str(error)


def test_a_library_that_is_missing_says_where_it_was_looked_for(monkeypatch, proxy, cards) -> None:
    cards("mlx5_0")

    def missing(*_):
        raise StateError(
            "libmlx5 cannot be opened; tried libmlx5.so.1: no. It is in Debian and Ubuntu: ibverbs-providers"
        )

    monkeypatch.setattr(agree, "open_provider", missing)
    with pytest.warns(
        RuntimeWarning, match=r"mlx5_0:1: libmlx5 cannot be opened; tried libmlx5.so.1.*ibverbs-providers"
    ):
        assert opened(2, cards.root)[1].name == "proxy"


def test_cards_that_all_have_go_first(monkeypatch, proxy, cards) -> None:
    made = []
    monkeypatch.setattr(real_cards, "CardFabric", lambda name, root: made.append(NotedFabric(name)) or made[-1])
    cards("bnxt_re0", BROADCOM)
    cards("mlx5_0")
    assert [network.name for network in opened(2, cards.root)] == ["mlx5", "mlx5"]
    # the user may see to it that some PEs have others
    only = [DeviceFilter(("bnxt_re0",), False), None]
    assert [network.name for network in opened(2, cards.root, rdma_devices=only)] == ["bnxt_re"] * 2
    apart = [DeviceFilter(("bnxt_re0",), False), DeviceFilter(("mlx5_0",), False)]
    with pytest.warns(RuntimeWarning, match="PE 0: has bnxt_re cards only; PE 1: has mlx5 cards only"):
        assert opened(2, cards.root, rdma_devices=apart)[0].name == "proxy"


def test_a_card_that_cannot_be_used_falls_back_too(monkeypatch, proxy, cards) -> None:
    cards("mlx5_0")

    class Broken(NotedFabric):
        def open(self, site):
            return together(site.bootstrap, "the network over mlx5", self.fail)

        def fail(self):
            raise NotSupported("mlx5_0:1 has no atomics")

    monkeypatch.setattr(real_cards, "CardFabric", lambda name, root: Broken(name))
    with pytest.warns(RuntimeWarning, match="no network card is used .*mlx5_0:1 has no atomics"):
        assert opened(2, cards.root)[1].name == "proxy"
    # but not where it was asked for
    error = same(opened(2, cards.root, transport="mlx5"))
    assert isinstance(error, NotSupported)
    assert str(error) == (
        "the network over mlx5 could not be set up (PE 0: mlx5_0:1 has no atomics; PE 1: mlx5_0:1 has no atomics)"
    )


def test_cards_that_are_asked_for_and_not_there(proxy, cards) -> None:
    error = same(opened(2, cards.root, transport="ionic"))
    assert isinstance(error, HeapError)
    assert "the network over ionic could not be set up (PE 0: no ionic card: no RDMA device" in str(error)
    cards("mlx5_0")
    error = same(opened(2, cards.root, transport="ionic"))
    assert "no ionic card: those that there are, are others: mlx5_0:1" in str(error)


def test_devices_that_there_are_not(proxy, cards) -> None:
    cards("mlx5_0")
    wanted = [DeviceFilter(("mlx5_7",), False), None]
    for transport in ("auto", "mlx5"):
        error = same(opened(2, cards.root, rdma_devices=wanted, transport=transport))
        assert "could not be set up (PE 0: MORI_RDMA_DEVICES" in str(error)
        assert "there is no mlx5_7, there are: mlx5_0" in str(error)
    assert proxy.sites == []


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


def test_what_stands_in_several_places() -> None:
    assert choose.CARDS == tuple(agree.LIBRARIES) == tuple(soft_hca.PROVIDERS)
    assert set(env.TRANSPORTS) == {"auto", *abi.PROVIDERS} - {"any"}
    assert {name: code for name, code in abi.PROVIDERS.items() if name != "any"} == {
        "mlx5": 1, "bnxt_re": 2, "ionic": 3, "proxy": 4, "p2p": 5,
    }  # fmt: skip


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
