"""The device library in weak-memory worlds: what it orders is clean under every seed, what it does not is found."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import WeakMemoryError
from tests.device import kernels

pytestmark = pytest.mark.cpu

N = 128


@triton.jit(do_not_specialize=["epoch"])
def everybody_kernel(ctx, parts, counter, signals, bad, epoch, N: tl.constexpr, AT_ONCE: tl.constexpr):
    """Every program writes its part to every PE; the last one signals all; all wait for all and check. parts: int32
    [n_pes, programs, N] and signals: int64 [n_pes], symmetric.
    """
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    pid, programs = tl.program_id(0), tl.num_programs(0)
    offs = tl.arange(0, N)
    mine = (me * programs + pid) * N
    for pe in range(n):
        tl.store(shmem.remote_ptr(ctx, parts, pe) + mine + offs, offs + epoch + 10 * me + pid)
    if AT_ONCE:
        shmem.signal_set_all_last(ctx, signals + me, epoch, counter, programs)
    elif shmem.arrive_last(ctx, counter, programs) == 1:
        shmem.signal_set_all(ctx, signals + me, epoch)
    shmem.wait_all_ge(ctx, signals, n, epoch, 3)
    wrong = tl.zeros([N], tl.int32)
    for pe in range(n):
        row = parts + (pe * programs + pid) * N
        wrong += (tl.load(row + offs) != offs + epoch + 10 * pe + pid).to(tl.int32)
    tl.store(bad + pid, tl.sum(wrong, 0))


@triton.jit
def handover_kernel(ctx, src, dst, sig, bad, SIGNAL: tl.constexpr, N: tl.constexpr):
    """PE 0 puts a row to PE 1, which checks it; the flag is a signal, a put with signal, or only an atomic."""
    offs = tl.arange(0, N)
    if shmem.my_pe(ctx) == 0:
        tl.store(src + offs, offs + 7)
        if SIGNAL == "put_signal":
            shmem.put_signal(ctx, dst, src, N * 4, sig, 1, shmem.SIGNAL_SET, 1)
        else:
            shmem.put(ctx, dst, src, N * 4, 1)
            if SIGNAL == "signal":
                shmem.signal_add(ctx, sig, 1, 1)
            elif SIGNAL == "fence":
                shmem.fence(ctx)
                shmem.atomic_add(ctx, sig, 1, 1)
            else:
                shmem.atomic_add(ctx, sig, 1, 1)
    else:
        shmem.wait_ge(ctx, sig, 1, 0, 5)
        tl.store(bad, tl.sum((tl.load(dst + offs) != offs + 7).to(tl.int32), 0))


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = mori.shmem.mori_shmem_create_tensor(shape, dtype)
    tensor.zero_()
    mori.shmem.shmem_barrier_all()
    return tensor


def everybody(pe: int, at_once: bool) -> list[int]:
    """Two rounds in one world, as many programs as may be resident."""
    n, programs = mori.shmem.shmem_npes(), 2
    parts, signals = zeros((n, programs, N), torch.int32), zeros((n,), torch.int64)
    counter = torch.zeros(1, dtype=torch.int32)
    results = []
    for epoch in (1, 2):
        bad = torch.full((programs,), -1, dtype=torch.int32)
        args = (mori.shmem.context(), parts, counter, signals, bad, epoch)
        launch(everybody_kernel, (programs,), *args, N=N, AT_ONCE=at_once, num_warps=2)
        results += bad.tolist()
        mori.shmem.shmem_barrier_all()
    return results


def barriers(pe: int) -> int:
    n = mori.shmem.shmem_npes()
    words, bad = zeros((n,), torch.int64), torch.full((1,), -1, dtype=torch.int32)
    launch(kernels.barrier_kernel, (1,), mori.shmem.context(), words, bad, 3, num_warps=1)
    return int(bad[0])


def handover(pe: int, signal: str) -> int:
    dst, sig = zeros((N,), torch.int32), zeros((1,), torch.int64)
    src, bad = torch.zeros(N, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    launch(handover_kernel, (1,), mori.shmem.context(), src, dst, sig, bad, SIGNAL=signal, N=N, num_warps=2)
    return int(bad[0])


@pytest.mark.parametrize("at_once", [False, True], ids=["arrive_last, signal_set_all", "signal_set_all_last"])
@pytest.mark.parametrize(("arch", "seeds"), [("gfx1201", range(4)), ("gfx942", range(2))])
def test_arrive_last_signal_set_all_and_wait_all_order_everything(arch: str, seeds: range, at_once: bool) -> None:
    for seed in seeds:
        world = mori.local_world(3, device="cpu", arch=arch, seed=seed, weak_memory=True)
        assert world.run(everybody, at_once) == [[0] * 4] * 3


@pytest.mark.parametrize(("arch", "n"), [("gfx1201", 3), ("gfx1201", 10), ("gfx942", 2)])
def test_barrier_all_orders_everything(arch: str, n: int) -> None:
    for seed in range(3):
        assert mori.local_world(n, device="cpu", arch=arch, seed=seed, weak_memory=True).run(barriers) == [0] * n


@pytest.mark.parametrize("signal", ["signal", "put_signal", "fence"])
def test_a_released_row_is_there(signal: str) -> None:
    for seed in range(4):
        world = mori.local_world(2, device="cpu", arch="gfx1201", seed=seed, weak_memory=True)
        assert world.run(handover, signal) == [-1, 0]


def test_an_atomic_alone_releases_nothing() -> None:
    reports = []
    for seed in range(6):
        world = mori.local_world(2, device="cpu", arch="gfx1201", seed=seed, weak_memory=True)
        try:
            world.run(handover, "nothing")
        except WeakMemoryError as e:
            reports.append(str(e))
    assert reports
    assert all("handover_kernel" in report for report in reports)
