"""Kernels of the device library's tests. `which` selects at run time, and no value is specialised: a group of functions
is compiled once.
"""

import triton
import triton.language as tl

from mori_triton.device import externs, shmem


@triton.jit(do_not_specialize=["dst", "src", "num_bytes", "pe", "sig", "value", "op", "which"])
def copy_kernel(ctx, out, dst, src, num_bytes, pe, sig, value, op, which, FULL: tl.constexpr):
    """Every ctx-first copy, or (not FULL) one of each kind. out: int64 [1]; dst, src, sig: addresses."""
    result = tl.cast(-7, tl.int32)
    if which == 0:
        result = shmem.put(ctx, dst, src, num_bytes, pe)
    elif which == 1:
        result = externs.ctx_put_warp(ctx, dst, src, num_bytes, pe, 0)
    elif which == 2:
        result = externs.ctx_get_warp(ctx, dst, src, num_bytes, pe, 0)
    elif which == 3:
        result = shmem.put_signal(ctx, dst, src, num_bytes, sig, value, op, pe)
    elif FULL:
        if which == 4:
            result = shmem.get(ctx, dst, src, num_bytes, pe)
        elif which == 5:
            result = externs.ctx_get_thread(ctx, dst, src, num_bytes, pe, 0)
        elif which == 6:
            result = externs.ctx_put_thread(ctx, dst, src, num_bytes, pe, 0)
        elif which == 7:
            result = shmem.put_nbi(ctx, dst, src, num_bytes, pe)
        elif which == 8:
            result = externs.ctx_put_nbi_warp(ctx, dst, src, num_bytes, pe, 0)
        elif which == 9:
            result = externs.ctx_put_nbi_thread(ctx, dst, src, num_bytes, pe, 0)
        elif which == 10:
            result = externs.ctx_put_signal_warp(ctx, dst, src, num_bytes, sig, value, op, pe, 0)
        elif which == 11:
            result = externs.ctx_put_signal_thread(ctx, dst, src, num_bytes, sig, value, op, pe, 0)
    tl.store(out, result.to(tl.int64))


# values of `which`; those up to PART need no FULL
PUTS, GETS, SIGNALS, PART = (0, 1, 6, 7, 8, 9), (2, 4, 5), (3, 10, 11), 3


@triton.jit
def put_after_store_kernel(ctx, dst, scratch, got, N: tl.constexpr):
    """Threads write a row in one layout, the put reads it in another; then back by a get, read in a third."""
    offs = tl.arange(0, N)
    tl.store(scratch + (N - 1 - offs), offs)
    shmem.put(ctx, dst, scratch, N * 4, 1)
    # the source may be reused at once
    tl.store(scratch + offs, tl.zeros([N], tl.int32) - 1)
    shmem.get(ctx, got, dst, N * 4, 1)
    row = tl.load(got + offs)
    tl.store(got + N + offs, tl.flip(row, 0))


@triton.jit(do_not_specialize=["p32", "p64", "pe"])
def fetch_kernel(ctx, out, p32, p64, pe, LANES: tl.constexpr):
    """Every fetch once, 32 and 64 bits; the results reach all threads. out: int64 [16, LANES]."""
    offs = tl.arange(0, LANES)
    zero = (offs * 0).to(tl.int64)
    for i in tl.static_range(2):
        p = p32 if i == 0 else p64
        o = out + i * 8 * LANES + offs
        tl.store(o, zero + shmem.atomic_fetch(ctx, p, pe))
        tl.store(o + LANES, zero + shmem.atomic_fetch_add(ctx, p, 5, pe))
        tl.store(o + 2 * LANES, zero + shmem.atomic_fetch_inc(ctx, p, pe))
        tl.store(o + 3 * LANES, zero + shmem.atomic_fetch_and(ctx, p, 0x0FF0, pe))
        tl.store(o + 4 * LANES, zero + shmem.atomic_fetch_or(ctx, p, 0x3000, pe))
        tl.store(o + 5 * LANES, zero + shmem.atomic_fetch_xor(ctx, p, 0x5555, pe))
        tl.store(o + 6 * LANES, zero + shmem.atomic_swap(ctx, p, 1234, pe))
        tl.store(o + 7 * LANES, zero + shmem.atomic_compare_swap(ctx, p, 1234, 4321, pe))


@triton.jit(do_not_specialize=["p32", "p64", "pe"])
def nonfetch_kernel(ctx, p32, p64, pe):
    """Every operation without a result, on words of its own. p32, p64: [8]."""
    for i in tl.static_range(2):
        p = p32 if i == 0 else p64
        shmem.atomic_add(ctx, p, 7, pe)
        shmem.atomic_inc(ctx, p + 1, pe)
        shmem.atomic_set(ctx, p + 2, 99, pe)
        shmem.atomic_and(ctx, p + 3, 0x0F0F, pe)
        shmem.atomic_or(ctx, p + 4, 0x0F0F, pe)
        shmem.atomic_xor(ctx, p + 5, 0x0F0F, pe)
    externs.ctx_put_value_uint32(ctx, p32 + 6, 77, pe, 0)
    externs.ctx_put_value_uint64(ctx, p64 + 6, 1 << 40, pe, 0)


@triton.jit
def mixed_lds_kernel(ctx, x, out, counter, N: tl.constexpr):
    """Reductions, scans and sorts, which live in LDS, among externs that broadcast through it. out: int32 [4, N]."""
    offs = tl.arange(0, N)
    row = tl.load(x + offs)
    first = shmem.atomic_fetch_add(ctx, counter, 1, 0)
    total = tl.sum(row, 0)
    second = shmem.atomic_fetch_add(ctx, counter, total, 0)
    ordered = tl.sort(row)
    third = shmem.atomic_fetch_add(ctx, counter, tl.max(ordered, 0), 0)
    running = tl.cumsum(row, 0)
    fourth = shmem.atomic_fetch(ctx, counter, 0)
    tl.store(out + offs, ordered + first)
    tl.store(out + N + offs, running + second)
    tl.store(out + 2 * N + offs, tl.flip(row, 0) + third)
    tl.store(out + 3 * N + offs, row * 0 + fourth)


@triton.jit
def where_kernel(ctx, out, addresses, pes, N: tl.constexpr):
    """out: int64 [N + 2]; translations elementwise, then my_pe, n_pes."""
    offs = tl.arange(0, N)
    p = tl.load(addresses + offs).to(tl.pointer_type(tl.int32))
    there = shmem.remote_ptr(ctx, p, tl.load(pes + offs))
    tl.store(out + offs, there.to(tl.int64))
    tl.store(out + N, shmem.my_pe(ctx))
    tl.store(out + N + 1, shmem.n_pes(ctx))


@triton.jit(do_not_specialize=["sig", "value", "pe", "which"])
def signal_kernel(ctx, out, sig, value, pe, which):
    """A signal, or a wait. out: int64 [64], the result of every thread."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = shmem.signal_set(ctx, sig, value, pe).to(tl.int64)
    elif which == 1:
        result = shmem.signal_add(ctx, sig, value, pe).to(tl.int64)
    elif which == 2:
        result = shmem.wait_eq(ctx, sig, value, pe, 11)
    elif which == 3:
        result = shmem.wait_ne(ctx, sig, value, pe, 12)
    elif which == 4:
        result = shmem.wait_gt(ctx, sig, value, pe, 13)
    elif which == 5:
        result = shmem.wait_ge(ctx, sig, value, pe, 14)
    elif which == 6:
        result = shmem.wait_lt(ctx, sig, value, pe, 15)
    elif which == 7:
        result = shmem.wait_le(ctx, sig, value, pe, 16)
    elif which == 8:
        result = shmem.wait_all_ge(ctx, sig, pe, value, 17)
    elif which == 9:
        result = shmem.signal_set_all(ctx, sig, value).to(tl.int64)
    elif which == 10:
        # the one program is the last, and nobody to count
        result = shmem.signal_set_all_last(ctx, sig, value, 0, 1).to(tl.int64)
    tl.store(out + tl.arange(0, 64), result)


@triton.jit(do_not_specialize=["sig", "epoch"])
def signal_last_kernel(ctx, out, counter, sig, epoch):
    """Every program arrives, the last one signals all PEs. out: int32 [programs]: who was last."""
    last = shmem.signal_set_all_last(ctx, sig, epoch, counter, tl.num_programs(0))
    tl.store(out + tl.program_id(0), last)


@triton.jit(do_not_specialize=["rounds"])
def ping_kernel(ctx, data, sig, bad, rounds, N: tl.constexpr):
    """Each round every PE sends a row to the next one, which checks all of it. data: int32 [2, N]; bad: int32 [1]."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    following = (me + 1) % n
    previous = (me + n - 1) % n
    offs = tl.arange(0, N)
    wrong = tl.zeros([N], tl.int32)
    for i in range(rounds):
        row = data + (i % 2) * N
        tl.store(shmem.remote_ptr(ctx, row, following) + offs, offs + 1000 * i + me)
        shmem.signal_add(ctx, sig, 1, following)
        shmem.wait_ge(ctx, sig, i + 1, previous)
        wrong += (tl.load(row + offs) != offs + 1000 * i + previous).to(tl.int32)
        # two rows: the sender is at most one round ahead once it has heard that I am done with the last
        shmem.signal_add(ctx, sig + 1, 1, previous)
        shmem.wait_ge(ctx, sig + 1, i + 1, following)
    tl.store(bad, tl.sum(wrong, 0))


@triton.jit(do_not_specialize=["rounds"])
def barrier_kernel(ctx, words, bad, rounds):
    """Write to everybody, meet, check all, meet. words: int64 [n], symmetric; bad: int32 [1]."""
    me, n = shmem.my_pe(ctx), shmem.n_pes(ctx)
    wrong = 0
    for i in range(rounds):
        for pe in range(n):
            tl.store(shmem.remote_ptr(ctx, words + me, pe), (i + 1) * 100 + me)
        shmem.barrier_all(ctx)
        for pe in range(n):
            wrong += (tl.load(words + pe) != (i + 1) * 100 + pe).to(tl.int32)
        shmem.barrier_all(ctx)
    tl.store(bad, wrong)


@triton.jit
def last_kernel(ctx, out, counter, parts, N: tl.constexpr):
    """Every program writes a part, the last one adds them up. out: int32 [2]: programs that were last, their sum."""
    pid = tl.program_id(0)
    offs = tl.arange(0, N)
    tl.store(parts + pid * N + offs, offs + pid)
    if shmem.arrive_last(ctx, counter, tl.num_programs(0)) == 1:
        total = tl.zeros([N], tl.int32)
        for i in range(tl.num_programs(0)):
            total += tl.load(parts + i * N + offs)
        tl.atomic_add(out, 1)
        tl.store(out + 1, tl.sum(total, 0))


@triton.jit
def order_kernel(ctx, data, sig):
    """A hint, then stores, fence or quiet, a relaxed store."""
    shmem.prefetch(ctx)
    tl.store(data + tl.arange(0, 256), tl.arange(0, 256))
    shmem.fence(ctx)
    tl.store(data + 256 + tl.arange(0, 256), tl.arange(0, 256))
    shmem.quiet(ctx)
    shmem.atomic_set(ctx, sig, 1, 0)
    shmem.acquire(ctx)
    tl.store(data + 512, tl.load(data + 513))


@triton.jit(do_not_specialize=["rounds"])
def ball_kernel(ctx, sig, seen, rounds, STYLE: tl.constexpr):
    """Two PEs hand a round number to and fro; each waits in its own way. sig: int64 [1], symmetric; seen: int64 [1]."""
    me = shmem.my_pe(ctx)
    zero = tl.full([], 0, tl.int64)
    last = zero
    for i in range(rounds):
        if me == 1:
            shmem.signal_set(ctx, sig, i + 1, 0)
        if STYLE == "wait":
            last = shmem.wait_ge(ctx, sig, i + 1, 1 - me, 21)
        elif STYLE == "wait_all":
            last = shmem.wait_all_ge(ctx, sig, 1, i + 1, 22)
        elif STYLE == "atomic_add":
            last = tl.atomic_add(sig, 0, sem="acquire", scope="sys")
            while last < i + 1:
                last = tl.atomic_add(sig, 0, sem="acquire", scope="sys")
        else:
            last = tl.atomic_cas(sig, zero, zero, sem="acquire", scope="sys")
            while last < i + 1:
                last = tl.atomic_cas(sig, zero, zero, sem="acquire", scope="sys")
        if me == 0:
            shmem.signal_set(ctx, sig, i + 1, 1)
    tl.store(seen, last)
