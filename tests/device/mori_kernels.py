"""Kernels that call MORI's no-argument names, one group a kernel: `which` selects at run time, so a group is compiled
once.
"""

import triton
import triton.language as tl

from mori_triton.device import externs as mori


@triton.jit(do_not_specialize=["dst", "src", "count", "pe", "which"])
def put_kernel(out, dst, src, count, pe, which):
    """Every typed put."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.putmem_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 1:
        result = mori.put_uint32_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 2:
        result = mori.put_uint64_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 3:
        result = mori.put_float_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 4:
        result = mori.put_double_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 5:
        result = mori.putmem_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 6:
        result = mori.put_uint32_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 7:
        result = mori.put_uint64_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 8:
        result = mori.put_float_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 9:
        result = mori.put_double_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 10:
        result = mori.putmem_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 11:
        result = mori.put_uint32_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 12:
        result = mori.put_uint64_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 13:
        result = mori.put_float_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 14:
        result = mori.put_double_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["dst", "src", "count", "pe", "which"])
def get_nbi_kernel(out, dst, src, count, pe, which):
    """Every typed non-blocking get."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.getmem_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 1:
        result = mori.get_uint32_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 2:
        result = mori.get_uint64_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 3:
        result = mori.get_float_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 4:
        result = mori.get_double_nbi_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 5:
        result = mori.getmem_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 6:
        result = mori.get_uint32_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 7:
        result = mori.get_uint64_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 8:
        result = mori.get_float_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 9:
        result = mori.get_double_nbi_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 10:
        result = mori.getmem_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 11:
        result = mori.get_uint32_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 12:
        result = mori.get_uint64_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 13:
        result = mori.get_float_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 14:
        result = mori.get_double_nbi_block(dst, src, count, pe, 1).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["dst", "src", "count", "pe", "which"])
def get_kernel(out, dst, src, count, pe, which):
    """Every typed get."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.getmem_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 1:
        result = mori.get_uint32_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 2:
        result = mori.get_uint64_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 3:
        result = mori.get_float_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 4:
        result = mori.get_double_thread(dst, src, count, pe, 1).to(tl.int64)
    elif which == 5:
        result = mori.getmem_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 6:
        result = mori.get_uint32_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 7:
        result = mori.get_uint64_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 8:
        result = mori.get_float_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 9:
        result = mori.get_double_warp(dst, src, count, pe, 1).to(tl.int64)
    elif which == 10:
        result = mori.getmem_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 11:
        result = mori.get_uint32_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 12:
        result = mori.get_uint64_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 13:
        result = mori.get_float_block(dst, src, count, pe, 1).to(tl.int64)
    elif which == 14:
        result = mori.get_double_block(dst, src, count, pe, 1).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["dst", "src", "count", "sig", "value", "op", "pe", "which"])
def put_signal_kernel(out, dst, src, count, sig, value, op, pe, which):
    """Puts with a signal, and the put of a small value in memory."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.putmem_nbi_signal_thread(dst, src, count, sig, value, op, pe, 0).to(tl.int64)
    elif which == 1:
        result = mori.putmem_nbi_signal_warp(dst, src, count, sig, value, op, pe, 0).to(tl.int64)
    elif which == 2:
        result = mori.putmem_nbi_signal_block(dst, src, count, sig, value, op, pe, 0).to(tl.int64)
    elif which == 3:
        result = mori.put_size_imm_nbi_thread(dst, src, count, pe, 0).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["dst", "value", "real", "pe", "which"])
def p_kernel(out, dst, value, real, pe, which):
    """Every immediate put."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.int32_p(dst, value, pe, 0).to(tl.int64)
    elif which == 1:
        result = mori.int64_p(dst, value, pe, 0).to(tl.int64)
    elif which == 2:
        result = mori.uint32_p(dst, value, pe, 0).to(tl.int64)
    elif which == 3:
        result = mori.uint64_p(dst, value, pe, 0).to(tl.int64)
    elif which == 4:
        result = mori.int_p(dst, value, pe, 0).to(tl.int64)
    elif which == 5:
        result = mori.char_p(dst, value, pe, 0).to(tl.int64)
    elif which == 6:
        result = mori.uchar_p(dst, value, pe, 0).to(tl.int64)
    elif which == 7:
        result = mori.short_p(dst, value, pe, 0).to(tl.int64)
    elif which == 8:
        result = mori.ushort_p(dst, value, pe, 0).to(tl.int64)
    elif which == 9:
        result = mori.uint_p(dst, value, pe, 0).to(tl.int64)
    elif which == 10:
        result = mori.long_p(dst, value, pe, 0).to(tl.int64)
    elif which == 11:
        result = mori.ulong_p(dst, value, pe, 0).to(tl.int64)
    elif which == 12:
        result = mori.longlong_p(dst, value, pe, 0).to(tl.int64)
    elif which == 13:
        result = mori.ulonglong_p(dst, value, pe, 0).to(tl.int64)
    elif which == 14:
        result = mori.float_p(dst, real, pe, 0).to(tl.int64)
    elif which == 15:
        result = mori.double_p(dst, real, pe, 0).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["dst", "src", "count", "value", "compare", "op", "pe", "which"])
def atomic_kernel(out, dst, src, count, value, compare, op, pe, which):
    """Every atomic."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.atomic_size_nonfetch_thread(dst, src, count, op, pe, 0).to(tl.int64)
    elif which == 1:
        result = mori.atomic_uint32_nonfetch_thread(dst, value, op, pe, 0).to(tl.int64)
    elif which == 2:
        result = mori.atomic_uint32_fetch_thread(dst, value, compare, op, pe, 0).to(tl.int64)
    elif which == 3:
        result = mori.uint32_atomic_add_thread(dst, value, pe, 0).to(tl.int64)
    elif which == 4:
        result = mori.uint32_atomic_fetch_add_thread(dst, value, pe, 0).to(tl.int64)
    elif which == 5:
        result = mori.atomic_uint64_nonfetch_thread(dst, value, op, pe, 0).to(tl.int64)
    elif which == 6:
        result = mori.atomic_uint64_fetch_thread(dst, value, compare, op, pe, 0).to(tl.int64)
    elif which == 7:
        result = mori.uint64_atomic_add_thread(dst, value, pe, 0).to(tl.int64)
    elif which == 8:
        result = mori.uint64_atomic_fetch_add_thread(dst, value, pe, 0).to(tl.int64)
    elif which == 9:
        result = mori.atomic_int64_nonfetch_thread(dst, value, op, pe, 0).to(tl.int64)
    elif which == 10:
        result = mori.atomic_int64_fetch_thread(dst, value, compare, op, pe, 0).to(tl.int64)
    elif which == 11:
        result = mori.int64_atomic_add_thread(dst, value, pe, 0).to(tl.int64)
    elif which == 12:
        result = mori.int64_atomic_fetch_add_thread(dst, value, pe, 0).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["addr", "value", "which"])
def wait_kernel(out, addr, value, which):
    """Every wait."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.uint32_wait_until_greater_than(addr, value).to(tl.int64)
    elif which == 1:
        result = mori.uint32_wait_until_equals(addr, value).to(tl.int64)
    elif which == 2:
        result = mori.uint64_wait_until_greater_than(addr, value).to(tl.int64)
    elif which == 3:
        result = mori.uint64_wait_until_equals(addr, value).to(tl.int64)
    elif which == 4:
        result = mori.int32_wait_until_greater_than(addr, value).to(tl.int64)
    elif which == 5:
        result = mori.int32_wait_until_equals(addr, value).to(tl.int64)
    elif which == 6:
        result = mori.int64_wait_until_greater_than(addr, value).to(tl.int64)
    elif which == 7:
        result = mori.int64_wait_until_equals(addr, value).to(tl.int64)
    tl.store(out, result)


@triton.jit(do_not_specialize=["addr", "pe", "which"])
def plain_kernel(out, addr, pe, which):
    """Who, where, order, barrier."""
    result = tl.cast(-7, tl.int64)
    if which == 0:
        result = mori.my_pe().to(tl.int64)
    elif which == 1:
        result = mori.n_pes().to(tl.int64)
    elif which == 2:
        result = mori.ptr(addr, pe).to(tl.int64)
    elif which == 3:
        result = mori.ptr_p2p(addr, 0, pe).to(tl.int64)
    elif which == 4:
        result = mori.quiet_thread().to(tl.int64)
    elif which == 5:
        result = mori.quiet_thread_pe(pe).to(tl.int64)
    elif which == 6:
        result = mori.quiet_thread_pe_qp(pe, 0).to(tl.int64)
    elif which == 7:
        result = mori.fence_thread().to(tl.int64)
    elif which == 8:
        result = mori.fence_thread_pe(pe).to(tl.int64)
    elif which == 9:
        result = mori.fence_thread_pe_qp(pe, 0).to(tl.int64)
    elif which == 10:
        result = mori.barrier_all_thread().to(tl.int64)
    elif which == 11:
        result = mori.barrier_all_block().to(tl.int64)
    tl.store(out, result)


# the functions of each group, at the index that `which` selects
PUTS = (
    "putmem_nbi_thread",
    "put_uint32_nbi_thread",
    "put_uint64_nbi_thread",
    "put_float_nbi_thread",
    "put_double_nbi_thread",
    "putmem_nbi_warp",
    "put_uint32_nbi_warp",
    "put_uint64_nbi_warp",
    "put_float_nbi_warp",
    "put_double_nbi_warp",
    "putmem_nbi_block",
    "put_uint32_nbi_block",
    "put_uint64_nbi_block",
    "put_float_nbi_block",
    "put_double_nbi_block",
)
GETS_NBI = (
    "getmem_nbi_thread",
    "get_uint32_nbi_thread",
    "get_uint64_nbi_thread",
    "get_float_nbi_thread",
    "get_double_nbi_thread",
    "getmem_nbi_warp",
    "get_uint32_nbi_warp",
    "get_uint64_nbi_warp",
    "get_float_nbi_warp",
    "get_double_nbi_warp",
    "getmem_nbi_block",
    "get_uint32_nbi_block",
    "get_uint64_nbi_block",
    "get_float_nbi_block",
    "get_double_nbi_block",
)
GETS = (
    "getmem_thread",
    "get_uint32_thread",
    "get_uint64_thread",
    "get_float_thread",
    "get_double_thread",
    "getmem_warp",
    "get_uint32_warp",
    "get_uint64_warp",
    "get_float_warp",
    "get_double_warp",
    "getmem_block",
    "get_uint32_block",
    "get_uint64_block",
    "get_float_block",
    "get_double_block",
)
PUT_SIGNALS = (
    "putmem_nbi_signal_thread",
    "putmem_nbi_signal_warp",
    "putmem_nbi_signal_block",
    "put_size_imm_nbi_thread",
)
PS = (
    "int32_p",
    "int64_p",
    "uint32_p",
    "uint64_p",
    "int_p",
    "char_p",
    "uchar_p",
    "short_p",
    "ushort_p",
    "uint_p",
    "long_p",
    "ulong_p",
    "longlong_p",
    "ulonglong_p",
    "float_p",
    "double_p",
)
ATOMICS = (
    "atomic_size_nonfetch_thread",
    "atomic_uint32_nonfetch_thread",
    "atomic_uint32_fetch_thread",
    "uint32_atomic_add_thread",
    "uint32_atomic_fetch_add_thread",
    "atomic_uint64_nonfetch_thread",
    "atomic_uint64_fetch_thread",
    "uint64_atomic_add_thread",
    "uint64_atomic_fetch_add_thread",
    "atomic_int64_nonfetch_thread",
    "atomic_int64_fetch_thread",
    "int64_atomic_add_thread",
    "int64_atomic_fetch_add_thread",
)
WAITS = (
    "uint32_wait_until_greater_than",
    "uint32_wait_until_equals",
    "uint64_wait_until_greater_than",
    "uint64_wait_until_equals",
    "int32_wait_until_greater_than",
    "int32_wait_until_equals",
    "int64_wait_until_greater_than",
    "int64_wait_until_equals",
)
PLAIN = (
    "my_pe",
    "n_pes",
    "ptr",
    "ptr_p2p",
    "quiet_thread",
    "quiet_thread_pe",
    "quiet_thread_pe_qp",
    "fence_thread",
    "fence_thread_pe",
    "fence_thread_pe_qp",
    "barrier_all_thread",
    "barrier_all_block",
)
