"""The three kernels of a dispatch: route (give out slots), copy (write rows to the peers), wait (for the peers' rows).

Protocol, argued in docs/protocol.md: a kernel boundary joins the programs of one PE, so no program waits for another of
its own grid. The program of `copy` that arrives last signals every peer; `wait` alone polls.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.ops.kernels.rows import as_words, row_offset


@triton.jit(do_not_specialize=["num_tokens", "top_k", "num_experts_per_rank", "capacity"])
def dispatch_route_kernel(
    ctx,  # device context
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    forward_ptr,  # int32 [M, top_k], local, out: destination PE * capacity + slot, -1: not sent
    slots_ptr,  # symmetric int32 [1]: rows given out by all PEs so far in this round
    num_tokens,
    top_k,
    num_experts_per_rank,
    capacity,  # rows of a receive buffer
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_K: tl.constexpr,  # >= top_k
):
    """One slot for each (token, distinct destination PE): a token's first id of a PE carries it, later ones get -1."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    column = tl.arange(0, BLOCK_K)
    mask = (token < num_tokens)[:, None] & (column < top_k)[None, :]
    # [BLOCK_T, BLOCK_K]
    offs = row_offset(token, top_k)[:, None] + column[None, :]
    expert = tl.load(indices_ptr + offs, mask=mask, other=-1)
    num_pes = shmem.n_pes(ctx)
    known = (expert >= 0) & (expert < num_pes * num_experts_per_rank)
    # a C division takes -1 to 0: only ids that are in range may be divided
    owner = tl.where(known, expert // num_experts_per_rank, -1)
    forward = tl.full([BLOCK_T, BLOCK_K], -1, tl.int32)
    for pe in range(num_pes):
        # [BLOCK_T]: the column that carries the token to pe, BLOCK_K when none does
        carrier = tl.min(tl.where(owner == pe, column[None, :], BLOCK_K), 1)
        sent = (carrier < BLOCK_K).to(tl.int32)
        num_sent = tl.sum(sent, 0)
        if num_sent > 0:
            # only the sum matters and the signal orders it, so relaxed; the word is a peer's, so system scope
            first = tl.atomic_add(shmem.remote_ptr(ctx, slots_ptr, pe), num_sent, sem="relaxed", scope="sys")
            slot = first + tl.cumsum(sent, 0) - sent
            # a slot past the end is given out but not used: the receiver sees how many were asked for
            placed = (column[None, :] == carrier[:, None]) & (slot < capacity)[:, None]
            forward = tl.where(placed, pe * capacity + slot[:, None], forward)
    tl.store(forward_ptr + offs, forward, mask=mask)


@triton.jit(
    do_not_specialize=[
        "num_tokens", "top_k", "capacity", "max_tokens", "row_units", "num_pieces", "scale_units",
    ]
)  # fmt: skip
def dispatch_copy_kernel(
    ctx,  # device context
    tokens_ptr,  # [num_tokens, h], any dtype, local
    indices_ptr,  # int32 [num_tokens, top_k], local
    forward_ptr,  # int32 [M, top_k], local: of the route kernel
    recv_tokens_ptr,  # symmetric [capacity, h], dtype of tokens
    recv_indices_ptr,  # symmetric int32 [capacity, top_k]
    recv_weights_ptr,  # symmetric float32 [capacity, top_k]
    recv_sources_ptr,  # symmetric int32 [capacity]: source PE * max_tokens + token
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    epoch_ptr,  # int64 [1], local: rounds whose dispatch arrived
    arrivals_ptr,  # int32 [1], local: programs of this launch that are done
    num_tokens,
    top_k,
    capacity,
    max_tokens,
    row_units,  # bytes of a row / ALIGN
    num_pieces,  # pieces of BLOCK words in a row, rounded up
    scale_units,  # bytes of a scale row / SCALE_ALIGN
    # these may be None and come last: the words before them are 29, see test_arguments_that_gfx1250_preloads
    weights_ptr,  # float32 [num_tokens, top_k], local, or None
    scales_ptr,  # [num_tokens, scale row], bytes, local, or None
    recv_scales_ptr,  # symmetric [capacity, scale row], or None
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) moved at a time
    BLOCK_K: tl.constexpr,  # >= top_k
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # >= words of a scale row
):
    """Write every routed token to its slots on the peers; the last program tells every peer that all of it is there."""
    UNIT: tl.constexpr = (ALIGN + 3) // 4
    SCALE_UNIT: tl.constexpr = (SCALE_ALIGN + 3) // 4
    me = shmem.my_pe(ctx)
    row_words = row_units * UNIT
    for item in range(tl.program_id(0), num_tokens * num_pieces, tl.num_programs(0)):
        token = item // num_pieces
        piece = item % num_pieces
        offs = piece * BLOCK + tl.arange(0, BLOCK)
        source = as_words(tokens_ptr, ALIGN) + row_offset(token, row_words)
        row = tl.load(source + offs, mask=offs < row_words)
        column = tl.arange(0, BLOCK_K)
        mask_k = column < top_k
        for k in range(top_k):
            target = tl.load(forward_ptr + row_offset(token, top_k) + k)
            if target >= 0:
                pe = target // capacity
                slot = target % capacity
                there = as_words(shmem.remote_ptr(ctx, recv_tokens_ptr, pe), ALIGN) + row_offset(slot, row_words)
                tl.store(there + offs, row, mask=offs < row_words)
                # the small rows travel with the first piece
                if piece == 0:
                    from_row = row_offset(token, top_k) + column
                    to_row = row_offset(slot, top_k) + column
                    ids = tl.load(indices_ptr + from_row, mask=mask_k)
                    tl.store(shmem.remote_ptr(ctx, recv_indices_ptr, pe) + to_row, ids, mask=mask_k)
                    if weights_ptr is not None:
                        weights = tl.load(weights_ptr + from_row, mask=mask_k)
                        tl.store(shmem.remote_ptr(ctx, recv_weights_ptr, pe) + to_row, weights, mask=mask_k)
                    if scales_ptr is not None:
                        offs_s = tl.arange(0, SCALE_BLOCK)
                        scale_words = scale_units * SCALE_UNIT
                        from_scales = as_words(scales_ptr, SCALE_ALIGN) + row_offset(token, scale_words)
                        to_scales = as_words(shmem.remote_ptr(ctx, recv_scales_ptr, pe), SCALE_ALIGN)
                        to_scales += row_offset(slot, scale_words)
                        scales = tl.load(from_scales + offs_s, mask=offs_s < scale_words)
                        tl.store(to_scales + offs_s, scales, mask=offs_s < scale_words)
                    tl.store(shmem.remote_ptr(ctx, recv_sources_ptr, pe) + slot, me * max_tokens + token)
    if shmem.arrive_last(ctx, arrivals_ptr, tl.num_programs(0)) != 0:
        shmem.signal_set_all(ctx, signals_ptr + me, tl.load(epoch_ptr) + 1)


@triton.jit(do_not_specialize=["capacity"])
def dispatch_wait_kernel(
    ctx,  # device context
    signals_ptr,  # symmetric int64 [n_pes]
    slots_ptr,  # symmetric int32 [1], this PE's own; set back to 0
    epoch_ptr,  # int64 [1], local; advanced by one
    total_ptr,  # int32 [1], local, out: rows received
    overflow_ptr,  # int64 [1], local: rows that found no slot, added up
    capacity,
    TAG: tl.constexpr,  # names this wait in error records
):
    """One program: wait for every PE's dispatch, take the number of rows, free the slots for the next round.

    On time-out nothing is advanced and the total is 0. Nobody asks for a slot here before this PE's combine has
    signalled, which comes after this kernel, so the counter may be set back by a plain store.
    """
    epoch = tl.load(epoch_ptr) + 1
    seen = shmem.wait_all_ge(ctx, signals_ptr, shmem.n_pes(ctx), epoch, TAG)
    if seen >= epoch:
        asked = tl.load(slots_ptr)
        received = tl.minimum(asked, capacity)
        tl.store(total_ptr, received)
        tl.store(overflow_ptr, tl.load(overflow_ptr) + (asked - received))
        tl.store(slots_ptr, 0)
        tl.store(epoch_ptr, epoch)
    else:
        tl.store(total_ptr, 0)
