"""Worlds of PEs that are not mapped: real kernels over each transport, what goes wrong, what settings may be."""

import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import ArgumentError, KernelFault, NetworkError, PeerTimeout
from mori_triton.host import state
from tests.network_programs import (
    exchange,
    put_and_leave_kernel,
    put_kernel,
    symmetric,
    wait_kernel,
)

pytestmark = pytest.mark.cpu

CARDS = ("mlx5", "bnxt_re", "ionic")
TRANSPORTS = (*CARDS, "proxy")
# nothing, less than a word, an inline write, across words, more than a packet
SIZES = (0, 3, 16, 100, 4097)


def total(n, rounds):
    return [rounds * n * (n + 1) // 2] * n


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_everybody_with_everybody(transport):
    assert mori.local_world(3, transport=transport, timeout_s=20).run(exchange, SIZES) == total(3, 5)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_some_peers_are_mapped(transport):
    """PEs 0 and 1, and 2 and 3, load and store; the others are far."""
    world = mori.local_world(4, gpus_per_node=2, transport=transport, timeout_s=20)

    def program(pe):
        here = state.current()
        assert [here.heap.reaches(peer) for peer in range(4)] == [peer // 2 == pe // 2 for peer in range(4)]
        assert here.provider == transport
        return exchange(pe, (100, 4097))

    assert world.run(program) == total(4, 2)


@pytest.mark.parametrize("transport", CARDS)
def test_rings_that_are_full_again_and_again(transport):
    world = mori.local_world(2, transport=transport, network={"num_wqes": 4}, timeout_s=20)
    assert world.run(exchange, [8 * size for size in range(1, 13)]) == total(2, 12)


@pytest.mark.parametrize("transport", CARDS)
def test_late_cards(transport):
    world = mori.local_world(3, transport=transport, network={"late": True, "seed": 5}, timeout_s=20)
    assert world.run(exchange, (100, 4097)) == total(3, 2)


@pytest.mark.parametrize("transport", CARDS)
@pytest.mark.parametrize("weak_memory", [False, True])
def test_seeded_worlds(transport, weak_memory):
    for seed in range(12):
        world = mori.local_world(
            2, transport=transport, seed=seed, weak_memory=weak_memory, network={"late": True}, timeout_s=20
        )
        assert world.run(exchange, (3, 100)) == total(2, 2)


def test_auto_is_what_is_needed():
    def program(pe):
        return state.current().provider

    assert mori.local_world(2).run(program) == ["p2p"] * 2
    assert mori.local_world(2, gpus_per_node=2).run(program) == ["p2p"] * 2
    assert mori.local_world(2, gpus_per_node=1).run(program) == ["mlx5"] * 2
    assert mori.local_world(2, gpus_per_node=1, transport="p2p").run(program) == ["p2p"] * 2


def test_auto_without_p2p(monkeypatch):
    monkeypatch.setenv("MORI_DISABLE_P2P", "1")
    assert mori.local_world(2).run(lambda pe: state.current().provider) == ["mlx5"] * 2


@pytest.mark.parametrize("transport", ["bnxt_re", "proxy"])
def test_again_with_another_heap_and_again(transport):
    """shmem is finalized and initialised within a run, and worlds come one after the other."""

    def program(pe):
        first = exchange(pe, (100,))
        here = state.current()
        shmem.shmem_finalize()
        # what a program may ask for before it comes back
        here.settings = dataclasses.replace(here.settings, heap_bytes=1 << 21)
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, b"")
        assert state.current() is not here
        assert state.current().heap.num_bytes == 1 << 21
        return first + exchange(pe, (4097,))

    for _ in range(2):
        assert mori.local_world(2, transport=transport, timeout_s=20).run(program) == [6, 6]


# --------------------------------------------------------------------------------------------------- what goes wrong
WORDS = {
    "retry": {"mlx5": "transport retries exceeded", "bnxt_re": "transport retries exceeded",
              "ionic": "transport retries exceeded"},
    "remote_access": {"mlx5": "remote access error", "bnxt_re": "remote access error", "ionic": "remote access error"},
}  # fmt: skip


@pytest.mark.parametrize("transport", CARDS)
@pytest.mark.parametrize("fault", WORDS)
def test_a_request_that_fails(transport, fault):
    """One error names all there is to know, and the queue pair stays broken; nobody waits for ever."""

    def program(pe):
        x, status = symmetric(64), symmetric(2, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            for call in range(2):
                launch(put_kernel, (1,), shmem.context(), x, status[call:], 100, 1)
            assert (status < 100).all(), status
        shmem.shmem_barrier_all()

    world = mori.local_world(
        2, transport=transport, network={"faults": [{"pe": 0, "peer": 1, "fault": fault}]}, timeout_s=5
    )
    start = time.monotonic()
    with pytest.raises(NetworkError) as caught:
        world.run(program)
    assert time.monotonic() - start < 60
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in (transport, "PE 0", "PE 1", "queue pair 0x", "request 0", WORDS[fault][transport]):
        assert part in text, text


def test_a_failure_that_no_kernel_waited_for():
    def program(pe):
        x = symmetric(64)
        shmem.shmem_barrier_all()
        if pe == 1:
            launch(put_and_leave_kernel, (1,), shmem.context(), x, 0)

    world = mori.local_world(2, transport="ionic", network={"faults": [{"pe": 1, "peer": 0}]}, timeout_s=5)
    with pytest.raises(NetworkError, match=r"soft ionic, queue pair 0x\w+ of PE 1 to PE 0, request 0: .*\(retry\)"):
        world.run(program)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_peer_that_does_not_signal(transport):
    def program(pe):
        signal = symmetric(1, torch.int64)
        shmem.shmem_barrier_all()
        if pe == 0:
            launch(wait_kernel, (1,), shmem.context(), signal, 1)

    start = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"PE 0 waiting for PE 1"):
        mori.local_world(2, transport=transport, timeout_s=1).run(program)
    assert time.monotonic() - start < 60


def test_p2p_refuses_peers_that_are_not_mapped():
    def program(pe):
        x, status = symmetric(64), symmetric(1, torch.int64)
        shmem.shmem_barrier_all()
        launch(put_kernel, (1,), shmem.context(), x, status, 100, 1 - pe)

    with pytest.raises(KernelFault, match="refused"):
        mori.local_world(2, gpus_per_node=1, transport="p2p").run(program)


# ------------------------------------------------------------------------------------------------------------ settings
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"transport": "rdma"}, r"transport: want auto or p2p or mlx5 or bnxt_re or ionic or proxy, got 'rdma'"),
        ({"transport": None}, "transport: want auto"),
        ({"transport": "proxy", "seed": 1}, "transport: want .* with a seed: UCX runs in real time"),
        (
            {"network": {"late": True}},
            r'network: want no options: PEs do not use a network \(transport "p2p"\), got .late',
        ),
        ({"transport": "mlx5", "network": 3}, "network: want None or a dict of options, got 3"),
        (
            {"transport": "mlx5", "network": {"latex": 1}},
            "network: want one of late, seed, num_wqes, faults, got 'latex'",
        ),
        ({"transport": "mlx5", "network": {"late": 1}}, r"network\['late'\]: want True or False, got 1"),
        ({"transport": "mlx5", "network": {"num_wqes": 100}}, r"network\['num_wqes'\]: want a power of two"),
        ({"transport": "mlx5", "network": {"faults": [{"pe": 0}]}}, r"network\['faults'\]: want dict\(pe=, peer="),
        (
            {"transport": "mlx5", "network": {"faults": [{"pe": 0, "peer": 1, "fault": "gone"}]}},
            r"network\['faults'\]: fault: want length or .* got 'gone'",
        ),
        (
            {"transport": "mlx5", "network": {"faults": [{"pe": 0, "peer": 2}]}},
            r"network\['faults'\]: pe, peer: want two PEs, from 0 to 1, got 0, 2",
        ),
        ({"transport": "proxy", "network": {"late": True}}, "network: want one of entries, options, got 'late'"),
    ],
)
def test_settings_that_cannot_be(options, text):
    with pytest.raises(ArgumentError, match=text):
        mori.local_world(2, **options)


# ----------------------------------------------------------------------------------------------------------- processes
PROCESS = """
    import os, sys, time
    import torch
    from mori_triton import shmem
    from mori_triton.device.launch import launch
    from mori_triton.errors import PeerTimeout
    from tests.network_programs import exchange, symmetric, wait_kernel

    rank, n, unique_id = int(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    if rank == 0:
        unique_id = shmem.shmem_get_unique_id()
        print(unique_id.hex(), flush=True)
    shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, rank, n, unique_id)
    exchange(rank, (3, 4097))
    signal = symmetric(1, torch.int64)
    shmem.shmem_barrier_all()
    if rank == n - 1:
        os._exit(9)
    start = time.monotonic()
    launch(wait_kernel, (1,), shmem.context(), signal, n - 1)
    try:
        shmem.shmem_finalize()
    except PeerTimeout as error:
        print("timeout", f"{time.monotonic() - start:.1f}", str(error).replace(chr(10), " "), flush=True)
"""


@pytest.mark.slow
def test_a_process_that_is_killed():
    """Over the proxy: the kernel that waits for it ends at its limit, and the other PEs are told who is missing."""
    environ = os.environ | {
        "MORI_TRITON_DEVICE": "cpu", "MORI_DISABLE_P2P": "1", "MORI_TRITON_TRANSPORT": "proxy",
        "MORI_TRITON_WAIT_TIMEOUT": "3", "MORI_SHMEM_HEAP_SIZE": "4M", "MORI_BOOTSTRAP_TIMEOUT": "120",
        "MORI_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    code = textwrap.dedent(PROCESS)

    def start(rank, unique_id):
        return subprocess.Popen(
            [sys.executable, "-c", code, str(rank), "2", unique_id],
            env=environ, cwd=Path(__file__).parent.parent, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    first = start(0, "")
    second = start(1, first.stdout.readline().strip())
    try:
        assert second.wait(200) == 9
        said, _ = first.communicate(timeout=200)
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    word, seconds, text = said.strip().split(" ", 2)
    assert word == "timeout"
    assert float(seconds) < 60
    assert "PE 1" in text
