"""Small Triton kernels that together use what communication and MoE kernels use, on one device."""

import triton
import triton.language as tl


@triton.jit
def vadd(x, y, out, n, BLOCK: tl.constexpr):
    """out[i] = x[i] + y[i] below n, masked."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    tl.store(out + i, tl.load(x + i, mask=mask, other=0.0) + tl.load(y + i, mask=mask, other=0.0), mask=mask)


@triton.jit
def spin_lock(count, lock, out):
    """Each program takes a ticket, then adds its number to out[0] inside a CAS spin lock; out[1 + pid] = the ticket."""
    pid = tl.program_id(0)
    ticket = tl.atomic_add(count, 1, sem="acq_rel", scope="sys")
    while tl.atomic_cas(lock, 0, 1, sem="acquire", scope="sys") != 0:
        pass
    tl.store(out, tl.load(out, volatile=True) + pid + 1)
    tl.atomic_xchg(lock, 0, sem="release", scope="sys")
    tl.store(out + 1 + pid, ticket)


@triton.jit
def ping_pong(flag, out, me, rounds):
    """Two peers: wait until flag == 2 * round + me, then make it one more."""
    r = 0
    spins = 0
    while r < rounds:
        want = 2 * r + me
        while tl.atomic_add(flag, 0, sem="acquire", scope="sys") != want:
            spins += 1
        tl.atomic_xchg(flag, want + 1, sem="release", scope="sys")
        r += 1
    tl.store(out, spins)


@triton.jit
def wait_for_later(flag, out):
    """Program 0 waits for the last program of its own grid: only works when workgroups are interleaved."""
    pid = tl.program_id(0)
    if pid == 0:
        while tl.atomic_add(flag, 0, sem="acquire", scope="gpu") == 0:
            pass
        tl.store(out, 7)
    elif pid == tl.num_programs(0) - 1:
        tl.atomic_xchg(flag, 1, sem="release", scope="gpu")


@triton.jit
def row_reduce(src, idx, weight, out, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[row] = sum over k of weight[row, k] * src[idx[row, k]]: bf16 in, fp32 sum, bf16 out; idx -1 is skipped."""
    row = tl.program_id(0).to(tl.int64)
    for h in range(0, H, BLOCK):
        c = h + tl.arange(0, BLOCK)
        mask = c < H
        acc = tl.zeros([BLOCK], tl.float32)
        for k in tl.static_range(K):
            s = tl.load(idx + row * K + k).to(tl.int64)
            if s >= 0:
                w = tl.load(weight + row * K + k)
                acc += w * tl.load(src + s * H + c, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + row * H + c, acc.to(tl.bfloat16), mask=mask)


@triton.jit
def scan_sum_max(x, out, N: tl.constexpr):
    """out[:N] = running sum, out[N] = sum, out[N + 1] = max."""
    i = tl.arange(0, N)
    v = tl.load(x + i)
    tl.store(out + i, tl.cumsum(v, 0))
    tl.store(out + N, tl.sum(v, 0))
    tl.store(out + N + 1, tl.max(v, 0))


@triton.jit
def matmul(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a @ b for one tile."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x, y))


@triton.jit
def clock_gfx12():
    return tl.inline_asm_elementwise(
        "s_sendmsg_rtn_b64 $0, sendmsg(MSG_RTN_GET_REALTIME)\n s_wait_kmcnt 0",
        "=s", [], dtype=tl.int64, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def clock_gfx9():
    return tl.inline_asm_elementwise(
        "s_memrealtime $0\n s_waitcnt lgkmcnt(0)", "=s", [], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def nap():
    return tl.inline_asm_elementwise("s_sleep 1\n v_mov_b32 $0, 0", "=v", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_with_limit(flag, out, ticks, GFX12: tl.constexpr):
    """Wait until flag is not 0, at most `ticks` of the device clock; out = (flag, timed out)."""
    start = clock_gfx12() if GFX12 else clock_gfx9()
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    late = 0
    while (seen == 0) & (late == 0):
        nap()
        now = clock_gfx12() if GFX12 else clock_gfx9()
        late = (now - start > ticks).to(tl.int32)
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.store(out, seen)
    tl.store(out + 1, late)


@triton.jit
def atomics_i64(p, old_max, v, n, BLOCK: tl.constexpr):
    """p[0] += every v, p[1] = max of every v; each lane keeps the maximum it found."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    x = tl.load(v + i, mask=mask, other=0)
    tl.atomic_add(p + i * 0, x, mask=mask, sem="relaxed", scope="sys")
    old = tl.atomic_max(p + 1 + i * 0, x, mask=mask, sem="relaxed", scope="sys")
    tl.store(old_max + i, old, mask=mask)


@triton.jit
def histogram(ids, count, position, n, BLOCK: tl.constexpr):
    """Count ids; position[i] = how many of ids[i] came before."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    e = tl.load(ids + i, mask=mask, other=0)
    tl.store(position + i, tl.atomic_add(count + e, 1, mask=mask, sem="relaxed", scope="gpu"), mask=mask)


@triton.jit
def quantise_fp8(x, q, scale, H, BLOCK: tl.constexpr, DTYPE: tl.constexpr, TOP: tl.constexpr):
    """Row-wise fp8 with a scale of max |x| / TOP."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * H + c, mask=c < H, other=0.0).to(tl.float32)
    s = tl.maximum(tl.max(tl.abs(v), 0), 1e-4) / TOP
    tl.store(scale + row, s)
    tl.store(q + row * H + c, (v / s).to(DTYPE), mask=c < H)


@triton.jit
def softmax(x, y, H, BLOCK: tl.constexpr):
    """y = softmax of each row of x."""
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    v = tl.load(x + row * H + c, mask=c < H, other=-float("inf"))
    v = tl.exp(v - tl.max(v, 0))
    tl.store(y + row * H + c, v / tl.sum(v, 0), mask=c < H)


@triton.jit
def copy_rows(src, dst, rows, stride, H, BLOCK: tl.constexpr):
    """dst[r] = src[r, :H] with a row stride and cache hints; programs share the rows."""
    r = tl.program_id(0).to(tl.int64)
    while r < rows:
        for h in range(0, H, BLOCK):
            c = tl.max_contiguous(tl.multiple_of(h + tl.arange(0, BLOCK), 16), 16)
            v = tl.load(src + r * stride + c, mask=c < H, cache_modifier=".cg")
            tl.store(dst + r * H + c, v, mask=c < H, cache_modifier=".wt")
        r += tl.num_programs(0)


@triton.jit
def sort_argmax(x, out, N: tl.constexpr):
    """out[:N] = sorted x, out[N] = position of the maximum."""
    v = tl.load(x + tl.arange(0, N))
    tl.store(out + tl.arange(0, N), tl.sort(v))
    tl.store(out + N, tl.argmax(v, 0))


@triton.jit
def add_f32(x, y, N: tl.constexpr):
    """y[i % 4] += x[i], atomically."""
    i = tl.arange(0, N)
    tl.atomic_add(y + (i % 4), tl.load(x + i), sem="relaxed", scope="sys")


@triton.jit
def all_reduce(bases, x, out, me, n, H, ROWS, target, BLOCK: tl.constexpr):
    """Put my rows into every heap, signal, wait for all, sum in fp32; then signal that my slots may be overwritten."""
    pid, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, BLOCK)
    for p in range(n):
        peer = tl.load(bases + p)
        data = (peer + 4096).to(tl.pointer_type(tl.bfloat16))
        for r in range(pid, ROWS, programs):
            for h in range(0, H, BLOCK):
                mask = h + c < H
                tl.store(data + (me * ROWS + r) * H + h + c, tl.load(x + r * H + h + c, mask=mask), mask=mask)
        tl.debug_barrier()
        tl.atomic_add(peer.to(tl.pointer_type(tl.int32)), 1, sem="release", scope="sys")
    mine = tl.load(bases + me)
    arrived = mine.to(tl.pointer_type(tl.int32))
    while tl.atomic_add(arrived, 0, sem="acquire", scope="sys") < target:
        pass
    tl.debug_barrier()
    src = (mine + 4096).to(tl.pointer_type(tl.bfloat16))
    for r in range(pid, ROWS, programs):
        for h in range(0, H, BLOCK):
            mask = h + c < H
            acc = tl.zeros([BLOCK], tl.float32)
            for p in range(n):
                acc += tl.load(src + (p * ROWS + r) * H + h + c, mask=mask, other=0.0, cache_modifier=".cv").to(
                    tl.float32
                )
            tl.store(out + r * H + h + c, acc.to(tl.bfloat16), mask=mask)
    tl.debug_barrier()
    for p in range(n):
        peer = tl.load(bases + p)
        tl.atomic_add(peer.to(tl.pointer_type(tl.int32)) + 16, 1, sem="release", scope="sys")
    while tl.atomic_add(arrived + 16, 0, sem="acquire", scope="sys") < target:
        pass


@triton.jit
def grid_ids(out):
    """out[program] = (x, y, z, grid) of a 3-D grid, as decimal digits."""
    x, y, z = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    gx, gy, gz = tl.num_programs(0), tl.num_programs(1), tl.num_programs(2)
    tl.store(out + (z * gy + y) * gx + x, ((x * 10 + y) * 10 + z) * 1000 + (gx * 10 + gy) * 10 + gz)


@triton.jit
def some_ids(out, Y: tl.constexpr, Z: tl.constexpr):
    """out[id] = id + 1 for the numbers along y, along z, or along both; nothing else of the grid is asked for."""
    if Y and Z:
        tl.store(out + tl.program_id(2) * 3 + tl.program_id(1), tl.program_id(2) * 3 + tl.program_id(1) + 1)
    else:
        tl.store(out + tl.program_id(1 if Y else 2), tl.program_id(1 if Y else 2) + 1)


@triton.jit
def all_kinds(out, a, b, c, d, e, f, maybe, T: tl.constexpr):
    """Scalars of several types; `maybe` is a pointer or None."""
    tl.store(out + 0, a.to(tl.float64))
    tl.store(out + 1, b.to(tl.float64))
    tl.store(out + 2, c.to(tl.float64))
    tl.store(out + 3, d.to(tl.float64))
    tl.store(out + 4, e.to(tl.float64))
    tl.store(out + 5, f.to(tl.float64))
    if maybe is not None:
        tl.store(out + 6, tl.load(maybe).to(tl.float64))
    tl.store(out + 7, T)
