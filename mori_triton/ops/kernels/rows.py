"""Row addressing and row copies shared by the dispatch and combine kernels."""

import triton
import triton.language as tl


@triton.jit
def row_offset(row, row_size):
    """Offset of `row` in elements, in 64 bits: 65536 rows of 7168 elements pass 2^31."""
    return tl.cast(row, tl.int64) * row_size


@triton.jit
def as_words(ptr, ALIGN: tl.constexpr):
    """A byte-moving view of a row pointer whose value is a multiple of ALIGN bytes."""
    if ALIGN >= 4:
        words = tl.cast(ptr, tl.pointer_type(tl.int32), bitcast=True)
    elif ALIGN == 2:
        words = tl.cast(ptr, tl.pointer_type(tl.int16), bitcast=True)
    else:
        words = tl.cast(ptr, tl.pointer_type(tl.int8), bitcast=True)
    # a translated pointer carries no alignment, and without the hint a copy falls to single words
    return tl.multiple_of(words, ALIGN)


@triton.jit
def as_bits(ptr):
    """The elements of a region (16-byte aligned) as integers of their width, to be loaded and cast back.

    The hint needs an operation of its own to hold on to: on the result of a call it is lost when the call is inlined.
    """
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        bits = tl.cast(ptr, tl.pointer_type(tl.int32), bitcast=True)
    else:
        bits = tl.cast(ptr, tl.pointer_type(tl.int16), bitcast=True)
    return tl.multiple_of(bits, 16)
