"""Worlds on GPUs whose PEs are not mapped, without a GPU: launches are asynchronous, a host thread is the card."""

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import NetworkError, PeerTimeout
from mori_triton.host import state
from mori_triton.host.drivers import MemoryKind
from tests.fake_gpu_worlds import fake  # noqa: F401
from tests.fake_gpus import FakeDriver
from tests.network_programs import exchange, put_kernel, symmetric, wait_kernel

pytestmark = pytest.mark.cpu

TRANSPORTS = ("mlx5", "bnxt_re", "ionic", "proxy")


def world(n, transport, **settings):
    return mori.local_world(n, device="cuda", heap_size="1M", transport=transport, **{"timeout_s": 20.0, **settings})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everybody_with_everybody(transport, monkeypatch):
    heaps, alloc = [], FakeDriver.alloc

    def note(self, num_bytes, *, exportable=False, **options):
        if exportable and num_bytes == 1 << 20:
            heaps.append(options["kind"])
        return alloc(self, num_bytes, exportable=exportable, **options)

    monkeypatch.setattr(FakeDriver, "alloc", note)
    assert world(2, transport).run(exchange, (3, 4097)) == [6, 6]
    # a host thread reads and writes it
    assert heaps == [MemoryKind.FINE_GRAINED] * 2


def test_some_peers_are_mapped():
    def program(pe):
        assert [state.current().heap.reaches(peer) for peer in range(4)] == [peer // 2 == pe // 2 for peer in range(4)]
        return exchange(pe, (100,))

    assert world(4, "mlx5", gpus_per_node=2).run(program) == [10] * 4


def test_a_request_that_fails():
    def program(pe):
        x, status = symmetric(64), symmetric(1, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            launch(put_kernel, (1,), shmem.context(), x, status, 100, 1)
        shmem.shmem_barrier_all()

    faults = [{"pe": 0, "peer": 1, "fault": "rnr"}]
    with pytest.raises(NetworkError, match=r"bnxt_re, PE 0 to PE 1: queue pair 0x.*request 0: .*receiver-not-ready"):
        world(2, "bnxt_re", network={"faults": faults}, timeout_s=5).run(program)


def test_a_peer_that_does_not_signal():
    def program(pe):
        signal = symmetric(1, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            launch(wait_kernel, (1,), shmem.context(), signal, 1)

    with pytest.raises(PeerTimeout, match="PE 0 waiting for PE 1"):
        world(2, "ionic", timeout_s=1).run(program)
