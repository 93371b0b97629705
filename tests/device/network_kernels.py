"""Kernels that reach peers through a network. No value is specialised: each kernel is compiled once for a provider."""

import triton
import triton.language as tl

from mori_triton.device import externs, shmem


@triton.jit(do_not_specialize=["dst", "src", "num_bytes", "sig", "value", "op", "pe", "qp", "which"])
def copy_kernel(ctx, out, dst, src, num_bytes, sig, value, op, pe, qp, which):
    """One copy or value. dst, src, sig: addresses; out: int64 [1]."""
    result = tl.cast(-7, tl.int32)
    if which == 0:
        result = externs.ctx_put_block(ctx, dst, src, num_bytes, pe, qp)
    elif which == 1:
        result = externs.ctx_put_nbi_block(ctx, dst, src, num_bytes, pe, qp)
    elif which == 2:
        result = externs.ctx_get_block(ctx, dst, src, num_bytes, pe, qp)
    elif which == 3:
        result = externs.ctx_put_signal_block(ctx, dst, src, num_bytes, sig, value, op, pe, qp)
    elif which == 4:
        result = externs.ctx_put_value_uint32(ctx, dst, value, pe, qp)
    elif which == 5:
        result = externs.ctx_put_value_uint64(ctx, dst, value, pe, qp)
    elif which == 6:
        result = externs.ctx_quiet(ctx, pe, qp)
    tl.store(out, result.to(tl.int64))


PUT, PUT_NBI, GET, PUT_SIGNAL, VALUE4, VALUE8, QUIET = range(7)


@triton.jit(do_not_specialize=["dst", "value", "compare", "op", "pe", "qp", "which"])
def atomic_kernel(ctx, out, dst, value, compare, op, pe, qp, which):
    """One atomic. dst: an address; out: int64 [1]."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = externs.ctx_atomic_uint64(ctx, dst, value, compare, op, pe, qp).to(tl.int64)
    elif which == 1:
        result = externs.ctx_atomic_fetch_uint64(ctx, dst, value, compare, op, pe, qp).to(tl.int64)
    elif which == 2:
        result = externs.ctx_atomic_uint32(ctx, dst, value, compare, op, pe, qp).to(tl.int64)
    elif which == 3:
        result = externs.ctx_atomic_fetch_uint32(ctx, dst, value, compare, op, pe, qp).to(tl.int64)
    tl.store(out, result)


ATOMIC8, FETCH8, ATOMIC4, FETCH4 = range(4)


@triton.jit(do_not_specialize=["rounds", "qps"])
def crowd_kernel(ctx, out, data, counters, signal, rounds, qps, N: tl.constexpr):
    """Every program, every round: put my row with a signal, then count by a fetch that must be mine alone.

    out: int64 [programs, rounds], what the fetches returned. data: int32 [2, programs, N], symmetric: mine, received.
    counters: int64 [1]; signal: int64 [1].
    """
    pid = tl.program_id(0)
    n = tl.num_programs(0)
    offs = tl.arange(0, N)
    row = data + pid * N
    there = data + (n + pid) * N
    status = tl.cast(0, tl.int32)
    for i in range(rounds):
        tl.store(row + offs, offs + 1000 * i + 100000 * pid)
        status |= shmem.put_signal(ctx, there, row, N * 4, signal, 1, 10, 1, pid % qps)
        got = shmem.atomic_fetch_add(ctx, counters, 1, 1, pid % qps)
        tl.store(out + pid * rounds + i, got)
        # the row is written again
        status |= shmem.quiet(ctx, 1, pid % qps)
    if status != 0:
        tl.store(out + pid * rounds, tl.cast(-1, tl.int64))


@triton.jit(do_not_specialize=["dst", "src", "num_bytes", "rounds", "qp"])
def flood_kernel(ctx, out, dst, src, num_bytes, rounds, qp):
    """Puts without a wait between them. out: int32 [programs], how many were refused."""
    refused = tl.cast(0, tl.int32)
    for _ in range(rounds):
        refused -= externs.ctx_put_nbi_block(ctx, dst, src, num_bytes, 1, qp)
    tl.store(out + tl.program_id(0), refused)


@triton.jit(do_not_specialize=["words", "rounds"])
def neighbours_kernel(ctx, words, rounds):
    """Programs add 7 to the first or 11 to the second of two 32-bit words of PE 1, in the same 8 bytes."""
    second = tl.program_id(0) % 2
    for _ in range(rounds):
        externs.ctx_atomic_uint32(ctx, words + 4 * second, 7 + 4 * second, 0, 4, 1, 0)


@triton.jit
def each_kernel(ctx, out, data, words):
    """One put with signal, one fetch, one quiet: what is looked at as code."""
    shmem.put_signal(ctx, data, data, 4096, words, 1, 10, 1)
    tl.store(out, shmem.atomic_fetch_add(ctx, words + 1, 1, 1))
    shmem.quiet(ctx, 1, 0)
