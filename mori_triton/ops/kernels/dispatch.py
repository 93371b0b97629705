"""The kernels of a dispatch: route (give out slots), copy (write rows to the peers, signal, wait for theirs), recv (the
wait alone).

Protocol, argued in docs/protocol.md: a kernel boundary joins the programs of one PE; the program of `copy` that arrives
last signals every peer, waits for all of them and finishes.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.finish import (
    DISPATCH_ARRIVALS,
    DISPATCH_EPOCH,
    finish_dispatch,
    is_broken,
    signal_last,
)
from mori_triton.ops.kernels.rows import (
    as_words,
    at_peer,
    copy_metadata,
    copy_scales,
    load_targets,
    peer_table,
    row_offset,
    split_target,
)


@triton.jit(
    do_not_specialize=[
        "ctx", "indices_ptr", "forward_ptr", "slots_ptr", "control_ptr", "num_tokens", "top_k",
        "num_experts_per_rank", "capacity",
    ]
)  # fmt: skip
def dispatch_route_kernel(
    ctx,  # device context
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    forward_ptr,  # int32 [M, top_k], local, out: destination PE * capacity + slot, -1: not sent
    slots_ptr,  # symmetric int32 [1]: rows given out by all PEs so far in this round
    control_ptr,  # int64 [CONTROL_WORDS], local
    num_tokens,
    top_k,
    num_experts_per_rank,
    capacity,  # rows of a receive buffer
    BLOCK_T: tl.constexpr,  # tokens of a program
    BLOCK_K: tl.constexpr,  # >= top_k
    BLOCK_P: tl.constexpr,  # PEs that slots are taken from at a time
):
    """One slot for each (token, distinct destination PE): a token's first id of a PE carries it, later ones get -1."""
    gdc_wait()
    gdc_launch_dependents()
    if not is_broken(control_ptr):
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
        for first_pe in range(0, num_pes, BLOCK_P):
            pe = first_pe + tl.arange(0, BLOCK_P)
            # [BLOCK_T, BLOCK_K, BLOCK_P]
            hit = owner[:, :, None] == pe[None, None, :]
            # [BLOCK_T, BLOCK_P]: the column that carries the token to pe, BLOCK_K when none does
            carrier = tl.min(tl.where(hit, column[None, :, None], BLOCK_K), 1)
            sent = (carrier < BLOCK_K).to(tl.int32)
            num_sent = tl.sum(sent, 0)
            slots = shmem.remote_ptr(ctx, slots_ptr + tl.zeros([BLOCK_P], tl.int32), pe)
            # only the sum matters and the signal orders it, so relaxed; the words are the peers', so system scope
            base = tl.atomic_add(slots, num_sent, mask=num_sent > 0, sem="relaxed", scope="sys")
            slot = base[None, :] + tl.cumsum(sent, 0) - sent
            # a slot past the end is given out but not used: the receiver sees how many were asked for
            target = tl.where(slot < capacity, pe[None, :] * capacity + slot, -1)
            carries = hit & (column[None, :, None] == carrier[:, None, :])
            forward = tl.maximum(forward, tl.max(tl.where(carries, target[:, None, :], -1), 2))
        tl.store(forward_ptr + offs, forward, mask=mask)


@triton.jit
def copy_piece(
    bases,
    heap,
    works,
    tokens_ptr,
    indices_ptr,
    forward_ptr,
    weights_ptr,
    scales_ptr,
    recv_tokens_ptr,
    recv_indices_ptr,
    recv_weights_ptr,
    recv_sources_ptr,
    recv_scales_ptr,
    token,
    piece,
    source,
    capacity,
    inverse,
    shift,
    scale_units,
    ROW_UNITS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):
    """Write one piece of a token to its slots, loaded once; one piece of each token takes the small rows along.

    Arguments are those of `dispatch_copy_kernel`. Nothing is written unless it `works`.
    """
    ROW_WORDS: tl.constexpr = ROW_UNITS * ((ALIGN + 3) // 4)
    NUM_PIECES: tl.constexpr = (ROW_WORDS + BLOCK - 1) // BLOCK
    offs = piece * BLOCK + tl.arange(0, BLOCK)
    mask = offs < ROW_WORDS
    row = tl.load(as_words(tokens_ptr, ALIGN) + row_offset(token, ROW_WORDS) + offs, mask=mask)
    for first in range(0, TOP_K, CHUNK):
        targets = load_targets(forward_ptr, token, TOP_K, first, CHUNK)
        # every address before the first store, which could be to the table for all the compiler knows
        rows = ()
        for j in tl.static_range(CHUNK):
            # what a dispatch that failed left there is no address
            target = tl.maximum(tl.where(works, targets[j], -1), 0)
            pe, slot = split_target(target, capacity, inverse, shift)
            there = as_words(at_peer(bases, heap, recv_tokens_ptr, pe), ALIGN)
            rows += (there + row_offset(slot, ROW_WORDS),)  # type: ignore[assignment]
        for j in tl.static_range(CHUNK):
            if (targets[j] >= 0) & works:
                tl.store(rows[j] + offs, row, mask=mask, cache_modifier=".cs")
    # not always the same piece
    if (token % NUM_PIECES == piece) & works:
        copy_metadata(
            bases, heap, forward_ptr, indices_ptr, weights_ptr,
            recv_indices_ptr, recv_weights_ptr, recv_sources_ptr,
            token, source + token, TOP_K, capacity, inverse, shift, BLOCK_K,
        )  # fmt: skip
        if scales_ptr is not None:
            copy_scales(
                bases, heap, forward_ptr, scales_ptr, recv_scales_ptr,
                token, TOP_K, capacity, inverse, shift, scale_units, SCALE_ALIGN, SCALE_BLOCK,
            )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "ctx", "tokens_ptr", "indices_ptr", "forward_ptr", "recv_tokens_ptr", "recv_indices_ptr", "recv_weights_ptr",
        "recv_sources_ptr", "signals_ptr", "control_ptr", "total_ptr", "num_tokens", "capacity", "inverse", "shift",
        "max_tokens", "me", "scale_units", "slots_ptr", "weights_ptr", "scales_ptr", "recv_scales_ptr",
    ]
)  # fmt: skip
def dispatch_copy_kernel(
    ctx,  # device context
    tokens_ptr,  # [num_tokens, row], bytes, local
    indices_ptr,  # int32 [num_tokens, TOP_K], local
    forward_ptr,  # int32 [M, TOP_K], local: of the route kernel, or of the dispatch that is replayed
    recv_tokens_ptr,  # symmetric [capacity, row], bytes
    recv_indices_ptr,  # symmetric int32 [capacity, TOP_K]
    recv_weights_ptr,  # symmetric float32 [capacity, TOP_K]
    recv_sources_ptr,  # symmetric int32 [capacity]: source PE * max_tokens + token
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    control_ptr,  # int64 [CONTROL_WORDS], local
    total_ptr,  # int32 [1], local, out: rows received
    num_tokens,
    capacity,  # rows of a receive buffer
    inverse,  # of `ops.calls.inverse_of(capacity)`
    shift,
    max_tokens,
    me,  # this PE
    scale_units,  # bytes of a scale row / SCALE_ALIGN
    # these may be None; the words before them are 29, so that no number of them makes 30, which gfx1250 cannot preload
    slots_ptr,  # symmetric int32 [1], this PE's own, or None: a replay
    weights_ptr,  # float32 [num_tokens, TOP_K], local, or None
    scales_ptr,  # [num_tokens, scale row], bytes, local, or None
    recv_scales_ptr,  # symmetric [capacity, scale row], or None
    ROW_UNITS: tl.constexpr,  # bytes of a row / ALIGN
    ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) moved at a time
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,  # >= TOP_K
    CHUNK: tl.constexpr,  # ids of a token whose targets are loaded at a time
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # >= words of a scale row
    SINGLE: tl.constexpr,  # whether there is a program for each piece of each token
    WAIT: tl.constexpr,  # whether the last program also waits for the peers and finishes
    TAG: tl.constexpr,  # names this wait in error records
):
    """Write every routed token to its slots on the peers; the last program tells every peer that all of it is there.

    Programs (piece, token).
    """
    bases, heap = peer_table(ctx)
    gdc_wait()
    # a number, not a branch around everything, so that the first loads need not wait for this one
    works = is_broken(control_ptr) == 0
    NUM_PIECES: tl.constexpr = (ROW_UNITS * ((ALIGN + 3) // 4) + BLOCK - 1) // BLOCK
    source = me * max_tokens
    if SINGLE:
        copy_piece(
            bases, heap, works, tokens_ptr, indices_ptr, forward_ptr, weights_ptr, scales_ptr,
            recv_tokens_ptr, recv_indices_ptr, recv_weights_ptr, recv_sources_ptr, recv_scales_ptr,
            tl.program_id(1), tl.program_id(0), source, capacity, inverse, shift, scale_units,
            ROW_UNITS, ALIGN, BLOCK, TOP_K, BLOCK_K, CHUNK, SCALE_ALIGN, SCALE_BLOCK,
        )  # fmt: skip
    else:
        for piece in range(tl.program_id(0), NUM_PIECES, tl.num_programs(0)):
            for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
                copy_piece(
                    bases, heap, works, tokens_ptr, indices_ptr, forward_ptr, weights_ptr, scales_ptr,
                    recv_tokens_ptr, recv_indices_ptr, recv_weights_ptr, recv_sources_ptr, recv_scales_ptr,
                    token, piece, source, capacity, inverse, shift, scale_units,
                    ROW_UNITS, ALIGN, BLOCK, TOP_K, BLOCK_K, CHUNK, SCALE_ALIGN, SCALE_BLOCK,
                )  # fmt: skip
    if works:
        last = signal_last(ctx, signals_ptr, control_ptr, DISPATCH_ARRIVALS, DISPATCH_EPOCH)
        if WAIT:  # noqa: SIM102 - Triton decides this one while compiling
            if last != 0:
                finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG)


@triton.jit(do_not_specialize=["ctx", "signals_ptr", "total_ptr", "control_ptr", "capacity", "slots_ptr"])
def dispatch_recv_kernel(
    ctx,  # device context
    signals_ptr,  # symmetric int64 [n_pes]
    total_ptr,  # int32 [1], local, out: rows received
    control_ptr,  # int64 [CONTROL_WORDS], local
    capacity,
    slots_ptr,  # symmetric int32 [1], this PE's own, or None: a replay
    TAG: tl.constexpr,
):
    """One program: the wait and the end of a dispatch whose `copy` did not wait."""
    shmem.prefetch(ctx)
    gdc_wait()
    if not is_broken(control_ptr):
        finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG)
