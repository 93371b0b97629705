"""The kernels of a combine: copy (expert outputs to where peers can read them, signal, wait), recv (the wait alone) and
reduce (pull and sum a token's rows).

Protocol, argued in docs/protocol.md: the program of `copy` that arrives last signals every peer and waits for all of
them; `reduce` starts when that kernel has ended, so none of its programs waits.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.finish import (
    COMBINE_ARRIVALS,
    COMBINE_EPOCH,
    finish_combine,
    is_broken,
    signal_last,
)
from mori_triton.ops.kernels.rows import as_bits, as_words, peer_table, row_offset, sum_rows, sum_weights


@triton.jit(
    do_not_specialize=[
        "ctx", "rows_ptr", "weights_ptr", "combine_in_ptr", "combine_in_weights_ptr", "total_ptr", "signals_ptr",
        "control_ptr", "top_k", "num_rows",
    ]
)  # fmt: skip
def combine_copy_kernel(
    ctx,  # device context
    rows_ptr,  # [num_rows, row], bytes, local, or None: the rows are in the registered buffer already
    weights_ptr,  # float32 [num_rows, top_k], local, or None
    combine_in_ptr,  # symmetric [capacity, row], bytes
    combine_in_weights_ptr,  # symmetric float32 [capacity, top_k]
    total_ptr,  # int32 [1], local: rows received by the dispatch
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    control_ptr,  # int64 [CONTROL_WORDS], local
    top_k,
    num_rows,
    ROW_UNITS: tl.constexpr,  # bytes of a row / ALIGN
    ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) moved at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    WAIT: tl.constexpr,  # whether the last program also waits for the peers
    TAG: tl.constexpr,  # names this wait in error records
):
    """Put this PE's rows where peers read them; the last program tells every peer. Programs (piece, row)."""
    # with nothing to copy this is one program, which would wait for memory three times over
    shmem.prefetch(ctx)
    gdc_wait()
    if not is_broken(control_ptr):
        total = tl.minimum(tl.load(total_ptr), num_rows)
        if rows_ptr is not None:
            ROW_WORDS: tl.constexpr = ROW_UNITS * ((ALIGN + 3) // 4)
            for piece in range(tl.program_id(0), (ROW_WORDS + BLOCK - 1) // BLOCK, tl.num_programs(0)):
                offs = piece * BLOCK + tl.arange(0, BLOCK)
                mask = offs < ROW_WORDS
                for row in range(tl.program_id(1), total, tl.num_programs(1)):
                    start = row_offset(row, ROW_WORDS)
                    words = tl.load(as_words(rows_ptr, ALIGN) + start + offs, mask=mask)
                    tl.store(as_words(combine_in_ptr, ALIGN) + start + offs, words, mask=mask)
        if weights_ptr is not None:
            column = tl.arange(0, BLOCK_K)
            mine = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
            for row in range(mine, total, tl.num_programs(0) * tl.num_programs(1)):
                offs_k = row_offset(row, top_k) + column
                weights = tl.load(weights_ptr + offs_k, mask=column < top_k)
                tl.store(combine_in_weights_ptr + offs_k, weights, mask=column < top_k)
        last = signal_last(ctx, signals_ptr, control_ptr, COMBINE_ARRIVALS, COMBINE_EPOCH)
        if WAIT:  # noqa: SIM102 - Triton decides this one while compiling
            if last != 0:
                finish_combine(ctx, signals_ptr, control_ptr, TAG)


@triton.jit(do_not_specialize=["ctx", "signals_ptr", "control_ptr"])
def combine_recv_kernel(
    ctx,  # device context
    signals_ptr,  # symmetric int64 [n_pes]
    control_ptr,  # int64 [CONTROL_WORDS], local
    TAG: tl.constexpr,
):
    """One program: the wait of a combine whose `copy` did not wait."""
    shmem.prefetch(ctx)
    gdc_wait()
    if not is_broken(control_ptr):
        finish_combine(ctx, signals_ptr, control_ptr, TAG)


@triton.jit(
    do_not_specialize=[
        "ctx", "combine_in_ptr", "forward_ptr", "control_ptr", "out_ptr", "out_weights_ptr", "num_tokens",
        "capacity", "inverse", "shift", "combine_in_weights_ptr",
    ]
)  # fmt: skip
def combine_reduce_kernel(
    ctx,  # device context
    combine_in_ptr,  # symmetric [capacity, HIDDEN], dtype of out
    forward_ptr,  # int32 [M, TOP_K], local: of the dispatch's route kernel
    control_ptr,  # int64 [CONTROL_WORDS], local
    out_ptr,  # [M, HIDDEN], local, aligned to 16 bytes
    out_weights_ptr,  # float32 [M, TOP_K], local
    num_tokens,
    capacity,  # rows of a receive buffer
    inverse,  # of `ops.calls.inverse_of(capacity)`
    shift,
    combine_in_weights_ptr,  # symmetric float32 [capacity, TOP_K], or None
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,  # elements summed at a time
    BLOCK_K: tl.constexpr,  # >= TOP_K
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
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    EVEN: tl.constexpr = HIDDEN % BLOCK == 0
    NUM_PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for piece in range(tl.program_id(0), NUM_PIECES, tl.num_programs(0)):
        offs = piece * BLOCK + tl.arange(0, BLOCK)
        mask = offs < HIDDEN
        for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
            total = sum_rows(
                bases, heap, combine_in_ptr, forward_ptr, token, TOP_K, capacity, HIDDEN, offs, mask,
                CHUNK, EVEN, works, inverse, shift,
            )  # fmt: skip
            out = as_bits(out_ptr) + row_offset(token, HIDDEN)
            bits = total.to(dtype).to(out.dtype.element_ty, bitcast=True)
            if EVEN:
                tl.store(out + offs, bits, mask=works)
            else:
                tl.store(out + offs, bits, mask=mask & works)
            if combine_in_weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
                if token % NUM_PIECES == piece:
                    sum_weights(
                        bases, heap, combine_in_weights_ptr, forward_ptr, out_weights_ptr, token, TOP_K, capacity,
                        works, inverse, shift, BLOCK_K, CHUNK,
                    )  # fmt: skip
