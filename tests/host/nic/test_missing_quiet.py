"""A quiet missing after a get that does not wait, or after an atomic without a result, shows: cards are late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import shmem as host
from mori_triton.device import shmem
from mori_triton.device.launch import launch

pytestmark = pytest.mark.cpu

N = 64
SEEDS = 24


@triton.jit
def lent_row_kernel(ctx, row_ptr, came_ptr, signal_ptr, N: tl.constexpr, QUIET: tl.constexpr):
    """PE 0 gets PE 1's row and says that it may be written again; PE 1 writes it. row, came: int32 [N]."""
    offs = tl.arange(0, N)
    if shmem.my_pe(ctx) == 0:
        shmem.get_nbi(ctx, came_ptr, row_ptr, N * 4, 1)
        if QUIET:
            shmem.quiet(ctx)
        shmem.signal_set(ctx, signal_ptr, 1, 1)
        shmem.quiet(ctx)
    elif shmem.wait_ge(ctx, signal_ptr, 1, 0) >= 1:
        tl.store(row_ptr + offs, offs + 1000)
        # a card reads memory
        shmem.fence(ctx)


@triton.jit
def count_kernel(ctx, counter_ptr, came_ptr, signal_ptr, N: tl.constexpr, QUIET: tl.constexpr):
    """PE 0 adds to PE 1's counter and signals; PE 1 reads the counter. counter: int64 [1]; came: int64 [1]."""
    if shmem.my_pe(ctx) == 0:
        shmem.atomic_add(ctx, counter_ptr, N, 1)
        if QUIET:
            shmem.quiet(ctx)
        shmem.signal_set(ctx, signal_ptr, 1, 1)
        shmem.quiet(ctx)
    elif shmem.wait_ge(ctx, signal_ptr, 1, 0) >= 1:
        tl.store(came_ptr, shmem.atomic_fetch(ctx, counter_ptr, 1))


def program(pe: int, kernel: Any, quiet: bool) -> list[int]:
    """What has come: to PE 0 the row, to PE 1 the counter."""
    if kernel is lent_row_kernel:
        source, came = (host.mori_shmem_create_tensor((N,), torch.int32) for _ in range(2))
        source[:] = torch.arange(N, dtype=torch.int32)
    else:
        source, came = (host.mori_shmem_create_tensor((1,), torch.int64) for _ in range(2))
        source[:] = 0
    came.fill_(-1)
    signal = host.mori_shmem_create_tensor((1,), torch.int64)
    signal.zero_()
    host.shmem_barrier_all()
    launch(kernel, (1,), host.context(), source, came, signal, N=N, QUIET=quiet, num_warps=1)
    host.shmem_barrier_all()
    return came.tolist()


def is_wrong(kernel: Any, transport: str, seed: int, *, quiet: bool) -> bool:
    """Whether something else has come than there was before the signal."""
    reader, want = (0, list(range(N))) if kernel is lent_row_kernel else (1, [N])
    # weak memory would end the run before the value is read
    world = mori.local_world(
        2, transport=transport, heap_size="1M", seed=seed, weak_memory=quiet, network={"late": True, "seed": seed}
    )
    return world.run(program, kernel, quiet)[reader] != want


@pytest.mark.parametrize(
    "transport", ["mlx5", *(pytest.param(t, marks=pytest.mark.slow) for t in ("bnxt_re", "ionic"))]
)
@pytest.mark.parametrize("kernel", [lent_row_kernel, count_kernel], ids=["get", "atomic"])
def test_a_missing_quiet_shows(kernel: Any, transport: str) -> None:
    assert any(is_wrong(kernel, transport, seed, quiet=False) for seed in range(SEEDS))
    assert not any(is_wrong(kernel, transport, seed, quiet=True) for seed in range(SEEDS // 3))
