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
