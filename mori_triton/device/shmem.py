"""What `@triton.jit` code calls: `from mori_triton.device import shmem`.

`ctx` is the kernel's first argument, `SymmetricHeap.ctx` (a pointer, or its address as int64). Pointers named `*_ptr`
are this PE's own addresses of symmetric memory; the callee finds the peer's. Every function is one operation of the
whole program, whatever `num_warps` is, and has to be called where all its threads come by: not inside a loop over
elements, not on blocks (`remote_ptr` excepted, which is elementwise).

Order: a signal covers every earlier store of the program; a wait is an acquire for all of it. Puts, gets and atomics
order nothing by themselves: `fence` and `quiet` do. A wait that returns a value which does not satisfy it has reached
the time limit (the error log has a record with `tag`): end the kernel then.

A PE whose memory is not mapped is reached through the network; `qp` chooses one of the queue pairs to it, any number
will do. What holds then for order, and for the local side of a copy, is in docs/semantics.md.
"""

import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import externs
from mori_triton.device.waits import EQ, GE, GT, LE, LT, NE, wait

SIGNAL_SET = tl.constexpr(abi.SIGNAL_SET)
SIGNAL_ADD = tl.constexpr(abi.SIGNAL_ADD)
ERROR_OVERFLOW = tl.constexpr(abi.ERROR_OVERFLOW)

_FETCH: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH)
_ADD: tl.constexpr = tl.constexpr(abi.ATOMIC_ADD)
_SET: tl.constexpr = tl.constexpr(abi.ATOMIC_SET)
_INC: tl.constexpr = tl.constexpr(abi.ATOMIC_INC)
_AND: tl.constexpr = tl.constexpr(abi.ATOMIC_AND)
_OR: tl.constexpr = tl.constexpr(abi.ATOMIC_OR)
_XOR: tl.constexpr = tl.constexpr(abi.ATOMIC_XOR)
_FETCH_ADD: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH_ADD)
_FETCH_INC: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH_INC)
_FETCH_AND: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH_AND)
_FETCH_OR: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH_OR)
_FETCH_XOR: tl.constexpr = tl.constexpr(abi.ATOMIC_FETCH_XOR)
_SWAP: tl.constexpr = tl.constexpr(abi.ATOMIC_SWAP)
_COMPARE_SWAP: tl.constexpr = tl.constexpr(abi.ATOMIC_COMPARE_SWAP)


# -------------------------------------------------------------------------------------------------------- who and where


@triton.jit
def my_pe(ctx):
    """This PE's index, int32."""
    return externs.ctx_my_pe(ctx)


@triton.jit
def n_pes(ctx):
    """Number of PEs, int32."""
    return externs.ctx_n_pes(ctx)


@triton.jit
def remote_ptr(ctx, ptr, pe):
    """`ptr` in the heap of `pe`: same pointer type, elementwise in both. Null if `pe` is out of range or cannot be
    reached by load and store, or if `ptr` is outside the heap. Carries no alignment: give `tl.multiple_of(..., 16)`
    where you know it.
    """
    return externs.ctx_ptr(ctx, ptr, pe).to(ptr.dtype)


@triton.jit
def prefetch(ctx):
    """A hint for a kernel of few programs that is to signal: load the context and the table of peers meanwhile."""
    return externs.ctx_prefetch(ctx)


# -------------------------------------------------------------------------------------------------------------- signals


@triton.jit
def _word(sig_ptr):
    """A signal's address or pointer; the element type of a pointer has to be as wide as the word, 64 bits."""
    if sig_ptr.dtype.is_ptr():
        tl.static_assert(
            sig_ptr.dtype.element_ty.primitive_bitwidth == 64, "signals are 64-bit words: use an int64 tensor"
        )
    return sig_ptr


@triton.jit
def signal_set(ctx, sig_ptr, value, pe, qp=0):
    """Release, then set the 64-bit word of `pe` to `value`. 0, or -1 if refused."""
    return externs.ctx_signal_set(ctx, _word(sig_ptr), value, pe, qp)


@triton.jit
def signal_add(ctx, sig_ptr, value, pe, qp=0):
    """Release, then add `value` to the 64-bit word of `pe`. 0, or -1 if refused."""
    return externs.ctx_signal_add(ctx, _word(sig_ptr), value, pe, qp)


@triton.jit
def signal_set_all(ctx, sig_ptr, value):
    """Release once, then set the 64-bit word of every PE (mine too) to `value`. 0, or -1 if the word is not in the
    heap; a PE that cannot be reached gets a record in the error log and no signal.
    """
    return externs.ctx_signal_set_all(ctx, _word(sig_ptr), value)


@triton.jit
def wait_eq(ctx, sig_ptr, value, peer=-1, tag=0):
    """Wait until my word == `value`, acquire; the value seen, of the pointer's element type: int64, uint64, int32 or
    uint32 (an address: int64). `peer` and `tag` only name the wait in a report.
    """
    return wait(ctx, sig_ptr, value, EQ, peer, tag)


@triton.jit
def wait_ne(ctx, sig_ptr, value, peer=-1, tag=0):
    """As `wait_eq`, until != `value`."""
    return wait(ctx, sig_ptr, value, NE, peer, tag)


@triton.jit
def wait_gt(ctx, sig_ptr, value, peer=-1, tag=0):
    """As `wait_eq`, until > `value`."""
    return wait(ctx, sig_ptr, value, GT, peer, tag)


@triton.jit
def wait_ge(ctx, sig_ptr, value, peer=-1, tag=0):
    """As `wait_eq`, until >= `value`."""
    return wait(ctx, sig_ptr, value, GE, peer, tag)


@triton.jit
def wait_lt(ctx, sig_ptr, value, peer=-1, tag=0):
    """As `wait_eq`, until < `value`."""
    return wait(ctx, sig_ptr, value, LT, peer, tag)


@triton.jit
def wait_le(ctx, sig_ptr, value, peer=-1, tag=0):
    """As `wait_eq`, until <= `value`."""
    return wait(ctx, sig_ptr, value, LE, peer, tag)


@triton.jit
def wait_all_ge(ctx, sig_ptr, num, value, tag=0):
    """Wait until each of my `num` words from `sig_ptr` is >= `value`; word i is written by PE i. Acquires. `value`, or
    something smaller if a word did not come in time (one record each).
    """
    return externs.ctx_wait_all_ge(ctx, _word(sig_ptr), num, value, tag)


@triton.jit
def arrive_last(ctx, counter_ptr, count):
    """1 in the program that calls it last of `count` programs of a launch, which then sees all their stores; 0 in the
    others. `counter_ptr`: a local uint32 that is 0 at the start, and again afterwards.
    """
    return externs.ctx_arrive_last(ctx, counter_ptr, count)


@triton.jit
def signal_set_all_last(ctx, sig_ptr, value, counter_ptr, count):
    """`arrive_last`, and of the program that is last `signal_set_all`, for what all have stored; 1 in it, 0 in others.
    Takes less than the two, but acquires nothing: what others have stored is seen here after a wait only.
    A word that is not in the heap and a PE that cannot be reached get a record in the error log, and no signal.
    """
    return externs.ctx_signal_set_all_last(ctx, _word(sig_ptr), value, counter_ptr, count)


# ----------------------------------------------------------------------------------------------------------------- data


@triton.jit
def put(ctx, dst_ptr, src_ptr, num_bytes, pe, qp=0):
    """Copy `num_bytes` from local `src_ptr` (any device memory) to `dst_ptr` of `pe`, all threads moving 16 bytes where
    both are aligned alike. The source may be reused on return. 0, or -1 if refused.
    """
    return externs.ctx_put_block(ctx, dst_ptr, src_ptr, num_bytes, pe, qp)


@triton.jit
def put_nbi(ctx, dst_ptr, src_ptr, num_bytes, pe, qp=0):
    """As `put`, but the source must stay as it is until `quiet`, `fence` or a signal."""
    return externs.ctx_put_nbi_block(ctx, dst_ptr, src_ptr, num_bytes, pe, qp)


@triton.jit
def get(ctx, dst_ptr, src_ptr, num_bytes, pe, qp=0):
    """Copy `num_bytes` from `src_ptr` of `pe` to local `dst_ptr` (any device memory). Every thread may read it on
    return.
    """
    return externs.ctx_get_block(ctx, dst_ptr, src_ptr, num_bytes, pe, qp)


@triton.jit
def get_nbi(ctx, dst_ptr, src_ptr, num_bytes, pe, qp=0):
    """As `get`, but what comes through the network may be read only after `quiet`."""
    return externs.ctx_get_nbi_block(ctx, dst_ptr, src_ptr, num_bytes, pe, qp)


@triton.jit
def put_value(ctx, dst_ptr, value, pe, qp=0):
    """Write one element of the pointer's type, 8 to 64 bits, in a single access; `dst_ptr` has to be aligned to it. 0,
    or -1 if refused. Triton passes a Python float as fp32, so a float64 element gets the rounded one.
    """
    tl.static_assert(dst_ptr.dtype.is_ptr(), "put_value takes a pointer: its element type says how wide")
    element: tl.constexpr = dst_ptr.dtype.element_ty
    width: tl.constexpr = element.primitive_bitwidth
    tl.static_assert(width >= 8, "values are 8, 16, 32 or 64 bits wide")
    bits = tl.cast(value, element)
    if width == 64:
        return externs.ctx_put_value_uint64(ctx, dst_ptr, bits.to(tl.uint64, bitcast=True), pe, qp)
    elif width == 32:
        return externs.ctx_put_value_uint32(ctx, dst_ptr, bits.to(tl.uint32, bitcast=True), pe, qp)
    elif width == 16:
        return externs.ctx_put_value_uint16(ctx, dst_ptr, bits.to(tl.uint16, bitcast=True), pe, qp)
    else:
        return externs.ctx_put_value_uint8(ctx, dst_ptr, bits.to(tl.uint8, bitcast=True), pe, qp)


@triton.jit
def put_small(ctx, dst_ptr, src_ptr, num_bytes, pe, qp=0):
    """As `put_nbi`, by one thread; 1, 2, 4 or 8 bytes travel in the request, so over a network `src_ptr` may be any
    device memory.
    """
    return externs.ctx_put_small(ctx, dst_ptr, src_ptr, num_bytes, pe, qp)


@triton.jit
def put_signal(ctx, dst_ptr, src_ptr, num_bytes, sig_ptr, value, op, pe, qp=0):
    """`put`, then a signal: `op` is `SIGNAL_SET` or `SIGNAL_ADD`. Zero bytes still signal; if either is refused neither
    is done.
    """
    return externs.ctx_put_signal_block(ctx, dst_ptr, src_ptr, num_bytes, _word(sig_ptr), value, op, pe, qp)


# -------------------------------------------------------------------------------------------------------------- atomics


@triton.jit
def _atomic(ctx, ptr, value, compare, op, pe, qp):
    tl.static_assert(ptr.dtype.is_ptr(), "atomics take a pointer: its element type says how wide")
    width: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(width == 32 or width == 64, "atomics are 32 or 64 bits wide")  # noqa: PLR1714
    if width == 64:
        return externs.ctx_atomic_uint64(ctx, ptr, value, compare, op, pe, qp)
    else:
        return externs.ctx_atomic_uint32(ctx, ptr, value, compare, op, pe, qp)


@triton.jit
def _atomic_fetch(ctx, ptr, value, compare, op, pe, qp):
    tl.static_assert(ptr.dtype.is_ptr(), "atomics take a pointer: its element type says how wide")
    width: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(width == 32 or width == 64, "atomics are 32 or 64 bits wide")  # noqa: PLR1714
    if width == 64:
        return externs.ctx_atomic_fetch_uint64(ctx, ptr, value, compare, op, pe, qp).to(ptr.dtype.element_ty)
    else:
        return externs.ctx_atomic_fetch_uint32(ctx, ptr, value, compare, op, pe, qp).to(ptr.dtype.element_ty)


@triton.jit
def atomic_add(ctx, ptr, value, pe, qp=0):
    """Add to a 32- or 64-bit integer of `pe`, relaxed. As all below: 0, or -1 if refused."""
    return _atomic(ctx, ptr, value, 0, _ADD, pe, qp)


@triton.jit
def atomic_inc(ctx, ptr, pe, qp=0):
    """Add 1."""
    return _atomic(ctx, ptr, 0, 0, _INC, pe, qp)


@triton.jit
def atomic_set(ctx, ptr, value, pe, qp=0):
    """Write atomically."""
    return _atomic(ctx, ptr, value, 0, _SET, pe, qp)


@triton.jit
def atomic_and(ctx, ptr, value, pe, qp=0):
    """Bitwise and."""
    return _atomic(ctx, ptr, value, 0, _AND, pe, qp)


@triton.jit
def atomic_or(ctx, ptr, value, pe, qp=0):
    """Bitwise or."""
    return _atomic(ctx, ptr, value, 0, _OR, pe, qp)


@triton.jit
def atomic_xor(ctx, ptr, value, pe, qp=0):
    """Bitwise exclusive or."""
    return _atomic(ctx, ptr, value, 0, _XOR, pe, qp)


@triton.jit
def atomic_from(ctx, ptr, value_ptr, op, pe, qp=0):
    """Operation `op` (`abi.ATOMIC_*`) on a 32- or 64-bit integer of `pe`, its operand read from local `value_ptr`, any
    device memory. What compares, compares with 0.
    """
    tl.static_assert(ptr.dtype.is_ptr(), "atomics take a pointer: its element type says how wide")
    width: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
    tl.static_assert(width == 32 or width == 64, "atomics are 32 or 64 bits wide")  # noqa: PLR1714
    return externs.ctx_atomic_from(ctx, ptr, value_ptr, width // 8, op, pe, qp)


@triton.jit
def atomic_fetch(ctx, ptr, pe, qp=0):
    """Read atomically. As all below: the old value, of the pointer's element type, in every thread; 0 if refused."""
    return _atomic_fetch(ctx, ptr, 0, 0, _FETCH, pe, qp)


@triton.jit
def atomic_fetch_add(ctx, ptr, value, pe, qp=0):
    """Add; the old value."""
    return _atomic_fetch(ctx, ptr, value, 0, _FETCH_ADD, pe, qp)


@triton.jit
def atomic_fetch_inc(ctx, ptr, pe, qp=0):
    """Add 1; the old value."""
    return _atomic_fetch(ctx, ptr, 0, 0, _FETCH_INC, pe, qp)


@triton.jit
def atomic_fetch_and(ctx, ptr, value, pe, qp=0):
    """Bitwise and; the old value."""
    return _atomic_fetch(ctx, ptr, value, 0, _FETCH_AND, pe, qp)


@triton.jit
def atomic_fetch_or(ctx, ptr, value, pe, qp=0):
    """Bitwise or; the old value."""
    return _atomic_fetch(ctx, ptr, value, 0, _FETCH_OR, pe, qp)


@triton.jit
def atomic_fetch_xor(ctx, ptr, value, pe, qp=0):
    """Bitwise exclusive or; the old value."""
    return _atomic_fetch(ctx, ptr, value, 0, _FETCH_XOR, pe, qp)


@triton.jit
def atomic_swap(ctx, ptr, value, pe, qp=0):
    """Exchange; the old value."""
    return _atomic_fetch(ctx, ptr, value, 0, _SWAP, pe, qp)


@triton.jit
def atomic_compare_swap(ctx, ptr, compare, value, pe, qp=0):
    """Write `value` if the word == `compare`; the old value."""
    return _atomic_fetch(ctx, ptr, value, compare, _COMPARE_SWAP, pe, qp)


# --------------------------------------------------------------------------------------------------------------- errors


@triton.jit
def report(ctx, kind, peer, tag, address, expected, seen):
    """Append one record of the program to this PE's error log, which the host raises as an exception. 0.

    `kind` is `ERROR_OVERFLOW` (`expected`: rows there is room for, `seen`: rows that came), `peer` a PE or -1, `tag` as
    `register_wait_site` gave it, `address` (or a pointer) what it is about.
    """
    return externs.ctx_report(ctx, kind, peer, tag, address, expected, seen)


# ---------------------------------------------------------------------------------------------------------------- order


@triton.jit
def fence(ctx, pe=-1, qp=-1):
    """Every earlier store of the program, to any PE, comes before every later one. As `quiet`."""
    return externs.ctx_fence(ctx, pe, qp)


@triton.jit
def quiet(ctx, pe=-1, qp=-1):
    """Every earlier put and store of the program is complete and visible to all PEs; sources may be reused, and what
    `get_nbi` asked for may be read. Of what went through the network only that to `pe` and on `qp`, negative: all. 0,
    or -1 if something failed.
    """
    return externs.ctx_quiet(ctx, pe, qp)


@triton.jit
def acquire(ctx):
    """What a relaxed read of the program (an atomic of `tl`) has seen released is visible to all its later loads. Waits
    do it.
    """
    return externs.ctx_acquire(ctx)


@triton.jit
def barrier_all(ctx):
    """All PEs: every store before is visible to every PE after. One program a PE (grid 1), streams in turn. 0, or -1 on
    time-out.
    """
    return externs.ctx_barrier_all(ctx)
