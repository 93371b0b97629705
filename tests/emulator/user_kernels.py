"""Kernels as users write them in a notebook: scans, sorts, reductions, random numbers, atomics, products."""

import triton
import triton.language as tl


@triton.jit
def _affine(a1, b1, a2, b2):
    """x -> a1 * x + b1, then x -> a2 * x + b2."""
    return a1 * a2, b1 * a2 + b2


@triton.jit
def recurrence(a, b, out, N: tl.constexpr, REVERSE: tl.constexpr):
    """h = a * h + b along N, as a scan of pairs."""
    i = tl.arange(0, N)
    _, h = tl.associative_scan((tl.load(a + i), tl.load(b + i)), 0, _affine, reverse=REVERSE)
    tl.store(out + i, h)


@triton.jit
def scans(x, out, ROWS: tl.constexpr, N: tl.constexpr):
    """out[0]: sums from the end of each row; out[1]: running products of each column."""
    i = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    tl.store(out + i, tl.cumsum(v, axis=1, reverse=True))
    tl.store(out + ROWS * N + i, tl.cumprod(v, axis=0))


@triton.jit
def sorts(x, down, largest, flipped, ROWS: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Each row in falling order, its K largest, and backwards."""
    rows = tl.arange(0, ROWS)[:, None]
    i = rows * N + tl.arange(0, N)[None, :]
    v = tl.load(x + i)
    tl.store(down + i, tl.sort(v, descending=True))
    tl.store(largest + rows * K + tl.arange(0, K)[None, :], tl.topk(v, K))
    tl.store(flipped + i, tl.flip(v, 1))


@triton.jit
def histogram(x, out, n, N: tl.constexpr, BINS: tl.constexpr):
    """How many of the first n numbers are 0, 1, ... BINS - 1."""
    i = tl.arange(0, N)
    tl.store(out + tl.arange(0, BINS), tl.histogram(tl.load(x + i, mask=i < n, other=0), BINS, mask=i < n))


@triton.jit
def gather(x, at, out, ROWS: tl.constexpr, N: tl.constexpr):
    """out[0][i, j] = x[at[i, j], j]; out[1][i, j] = x[i, at[i, j] % N]."""
    i = tl.arange(0, ROWS)[:, None] * N + tl.arange(0, N)[None, :]
    v, k = tl.load(x + i), tl.load(at + i)
    tl.store(out + i, tl.gather(v, k, 0))
    tl.store(out + ROWS * N + i, tl.gather(v, k % N, 1))


@triton.jit
def reductions(x, out, where, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Of an odd-sized matrix: maximum and its place in each row, sum and place of the minimum of each column, total."""
    i, j = tl.arange(0, ROWS), tl.arange(0, COLS)
    mask = (i[:, None] < rows) & (j[None, :] < cols)
    v = tl.load(x + i[:, None] * cols + j[None, :], mask=mask)
    top, place = tl.max(tl.where(mask, v, -float("inf")), 1, return_indices=True)
    tl.store(out + i, top, mask=i < rows)
    tl.store(where + i, place, mask=i < rows)
    tl.store(out + rows + j, tl.sum(tl.where(mask, v, 0.0), 0), mask=j < cols)
    tl.store(where + rows + j, tl.argmin(tl.where(mask, v, float("inf")), 0), mask=j < cols)
    tl.store(out + rows + cols, tl.sum(tl.where(mask, v, 0.0)))


@triton.jit
def randoms(uniform, normal, words, seed, N: tl.constexpr):
    """Uniform and normal numbers, and four words of Philox for each counter."""
    i = tl.arange(0, N)
    tl.store(uniform + i, tl.rand(seed, i))
    tl.store(normal + i, tl.randn(seed, i))
    a, b, c, d = tl.randint4x(seed, i)
    tl.store(words + i, a)
    tl.store(words + N + i, b)
    tl.store(words + 2 * N + i, c)
    tl.store(words + 3 * N + i, d)


@triton.jit
def transpose(x, y, M, N, BLOCK: tl.constexpr):
    """y = x^T through tensor descriptors, beyond the edges too."""
    src = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    dst = tl.make_tensor_descriptor(y, [N, M], [M, 1], [BLOCK, BLOCK])
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    dst.store([j, i], src.load([i, j]).T)


@triton.jit
def atomics(p, x, OP: tl.constexpr, N: tl.constexpr, BINS: tl.constexpr):
    """p[i % BINS] = OP(p[i % BINS], x[i]) for all i."""
    i = tl.arange(0, N)
    v, at = tl.load(x + i), p + i % BINS
    if OP == "add":
        tl.atomic_add(at, v)
    elif OP == "max":
        tl.atomic_max(at, v)
    elif OP == "min":
        tl.atomic_min(at, v)
    elif OP == "and":
        tl.atomic_and(at, v)
    elif OP == "or":
        tl.atomic_or(at, v)
    else:
        tl.atomic_xor(at, v)


@triton.jit
def compare_and_swap(p, old, expected, new, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(old + i, tl.atomic_cas(p + i, tl.load(expected + i), tl.load(new + i)))


@triton.jit
def product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    """c = a @ b for one tile, summed in c's format."""
    i, j, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + i[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + j[None, :])
    out = tl.dot(x, y, input_precision=PRECISION, out_dtype=c.dtype.element_ty)
    tl.store(c + i[:, None] * N + j[None, :], out)


@triton.jit
def products(a, b, c, BATCH: tl.constexpr, M: tl.constexpr):
    """c[h] = a[h] @ b[h], one dot of three dimensions."""
    h, i, j = tl.arange(0, BATCH)[:, None, None], tl.arange(0, M)[None, :, None], tl.arange(0, M)[None, None, :]
    at = (h * M + i) * M + j
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


@triton.jit
def collatz(x, out):
    """Steps until x is 1."""
    v, steps = tl.load(x + tl.program_id(0)), 0
    while v != 1:
        v = tl.where(v % 2 == 0, v // 2, 3 * v + 1)
        steps += 1
    tl.store(out + tl.program_id(0), steps)


@triton.jit
def functions(x, y, out, n, N: tl.constexpr):
    """Row by row: elementary functions of x and y, masked."""
    i = tl.arange(0, N)
    m = i < n
    a, b = tl.load(x + i, mask=m, other=1.0), tl.load(y + i, mask=m, other=1.0)
    tl.store(out + i, tl.sigmoid(a), mask=m)
    tl.store(out + N + i, tl.erf(a), mask=m)
    tl.store(out + 2 * N + i, tl.sin(a) + tl.cos(b), mask=m)
    tl.store(out + 3 * N + i, tl.floor(a) + tl.ceil(b), mask=m)
    tl.store(out + 4 * N + i, tl.exp(a) / tl.log(tl.abs(b) + 2.0), mask=m)
    tl.store(out + 5 * N + i, tl.math.rsqrt(tl.abs(a) + 1.0), mask=m)
    tl.store(out + 6 * N + i, tl.clamp(a, -0.5, 0.5), mask=m)
    tl.store(out + 7 * N + i, tl.div_rn(a, b), mask=m)
    tl.store(out + 8 * N + i, tl.sqrt_rn(tl.abs(a)), mask=m)
    tl.store(out + 9 * N + i, a % b, mask=m)


@triton.jit
def integers(x, y, out, N: tl.constexpr):
    """Row by row: division, remainders, high halves, 64-bit products and quotients, bits."""
    i = tl.arange(0, N)
    a, b = tl.load(x + i), tl.load(y + i)
    ua, ub, wide = a.to(tl.uint32), b.to(tl.uint32), a.to(tl.int64)
    tl.store(out + i, a // b)
    tl.store(out + N + i, a % b)
    tl.store(out + 2 * N + i, tl.umulhi(ua, ub).to(tl.int32))
    tl.store(out + 3 * N + i, (wide * b.to(tl.int64) >> 13).to(tl.int32))
    tl.store(out + 4 * N + i, ((a << 3) ^ (b >> 2)) | ~a)
    tl.store(out + 5 * N + i, (ua // ub).to(tl.int32))
    tl.store(out + 6 * N + i, (wide * 1000003 // b.to(tl.int64)).to(tl.int32))


@triton.jit
def shapes(x, out, N: tl.constexpr):
    """Interleaved with its double, a pair that is split again, transposed as 8 rows."""
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(out + tl.arange(0, 2 * N), tl.interleave(a, a * 2))
    p, q = tl.split(tl.join(a, a + 1))
    tl.store(out + 2 * N + i, p - q)
    tl.store(out + 3 * N + i, tl.trans(a.reshape(8, N // 8)).reshape(N))


@triton.jit
def cast(x, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(out.dtype.element_ty))


@triton.jit
def inline(x, N: tl.constexpr):
    """An instruction that the emulated device does not have."""
    i = tl.arange(0, N)
    v = tl.inline_asm_elementwise(
        "v_cubeid_f32 $0, $1, $1, $1", "=v,v", [tl.load(x + i)], dtype=tl.float32, is_pure=True, pack=1
    )
    tl.store(x + i, v)
