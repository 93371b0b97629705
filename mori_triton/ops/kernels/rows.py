"""Row addressing, row copies and row sums shared by the dispatch and combine kernels."""

import triton
import triton.language as tl

from mori_triton import abi

# where the context holds them, in 64-bit words
_HEAP_BASE = tl.constexpr(abi.CONTEXT_FIELDS["heap_base"].offset // 8)
_PEER_BASES = tl.constexpr(abi.CONTEXT_FIELDS["peer_bases"].offset // 8)


@triton.jit
def row_offset(row, row_size):
    """Offset of `row` in elements, in 64 bits: what 8 PEs receive of 65536 tokens of 7168 elements passes 2^31."""
    return tl.cast(row, tl.int64) * row_size


@triton.jit
def program_share(num_rows, num_pieces):
    """What this program does of `num_rows` rows in `num_pieces` pieces: (first piece, step, first row, step).

    A program keeps to one piece where there are programs enough, and neighbours do the pieces of one row. Nothing here
    multiplies rows by pieces, which could pass 2^31. Programs beyond the last whole row of programs do nothing.
    """
    lanes = tl.maximum(tl.num_programs(0) // num_pieces, 1)
    lane = tl.program_id(0) // num_pieces
    first_row = tl.where(lane < lanes, lane, num_rows)
    return tl.program_id(0) % num_pieces, tl.minimum(tl.num_programs(0), num_pieces), first_row, lanes


@triton.jit
def peer_table(ctx):
    """(table of where this PE sees each PE's heap, where its own is), for `at_peer`: loaded once for many rows.

    `shmem.remote_ptr` checks more and would load it again after every store, which could be to the context for all that
    the compiler knows.
    """
    return tl.load(ctx + _PEER_BASES).to(tl.pointer_type(tl.int64)), tl.load(ctx + _HEAP_BASE)


@triton.jit
def at_peer(bases_ptr, heap, ptr, pe):
    """`ptr`, a region of the op, in the heap of `pe`; elementwise in `pe`. An op reaches every PE, or is not made."""
    return (ptr.to(tl.int64) - heap + tl.load(bases_ptr + pe)).to(ptr.dtype)


@triton.jit
def split_target(target, capacity, inverse, shift):
    """(PE, slot) of an entry of `forward` that is not -1: `capacity`'s quotient and rest, exact.

    `inverse`, `shift`: of `ops.calls.inverse_of(capacity)`; a division would be most of what a program computes.
    """
    quotient = tl.umulhi(target.to(tl.uint32), inverse.to(tl.uint32)) >> shift.to(tl.uint32)
    return quotient.to(tl.int32), target - quotient.to(tl.int32) * capacity


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


@triton.jit
def load_targets(forward_ptr, token, top_k, first, CHUNK: tl.constexpr):
    """Where ids `first` to `first + CHUNK - 1` of a token go, as a tuple of scalars; -1: nowhere. All in flight."""
    targets = ()
    for j in tl.static_range(CHUNK):
        entry = forward_ptr + row_offset(token, top_k) + first + j
        targets += (tl.load(entry, mask=first + j < top_k, other=-1),)  # type: ignore[assignment]
    return targets


@triton.jit
def copy_metadata(
    bases_ptr,
    heap,
    forward_ptr,
    indices_ptr,
    weights_ptr,
    recv_indices_ptr,
    recv_weights_ptr,
    recv_sources_ptr,
    token,
    source,
    top_k,
    capacity,
    inverse,
    shift,
    BLOCK_K: tl.constexpr,
):
    """Write a token's ids, weights and `source` to its slots on all its PEs at once."""
    # [BLOCK_K targets, BLOCK_K columns]
    to = tl.arange(0, BLOCK_K)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    row = row_offset(token, top_k)
    target = tl.load(forward_ptr + row + to, mask=to < top_k, other=-1)
    sent = target >= 0
    pe, slot = split_target(tl.maximum(target, 0), capacity, inverse, shift)
    mask = sent & (column < top_k)
    there = row_offset(slot, top_k) + column
    # all loads before the first store, which could be to what they read for all that the compiler knows
    to_indices = at_peer(bases_ptr, heap, recv_indices_ptr, pe) + there
    to_sources = at_peer(bases_ptr, heap, recv_sources_ptr, pe) + slot
    ids = tl.load(indices_ptr + row + column + to * 0, mask=mask)
    if weights_ptr is not None:
        to_weights = at_peer(bases_ptr, heap, recv_weights_ptr, pe) + there
        weights = tl.load(weights_ptr + row + column + to * 0, mask=mask)
        tl.store(to_weights, weights, mask=mask)
    tl.store(to_indices, ids, mask=mask)
    tl.store(to_sources, source, mask=sent)


@triton.jit
def copy_scales(
    bases_ptr,
    heap,
    forward_ptr,
    scales_ptr,
    recv_scales_ptr,
    token,
    top_k,
    capacity,
    inverse,
    shift,
    scale_units,
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """Write a token's scale row, opaque bytes, to its slots."""
    SCALE_UNIT: tl.constexpr = (SCALE_ALIGN + 3) // 4
    scale_words = scale_units * SCALE_UNIT
    offs = tl.arange(0, SCALE_BLOCK)
    scales = tl.load(as_words(scales_ptr, SCALE_ALIGN) + row_offset(token, scale_words) + offs, mask=offs < scale_words)
    for k in range(top_k):
        target = tl.load(forward_ptr + row_offset(token, top_k) + k)
        if target >= 0:
            pe, slot = split_target(target, capacity, inverse, shift)
            there = as_words(at_peer(bases_ptr, heap, recv_scales_ptr, pe), SCALE_ALIGN)
            there += row_offset(slot, scale_words)
            tl.store(there + offs, scales, mask=offs < scale_words)


@triton.jit
def sum_rows(
    bases_ptr,
    heap,
    rows_ptr,
    forward_ptr,
    token,
    top_k,
    capacity,
    row_size,
    offs,
    mask,
    CHUNK: tl.constexpr,
    EVEN: tl.constexpr,
    works,
    inverse,
    shift,
):
    """float32 sum, over a token's PEs in the order of its ids, of columns `offs` of the rows that they hold for it.

    `rows_ptr`: symmetric [capacity, row_size]. The rows of a chunk are all in flight before the first is added. `EVEN`:
    `mask` is true everywhere. `inverse`, `shift`: see `split_target`. Reads no row, and sums nothing of use, unless it
    `works`.
    """
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    total = tl.zeros(offs.shape, tl.float32)
    for first in range(0, top_k, CHUNK):
        targets = load_targets(forward_ptr, token, top_k, first, CHUNK)
        rows = ()
        for j in tl.static_range(CHUNK):
            # what a dispatch that failed left there is no address
            target = tl.maximum(tl.where(works, targets[j], -1), 0)
            pe, slot = split_target(target, capacity, inverse, shift)
            there = as_bits(at_peer(bases_ptr, heap, rows_ptr, pe)) + row_offset(slot, row_size)
            present = (targets[j] >= 0) & works
            row = tl.load(there + offs, mask=present) if EVEN else tl.load(there + offs, mask=mask & present)
            rows += (row,)  # type: ignore[assignment]
        for j in tl.static_range(CHUNK):
            # a branch, across which the loads are not moved to after the first additions
            if targets[j] >= 0:
                total += rows[j].to(dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit
def sum_weights(
    bases_ptr,
    heap,
    weights_ptr,
    forward_ptr,
    out_weights_ptr,
    token,
    top_k,
    capacity,
    works,
    inverse,
    shift,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum a token's weight rows, symmetric float32 [capacity, top_k], as `sum_rows` does, and write the sums."""
    column = tl.arange(0, BLOCK_K)
    mask = (column < top_k) & works
    sums = sum_rows(
        bases_ptr, heap, weights_ptr, forward_ptr, token, top_k, capacity, top_k, column, mask, CHUNK, False, works,
        inverse, shift,
    )  # fmt: skip
    tl.store(out_weights_ptr + row_offset(token, top_k) + column, sums, mask=mask)
