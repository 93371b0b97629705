"""Kernels that are given tensor descriptors."""

import triton
import triton.language as tl


@triton.jit
def transpose(src, dst, scale, BLOCK: tl.constexpr):
    """dst = scale * src^T by tiles, beyond the edges too."""
    i, j = tl.program_id(0) * BLOCK, tl.program_id(1) * BLOCK
    dst.store([j, i], (src.load([i, j]) * scale).to(dst.dtype).T)


@triton.jit
def product(a, b, c, K, M: tl.constexpr, N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c = a @ b^T, one tile a program."""
    i, j = tl.program_id(0) * M, tl.program_id(1) * N
    total = tl.zeros((M, N), tl.float32)
    for k in range(0, K, BLOCK_K):
        total = tl.dot(a.load([i, k]), b.load([j, k]).T, total)
    c.store([i, j], total.to(c.dtype))


@triton.jit
def shift(src, dst, at, N: tl.constexpr):
    """dst[p N + at:] = src[p N:] + 1, of one dimension."""
    p = tl.program_id(0) * N
    dst.store([p + at], src.load([p]) + 1)


@triton.jit
def pair(both, i, N: tl.constexpr):
    """The second of a tuple of descriptors = the first, tile i."""
    both[1].store([i * N, 0], both[0].load([i * N, 0]))


@triton.jit
def own_shape(x, out):
    """What the kernel knows of the tensor."""
    tl.store(out, x.shape[0].to(tl.int64))
    tl.store(out + 1, x.shape[1].to(tl.int64))
    tl.store(out + 2, x.strides[0].to(tl.int64))


@triton.jit
def slabs(src, dst, N: tl.constexpr):
    """Of three dimensions."""
    dst.store([1, 0, 0], src.load([1, 0, 0]))


@triton.jit
def made_slabs(x, y, A, B, N: tl.constexpr):
    """The same with descriptors of its own."""
    src = tl.make_tensor_descriptor(x, [A, B, N], [B * N, N, 1], [2, N, N])
    dst = tl.make_tensor_descriptor(y, [A, B, N], [B * N, N, 1], [2, N, N])
    dst.store([1, 0, 0], src.load([1, 0, 0]))


@triton.jit
def blocks(src, dst):
    """Of five dimensions."""
    dst.store([1, 1, 2, 1, 0], src.load([1, 1, 2, 1, 0]))
