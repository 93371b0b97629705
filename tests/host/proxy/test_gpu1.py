"""A world of PEs on one GPU that reach each other through the proxy only: heaps and rings in pinned host memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton.device import shmem
from mori_triton.device.launch import launch, load
from mori_triton.errors import MoriError
from tests.host.proxy import kernels
from tests.host.proxy.ucx import needs_ucx

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
    needs_ucx,
]

PROGRAMS, EACH = 200, 3


def draw(pe: int, preload) -> np.ndarray:
    """Every program of every PE but the first draws numbers from one counter on the first."""
    counter = mori.shmem.mori_shmem_create_tensor((1,), torch.int64)
    counter.zero_()
    out = torch.full((PROGRAMS * EACH,), -7, device=counter.device)
    arguments = mori.shmem.context(), out, counter, 0
    preload(lambda: load(kernels.tickets_kernel, *arguments, NUM=EACH))
    mori.shmem.shmem_barrier_all()
    if pe:
        launch(kernels.tickets_kernel, (PROGRAMS,), *arguments, NUM=EACH)
    mori.shmem.shmem_barrier_all()
    return out.cpu().numpy() if pe else counter.cpu().numpy()


def order(pe: int, preload) -> int:
    """Elements that a signal came before."""
    length, rounds = 16384, 50
    data = mori.shmem.mori_shmem_create_tensor((2, length), torch.int32)
    words = [mori.shmem.mori_shmem_create_tensor((1,), torch.int64) for _ in range(3)]
    for tensor in (data, *words):
        tensor.zero_()
    out = torch.full((1,), -7, device=data.device)
    arguments = mori.shmem.context(), out, data, *words, 1 - pe, rounds, pe
    preload(lambda: load(kernels.order_kernel, *arguments, N=length))
    mori.shmem.shmem_barrier_all()
    launch(kernels.order_kernel, (1,), *arguments, N=length)
    mori.shmem.shmem_barrier_all()
    return int(out.item())


def test_each_fetch_gets_its_own_number() -> None:
    world = mori.local_world(3, device="cuda", transport="proxy", heap_size="4M", network={"entries": 64})
    count, *drawn = world.run(draw, world.preload)
    assert count[0] == 2 * PROGRAMS * EACH
    np.testing.assert_array_equal(np.sort(np.concatenate(drawn)), np.arange(2 * PROGRAMS * EACH))


def test_a_signal_covers_what_was_put_before_it() -> None:
    world = mori.local_world(2, device="cuda", transport="proxy", heap_size="4M")
    assert world.run(order, world.preload) == [0, 0]


@triton.jit
def put_kernel(ctx, dst_ptr, src_ptr, status_ptr, peer):
    tl.store(status_ptr, shmem.put(ctx, dst_ptr, src_ptr, 64, peer))


def test_memory_of_the_gpu_outside_the_heap_is_refused_where_ucx_does_not_know_it() -> None:
    """With `TLS` "tcp" UCX knows the host's memory only; the process goes on."""

    def program(pe: int, preload) -> None:
        dst = mori.shmem.mori_shmem_create_tensor((64,), torch.uint8)
        src = torch.zeros(64, dtype=torch.uint8, device=dst.device)
        status = torch.full((1,), -9, dtype=torch.int32, device=dst.device)
        arguments = mori.shmem.context(), dst, src, status, 1 - pe
        preload(lambda: load(put_kernel, *arguments))
        mori.shmem.shmem_barrier_all()
        if pe == 0:
            launch(put_kernel, (1,), *arguments)
        mori.shmem.shmem_barrier_all()

    world = mori.local_world(
        2, device="cuda", transport="proxy", heap_size="4M", network={"options": {"TLS": "tcp"}}, timeout_s=10
    )
    with pytest.raises(MoriError, match="its local side is memory that the host thread cannot touch"):
        world.run(program, world.preload)
