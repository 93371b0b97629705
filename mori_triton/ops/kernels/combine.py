"""The two kernels of a combine: copy (expert outputs to where peers can read them) and reduce (pull and sum a token's
rows).

Protocol, argued in docs/protocol.md: the program of `copy` that arrives last signals every peer; every program of
`reduce` waits for all PEs by itself, because it then reads what they wrote.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.ops.kernels.rows import as_bits, as_words, row_offset


@triton.jit(do_not_specialize=["top_k", "num_rows", "row_units", "num_pieces"])
def combine_copy_kernel(
    ctx,  # device context
    rows_ptr,  # [num_rows, h], any dtype, local, or None: the rows are in the registered buffer already
    weights_ptr,  # float32 [num_rows, top_k], local, or None
    combine_in_ptr,  # symmetric [capacity, h], dtype of rows
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k]
    total_ptr,  # int32 [1], local: rows received by the dispatch
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    epoch_ptr,  # int64 [1], local: this round, since its dispatch arrived
    arrivals_ptr,  # int32 [1], local: programs of this launch that are done
    top_k,
    num_rows,
    row_units,  # bytes of a row / ALIGN
    num_pieces,  # pieces of BLOCK words in a row, rounded up
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) moved at a time
    BLOCK_K: tl.constexpr,  # >= top_k
):
    """Put this PE's rows where peers read them; the last program tells every peer."""
    UNIT: tl.constexpr = (ALIGN + 3) // 4
    total = tl.minimum(tl.load(total_ptr), num_rows)
    if rows_ptr is not None:
        row_words = row_units * UNIT
        for item in range(tl.program_id(0), total * num_pieces, tl.num_programs(0)):
            row = item // num_pieces
            offs = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
            start = row_offset(row, row_words)
            words = tl.load(as_words(rows_ptr, ALIGN) + start + offs, mask=offs < row_words)
            tl.store(as_words(combine_in_ptr, ALIGN) + start + offs, words, mask=offs < row_words)
    if weights_ptr is not None:
        column = tl.arange(0, BLOCK_K)
        for row in range(tl.program_id(0), total, tl.num_programs(0)):
            offs_k = row_offset(row, top_k) + column
            weights = tl.load(weights_ptr + offs_k, mask=column < top_k)
            tl.store(combine_in_weights_ptr + offs_k, weights, mask=column < top_k)
    if shmem.arrive_last(ctx, arrivals_ptr, tl.num_programs(0)) != 0:
        shmem.signal_set_all(ctx, signals_ptr + shmem.my_pe(ctx), tl.load(epoch_ptr))


@triton.jit(do_not_specialize=["num_tokens", "top_k", "capacity", "row_units", "num_pieces"])
def combine_reduce_kernel(
    ctx,  # device context
    combine_in_ptr,  # symmetric [capacity, h], dtype of out
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k], or None
    forward_ptr,  # int32 [M, top_k], local: of the dispatch's route kernel
    signals_ptr,  # symmetric int64 [n_pes]
    epoch_ptr,  # int64 [1], local: this round
    out_ptr,  # [M, h], local, aligned to 16 bytes
    out_weights_ptr,  # float32 [M, top_k], local
    num_tokens,
    top_k,
    capacity,
    row_units,  # bytes of a row / ALIGN
    num_pieces,  # pieces of BLOCK elements in a row, rounded up
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes
    BLOCK: tl.constexpr,  # elements summed at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    TAG: tl.constexpr,  # names this wait in error records
):
    """Sum a token's rows over its distinct destination PEs, in the order of its ids, in float32, rounded once.

    Nothing is written when a wait times out. The epoch is only read here: this kernel's programs start at different
    times.
    """
    UNIT: tl.constexpr = ALIGN // (out_ptr.dtype.element_ty.primitive_bitwidth // 8)
    hidden = row_units * UNIT
    epoch = tl.load(epoch_ptr)
    seen = shmem.wait_all_ge(ctx, signals_ptr, shmem.n_pes(ctx), epoch, TAG)
    if seen >= epoch:
        column = tl.arange(0, BLOCK_K)
        mask_k = column < top_k
        for item in range(tl.program_id(0), num_tokens * num_pieces, tl.num_programs(0)):
            token = item // num_pieces
            piece = item % num_pieces
            offs = piece * BLOCK + tl.arange(0, BLOCK)
            mask = offs < hidden
            row_sum = tl.zeros([BLOCK], tl.float32)
            for k in range(top_k):
                target = tl.load(forward_ptr + row_offset(token, top_k) + k)
                if target >= 0:
                    there = as_bits(shmem.remote_ptr(ctx, combine_in_ptr, target // capacity))
                    there += row_offset(target % capacity, hidden)
                    bits = tl.load(there + offs, mask=mask, other=0)
                    row_sum += bits.to(out_ptr.dtype.element_ty, bitcast=True).to(tl.float32)
            out = out_ptr + row_offset(token, hidden)
            tl.store(out + offs, row_sum.to(out_ptr.dtype.element_ty), mask=mask)
            if combine_in_weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
                if piece == 0:
                    weight_sum = tl.zeros([BLOCK_K], tl.float32)
                    for k in range(top_k):
                        target = tl.load(forward_ptr + row_offset(token, top_k) + k)
                        if target >= 0:
                            from_pe = shmem.remote_ptr(ctx, combine_in_weights_ptr, target // capacity)
                            from_pe += row_offset(target % capacity, top_k)
                            weight_sum += tl.load(from_pe + column, mask=mask_k, other=0.0)
                    tl.store(out_weights_ptr + row_offset(token, top_k) + column, weight_sum, mask=mask_k)
