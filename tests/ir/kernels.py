"""Kernels under MORI's names, for tests of what the operations promise."""

import triton
import triton.language as tl

from mori_triton.ir import triton as mori_device


@triton.jit
def count_kernel(word_ptr, out_ptr, BLOCK: tl.constexpr):
    """One add a program at PE 0; what it fetched is in every thread."""
    old = mori_device.int64_atomic_fetch_add_thread(word_ptr, 1, 0, 0)
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, tl.zeros([BLOCK], tl.int64) + old)
