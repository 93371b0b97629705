"""The kernels of an RDNA4 combine: push (rows back to where their tokens came from, signal, wait) and sum (add up a
token's rows, its own PE's and those received).

Protocol, argued in docs/rdna4_ep.md: PE p writes what it has for token t of PE s to row `p * M + t` of the receive
staging of s, so no slot has to be asked for; the program of `push` that arrives last signals and waits, `sum` follows.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.finish import COMBINE_ARRIVALS, COMBINE_EPOCH, finish_combine, is_broken, signal_last
from mori_triton.ops.kernels.rows import as_words, at_peer, row_offset


@triton.jit(
    do_not_specialize=[
        "ctx", "payload_bases_ptr", "rows_ptr", "sources_ptr", "total_ptr", "staging_ptr", "staging_weights_ptr",
        "signals_ptr", "control_ptr", "top_k", "num_rows", "weights_ptr",
    ]
)  # fmt: skip
def rdna4_push_kernel(
    ctx,  # device context
    payload_bases_ptr,  # int64 [n_pes], local: where this PE sees each PE's payload memory
    rows_ptr,  # [num_rows, row], bytes, local: the experts' outputs
    sources_ptr,  # int32 [capacity], local: source PE * MAX_TOKENS + token of each row
    total_ptr,  # int32 [1], local: rows received by the dispatch
    staging_ptr,  # payload memory [n_pes * M, row], bytes: row p * M + t is PE p's for token t of the PE it is on
    staging_weights_ptr,  # payload memory, float32 [n_pes * M, top_k], likewise
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    control_ptr,  # int64 [CONTROL_WORDS], local
    # with the hidden ones these are 28 words at most, see test_gfx1250_whatever_arguments_are_absent
    top_k,
    num_rows,
    weights_ptr,  # float32 [num_rows, top_k], local, or None
    MAX_TOKENS: tl.constexpr,
    KEEPS_OWN: tl.constexpr,  # rows of this PE's own tokens stay where they are
    TOP_K: tl.constexpr,  # top_k, or 0: only `top_k` says
    BATCH: tl.constexpr,  # weights of a row that are moved together
    ROW_UNITS: tl.constexpr,  # bytes of a row / ALIGN
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) of a row moved at a time
    BLOCK_R: tl.constexpr,  # rows of a program at a time
    WAIT: tl.constexpr,  # whether the last program also waits for the peers
    TAG: tl.constexpr,  # names this wait in error records
):
    """Push rows to the PEs whose tokens they are of; the last program tells every peer. Programs (piece, rows)."""
    ROW_WORDS: tl.constexpr = ROW_UNITS * ((ALIGN + 3) // 4)
    NUM_PIECES: tl.constexpr = (ROW_WORDS + BLOCK - 1) // BLOCK
    shmem.prefetch(ctx)
    gdc_wait()
    num_ids = TOP_K if TOP_K != 0 else top_k
    if not is_broken(control_ptr):
        me = shmem.my_pe(ctx)
        mine = tl.load(payload_bases_ptr + me)
        total = tl.minimum(tl.load(total_ptr), num_rows)
        row = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
        next_source = tl.load(sources_ptr + row, mask=row < total, other=0)
        for block in range(tl.program_id(1), tl.cdiv(total, BLOCK_R), tl.num_programs(1)):
            row = block * BLOCK_R + tl.arange(0, BLOCK_R)
            source = next_source
            # on its way while these rows are
            next_row = row + tl.num_programs(1) * BLOCK_R
            next_source = tl.load(sources_ptr + next_row, mask=next_row < total, other=0)
            pe = source // MAX_TOKENS
            there = me * MAX_TOKENS + source - pe * MAX_TOKENS
            goes = (row < total) & ((pe != me) | (not KEEPS_OWN))
            to_row = as_words(at_peer(payload_bases_ptr, mine, staging_ptr, pe), ALIGN) + row_offset(there, ROW_WORDS)
            from_row = as_words(rows_ptr, ALIGN) + row_offset(row, ROW_WORDS)
            for piece in range(tl.program_id(0), NUM_PIECES, tl.num_programs(0)):
                offs = piece * BLOCK + tl.arange(0, BLOCK)
                mask = goes[:, None] & (offs < ROW_WORDS)[None, :]
                words = tl.load(from_row[:, None] + offs[None, :], mask=mask)
                tl.store(to_row[:, None] + offs[None, :], words, mask=mask, cache_modifier=".cs")
            if weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
                # this PE's too: what dispatch gave out belongs to peers again when they have seen the signal
                if block % tl.num_programs(0) == tl.program_id(0):
                    to_weights = at_peer(payload_bases_ptr, mine, staging_weights_ptr, pe) + row_offset(there, num_ids)
                    from_weights = weights_ptr + row_offset(row, num_ids)
                    for first in range(0, num_ids, BATCH):
                        column = first + tl.arange(0, BATCH)[None, :]
                        mask = (row < total)[:, None] & (column < num_ids)
                        weights = tl.load(from_weights[:, None] + column, mask=mask)
                        tl.store(to_weights[:, None] + column, weights, mask=mask)
        last = signal_last(ctx, signals_ptr, control_ptr, COMBINE_ARRIVALS, COMBINE_EPOCH)
        if WAIT:  # noqa: SIM102 - Triton decides this one while compiling
            if last != 0:
                finish_combine(ctx, signals_ptr, control_ptr, TAG)


@triton.jit
def _sum_staged(
    ptr,  # [n_pes * M, row_size] or, for a token's own PE, what `own_ptr` says
    own_ptr,  # [capacity, row_size], or None: the token's own PE has staged its row too
    targets,
    me,
    token,
    max_tokens,
    num_rows,
    capacity,
    row_size,
    offs,
    mask,
    works,
    NUM_PES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """float32 sum of columns `offs` of a token's rows, in the order of `targets`. All rows are loaded, then added."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    rows = ()
    for j in tl.static_range(NUM_PES):
        target = tl.maximum(tl.where(works, targets[j], -1), 0)
        # the PE, by comparison: there are few
        pe = tl.full([], 0, tl.int32)
        for p in tl.static_range(1, NUM_PES):
            pe += (target >= p * capacity).to(tl.int32)
        slot = target - pe * capacity
        present = (targets[j] >= 0) & works
        start = ptr + row_offset(pe * max_tokens + token, row_size)
        if own_ptr is not None:
            is_own = pe == me
            start = tl.where(is_own, own_ptr + row_offset(slot, row_size), start)
            # a caller that brings fewer rows than came is told on the emulated device only
            present = present & ((slot < num_rows) | (is_own == 0))
        if dtype.primitive_bitwidth == 32:
            bits = tl.cast(start, tl.pointer_type(tl.int32), bitcast=True)
        else:
            bits = tl.cast(start, tl.pointer_type(tl.int16), bitcast=True)
        bits = tl.multiple_of(bits, ALIGN)
        rows += (tl.load(bits + offs, mask=mask & present, other=0),)  # type: ignore[assignment]
    total = tl.zeros(offs.shape, tl.float32)
    for j in tl.static_range(NUM_PES):
        # of an absent row +0 is added, which changes no sum that began with +0
        total += rows[j].to(dtype, bitcast=True).to(tl.float32)
    return total


@triton.jit(
    do_not_specialize=[
        "ctx", "staging_ptr", "forward_ptr", "control_ptr", "out_ptr", "out_weights_ptr", "num_tokens", "top_k",
        "capacity", "max_tokens", "num_rows", "rows_ptr", "staging_weights_ptr",
    ]
)  # fmt: skip
def rdna4_sum_kernel(
    ctx,  # device context
    staging_ptr,  # [n_pes * M, HIDDEN], local, dtype of out: row p * M + t is what PE p has pushed for token t
    forward_ptr,  # int32 [M, top_k], local: of the dispatch
    control_ptr,  # int64 [CONTROL_WORDS], local
    out_ptr,  # [M, HIDDEN], local, aligned to 16 bytes
    out_weights_ptr,  # float32 [M, top_k], local
    # with the hidden ones these are 28 words at most
    num_tokens,
    top_k,
    capacity,  # rows of a receive buffer
    max_tokens,
    num_rows,
    rows_ptr,  # [num_rows, HIDDEN], local, dtype of out: where the rows of this PE's own tokens are, or None: staged
    staging_weights_ptr,  # float32 [n_pes * M, top_k], local, or None
    NUM_PES: tl.constexpr,
    HIDDEN: tl.constexpr,
    ALIGN: tl.constexpr,  # divides the bytes of a row and the address of every row
    TOP_K: tl.constexpr,  # top_k, or 0: only `top_k` says
    BATCH: tl.constexpr,  # weights of a row that are summed together
    BLOCK: tl.constexpr,  # elements summed at a time
):
    """Sum a token's rows over its distinct destination PEs, in the order of its ids, in float32, rounded once.

    Programs (piece, token). Nothing is written when the wait before it timed out.
    """
    gdc_wait()
    gdc_launch_dependents()
    works = is_broken(control_ptr) == 0
    num_ids = TOP_K if TOP_K != 0 else top_k
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    NUM_PIECES: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    me = shmem.my_pe(ctx)
    for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
        targets = ()
        for j in tl.static_range(NUM_PES):
            entry = forward_ptr + row_offset(token, num_ids) + j
            targets += (tl.load(entry, mask=j < num_ids, other=-1),)  # type: ignore[assignment]
        for piece in range(tl.program_id(0), NUM_PIECES, tl.num_programs(0)):
            offs = piece * BLOCK + tl.arange(0, BLOCK)
            mask = offs < HIDDEN
            total = _sum_staged(
                staging_ptr, rows_ptr, targets, me, token, max_tokens, num_rows, capacity, HIDDEN,
                offs, mask, works, NUM_PES, ALIGN,
            )  # fmt: skip
            out = tl.cast(out_ptr, tl.pointer_type(tl.int16), bitcast=True) + row_offset(token, HIDDEN)
            tl.store(tl.multiple_of(out, ALIGN) + offs, total.to(dtype).to(tl.int16, bitcast=True), mask=mask & works)
        if staging_weights_ptr is not None:  # noqa: SIM102 - Triton decides this one while compiling
            if token % tl.num_programs(0) == tl.program_id(0):
                for first in range(0, num_ids, BATCH):
                    column = first + tl.arange(0, BATCH)
                    mask = column < num_ids
                    sums = _sum_staged(
                        staging_weights_ptr, None, targets, me, token, max_tokens, num_rows, capacity,
                        num_ids, column, mask, works, NUM_PES, 4,
                    )  # fmt: skip
                    tl.store(out_weights_ptr + row_offset(token, num_ids) + column, sums, mask=mask & works)
