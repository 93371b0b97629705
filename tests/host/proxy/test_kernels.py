"""Kernels on the emulated device go through the proxy: real UCX between PEs of this process, and a double of it."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import abi, bitcode, emulator
from mori_triton.device.launch import TARGETS, cross_compile, launch
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.proxy import Op, Proxy, Ring, layout
from tests.device import kernels as device_kernels
from tests.device.pes import SENTINEL, Pes, pattern
from tests.host.proxy import kernels
from tests.host.proxy.programs import run_threads
from tests.host.proxy.ucp_double import Ucp
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu

ARCH = "gfx1201"
ALL_FREE = 2**64 - 1
NETWORK = abi.CONTEXT_FIELDS["network"].offset // 8


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    library = str(bitcode.specialize(ARCH, provider="proxy"))
    return launch(kernel, grid, *args, extern_libs={abi.LIBRARY: library}, **options)


class FarPes(Pes):
    """PEs that reach each other through a ring only; `rings[pe]`, its memory made by hand."""

    def __init__(self, n: int, rings: list[Ring], **options: Any) -> None:
        far = [(pe, q) for pe in range(n) for q in range(n) if pe != q]
        super().__init__(n, ARCH, unreachable=far, **options)
        self.rings = rings
        self.networks = []
        for pe in range(n):
            raw = bytearray(abi.NETWORK_SIZE)
            struct.pack_into("<II", raw, 0, abi.PROVIDERS["proxy"], 1)
            struct.pack_into("<Q", raw, abi.NETWORK_FIELDS["ring"].offset, rings[pe].address)
            self.networks.append(torch.frombuffer(raw, dtype=torch.uint8))
            self.contexts[pe][NETWORK] = self.networks[pe].data_ptr()

    def _allow(self, number: int, pe: int) -> None:
        emulator.allow(number, self.contexts[pe].data_ptr(), abi.CONTEXT_BYTES, f"context of PE {pe}")
        emulator.allow(number, self.peers[pe].data_ptr(), 8 * self.n, f"peer bases of PE {pe}")
        emulator.allow(number, self.logs[pe].data_ptr(), abi.ERROR_LOG_SIZE, f"error log of PE {pe}")
        # nothing of any other PE
        emulator.allow(number, self.base(pe), self.heap_bytes, f"heap of PE {pe}")
        emulator.allow(number, self.networks[pe].data_ptr(), abi.NETWORK_SIZE, f"network of PE {pe}")
        ring = self.rings[pe]
        emulator.allow(number, ring.address, Ring.num_bytes(ring.entries, self.n), f"ring of PE {pe}")

    def all_free(self) -> bool:
        return all(ring.header.free_tickets == ALL_FREE for ring in self.rings)


@contextmanager
def connected(n: int, *, entries: int = 64, tls: str = "sm,self", **options: Any) -> Iterator[FarPes]:
    """`n` PEs with a proxy each, over the real UCX."""
    heap_bytes = options.get("heap_bytes", 1 << 16)
    # the proxies want the heaps, the PEs the rings
    memory = [np.zeros(Ring.num_bytes(entries, n) + 64, np.uint8) for _ in range(n)]
    views = [raw[-raw.ctypes.data % 64 :][: Ring.num_bytes(entries, n)] for raw in memory]
    rings = [Ring(entries, n, view) for view in views]
    pes = FarPes(n, rings, **options)
    group = ThreadGroup(n, timeout_s=30)
    proxies: list[Any] = [None] * n

    def open_one(pe: int) -> None:
        proxies[pe] = Proxy(
            group.bootstrap(pe), pes.base(pe), heap_bytes,
            entries=entries, timeout_s=20.0, options={"TLS": tls}, memory=views[pe],
        )  # fmt: skip

    run_threads([lambda pe=pe: open_one(pe) for pe in range(n)])
    try:
        yield pes
        assert [proxy.ring.num_errors for proxy in proxies] == [0] * n
    finally:
        for proxy in proxies:
            proxy.close(failed=True)


@pytest.fixture(scope="module")
def two() -> Iterator[FarPes]:
    with connected(2) as pes:
        yield pes


SIZES = [1, 3, 64, 4096, 5000]


@needs_ucx
@pytest.mark.parametrize("which", [*device_kernels.PUTS, *device_kernels.SIGNALS, *device_kernels.GETS])
def test_a_copy_is_one_operation_of_its_program(two: FarPes, which: int) -> None:
    for size in SIZES:
        for heap in two.heaps:
            heap[2048:] = SENTINEL
        data = pattern(size, size)
        gets = which in device_kernels.GETS
        source_pe, target_pe = (1, 0) if gets else (0, 1)
        source, target, signal = 8192 + 5, 20480 + 3, 4096
        two.heaps[source_pe][source : source + size] = torch.from_numpy(data)
        two.view(1, signal, 1, torch.int64)[0] = 40
        out = torch.full((1,), -7)
        tails = [ring.header.tail for ring in two.rings]
        with two.current(0) as ctx:
            dst, src = two.base(0) + target, two.base(0) + source
            run(
                device_kernels.copy_kernel, (1,), ctx, out, dst, src, size, 1, two.base(0) + signal, 2,
                abi.SIGNAL_ADD, which, FULL=True, num_warps=2,
            )  # fmt: skip
            assert out.item() == 0
            run(kernels.quiet_all, (1,), ctx, out)
        assert out.item() == 0
        want = np.full(two.heap_bytes, SENTINEL, np.uint8)
        want[target : target + size] = data
        got = two.heaps[target_pe].numpy()
        np.testing.assert_array_equal(got[target - 256 : target + size + 256], want[target - 256 : target + size + 256])
        assert two.view(1, signal, 1, torch.int64).item() == (42 if which in device_kernels.SIGNALS else 40)
        # a copy and a quiet
        assert [ring.header.tail - tail for ring, tail in zip(two.rings, tails, strict=True)] == [2, 0]
    assert two.records(0) == []
    assert two.all_free()


@needs_ucx
def test_the_local_side_may_be_any_memory_of_the_process(two: FarPes) -> None:
    data, back, out = torch.from_numpy(pattern(3000, 9)), torch.full((3000,), 0xEE, dtype=torch.uint8), torch.zeros(1)
    put, get = device_kernels.PUTS[0], device_kernels.GETS[0]
    with two.current(0) as ctx:
        there = two.base(0) + 4096
        for which, dst, src in ((put, there, data), (get, back, there)):
            # tensors, so that the device knows their memory
            run(device_kernels.copy_kernel, (1,), ctx, out.long(), dst, src, 3000, 1, 0, 0, 0, which, FULL=False)
    np.testing.assert_array_equal(two.heaps[1][4096:7096].numpy(), data.numpy())
    np.testing.assert_array_equal(back.numpy(), data.numpy())
    assert two.records(0) == []


@needs_ucx
def test_every_fetch_and_every_atomic_without_a_result(two: FarPes) -> None:
    lanes, p32, p64 = 64, 8192, 8448
    out = torch.full((16, lanes), -7)
    with two.current(0) as ctx:
        two.view(1, p32, 2, torch.int32)[:] = torch.tensor([0x7000_0011, 5])
        two.view(1, p64, 2, torch.int64)[:] = torch.tensor([0x7000_0000_0000_0011, 5])
        before = two.rings[0].header.tail
        p = two.view(0, p32, 1, torch.int32), two.view(0, p64, 1, torch.int64)
        run(device_kernels.fetch_kernel, (1,), ctx, out, *p, 1, LANES=lanes, num_warps=2)
    assert two.rings[0].header.tail - before == 16
    rows = []
    for start in (0x7000_0011, 0x7000_0000_0000_0011):
        value = start
        for change in (
            lambda v: v, lambda v: v + 5, lambda v: v + 1, lambda v: v & 0x0FF0, lambda v: v | 0x3000,
            lambda v: v ^ 0x5555, lambda v: 1234, lambda v: 4321,
        ):  # fmt: skip
            rows.append(value)
            value = change(value)
    np.testing.assert_array_equal(out.numpy(), np.array(rows, np.int64)[:, None].repeat(lanes, 1))
    assert two.view(1, p32, 2, torch.int32).tolist() == [4321, 5]
    assert two.view(1, p64, 2, torch.int64).tolist() == [4321, 5]
    with two.current(0) as ctx:
        for view in (two.view(1, p32, 8, torch.int32), two.view(1, p64, 8, torch.int64)):
            view[:] = 0x3333
        before = two.rings[0].header.tail
        p = two.view(0, p32, 8, torch.int32), two.view(0, p64, 8, torch.int64)
        run(device_kernels.nonfetch_kernel, (1,), ctx, *p, 1, num_warps=2)
        run(kernels.quiet_all, (1,), ctx, out)
    assert two.rings[0].header.tail - before == 15
    old = 0x3333
    want = [old + 7, old + 1, 99, old & 0x0F0F, old | 0x0F0F, old ^ 0x0F0F]
    assert two.view(1, p32, 8, torch.int32).tolist() == [*want, 77, old]
    assert two.view(1, p64, 8, torch.int64).tolist() == [*want, 1 << 40, old]
    assert two.records(0) == []
    assert two.all_free()


@needs_ucx
def test_a_code_means_the_same_whether_its_result_is_wanted_or_not(two: FarPes) -> None:
    out = torch.full((4,), -7)
    two.view(1, 4096, 1, torch.int64)[0] = 100
    with two.current(0) as ctx:
        run(kernels.codes_kernel, (1,), ctx, out, two.view(0, 4096, 1, torch.int64), 1)
        run(kernels.quiet_all, (1,), ctx, torch.zeros(1))
    assert out.tolist() == [100, 100, 106, 300]
    assert two.view(1, 4096, 1, torch.int64).item() == 302
    assert two.records(0) == []


@needs_ucx
@pytest.mark.parametrize("n", [2, 4])
def test_many_programs_and_many_wraps_of_a_small_ring(n: int) -> None:
    programs, each = 24, 5
    with connected(n, entries=4) as pes:
        words = 4096
        for pe in range(n):
            pes.view(pe, words, n, torch.int64)[:] = 0

        def program(pe: int, ctx: torch.Tensor) -> int:
            out, to = torch.full((programs,), -7), (pe + 1) % n
            run(kernels.posts_kernel, (programs,), ctx, out, pes.view(pe, words, n, torch.int64)[pe:], to, pe + 3, each)
            run(kernels.quiet_all, (1,), ctx, torch.zeros(1))
            return int(out.abs().sum())

        assert pes.run(program) == [0] * n
        for pe in range(n):
            # the word of the one before, added to by all its programs
            want = [0] * n
            want[(pe - 1) % n] = programs * each * ((pe - 1) % n + 3)
            assert pes.view(pe, words, n, torch.int64).tolist() == want
            assert pes.rings[pe].header.tail == programs * each + 1 >= 4 * pes.rings[pe].entries
            assert pes.records(pe) == []
        assert pes.all_free()


@needs_ucx
def test_more_programs_than_tickets_fetch_at_once_and_each_gets_its_own() -> None:
    programs, each, n = 100, 2, 3
    with connected(n, entries=128) as pes:
        for pe in range(n):
            pes.view(pe, 4096, 1, torch.int64)[:] = 0

        def program(pe: int, ctx: torch.Tensor) -> list[int]:
            out = torch.full((programs * each,), -7)
            run(kernels.tickets_kernel, (programs,), ctx, out, pes.view(pe, 4096, 1, torch.int64), 0, NUM=each)
            return out.tolist()

        drawn = pes.run(lambda pe, ctx: program(pe, ctx) if pe else [])
        assert sorted(number for numbers in drawn for number in numbers) == list(range(programs * each * (n - 1)))
        assert pes.all_free()


@needs_ucx
@pytest.mark.parametrize("tls", ["tcp", "sm,self"])
def test_a_signal_covers_the_puts_and_values_before_it(tls: str) -> None:
    rounds, length = 12, 16384
    with connected(2, tls=tls, heap_bytes=1 << 18) as pes:
        for pe in range(2):
            pes.heaps[pe][1024:] = 0

        def program(pe: int, ctx: torch.Tensor) -> int:
            out = torch.full((1,), -7)
            words = [pes.view(pe, 1024 + 64 * i, 1, torch.int64) for i in range(3)]
            data = pes.view(pe, 4096, 2 * length, torch.int32)
            run(kernels.order_kernel, (1,), ctx, out, data, *words, 1 - pe, rounds, pe, N=length)
            return out.item()

        assert pes.run(program) == [0, 0]
        assert pes.records(0) == pes.records(1) == []


@needs_ucx
def test_a_barrier_of_pes_that_are_all_far() -> None:
    with connected(4) as pes:
        for pe in range(4):
            pes.view(pe, 4096, 4, torch.int64)[:] = 0

        def program(pe: int, ctx: torch.Tensor) -> int:
            out = torch.full((1,), -7)
            run(kernels.barrier_kernel, (1,), ctx, out, pes.view(pe, 4096, 4, torch.int64), 3)
            return out.item()

        assert pes.run(program) == [0] * 4
        assert [pes.records(pe) for pe in range(4)] == [[]] * 4


@pytest.mark.compile
@pytest.mark.parametrize("arch", list(TARGETS))
def test_kernels_through_the_proxy_are_built_for_every_target(arch: str) -> None:
    library = bitcode.specialize(arch, provider="proxy")
    signature = {"ctx": "*i64", "out": "*i64", "dst": "*i64", "src": "*i64", "num_bytes": "i32", "pe": "i32"}
    assert cross_compile(kernels.results_kernel, signature, arch=arch, library=library).asm


# ------------------------------------------------------------------------------------------ a loop that a test controls


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
