"""A kernel that only shows that the device library links: `bitcode/build.py --check` compiles it for every target."""

import triton
import triton.language as tl

from mori_triton.device import shmem

RING_SIGNATURE = {"ctx": "*i64", "x_ptr": "*i32", "signal_ptr": "*i64"}


@triton.jit
def ring_kernel(
    ctx,  # device context
    x_ptr,  # int32 [1], symmetric
    signal_ptr,  # int64 [1], symmetric, counts rounds
):
    """Write my index to the next PE, tell it, wait for the previous one, meet all."""
    me = shmem.my_pe(ctx)
    n = shmem.n_pes(ctx)
    following = (me + 1) % n
    tl.store(shmem.remote_ptr(ctx, x_ptr, following), me)
    shmem.signal_add(ctx, signal_ptr, 1, following)
    shmem.wait_ge(ctx, signal_ptr, 1, (me + n - 1) % n)
    shmem.barrier_all(ctx)
