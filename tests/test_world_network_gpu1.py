"""Worlds on one GPU whose PEs are not mapped: heaps and rings in pinned host memory, a host thread is the card."""

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import NetworkError, PeerTimeout
from mori_triton.host import state
from tests.host.proxy.ucx import needs_ucx
from tests.network_programs import exchange, put_kernel, symmetric, wait_kernel

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]

DEVICE = "hip" if torch.version.hip else "cuda"
CARDS = ("mlx5", "bnxt_re", "ionic")
TRANSPORTS = (*CARDS, pytest.param("proxy", marks=needs_ucx))
# what a request, an inline write, a packet and many packets hold
SIZES = (0, 3, 16, 100, 4097, 1 << 20)


def world(n, transport, **settings):
    return mori.local_world(n, device=DEVICE, heap_size="32M", transport=transport, **{"timeout_s": 10.0, **settings})


def total(n, rounds):
    return [rounds * n * (n + 1) // 2] * n


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("n", [2, 4])
def test_everybody_with_everybody(transport, n):
    assert world(n, transport).run(exchange, SIZES) == total(n, len(SIZES))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_some_peers_are_mapped(transport):
    def program(pe):
        assert [state.current().heap.reaches(peer) for peer in range(4)] == [peer // 2 == pe // 2 for peer in range(4)]
        return exchange(pe, (100, 4097))

    assert world(4, transport, gpus_per_node=2).run(program) == total(4, 2)


@pytest.mark.parametrize("transport", CARDS)
def test_full_rings_and_late_cards(transport):
    sizes = [8 * size for size in range(1, 13)]
    for network in ({"num_wqes": 4}, {"num_wqes": 16, "late": True, "seed": 3}):
        assert world(2, transport, network=network).run(exchange, sizes) == total(2, 12)


@pytest.mark.parametrize("transport", CARDS)
def test_a_request_that_fails(transport):
    def program(pe):
        x, status = symmetric(64), symmetric(2, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            for call in range(2):
                launch(put_kernel, (1,), shmem.context(), x, status[call:], 100, 1)
        shmem.shmem_barrier_all()

    faults = [{"pe": 0, "peer": 1}]
    with pytest.raises(NetworkError, match=f"{transport}, PE 0 to PE 1: queue pair 0x.*transport retries exceeded"):
        world(2, transport, network={"faults": faults}).run(program)


def test_a_peer_that_does_not_signal():
    def program(pe):
        signal = symmetric(1, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            launch(wait_kernel, (1,), shmem.context(), signal, 1)

    with pytest.raises(PeerTimeout, match="PE 0 waiting for PE 1"):
        world(2, "mlx5", timeout_s=1).run(program)


def test_worlds_one_after_the_other():
    def program(pe):
        first = exchange(pe, (100,))
        shmem.shmem_finalize()
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, b"")
        return first + exchange(pe, (4097,))

    for transport in CARDS:
        assert world(2, transport).run(program) == [6, 6]
