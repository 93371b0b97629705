"""The kernels of a combine whose rows are made of small floats: encode (bfloat16 rows to such rows where peers can read
them, signal, wait) and decode (pull and sum a token's rows).

They stand in for `copy` and `reduce` of `kernels.combine` and keep their protocol. A payload that is of a small format
already is copied by `copy`, and summed here.
"""

import triton
import triton.language as tl

from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.formats import BLOCK as _BLOCK
from mori_triton.ops.formats import MIN_SCALE as _MIN_SCALE
from mori_triton.ops.kernels.finish import (
    COMBINE_ARRIVALS,
    COMBINE_EPOCH,
    finish_combine,
    is_broken,
    signal_last,
)
from mori_triton.ops.kernels.formats import encode, in_order, lift, pack_nibbles, unpack
from mori_triton.ops.kernels.rows import (
    as_bits,
    as_words,
    at_peer,
    load_targets,
    peer_table,
    program_share,
    row_offset,
    split_target,
    sum_weights,
)

BLOCK = tl.constexpr(_BLOCK)
MIN_SCALE = tl.constexpr(_MIN_SCALE)


@triton.jit
def block_scales(values, FORMAT: tl.constexpr):
    """Scales of `[blocks, BLOCK]` float32 values that were bfloat16: `[blocks]`, see `ops.formats.encode_rows`.

    Compares magnitudes as integers, where NaNs are the largest and nothing depends on how a GPU's maximum takes them.
    """
    magnitude = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    is_nan = magnitude > 0x7F800000
    # an infinity counts as the largest bfloat16 number
    magnitude = tl.minimum(magnitude, 0x7F7F0000)
    # no code of e2m1 says NaN: the scale does, for the whole block
    magnitude = tl.where(is_nan, 0x7FC00000 if FORMAT == "e2m1" else 0, magnitude)
    largest_number: tl.constexpr = 6.0 if FORMAT == "e2m1" else 448.0
    largest = tl.max(magnitude, 1).to(tl.float32, bitcast=True)
    scales = tl.div_rn(largest, tl.full(largest.shape, largest_number, tl.float32))
    scales = tl.where(scales < MIN_SCALE, MIN_SCALE, scales)
    return tl.where(largest == 0.0, 1.0, scales)


@triton.jit
def store_codes(rows_ptr, row, num_bytes, values, first_block, works, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """Encode `[blocks, BLOCK]` values to a row of `num_bytes` bytes, from block `first_block` on.

    `rows_ptr`: uint8 [rows, num_bytes], a multiple of ALIGN as `num_bytes` is. Stores nothing unless it `works`.
    """
    codes = encode(values, FORMAT)
    blocks: tl.constexpr = values.shape[0]
    width: tl.constexpr = BLOCK // 2 if FORMAT == "e2m1" else BLOCK
    if FORMAT == "e2m1":
        codes = pack_nibbles(tl.reshape(codes, [blocks, width, 2]))
    offs = (first_block + tl.arange(0, blocks))[:, None] * width + tl.arange(0, width)[None, :]
    # the hint holds on to the sum: on an argument of this function it would be lost
    to_row = tl.multiple_of(rows_ptr + row_offset(row, num_bytes), ALIGN)
    tl.store(to_row + offs, codes, mask=(offs < num_bytes) & works)


@triton.jit(
    do_not_specialize=[
        "ctx", "rows_ptr", "combine_in_ptr", "combine_in_weights_ptr", "total_ptr", "signals_ptr", "control_ptr",
        "top_k", "num_rows", "row_units", "num_pieces", "weights_ptr", "scales_ptr",
    ]
)  # fmt: skip
def combine_encode_kernel(
    ctx,  # device context
    rows_ptr,  # bfloat16 [num_rows, h], bytes, local
    combine_in_ptr,  # symmetric [capacity, wire row], bytes
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k]
    total_ptr,  # int32 [1], local: rows received by the dispatch
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    control_ptr,  # int64 [CONTROL_WORDS], local
    top_k,
    num_rows,
    row_units,  # bytes of a row / ALIGN
    num_pieces,  # pieces of BLOCKS blocks in a row, rounded up
    # one word more and Triton 3.6 cannot assemble this for gfx1250, see test_gfx1250_whatever_arguments_are_absent
    weights_ptr,  # float32 [num_rows, top_k], local, or None
    scales_ptr,  # symmetric float32 [capacity, blocks of a row], or None: the codec has no scales
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes and the address of every row
    WIRE_ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides a wire row's bytes
    BLOCKS: tl.constexpr,  # blocks encoded at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    WAIT: tl.constexpr,  # whether the last program also waits for the peers
    TAG: tl.constexpr,  # names this wait in error records
):
    """Encode this PE's rows to where peers read them; the last program tells every peer."""
    gdc_wait()
    if not is_broken(control_ptr):
        total = tl.minimum(tl.load(total_ptr), num_rows)
        hidden = row_units * (ALIGN // 2)
        # exact, and says what divides it
        num_bytes = (hidden + 1) // 2 if FORMAT == "e2m1" else hidden
        num_bytes = num_bytes // WIRE_ALIGN * WIRE_ALIGN
        num_blocks = (hidden + (BLOCK - 1)) // BLOCK
        rows_bits = tl.multiple_of(tl.cast(rows_ptr, tl.pointer_type(tl.int16), bitcast=True), ALIGN)
        first_piece, piece_step, first_row, row_step = program_share(total, num_pieces)
        for piece in range(first_piece, num_pieces, piece_step):
            block = piece * BLOCKS + tl.arange(0, BLOCKS)
            offs = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            for row in range(first_row, total, row_step):
                bits = tl.load(rows_bits + row_offset(row, hidden) + offs, mask=offs < hidden, other=0)
                values = bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
                if scales_ptr is not None:
                    scales = block_scales(values, FORMAT)
                    tl.store(scales_ptr + row_offset(row, num_blocks) + block, scales, mask=block < num_blocks)
                    # a product rounds alike everywhere, and is cheaper than a quotient
                    values = values * tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), scales)[:, None]
                store_codes(combine_in_ptr, row, num_bytes, values, piece * BLOCKS, True, FORMAT, WIRE_ALIGN)
        if weights_ptr is not None:
            column = tl.arange(0, BLOCK_K)
            for row in range(tl.program_id(0), total, tl.num_programs(0)):
                offs_k = row_offset(row, top_k) + column
                weights = tl.load(weights_ptr + offs_k, mask=column < top_k)
                tl.store(combine_in_weights_ptr + offs_k, weights, mask=column < top_k)
        last = signal_last(ctx, signals_ptr, control_ptr, COMBINE_ARRIVALS, COMBINE_EPOCH)
        if WAIT:  # noqa: SIM102 - Triton decides this one while compiling
            if last != 0:
                finish_combine(ctx, signals_ptr, control_ptr, TAG)


@triton.jit
def sum_small_rows(
    bases_ptr,
    heap,
    rows_ptr,
    scales_ptr,
    forward_ptr,
    token,
    top_k,
    capacity,
    inverse,
    shift,
    block,
    offs,
    works,
    ROW_WORDS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """float32 sum, over a token's PEs in the order of its ids, of words `offs` of the rows that they hold for it.

    `rows_ptr`: symmetric [capacity, ROW_WORDS] in words of min(ALIGN, 4) bytes, given as bytes; `offs`: [blocks, words
    of a block], in the blocks `block`. The other arguments are those of `rows.sum_rows`, and so is the order of loads
    and sums. The result is as `unpack` leaves it, times the scales.
    """
    NUM_BYTES: tl.constexpr = min(ALIGN, 4)
    WORD: tl.constexpr = tl.uint32 if NUM_BYTES == 4 else tl.uint16 if NUM_BYTES == 2 else tl.uint8
    total = unpack(tl.zeros(offs.shape, WORD), FORMAT)
    for first in range(0, top_k, CHUNK):
        targets = load_targets(forward_ptr, token, top_k, first, CHUNK)
        rows = ()
        scales = ()
        for j in tl.static_range(CHUNK):
            # of a broken op `forward` may hold anything: it gives no addresses
            target = tl.where(works, targets[j], -1)
            pe, slot = split_target(tl.maximum(target, 0), capacity, inverse, shift)
            present = target >= 0
            there = as_words(at_peer(bases_ptr, heap, rows_ptr, pe), ALIGN) + row_offset(slot, ROW_WORDS)
            rows += (tl.load(there + offs, mask=(offs < ROW_WORDS) & present),)  # type: ignore[assignment]
            if scales_ptr is not None:
                # [blocks, 1]
                its_scales = at_peer(bases_ptr, heap, scales_ptr, pe) + row_offset(slot, NUM_BLOCKS) + block[:, None]
                known = (block < NUM_BLOCKS)[:, None] & present
                scales += (tl.load(its_scales, mask=known),)  # type: ignore[assignment]
        for j in tl.static_range(CHUNK):
            # a branch, behind which no load may sink: all are in flight first
            if targets[j] >= 0:
                values = unpack(rows[j].to(WORD, bitcast=True), FORMAT)
                if scales_ptr is not None:
                    factor = scales[j]
                    for _ in tl.static_range(len(values.shape) - 2):
                        factor = tl.expand_dims(factor, -1)
                    values *= factor
                total += values
    return total


@triton.jit(
    do_not_specialize=[
        "ctx", "combine_in_ptr", "forward_ptr", "control_ptr", "out_ptr", "out_weights_ptr", "num_tokens", "top_k",
        "capacity", "inverse", "shift", "combine_in_weights_ptr", "scales_ptr",
    ]
)  # fmt: skip
def combine_decode_kernel(
    ctx,  # device context
    combine_in_ptr,  # symmetric [capacity, ROW_BYTES], bytes
    forward_ptr,  # int32 [M, top_k], local: of the dispatch's route kernel
    control_ptr,  # int64 [CONTROL_WORDS], local
    out_ptr,  # bfloat16 [M, HIDDEN], or numbers of FORMAT as bytes [M, ROW_BYTES], local, aligned to 16 bytes
    out_weights_ptr,  # float32 [M, top_k], local
    num_tokens,
    top_k,  # not a constant: without the loop over chunks Triton lays each row out anew before it adds it
    capacity,  # rows of a receive buffer
    inverse,  # of `ops.calls.inverse_of(capacity)`
    shift,
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k], or None
    scales_ptr,  # symmetric float32 [capacity, blocks of a row], or None: rows have no scales
    FORMAT: tl.constexpr,  # of the rows
    HIDDEN: tl.constexpr,  # numbers in a row
    ROW_BYTES: tl.constexpr,  # that hold them
    ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides ROW_BYTES
    BLOCKS: tl.constexpr,  # blocks summed at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    CHUNK: tl.constexpr,  # rows of a token that are in flight at a time
):
    """Sum a token's rows over its distinct destination PEs, in the order of its ids, in float32, rounded once.

    Programs (piece, token). Nothing is written when the wait before it timed out.
    """
    bases, heap = peer_table(ctx)
    gdc_wait()
    gdc_launch_dependents()
    # a number, not a branch around everything, so that the first loads need not wait for this one
    works = is_broken(control_ptr) == 0
    NUM_BYTES: tl.constexpr = min(ALIGN, 4)
    WORDS: tl.constexpr = BLOCK * (4 if FORMAT == "e2m1" else 8) // 8 // NUM_BYTES
    NUM_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    NUM_PIECES: tl.constexpr = (NUM_BLOCKS + BLOCKS - 1) // BLOCKS
    for piece in range(tl.program_id(0), NUM_PIECES, tl.num_programs(0)):
        block = piece * BLOCKS + tl.arange(0, BLOCKS)
        offs = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
            total = sum_small_rows(
                bases, heap, combine_in_ptr, scales_ptr, forward_ptr, token, top_k, capacity, inverse, shift, block,
                offs, works, ROW_BYTES // NUM_BYTES, NUM_BLOCKS, FORMAT, ALIGN, CHUNK,
            )  # fmt: skip
            total = tl.reshape(in_order(total, FORMAT, NUM_BYTES) * lift(FORMAT), [BLOCKS, BLOCK])
            if out_ptr.dtype.element_ty == tl.uint8:
                store_codes(out_ptr, token, ROW_BYTES, total, piece * BLOCKS, works, FORMAT, ALIGN)
            else:
                columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
                out = as_bits(out_ptr) + row_offset(token, HIDDEN)
                rounded = total.to(tl.bfloat16).to(tl.int16, bitcast=True)
                tl.store(out + columns, rounded, mask=(columns < HIDDEN) & works)
            if combine_in_weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
                if token % NUM_PIECES == piece:
                    sum_weights(
                        bases, heap, combine_in_weights_ptr, forward_ptr, out_weights_ptr, token, top_k, capacity,
                        works, inverse, shift, BLOCK_K, CHUNK,
                    )  # fmt: skip
