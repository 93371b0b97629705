"""Kernels of the kinds that Triton's tutorials teach: softmax, products of matrices, layer norm, dropout, attention."""

import triton
import triton.language as tl


@triton.jit
def softmax_rows(x, y, stride_x, stride_y, num_rows, num_columns, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """y = softmax of each row of x; a program takes every num_programs-th row."""
    columns = tl.arange(0, BLOCK)
    mask = columns < num_columns
    for row in tl.range(tl.program_id(0), num_rows, tl.num_programs(0), num_stages=STAGES):
        v = tl.load(x + row * stride_x + columns, mask=mask, other=-float("inf"))
        e = tl.exp(v - tl.max(v, axis=0))
        tl.store(y + row * stride_y + columns, e / tl.sum(e, axis=0), mask=mask)


@triton.jit
def leaky_relu(v):
    return tl.where(v >= 0, v, 0.01 * v)


@triton.jit
def matmul(
    a, b, c, M, N, K, a_m, a_k, b_k, b_n, c_m, c_n,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """c = a @ b, rounded to c's type; tiles in groups of GROUP rows of tiles. The last letters name strides."""
    pid = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = pid // (GROUP * tiles_n)
    rows = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + pid % (GROUP * tiles_n) % rows
    tile_n = pid % (GROUP * tiles_n) // rows
    # rows and columns past the end wrap around, so that no load needs a mask for them
    i = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    j = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    k = tl.arange(0, BLOCK_K)
    a_at = a + i[:, None] * a_m + k[None, :] * a_k
    b_at = b + k[:, None] * b_k + j[None, :] * b_n
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        left = K - step * BLOCK_K
        x = tl.load(a_at, mask=k[None, :] < left, other=0.0)
        y = tl.load(b_at, mask=k[:, None] < left, other=0.0)
        acc = tl.dot(x, y, acc)
        a_at += BLOCK_K * a_k
        b_at += BLOCK_K * b_k
    if ACTIVATION:
        acc = leaky_relu(acc)
    i = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    j = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (i[:, None] < M) & (j[None, :] < N)
    tl.store(c + i[:, None] * c_m + j[None, :] * c_n, acc.to(c.dtype.element_ty), mask=mask)


@triton.jit
def one_product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """c = a @ b for one tile, summed in c's type."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + i[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * N + j[None, :])
    tl.store(c + i[:, None] * N + j[None, :], tl.dot(x, y, out_dtype=c.dtype.element_ty))


@triton.jit
def grouped_matmul(
    pointers, sizes, strides, count, NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """count products a @ b = c: addresses [count, 3], sizes (M, N, K), row strides; a fixed number of programs.

    Every K is a multiple of BLOCK_K.
    """
    tile = tl.program_id(0)
    first = 0
    for g in range(count):
        M, N, K = tl.load(sizes + 3 * g), tl.load(sizes + 3 * g + 1), tl.load(sizes + 3 * g + 2)
        tiles_n = tl.cdiv(N, BLOCK_N)
        end = first + tl.cdiv(M, BLOCK_M) * tiles_n
        while tile >= first and tile < end:
            a = tl.load(pointers + 3 * g).to(tl.pointer_type(DTYPE))
            b = tl.load(pointers + 3 * g + 1).to(tl.pointer_type(DTYPE))
            c = tl.load(pointers + 3 * g + 2).to(tl.pointer_type(DTYPE))
            a_m, b_k, c_m = tl.load(strides + 3 * g), tl.load(strides + 3 * g + 1), tl.load(strides + 3 * g + 2)
            i = (tile - first) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
            j = (tile - first) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
            k = tl.arange(0, BLOCK_K)
            a_at = a + i[:, None] * a_m + k[None, :]
            b_at = b + k[:, None] * b_k + j[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for _ in range(K // BLOCK_K):
                x = tl.load(a_at, mask=i[:, None] < M, other=0.0)
                y = tl.load(b_at, mask=j[None, :] < N, other=0.0)
                acc += tl.dot(x, y)
                a_at += BLOCK_K
                b_at += BLOCK_K * b_k
            mask = (i[:, None] < M) & (j[None, :] < N)
            tl.store(c + i[:, None] * c_m + j[None, :], acc.to(DTYPE), mask=mask)
            tile += NUM_PROGRAMS
        first = end


@triton.jit
def dropout(x, y, n, p, seed, BLOCK: tl.constexpr):
    """y = x / (1 - p), or 0 with probability p; the seed alone decides which."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    keep = tl.rand(seed, i) > p
    tl.store(y + i, tl.where(keep, tl.load(x + i, mask=mask) / (1 - p), 0.0), mask=mask)


@triton.jit
def layer_norm_forward(x, y, weight, bias, mean_out, rstd_out, stride, N, eps, BLOCK: tl.constexpr):
    """y = (x - mean) / std * weight + bias of each row; mean and 1 / std are kept for the backward pass."""
    row = tl.program_id(0)
    x += row * stride
    y += row * stride
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        total += tl.load(x + c, mask=c < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, axis=0) / N
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        v = tl.load(x + c, mask=c < N, other=0.0).to(tl.float32)
        d = tl.where(c < N, v - mean, 0.0)
        total += d * d
    rstd = 1 / tl.sqrt(tl.sum(total, axis=0) / N + eps)
    tl.store(mean_out + row, mean)
    tl.store(rstd_out + row, rstd)
    for start in range(0, N, BLOCK):
        c = start + tl.arange(0, BLOCK)
        w, b = tl.load(weight + c, mask=c < N), tl.load(bias + c, mask=c < N)
        v = tl.load(x + c, mask=c < N, other=0.0).to(tl.float32)
        tl.store(y + c, (v - mean) * rstd * w + b, mask=c < N)


@triton.jit
def layer_norm_backward_x(
    dx, dy, dw_parts, db_parts, x, weight, mean, rstd, locks, stride, N, GROUPS: tl.constexpr, BLOCK: tl.constexpr
):
    """dx of one row; the row's part of dw and db is added to one of GROUPS rows, each under its spin lock.

    locks: [2, GROUPS], the lock and whether its rows hold anything yet.
    """
    row = tl.program_id(0)
    c = tl.arange(0, BLOCK)
    mask = c < N
    group = row % GROUPS
    v = tl.load(x + row * stride + c, mask=mask, other=0).to(tl.float32)
    g = tl.load(dy + row * stride + c, mask=mask, other=0).to(tl.float32)
    w = tl.load(weight + c, mask=mask).to(tl.float32)
    r = tl.load(rstd + row)
    xhat = tl.where(mask, (v - tl.load(mean + row)) * r, 0.0)
    wg = tl.where(mask, w * g, 0.0)
    along_x, along_1 = tl.sum(xhat * wg, axis=0) / N, tl.sum(wg, axis=0) / N
    tl.store(dx + row * stride + c, (wg - (xhat * along_x + along_1)) * r, mask=mask)
    dw, db = (g * xhat).to(w.dtype), g.to(w.dtype)
    lock, used = locks + group, locks + GROUPS + group
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    if tl.load(used) == 0:
        tl.atomic_xchg(used, 1)
    else:
        dw += tl.load(dw_parts + group * N + c, mask=mask)
        db += tl.load(db_parts + group * N + c, mask=mask)
    tl.store(dw_parts + group * N + c, dw, mask=mask)
    tl.store(db_parts + group * N + c, db, mask=mask)
    # every wave's stores come before the lock is given up
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def layer_norm_backward_weight(dw_parts, db_parts, dw_out, db_out, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """dw and db: the sums of their M parts."""
    j = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    db = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, M, BLOCK_M):
        i = start + tl.arange(0, BLOCK_M)
        mask = (i[:, None] < M) & (j[None, :] < N)
        at = i[:, None] * N + j[None, :]
        dw += tl.load(dw_parts + at, mask=mask, other=0.0)
        db += tl.load(db_parts + at, mask=mask, other=0.0)
    tl.store(dw_out + j, tl.sum(dw, axis=0), mask=j < N)
    tl.store(db_out + j, tl.sum(db, axis=0), mask=j < N)


@triton.jit
def attention_forward(
    q, k, v, out, lse, scale, N,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q @ k^T) @ v for one head and BLOCK_M queries, with running maximum and sum.

    q, k, v, out: [heads, N, D], contiguous. lse: [heads, N], log2 of the sum of exponentials.
    """
    start, head = tl.program_id(0) * BLOCK_M, tl.program_id(1).to(tl.int64)
    i, j, d = start + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, D)
    base = head * N * D
    x = tl.load(q + base + i[:, None] * D + d[None, :])
    top = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    # exponentials to the base 2
    scale *= 1.44269504
    end = start + BLOCK_M if CAUSAL else N
    for first in range(0, end, BLOCK_N):
        keys = tl.load(k + base + (first + j)[None, :] * D + d[:, None])
        s = tl.dot(x, keys) * scale
        if CAUSAL:
            s = tl.where(i[:, None] >= (first + j)[None, :], s, -1.0e6)
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.math.exp2(s - new_top[:, None])
        shrink = tl.math.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + base + (first + j)[:, None] * D + d[None, :])
        acc = tl.dot(p.to(v.dtype.element_ty), values, acc * shrink[:, None])
        top = new_top
    tl.store(lse + head * N + i, top + tl.math.log2(total))
    tl.store(out + base + i[:, None] * D + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty))
