"""Kernels that wait for a proxy whose loop the test controls: full rings, limits, what fails. UCX is a double."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from mori_triton import abi
from mori_triton.host.proxy import Op, Ring, layout
from tests.device import kernels as device_kernels
from tests.host.proxy import kernels
from tests.host.proxy.far_pes import ALL_FREE, FarPes, run
from tests.host.proxy.ucp_double import Ucp

pytestmark = pytest.mark.cpu


@contextmanager
def served(ucp: Ucp, delay_s: float = 0.0) -> Iterator[None]:
    """The loop, with the double of UCX, runs from so much later on until the end."""
    timer = threading.Timer(delay_s, ucp.thread.start)
    timer.start()
    try:
        yield
    finally:
        timer.join()
        ucp.state.stop = int(10e9)
        ucp.thread.join(20)
        assert not ucp.thread.is_alive()


def test_a_ring_that_stays_full_refuses_within_the_limit_and_leaves_no_hole() -> None:
    ring = Ring(4, 2)
    pes = FarPes(2, [ring, ring], timeout_s=0.2)
    out = torch.full((3,), -7)
    start = time.monotonic()
    with pes.current(0) as ctx:
        run(kernels.posts_kernel, (3,), ctx, out, pes.view(0, 4096, 1, torch.int64), 1, 1, 2)
    assert time.monotonic() - start >= 0.2
    # six were wanted, four had room
    assert int(out.sum()) == 2
    assert (ring.header.tail, ring.header.head) == (4, 0)
    # who comes later, too
    (record,) = pes.records(0)
    assert (record["kind"], record["peer"], record["tag"]) == (abi.ERROR_WAIT_TIMEOUT, 1, abi.TAG_NETWORK)
    assert (record["expected"], record["seen"]) == (1, 0)
    assert pes.count(0) == 1


# what a ring is stuck in: no room, no ticket, no answer
STUCK = {
    "room": (kernels.posts_kernel, (5,), (1, 1, 1), {}),
    "ticket": (kernels.tickets_kernel, (1,), (1,), {"NUM": 1}),
    "answer": (kernels.tickets_kernel, (1,), (1,), {"NUM": 1}),
}


@pytest.mark.parametrize("what", list(STUCK))
def test_a_wait_at_its_limit_breaks_the_ring_for_all_that_comes_later(what: str) -> None:
    limit = 1.0
    ring = Ring(4, 3)
    pes = FarPes(3, [ring] * 3, timeout_s=limit)
    if what == "ticket":
        ring.header.free_tickets = 0
    kernel, grid, args, options = STUCK[what]
    out = torch.full((7,), -7)
    at = [pes.view(0, 4096 * place, 1, torch.int64) for place in (1, 2)]
    with pes.current(0) as ctx:
        assert ring.header.broken == 0
        run(kernel, grid, ctx, out, pes.view(0, 4096, 1, torch.int64), *args, **options)
        assert ring.header.broken == 1
        tail, free = ring.header.tail, ring.header.free_tickets
        for pe in (1, 2):
            start = time.monotonic()
            run(kernels.results_kernel, (1,), ctx, out, *at, 8, pe)
            took = time.monotonic() - start
            assert out.tolist() == [-1, -1, -1, -1, 0, -1, -1]
    # the last, for which nothing had to be compiled
    assert took < limit
    (record,) = pes.records(0)
    assert (record["kind"], record["peer"], pes.count(0)) == (abi.ERROR_WAIT_TIMEOUT, 1, 1)
    # nothing was posted, and no ticket lost
    assert (ring.header.tail, ring.header.free_tickets) == (tail, free)


def test_who_waits_in_a_ring_that_breaks_leaves_with_the_first() -> None:
    ring = Ring(64, 2)
    pes = FarPes(2, [ring, ring], timeout_s=0.5)
    out = torch.full((24,), -7)
    with pes.current(0) as ctx:
        # on itself, so that it is compiled
        run(kernels.tickets_kernel, (8,), ctx, out, pes.view(0, 4096, 1, torch.int64), 0, NUM=3)
        start = time.monotonic()
        run(kernels.tickets_kernel, (8,), ctx, out, pes.view(0, 4096, 1, torch.int64), 1, NUM=3)
    # three draws, of which only the first waits
    assert 0.5 <= time.monotonic() - start < 1.5
    assert pes.count(0) == len(pes.records(0)) == 1


def test_posting_goes_on_when_the_loop_makes_room() -> None:
    ucp = Ucp(entries=4)
    pes = FarPes(2, [ucp.ring, ucp.ring])
    ucp.heap[64:72] = 0
    out = torch.full((10,), -7)
    with served(ucp, 0.3), pes.current(0) as ctx:
        word = pes.base(0) + 64
        run(kernels.posts_kernel, (10,), ctx, out, word, 1, 7, 3)
        run(kernels.quiet_all, (1,), ctx, out)
    assert ucp.heap[64:72].view(np.uint64)[0] == 10 * 3 * 7
    assert ucp.ring.header.head == ucp.ring.header.tail == 31
    assert pes.records(0) == []


def test_an_answer_that_does_not_come_is_one_record_and_keeps_its_ticket() -> None:
    ring = Ring(8, 2)
    pes = FarPes(2, [ring, ring], timeout_s=0.2)
    out = torch.full((1,), -7)
    with pes.current(0) as ctx:
        run(kernels.tickets_kernel, (1,), ctx, out, pes.view(0, 4096, 1, torch.int64), 1, NUM=1)
    (record,) = pes.records(0)
    assert (record["kind"], record["peer"], record["expected"]) == (abi.ERROR_WAIT_TIMEOUT, 1, 1)
    assert bin(ring.header.free_tickets).count("1") == 63


def test_a_quiet_of_a_pe_that_does_not_exist_has_nothing_to_wait_for() -> None:
    ring = Ring(8, 2)
    pes = FarPes(2, [ring, ring], timeout_s=0.2)
    # so that who posts looks for the word of its PE
    ring.header.num_gone = 1
    out = torch.full((1,), -7)
    with pes.current(0) as ctx:
        run(kernels.quiet_of, (1,), ctx, out, 1 << 20)
    assert (int(out[0]), ring.header.tail, pes.records(0)) == (0, 0, [])


def test_what_failed_is_one_record_and_the_peer_takes_nothing_more() -> None:
    ucp = Ucp(entries=16, n_pes=3)
    pes = FarPes(3, [ucp.ring] * 3)
    ucp.answers = {"put": [0, -25]}
    out = torch.full((7,), -7)
    with served(ucp), pes.current(0) as ctx:
        at = (pes.base(0) + 128, pes.base(0) + 1024, 8)
        # one before it, to another PE
        run(device_kernels.copy_kernel, (1,), ctx, out, *at, 2, 0, 0, 0, 0, FULL=False)
        assert out[0] == 0
        run(
            kernels.results_kernel,
            (1,),
            ctx,
            out,
            pes.view(0, 128, 1, torch.int64),
            pes.view(0, 1024, 1, torch.int64),
            8,
            1,
        )
        assert out.tolist() == [-1, -1, -1, -1, 0, -1, -1]
        run(device_kernels.copy_kernel, (1,), ctx, out, *at, 2, 0, 0, 0, 0, FULL=False)
        assert out[0] == 0
    (record,) = pes.records(0)
    assert pes.count(0) == 1
    want = {"kind": abi.ERROR_NETWORK_FAILED, "pe": 0, "peer": 1, "tag": abi.TAG_NETWORK, "expected": 1}
    want |= {"seen": 2 << 8 | 256 - 25, "compare": abi.PROVIDERS["proxy"] | Op.PUT << 8, "address": pes.base(0) + 128}
    assert {key: record[key] for key in want} == want
    # only the two quiets were posted besides: what is for a PE that is gone is refused before
    assert [call[:2] for call in ucp.calls if call[0] == "put"] == [("put", 102), ("put", 101), ("put", 102)]
    assert ucp.ring.header.tail == 4
    assert ucp.ring.header.free_tickets == ALL_FREE
    assert ctypes.sizeof(layout.Ticket) == 32
