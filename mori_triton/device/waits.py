"""Which of the library's waits a word takes: by its type and by how it is compared. `device.shmem` has their names."""

import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import externs

EQ: tl.constexpr = tl.constexpr(abi.COMPARE_EQ)
NE: tl.constexpr = tl.constexpr(abi.COMPARE_NE)
GT: tl.constexpr = tl.constexpr(abi.COMPARE_GT)
GE: tl.constexpr = tl.constexpr(abi.COMPARE_GE)
LT: tl.constexpr = tl.constexpr(abi.COMPARE_LT)
LE: tl.constexpr = tl.constexpr(abi.COMPARE_LE)


@triton.jit
def _wait_int64(ctx, word_ptr, value, compare: tl.constexpr, peer, tag):
    if compare == EQ:
        return externs.ctx_wait_eq(ctx, word_ptr, value, peer, tag)
    elif compare == NE:
        return externs.ctx_wait_ne(ctx, word_ptr, value, peer, tag)
    elif compare == GT:
        return externs.ctx_wait_gt(ctx, word_ptr, value, peer, tag)
    elif compare == GE:
        return externs.ctx_wait_ge(ctx, word_ptr, value, peer, tag)
    elif compare == LT:
        return externs.ctx_wait_lt(ctx, word_ptr, value, peer, tag)
    else:
        return externs.ctx_wait_le(ctx, word_ptr, value, peer, tag)


@triton.jit
def wait(ctx, word_ptr, value, compare: tl.constexpr, peer, tag):
    """A pointer's element type says how wide the word is and whether it has a sign; an address is one of an int64."""
    if word_ptr.dtype.is_ptr():
        element: tl.constexpr = word_ptr.dtype.element_ty
        tl.static_assert(
            element.primitive_bitwidth == 64 or (element.is_int() and element.primitive_bitwidth == 32),
            "waits look at words of 32 or 64 bits",
        )
        if element == tl.uint64:
            return externs.ctx_wait_uint64(ctx, word_ptr, value, compare, peer, tag)
        elif element == tl.uint32:
            return externs.ctx_wait_uint32(ctx, word_ptr, value, compare, peer, tag)
        elif element == tl.int32:
            return externs.ctx_wait_int32(ctx, word_ptr, value, compare, peer, tag)
        else:
            return _wait_int64(ctx, word_ptr, value, compare, peer, tag)
    else:
        return _wait_int64(ctx, word_ptr, value, compare, peer, tag)
