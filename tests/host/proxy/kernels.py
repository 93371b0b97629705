"""Kernels that go through the proxy."""

import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import externs, shmem

ADD, INC, FETCH = tl.constexpr(abi.ATOMIC_ADD), tl.constexpr(abi.ATOMIC_INC), tl.constexpr(abi.ATOMIC_FETCH)
FETCH_ADD, SWAP = tl.constexpr(abi.ATOMIC_FETCH_ADD), tl.constexpr(abi.ATOMIC_SWAP)
COMPARE_SWAP = tl.constexpr(abi.ATOMIC_COMPARE_SWAP)


@triton.jit(do_not_specialize=["pe", "value", "num"])
def posts_kernel(ctx, out, word, pe, value, num):
    """Each program adds `value` `num` times, waiting for nothing. out: int64 [programs], how many were refused."""
    refused = tl.cast(0, tl.int64)
    for _ in range(num):
        refused -= externs.ctx_atomic_uint64(ctx, word, value, 0, ADD, pe, 0).to(tl.int64)
    tl.store(out + tl.program_id(0), refused)


@triton.jit(do_not_specialize=["pe"])
def tickets_kernel(ctx, out, word, pe, NUM: tl.constexpr):
    """Each program draws NUM numbers from one counter. out: int64 [programs * NUM]."""
    for i in range(NUM):
        tl.store(out + tl.program_id(0) * NUM + i, shmem.atomic_fetch_add(ctx, word, 1, pe))


@triton.jit(do_not_specialize=["pe", "rounds", "me"])
def order_kernel(ctx, out, data, words, values, back, pe, rounds, me, N: tl.constexpr):
    """Put a row without waiting, then a value, then signal without data; wait for the peer's and look at all of it.

    data: int32 [2, N] symmetric, row 0 is sent to row 1; words, values, back: int64 [1] symmetric, 0.
    out: int64 [1]: elements that were not there yet.
    """
    offs = tl.arange(0, N)
    wrong = tl.cast(0, tl.int64)
    for i in range(1, rounds + 1):
        tl.store(data + offs, offs * 0 + 1000 * i + 10 * me)
        shmem.put_nbi(ctx, data + N, data, N * 4, pe)
        shmem.atomic_set(ctx, values, i, pe)
        shmem.signal_set(ctx, words, i, pe)
        if shmem.wait_ge(ctx, words, i) >= i:
            row = tl.load(data + N + offs)
            wrong += tl.sum((row != 1000 * i + 10 * (1 - me)).to(tl.int64), 0)
            wrong += (tl.load(values) != i).to(tl.int64)
        # the row may be written over
        shmem.quiet(ctx)
        shmem.signal_set(ctx, back, i, pe)
        shmem.wait_ge(ctx, back, i)
    tl.store(out, wrong)


@triton.jit(do_not_specialize=["rounds"])
def barrier_kernel(ctx, out, data, rounds):
    """Each PE writes its word on all PEs; after a barrier all are there. data: int64 [n_pes] symmetric."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    wrong = tl.cast(0, tl.int64)
    for i in range(1, rounds + 1):
        for pe in range(n):
            shmem.atomic_set(ctx, data + me, tl.cast(i, tl.int64), pe)
        shmem.barrier_all(ctx)
        for pe in range(n):
            wrong += (tl.load(data + pe) != i).to(tl.int64)
        shmem.barrier_all(ctx)
    tl.store(out, wrong)


@triton.jit(do_not_specialize=["pe", "num_bytes"])
def results_kernel(ctx, out, dst, src, num_bytes, pe):
    """Status of one of each kind. out: int64 [7]."""
    tl.store(out, shmem.put(ctx, dst, src, num_bytes, pe).to(tl.int64))
    tl.store(out + 1, shmem.put_nbi(ctx, dst, src, num_bytes, pe).to(tl.int64))
    tl.store(out + 2, shmem.get(ctx, src, dst, num_bytes, pe).to(tl.int64))
    tl.store(out + 3, shmem.put_signal(ctx, dst, src, num_bytes, dst, 1, shmem.SIGNAL_ADD, pe).to(tl.int64))
    tl.store(out + 4, shmem.atomic_fetch_add(ctx, dst, 1, pe).to(tl.int64))
    tl.store(out + 5, shmem.quiet(ctx, pe).to(tl.int64))
    tl.store(out + 6, shmem.quiet(ctx).to(tl.int64))


@triton.jit
def quiet_all(ctx, out):
    tl.store(out, shmem.quiet(ctx))


@triton.jit(do_not_specialize=["pe"])
def quiet_of(ctx, out, pe):
    tl.store(out, shmem.quiet(ctx, pe))


@triton.jit(do_not_specialize=["pe"])
def codes_kernel(ctx, out, word, pe):
    """Codes that fetch where nobody wants it and the other way round, values that a code ignores. out: int64 [4]."""
    tl.store(out, externs.ctx_atomic_fetch_uint64(ctx, word, 7, 9, FETCH, pe, 0).to(tl.int64))
    tl.store(out + 1, externs.ctx_atomic_fetch_uint64(ctx, word, 5, 0, ADD, pe, 0).to(tl.int64))
    externs.ctx_atomic_uint64(ctx, word, 1, 0, FETCH_ADD, pe, 0)
    tl.store(out + 2, externs.ctx_atomic_fetch_uint64(ctx, word, 0, 0, FETCH, pe, 0).to(tl.int64))
    externs.ctx_atomic_uint64(ctx, word, 200, 0, SWAP, pe, 0)
    externs.ctx_atomic_uint64(ctx, word, 300, 200, COMPARE_SWAP, pe, 0)
    externs.ctx_atomic_uint64(ctx, word, 400, 200, COMPARE_SWAP, pe, 0)
    tl.store(out + 3, externs.ctx_atomic_fetch_uint64(ctx, word, 9, 0, INC, pe, 0).to(tl.int64))
    externs.ctx_atomic_uint64(ctx, word, 9, 0, INC, pe, 0)
