"""Kernels and programs for worlds on the CPU."""

import torch
import triton
import triton.language as tl

from mori_triton import shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch


@triton.jit
def ring_kernel(ctx, x_ptr, signal_ptr, n, step, BLOCK: tl.constexpr):
    """Put x into the next PE's x + n, signal it, wait for the previous one."""
    next_pe = (dev.my_pe(ctx) + 1) % dev.n_pes(ctx)
    prev_pe = (dev.my_pe(ctx) + dev.n_pes(ctx) - 1) % dev.n_pes(ctx)
    i = tl.arange(0, BLOCK)
    there = dev.remote_ptr(ctx, x_ptr, next_pe)
    tl.store(there + n + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    dev.signal_add(ctx, signal_ptr, 1, next_pe)
    dev.wait_ge(ctx, signal_ptr, step, prev_pe, 0)


@triton.jit
def spin_kernel(flag_ptr):
    """A loop of its own, without a limit."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass


def symmetric(shape, dtype):
    """A zeroed symmetric tensor that every PE has zeroed."""
    tensor = shmem.mori_shmem_create_tensor(shape, dtype)
    tensor.zero_()
    shmem.shmem_barrier_all()
    return tensor


def notes(error):
    """What the world added to an error; Python 3.10 has no notes."""
    return "; ".join(getattr(error, "__notes__", [str(error.__cause__)]))


def ring(pe, rounds):
    """Whether every PE found its left neighbour's row behind its own in each round."""
    n = shmem.shmem_npes()
    x, signal = symmetric((128,), torch.int32), symmetric((1,), torch.int64)
    seen = []
    for step in range(1, rounds + 1):
        x[:64] = 1000 * step + pe
        launch(ring_kernel, (1,), shmem.context(), x, signal, 64, step, BLOCK=64)
        seen.append(x[64:].tolist() == [1000 * step + (pe - 1) % n] * 64)
        shmem.shmem_barrier_all()
    return all(seen)
