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


@triton.jit
def stand_between(HOW: tl.constexpr, sig_ptr):
    """The operation that is to order what is before it and what is after it."""
    if HOW == "quiet_thread":
        mori_device.quiet_thread()
    elif HOW == "quiet_thread_pe":
        mori_device.quiet_thread_pe(1)
    elif HOW == "quiet_thread_pe_qp":
        mori_device.quiet_thread_pe_qp(1, 0)
    elif HOW == "fence_thread":
        mori_device.fence_thread()
    elif HOW == "fence_thread_pe":
        mori_device.fence_thread_pe(1)
    elif HOW == "fence_thread_pe_qp":
        mori_device.fence_thread_pe_qp(1, 0)
    elif HOW == "barrier_all_thread":
        mori_device.barrier_all_thread()
    elif HOW == "barrier_all_block":
        mori_device.barrier_all_block()
    elif HOW == "empty_signal":
        mori_device.putmem_nbi_signal_block(sig_ptr, sig_ptr, 0, sig_ptr, 1, mori_device.SIGNAL_SET, 1, 0)


@triton.jit
def handover_kernel(
    src_ptr,  # int32 [N], local
    dst_ptr,  # int32 [N], symmetric
    sig_ptr,  # uint64 [1], symmetric, 0
    bad_ptr,  # int32 [1], local: wrong elements that PE 1 saw
    HOW: tl.constexpr,  # what PE 0 calls after its stores
    FLAG: tl.constexpr,  # whether a relaxed atomic tells PE 1 then, and not HOW itself
    POLL: tl.constexpr,  # PE 1 polls with a relaxed atomic, instead of a wait of the library
    N: tl.constexpr,
):
    """PE 0 hands a row to PE 1: half of it with a put, half with plain stores to mapped memory."""
    offs = tl.arange(0, N)
    if mori_device.my_pe() == 0:
        tl.store(src_ptr + offs, offs + 7)
        mori_device.putmem_nbi_block(dst_ptr, src_ptr, N * 2, 1, 0)
        theirs = mori_device.ptr(dst_ptr, 1).to(tl.pointer_type(tl.int32))
        tl.store(theirs + offs, offs + 7, mask=offs >= N // 2)
        stand_between(HOW, sig_ptr)
        if FLAG:
            mori_device.uint64_atomic_add_thread(sig_ptr, 1, 1, 0)
    else:
        if FLAG or HOW == "empty_signal":
            if POLL:
                while tl.atomic_add(sig_ptr.to(tl.pointer_type(tl.int64)), 0, sem="relaxed", scope="sys") == 0:
                    pass
            else:
                mori_device.uint64_wait_until_equals(sig_ptr, 1)
        else:
            stand_between(HOW, sig_ptr)
        tl.store(bad_ptr, tl.sum((tl.load(dst_ptr + offs) != offs + 7).to(tl.int32), 0))


@triton.jit
def put_signal_kernel(
    src_ptr,  # int32 [N], local
    dst_ptr,  # int32 [N], symmetric
    sig_ptr,  # uint64 [1], symmetric, 0
    bad_ptr,  # int32 [1], local
    SCOPE: tl.constexpr,
    OP: tl.constexpr,  # SIGNAL_SET or SIGNAL_ADD
    N: tl.constexpr,
):
    """PE 0 puts a row to PE 1, with a signal."""
    offs = tl.arange(0, N)
    if mori_device.my_pe() == 0:
        tl.store(src_ptr + offs, offs + 7)
        if SCOPE == "thread":
            mori_device.putmem_nbi_signal_thread(dst_ptr, src_ptr, N * 4, sig_ptr, 1, OP, 1, 0)
        elif SCOPE == "warp":
            mori_device.putmem_nbi_signal_warp(dst_ptr, src_ptr, N * 4, sig_ptr, 1, OP, 1, 0)
        else:
            mori_device.putmem_nbi_signal_block(dst_ptr, src_ptr, N * 4, sig_ptr, 1, OP, 1, 0)
    else:
        mori_device.uint64_wait_until_greater_than(sig_ptr, 0)
        tl.store(bad_ptr, tl.sum((tl.load(dst_ptr + offs) != offs + 7).to(tl.int32), 0))


@triton.jit
def reach_kernel(x_ptr, out_ptr):
    """Each PE's view of every PE's x: whether there is an address, and what a put and an atomic return."""
    me = mori_device.my_pe()
    for pe in range(mori_device.n_pes()):
        tl.store(out_ptr + 4 * pe, (mori_device.ptr(x_ptr, pe) != 0).to(tl.int64))
        tl.store(out_ptr + 4 * pe + 1, (mori_device.ptr_p2p(x_ptr, me, pe) != 0).to(tl.int64))
        tl.store(out_ptr + 4 * pe + 2, mori_device.int64_p(x_ptr + me, 100 + me, pe, 0).to(tl.int64))
        tl.store(out_ptr + 4 * pe + 3, mori_device.int64_atomic_fetch_add_thread(x_ptr + 4, 1, pe, 0))


@triton.jit
def wait_kernel(sig_ptr):
    mori_device.uint64_wait_until_equals(sig_ptr, 5)
