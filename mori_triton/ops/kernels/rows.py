"""Row addressing, row copies and row sums shared by the dispatch and combine kernels."""

import triton
import triton.language as tl

from mori_triton.device import shmem


@triton.jit
def row_offset(row, row_size):
    """Offset of `row` in elements, in 64 bits: 65536 rows of 7168 elements pass 2^31."""
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
    ctx,
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
    BLOCK_K: tl.constexpr,
):
    """Write a token's ids, weights and `source` to its slots on all its PEs at once."""
    # [BLOCK_K targets, BLOCK_K columns]
    to = tl.arange(0, BLOCK_K)[:, None]
    column = tl.arange(0, BLOCK_K)[None, :]
    row = row_offset(token, top_k)
    target = tl.load(forward_ptr + row + to, mask=to < top_k, other=-1)
    sent = target >= 0
    pe = tl.where(sent, target, 0) // capacity
    slot = tl.where(sent, target, 0) % capacity
    mask = sent & (column < top_k)
    there = row_offset(slot, top_k) + column
    # all loads before the first store, which could be to what they read for all that the compiler knows
    to_indices = shmem.remote_ptr(ctx, recv_indices_ptr, pe) + there
    to_sources = shmem.remote_ptr(ctx, recv_sources_ptr, pe) + slot
    ids = tl.load(indices_ptr + row + column + to * 0, mask=mask)
    if weights_ptr is not None:
        to_weights = shmem.remote_ptr(ctx, recv_weights_ptr, pe) + there
        weights = tl.load(weights_ptr + row + column + to * 0, mask=mask)
        tl.store(to_weights, weights, mask=mask)
    tl.store(to_indices, ids, mask=mask)
    tl.store(to_sources, source, mask=sent)


@triton.jit
def copy_scales(
    ctx,
    forward_ptr,
    scales_ptr,
    recv_scales_ptr,
    token,
    top_k,
    capacity,
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
            there = as_words(shmem.remote_ptr(ctx, recv_scales_ptr, target // capacity), SCALE_ALIGN)
            there += row_offset(target % capacity, scale_words)
            tl.store(there + offs, scales, mask=offs < scale_words)


@triton.jit
def sum_rows(ctx, rows_ptr, forward_ptr, token, top_k, capacity, row_size, offs, mask, CHUNK: tl.constexpr):
    """float32 sum, over a token's PEs in the order of its ids, of columns `offs` of the rows that they hold for it.

    `rows_ptr`: symmetric [capacity, row_size]. The rows of a chunk are all in flight before the first is added.
    """
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    total = tl.zeros(offs.shape, tl.float32)
    for first in range(0, top_k, CHUNK):
        targets = load_targets(forward_ptr, token, top_k, first, CHUNK)
        rows = ()
        for j in tl.static_range(CHUNK):
            target = tl.maximum(targets[j], 0)
            there = as_bits(shmem.remote_ptr(ctx, rows_ptr, target // capacity))
            there += row_offset(target % capacity, row_size)
            rows += (tl.load(there + offs, mask=mask & (targets[j] >= 0), other=0),)  # type: ignore[assignment]
        for j in tl.static_range(CHUNK):
            # a row that is absent adds 0, which changes no sum that starts at 0
            total += rows[j].to(dtype, bitcast=True).to(tl.float32)
    return total
