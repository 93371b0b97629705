"""The kernels of a combine whose rows are made of small floats: encode (bfloat16 rows to such rows where peers can read
them, signal, wait) and decode (pull and sum a token's rows).

They stand in for `copy` and `reduce` of `kernels.combine` and keep their protocol. A payload that is of a small format
already is copied by `copy`, and summed here.
"""

import triton
import triton.language as tl

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
    as_words,
    at_peer,
    load_targets,
    peer_table,
    program_share,
    row_offset,
    split_target,
    sum_rows,
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
def store_codes(rows_ptr, row, num_bytes, values, first_block, FORMAT: tl.constexpr, ALIGN: tl.constexpr):
    """Encode `[blocks, BLOCK]` values to a row of `num_bytes` bytes, from block `first_block` on.

    `rows_ptr`: uint8 [rows, num_bytes], a multiple of ALIGN as `num_bytes` is.
    """
    codes = encode(values, FORMAT)
    blocks: tl.constexpr = values.shape[0]
    width: tl.constexpr = BLOCK // 2 if FORMAT == "e2m1" else BLOCK
    if FORMAT == "e2m1":
        codes = pack_nibbles(tl.reshape(codes, [blocks, width, 2]))
    offs = (first_block + tl.arange(0, blocks))[:, None] * width + tl.arange(0, width)[None, :]
    # the hint holds on to the sum: on an argument of this function it would be lost
    to_row = tl.multiple_of(rows_ptr + row_offset(row, num_bytes), ALIGN)
    tl.store(to_row + offs, codes, mask=offs < num_bytes)


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
                store_codes(combine_in_ptr, row, num_bytes, values, piece * BLOCKS, FORMAT, WIRE_ALIGN)
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
    bases,
    heap,
    rows_ptr,
    scales_ptr,
    forward_ptr,
    token,
    top_k,
    capacity,
    row_words,
    num_blocks,
    block,
    offs,
    FORMAT: tl.constexpr,
    ALIGN: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """float32 sum, over a token's PEs in the order of its ids, of words `offs` of the rows that they hold for it.

    `rows_ptr`: symmetric [capacity, row_words] in words of min(ALIGN, 4) bytes, given as bytes; `offs`: [blocks, words
    of a block], in the blocks `block`; `bases`, `heap`: of `peer_table`. The result is as `unpack` leaves it, times the
    scales. The rows of a chunk are all in flight before the first is added.
    """
    NUM_BYTES: tl.constexpr = min(ALIGN, 4)
    WORD: tl.constexpr = tl.uint32 if NUM_BYTES == 4 else tl.uint16 if NUM_BYTES == 2 else tl.uint8
    mask = offs < row_words
    total = unpack(tl.zeros(offs.shape, WORD), FORMAT)
    for first in range(0, top_k, CHUNK):
        targets = load_targets(forward_ptr, token, top_k, first, CHUNK)
        rows = ()
        scales = ()
        for j in tl.static_range(CHUNK):
            pe, slot = split_target(tl.maximum(targets[j], 0), capacity)
            there = as_words(at_peer(bases, heap, rows_ptr, pe), ALIGN) + row_offset(slot, row_words)
            rows += (tl.load(there + offs, mask=mask & (targets[j] >= 0)),)  # type: ignore[assignment]
            if scales_ptr is not None:
                # [blocks, 1]
                its_scales = at_peer(bases, heap, scales_ptr, pe) + row_offset(slot, num_blocks) + block[:, None]
                known = (block < num_blocks)[:, None] & (targets[j] >= 0)
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
        "capacity", "row_units", "out_units", "num_pieces", "combine_in_weights_ptr", "scales_ptr",
    ]
)  # fmt: skip
def combine_decode_kernel(
    ctx,  # device context
    combine_in_ptr,  # symmetric [capacity, wire row], bytes
    forward_ptr,  # int32 [M, top_k], local: of the dispatch's route kernel
    control_ptr,  # int64 [CONTROL_WORDS], local
    out_ptr,  # bfloat16 [M, h], or numbers of FORMAT as bytes, local, aligned to 16 bytes
    out_weights_ptr,  # float32 [M, top_k], local
    num_tokens,
    top_k,
    capacity,
    row_units,  # bytes of a wire row / ALIGN
    out_units,  # bytes of a row of out / OUT_ALIGN
    num_pieces,  # pieces of BLOCKS blocks in a row, rounded up
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k], or None
    scales_ptr,  # symmetric float32 [capacity, blocks of a row], or None: rows have no scales
    FORMAT: tl.constexpr,  # of the wire rows
    ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides a wire row's bytes
    OUT_ALIGN: tl.constexpr,  # likewise for a row of out
    BLOCKS: tl.constexpr,  # blocks summed at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    CHUNK: tl.constexpr,  # rows of a token that are in flight at a time
):
    """Sum a token's rows over its distinct destination PEs, in the order of its ids, in float32, rounded once.

    Nothing is written when the wait before it timed out.
    """
    if not is_broken(control_ptr):
        NUM_BYTES: tl.constexpr = min(ALIGN, 4)
        WORDS: tl.constexpr = BLOCK * (4 if FORMAT == "e2m1" else 8) // 8 // NUM_BYTES
        bases, heap = peer_table(ctx)
        row_words = row_units * (ALIGN // NUM_BYTES)
        first_piece, piece_step, first_token, token_step = program_share(num_tokens, num_pieces)
        for piece in range(first_piece, num_pieces, piece_step):
            block = piece * BLOCKS + tl.arange(0, BLOCKS)
            offs = block[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
            columns = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
            for token in range(first_token, num_tokens, token_step):
                if out_ptr.dtype.element_ty == tl.uint8:
                    num_bytes = out_units * OUT_ALIGN
                    total = sum_small_rows(
                        bases, heap, combine_in_ptr, None, forward_ptr, token, top_k, capacity, row_words, 0,
                        block, offs, FORMAT, ALIGN, CHUNK,
                    )  # fmt: skip
                    total = tl.reshape(in_order(total, FORMAT, NUM_BYTES) * lift(FORMAT), [BLOCKS, BLOCK])
                    store_codes(out_ptr, token, num_bytes, total, piece * BLOCKS, FORMAT, OUT_ALIGN)
                else:
                    hidden = out_units * (OUT_ALIGN // 2)
                    total = sum_small_rows(
                        bases, heap, combine_in_ptr, scales_ptr, forward_ptr, token, top_k, capacity, row_words,
                        (hidden + (BLOCK - 1)) // BLOCK, block, offs, FORMAT, ALIGN, CHUNK,
                    )  # fmt: skip
                    total = tl.reshape(in_order(total, FORMAT, NUM_BYTES) * lift(FORMAT), [BLOCKS, BLOCK])
                    out = tl.multiple_of(tl.cast(out_ptr, tl.pointer_type(tl.int16), bitcast=True), 16)
                    rounded = total.to(tl.bfloat16).to(tl.int16, bitcast=True)
                    tl.store(out + row_offset(token, hidden) + columns, rounded, mask=columns < hidden)
                if combine_in_weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
                    if token % num_pieces == piece:
                        column = tl.arange(0, BLOCK_K)
                        sums = sum_rows(
                            bases, heap, combine_in_weights_ptr, forward_ptr, token, top_k, capacity, top_k,
                            column, column < top_k, CHUNK,
                        )  # fmt: skip
                        tl.store(out_weights_ptr + row_offset(token, top_k) + column, sums, mask=column < top_k)
