"""Real cards as PEs use them, on doubles of their libraries: what tables say of queues, keys and doorbells."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import gc
import itertools
import os
import struct
from pathlib import Path
from typing import NamedTuple

import pytest

from mori_triton.errors import DriverError, HeapError, NetworkError, NotSupported
from mori_triton.host import state
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CpuDriver
from mori_triton.host.network.cards import CardFabric
from mori_triton.host.nic import agree, card, verbs_api
from mori_triton.host.nic.card import NicCard
from mori_triton.host.nic.discover import discover
from mori_triton.host.nic.select import links
from tests.host.fake_gpu import fake_driver
from tests.host.nic.fake_mlx5 import FakeMlx5
from tests.host.nic.fake_rdma import FakeVerbs
from tests.host.nic.sysfs_trees import BROADCOM, MELLANOX, PENSANDO, Node
from tests.host.nic.test_bnxt_re import FakeBnxt
from tests.host.nic.test_ionic import FakeIonic, FakeIonicVerbs
from tests.host.test_network_soft import NAMES, QUEUE
from tests.host.worlds import SETTINGS, run_threads

pytestmark = pytest.mark.cpu

PROVIDERS = ("mlx5", "bnxt_re", "ionic")
VENDORS = {"mlx5": MELLANOX, "bnxt_re": BROADCOM, "ionic": PENSANDO}
ELSEWHERE = 0x100000000000  # where the fake GPU sees what is mapped for it


class Verbs(FakeVerbs):
    """Also what of it ionic's queue pairs are made of, with numbers of their own."""

    numbers = itertools.count(0x51)

    def do_create_qp(self, pd, wanted):
        return self.struct("qp", verbs_api.Qp(qp_num=next(self.numbers)))

    do_destroy_qp = FakeIonicVerbs.do_destroy_qp
    do_destroy_cq = FakeIonicVerbs.do_destroy_cq


class Bnxt(FakeBnxt):
    numbers = itertools.count(0x4321)

    def do_create_qp(self, pd, wanted):
        handle = super().do_create_qp(pd, wanted)
        # the number is behind seven pointers and a handle
        ctypes.c_uint32.from_address(handle + 52).value = next(self.numbers)
        return handle


class Ionic(FakeIonic):
    def do_get_qp(self, out, qp):
        number = qp[0].qp_num
        # a page apart, as rings are
        out[0].sq.ptr, out[0].sq.mask, out[0].sq.db_val = 0x7D0000000000 + (number << 20), 4095, number << 24
        return 0

    def do_get_cq(self, out, cq, at):
        out[0].q.ptr, out[0].q.mask, out[0].q.db_val = 0x7C0000000000 + (int(cq) << 20), 8191, 0x33 << 24
        return 0


MAKERS = {"mlx5": FakeMlx5, "bnxt_re": Bnxt, "ionic": Ionic}


class Bench(NamedTuple):
    provider: str
    root: Path
    verbs: FakeVerbs
    maker: object


@pytest.fixture(params=PROVIDERS)
def bench(request, monkeypatch, tmp_path) -> Bench:
    provider = request.param
    names = [f"{provider}_{number}" for number in (0, 1)]
    node = Node(tmp_path)
    for number, name in enumerate(names):
        node.nic(name, f"pci0000:00/0000:{number + 1:02x}:00.0", vendor=VENDORS[provider])
    made = Bench(provider, tmp_path, Verbs(tuple(names)), MAKERS[provider]())
    for module in (agree, card):
        monkeypatch.setattr(module, "open_verbs", lambda override=None: made.verbs.library())
        monkeypatch.setattr(module, "open_provider", lambda name: made.maker.library())
    return made


def open_card(bench: Bench, driver, **settings) -> NicCard:
    link = links(discover(bench.root))[0]
    return NicCard(driver, link, dataclasses.replace(SETTINGS, **settings))


def held(bench: Bench) -> dict:
    return {**bench.verbs.held, **bench.maker.held}


def test_a_queue_pair_for_a_gpu(bench: Bench) -> None:
    driver, gpus = fake_driver("cuda")
    opened = open_card(bench, driver)
    made = opened.create(3, 0)
    fields = made.fields
    registered = gpus.memory["registered"]
    # registers as such; ionic's rings, which are memory of its library, too
    kinds = {flags for _, flags in registered.values()}
    assert kinds == ({7, 3} if bench.provider == "ionic" else {7})
    if bench.provider == "mlx5":
        assert fields["doorbell"] == 0x7E0000000800 + ELSEWHERE
        assert fields["num_wqes"] == 16384
        assert registered == {0x7E0000000000: (4096, 7)}
        assert driver.read(fields["cq"], 64) == b"\xff" * 64
        assert made.number == 0x000ABC02
    elif bench.provider == "bnxt_re":
        page = ctypes.addressof(bench.maker.page)
        assert fields["doorbell"] == page + ELSEWHERE
        assert (fields["num_wqes"], fields["num_psns"]) == (4096, 8192)
        assert fields["psn_table"] - fields["sq"] == 12288 * 16
    else:
        assert fields["doorbell"] == 0x7E0000000000 + 0x48 + ELSEWHERE
        assert fields["cq_doorbell"] == 0x7E0000000000 + 0x58 + ELSEWHERE
        assert fields["doorbell_value"] == made.number << 24
        assert fields["cq_doorbell_value"] == 0x33 << 24
        assert (fields["num_wqes"], fields["num_cqes"]) == (4096, 8192)
        assert fields["sq"] == 0x7D0000000000 + (made.number << 20) + ELSEWHERE
        assert registered[0x7D0000000000 + (made.number << 20)] == (4096 * 64, 3)
        assert registered[0x7E0000000000] == (4096, 7)
        assert len(registered) == 3
    # all of what kernels touch is named
    for name in ("sq", "cq", "doorbell"):
        assert any(at <= fields[name] < at + num_bytes for at, num_bytes, _ in made.memory)
    # a second one: doorbells in the same page are mapped once
    again = opened.create(3, 1)
    assert again.number != made.number
    assert [flags for _, flags in registered.values()].count(7) == 1
    opened.close()
    opened.close()
    assert held(bench) == {}
    driver.close()
    del driver, opened
    gc.collect()
    assert not any(gpus.memory.values())


def test_memory_of_a_gpu_by_dma_buf(bench: Bench) -> None:
    driver, gpus = fake_driver("hip")
    opened = open_card(bench, driver)
    heap = driver.alloc(3 << 20, exportable=True)
    before = len(os.listdir("/proc/self/fd"))
    assert opened.register(heap, 3 << 20) == (0x1001, 0xFFFF0001)
    (call,) = bench.verbs.of("reg_dmabuf_mr")
    assert call[1:4] == (0, 3 << 20, heap)
    assert call[5] == 15
    assert len(os.listdir("/proc/self/fd")) == before
    # what has none is registered by its address
    gpus.fail["dma_buf"] = 1
    opened.register(heap, 3 << 20)
    assert bench.verbs.of("reg_mr") == [(call[0], heap, 3 << 20, 15)]
    bench.verbs.fail["reg_mr"] = errno.EFAULT
    with pytest.raises(DriverError, match=r"ibv_reg_mr .*EFAULT: .*no dma-buf for it.*nvidia-peermem"):
        opened.register(heap, 3 << 20)
    opened.close()
    assert held(bench) == {}


def test_a_card_without_atomics(bench: Bench) -> None:
    bench.verbs.atomic_cap = 0
    with pytest.raises(NotSupported, match=rf"transport {bench.provider}: {bench.provider}_0:1 has no atomics"):
        open_card(bench, CpuDriver())
    assert held(bench) == {}


def world(bench: Bench, program, n: int = 2, **settings):
    group = ThreadGroup(n, timeout_s=5.0)
    chosen = dataclasses.replace(SETTINGS, gpus_per_node=1, num_qp_per_pe=2, transport=bench.provider, **settings)

    def on(pe: int):
        fabric = CardFabric(bench.provider, bench.root)
        here = state.open_state(group.bootstrap(pe), CpuDriver(), chosen, fabric=fabric)
        try:
            return program(here)
        finally:
            here.close(failed=True)

    return run_threads(n, on)


def test_a_world(bench: Bench) -> None:
    """Each end of a connection knows the other's number, heap and key."""

    def program(here: state.PeState):
        (network,) = struct.unpack("<Q", here.driver.read(here.heap.ctx_address + 64, 8))
        (table,) = struct.unpack("<Q", here.driver.read(network + 8, 8))
        raws = [here.driver.read(table + nth * 320, 320) for nth in range(2 * here.n_pes)]
        assert not any(any(raw) for raw in raws[2 * here.pe : 2 * here.pe + 2])
        queues = [dict(zip(NAMES, QUEUE.unpack_from(raw), strict=True)) for raw in raws]
        here.bootstrap.barrier()
        return queues, here.heap.base, here.provider

    worlds = world(bench, program)
    numbers = [queue["number"] for queues, _, _ in worlds for queue in queues if queue["number"]]
    assert len(set(numbers)) == 4
    for pe, (queues, _, provider) in enumerate(worlds):
        assert provider == bench.provider
        for at in range(2):
            queue, there = queues[2 * (1 - pe) + at], worlds[1 - pe][0][2 * pe + at]
            assert (queue["remote_base"], queue["remote_bytes"]) == (worlds[1 - pe][1], 1 << 20)
            # the doubles' keys: 0x1001, 0x1002 ... and 0xffff0001, 0xffff0002 for the same memory
            assert queue["rkey"] - 0xFFFF0000 == there["lkey"] - 0x1000
            assert queue["lkey"] != queue["results_lkey"]
            assert queue["mtu"] == 4096
    if bench.provider == "mlx5":
        # INIT2RTR_QP: opcode, own number, the peer's at byte 0x2c
        told = {
            (int.from_bytes(data[8:12], "big"), int.from_bytes(data[0x2C:0x30], "big"))
            for _, data in bench.maker.commands
            if data[:2] == b"\x05\x03"
        }
    else:
        states = [s for s, _ in bench.maker.states] if bench.provider == "bnxt_re" else None
        told = None
        peers = (
            [s["dest_qp_num"] for s in states if "dest_qp_num" in s]
            if states is not None
            else [attributes.dest_qp_num for attributes, _ in bench.verbs.attributes if attributes.dest_qp_num]
        )
        assert sorted(peers) == sorted(numbers)
    if told is not None:
        pairs = {
            (worlds[pe][0][2 * (1 - pe) + at]["number"], worlds[1 - pe][0][2 * pe + at]["number"])
            for pe in range(2)
            for at in range(2)
        }
        assert told == pairs
    assert held(bench) == {}


def test_a_failure_on_one_pe(bench: Bench) -> None:
    bench.verbs.fail["reg_mr"] = errno.ENOMEM
    with pytest.raises(
        HeapError, match=rf"the network over {bench.provider} could not be set up \(PE 0: ibv_reg_mr.*PE 1: "
    ):
        world(bench, lambda here: None)
    assert held(bench) == {}


def test_the_end_asks_completions(bench: Bench) -> None:
    """A PE whose kernels have left something behind waits for it, up to the limit of waits."""
    driver = CpuDriver()
    opened = open_card(bench, driver, wait_timeout_s=0.1)
    num_bytes = {"mlx5": 64, "bnxt_re": 32, "ionic": 32 * 8}[bench.provider]
    cq = driver.alloc(num_bytes)
    driver.memset(cq, 0xFF if bench.provider == "mlx5" else 0, num_bytes)
    queue = {"cq": cq, "posted": 0, "done": 0, "consumed": 0, "num_wqes": 16, "num_cqes": 8}
    made = type("Made", (), {"number": 0x77})
    opened.quiet([(made, queue)])
    with pytest.raises(
        NetworkError, match=rf"{bench.provider}_0, queue pair 0x77: 3 requests were not done within 0.1 s"
    ):
        opened.quiet([(made, queue | {"posted": 3})])
    failed = {
        "mlx5": bytes(55) + b"\x15" + bytes(7) + b"\xd0",
        "bnxt_re": bytes(25) + b"\x0a" + bytes(6),
        "ionic": bytes(24) + b"\0\0\0\x0b" + b"\0\0\0\x03",
    }[bench.provider]
    driver.write(cq, failed)
    with pytest.raises(NetworkError, match=r"queue pair 0x77: a request has failed with status 0x(15|a|b)"):
        opened.quiet([(made, queue | {"posted": 3})])
    opened.close()
