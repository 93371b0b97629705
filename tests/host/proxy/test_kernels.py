"""Kernels on the emulated device go through the proxy, by the real UCX, between PEs of this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import abi, bitcode
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.proxy import Proxy, Ring
from tests.device import kernels as device_kernels
from tests.device.pes import SENTINEL, pattern
from tests.host.proxy import kernels
from tests.host.proxy.far_pes import FarPes, run
from tests.host.proxy.programs import run_threads
from tests.host.proxy.ucx import needs_ucx

pytestmark = pytest.mark.cpu


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
