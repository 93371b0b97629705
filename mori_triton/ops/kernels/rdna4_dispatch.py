"""The kernels of an RDNA4 dispatch: dispatch (give out slots, push rows, signal, wait) and pull (fetch what sources
have staged).

Protocol, argued in docs/rdna4_ep.md: rows and their sources are pushed to the destinations. Ids and weights are pushed
too by 2 PEs; with 4 the source stages them once, and every destination pulls those of its rows when all have signalled.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.carriers import find_carriers, sums_before
from mori_triton.ops.kernels.finish import DISPATCH_ARRIVALS, DISPATCH_EPOCH, finish_dispatch, is_broken, signal_last
from mori_triton.ops.kernels.rows import as_words, at_peer, peer_table, row_offset, split_target

# no column of a token's ids
_NOWHERE = tl.constexpr(1 << 20)


@triton.jit
def _give_slots(
    bases,
    heap,
    indices_ptr,
    forward_ptr,
    slots_ptr,
    token,  # int32 [T]
    mask_t,  # bool [T]: tokens that are there; none of a broken op's
    num_ids,
    num_experts_per_rank,
    capacity,
    BATCH: tl.constexpr,
    BLOCK_T: tl.constexpr,
    NUM_PES: tl.constexpr,
):
    """Slots `[T, NUM_PES]` of a block of tokens on each PE, -1: does not go there. Writes `forward`."""
    pe = tl.arange(0, NUM_PES)
    row = row_offset(token, num_ids)[:, None]
    # by PE the column of a token's first id that lives there: the order in which combine adds
    carrier = tl.full([BLOCK_T, NUM_PES], _NOWHERE, tl.int32)
    for first in range(0, num_ids, BATCH):
        column = first + tl.arange(0, BATCH)
        mask = mask_t[:, None] & (column < num_ids)[None, :]
        ids = tl.load(indices_ptr + row + column[None, :], mask=mask, other=-1)
        found = find_carriers(ids, num_experts_per_rank, NUM_PES, BATCH, NUM_PES)
        carrier = tl.minimum(carrier, tl.where(found < BATCH, first + found, _NOWHERE))
        tl.store(forward_ptr + row + column[None, :], -1, mask=mask & (column >= NUM_PES)[None, :])
    sent = (carrier < _NOWHERE).to(tl.int32)
    num_sent = tl.sum(sent, 0)
    # an add for each PE, all in flight at once; only the sum matters and the signal orders it, so relaxed
    counters = at_peer(bases, heap, slots_ptr, pe)
    begin = tl.atomic_add(counters, num_sent, mask=num_sent > 0, sem="relaxed", scope="sys")
    slot = begin[None, :] + sums_before(sent, BLOCK_T)
    # a slot past the end is given out but not used: the receiver sees how many were asked for
    slot = tl.where((sent > 0) & (slot < capacity), slot, -1)
    target = tl.where(slot >= 0, pe[None, :] * capacity + slot, -1)
    # [T, PE, PE]: PEs that a token goes to before this one
    place = tl.sum((carrier[:, None, :] < carrier[:, :, None]).to(tl.int32), 2)
    # [T, PE, place]
    here = (place[:, :, None] == pe[None, None, :]) & (sent > 0)[:, :, None]
    forward = tl.max(tl.where(here, target[:, :, None], -1), 1)
    tl.store(forward_ptr + row + pe[None, :], forward, mask=mask_t[:, None] & (pe < num_ids)[None, :])
    return slot


@triton.jit
def _slots_of(forward_ptr, token, mask_t, num_ids, capacity, inverse, shift, NUM_PES: tl.constexpr):
    """The slots of a block of tokens as `_give_slots` made them, from the `forward` that it wrote."""
    pe = tl.arange(0, NUM_PES)
    mask = mask_t[:, None] & (pe < num_ids)[None, :]
    target = tl.load(forward_ptr + row_offset(token, num_ids)[:, None] + pe[None, :], mask=mask, other=-1)
    owner, slot = split_target(tl.maximum(target, 0), capacity, inverse, shift)
    # [T, place, PE]
    here = (owner[:, :, None] == pe[None, None, :]) & (target >= 0)[:, :, None]
    return tl.max(tl.where(here, slot[:, :, None], -1), 1)


@triton.jit
def _push_entries(
    bases, heap, from_ptr, to_ptr, token, slot, num_ids, BATCH: tl.constexpr, NUM_PES: tl.constexpr
):  # fmt: skip
    """Write the ids or weights of a block of tokens to their slots on all PEs. `slot`: `[T, NUM_PES]`."""
    there = at_peer(bases, heap, to_ptr, tl.arange(0, NUM_PES))[None, :] + row_offset(slot, num_ids)
    goes = tl.max(slot, 1) >= 0
    for first in range(0, num_ids, BATCH):
        column = first + tl.arange(0, BATCH)
        mask = (column < num_ids)[None, :]
        entries = tl.load(from_ptr + row_offset(token, num_ids)[:, None] + column[None, :], mask=goes[:, None] & mask)
        mask = (slot >= 0)[:, :, None] & mask[:, None, :]
        tl.store(there[:, :, None] + column[None, None, :], entries[:, None, :], mask=mask)


@triton.jit
def _stage_entries(from_ptr, staged_ptr, token, mask_t, num_ids, BATCH: tl.constexpr):
    """Copy the ids or weights of a block of tokens to where peers pull them."""
    for first in range(0, num_ids, BATCH):
        column = first + tl.arange(0, BATCH)
        mask = mask_t[:, None] & (column < num_ids)[None, :]
        offs = row_offset(token, num_ids)[:, None] + column[None, :]
        tl.store(staged_ptr + offs, tl.load(from_ptr + offs, mask=mask), mask=mask)


@triton.jit(
    do_not_specialize=[
        "ctx", "payload_bases_ptr", "tokens_ptr", "indices_ptr", "forward_ptr", "recv_tokens_ptr", "recv_sources_ptr",
        "signals_ptr", "control_ptr", "to_indices_ptr", "to_weights_ptr", "num_tokens", "top_k",
        "num_experts_per_rank", "capacity", "inverse", "shift", "max_tokens", "total_ptr", "slots_ptr", "weights_ptr",
    ]
)  # fmt: skip
def rdna4_dispatch_kernel(
    ctx,  # device context
    payload_bases_ptr,  # int64 [NUM_PES], local: where this PE sees each PE's payload memory
    tokens_ptr,  # [num_tokens, row], bytes, local
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    forward_ptr,  # int32 [M, top_k], local: destination PE * capacity + slot, -1: none. In with a replay, else out
    recv_tokens_ptr,  # payload memory [capacity, row], bytes
    recv_sources_ptr,  # symmetric int32 [capacity]: source PE * max_tokens + token
    signals_ptr,  # symmetric int64 [NUM_PES]: word p holds PE p's newest epoch here
    control_ptr,  # int64 [CONTROL_WORDS], local
    to_indices_ptr,  # symmetric int32, local part with STAGED [M, top_k], else peers' [capacity, top_k]
    to_weights_ptr,  # symmetric float32, likewise
    num_tokens,
    top_k,
    num_experts_per_rank,
    capacity,  # rows of a receive buffer
    inverse,  # of `ops.calls.inverse_of(capacity)`
    shift,
    max_tokens,
    # these may be None, but the first; the words before are 29, see test_gfx1250_whatever_arguments_are_absent
    total_ptr,  # int32 [1], local, out: rows received
    slots_ptr,  # symmetric int32 [1]: rows given out by all PEs so far in this round, or None: a replay
    weights_ptr,  # float32 [num_tokens, top_k], local, or None
    TOP_K: tl.constexpr,  # top_k, or 0: only `top_k` says
    BATCH: tl.constexpr,  # ids of a token that are looked at together
    NUM_PES: tl.constexpr,
    STAGED: tl.constexpr,  # ids and weights are staged for the destinations to pull
    ROW_UNITS: tl.constexpr,  # bytes of a row / ALIGN
    ALIGN: tl.constexpr,  # 16, 8, 4 or 2: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) of a row moved at a time
    BLOCK_T: tl.constexpr,  # tokens of a program at a time
    WAIT: tl.constexpr,  # off: another launch waits for the peers
    TAG: tl.constexpr,  # names this wait in error records
):
    """Route blocks of tokens and push them to their PEs; the last program tells every peer and waits for all."""
    ROW_WORDS: tl.constexpr = ROW_UNITS * ((ALIGN + 3) // 4)
    num_ids = TOP_K if TOP_K != 0 else top_k
    bases, heap = peer_table(ctx)
    me = shmem.my_pe(ctx)
    gdc_wait()
    works = is_broken(control_ptr) == 0
    mine = tl.load(payload_bases_ptr + me)
    pe = tl.arange(0, NUM_PES)
    offs = tl.arange(0, BLOCK)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        # a broken op gives out no slot and writes nothing
        mask_t = (token < num_tokens) & works
        source = as_words(tokens_ptr, ALIGN) + row_offset(token, ROW_WORDS)[:, None] + offs[None, :]
        # the rows' first piece is on its way while slots are given out
        words = tl.load(source, mask=mask_t[:, None] & (offs < ROW_WORDS)[None, :])
        if slots_ptr is None:
            slot = _slots_of(forward_ptr, token, mask_t, num_ids, capacity, inverse, shift, NUM_PES)
        else:
            slot = _give_slots(
                bases, heap, indices_ptr, forward_ptr, slots_ptr, token, mask_t, num_ids, num_experts_per_rank,
                capacity, BATCH, BLOCK_T, NUM_PES,
            )  # fmt: skip
        if STAGED:
            _stage_entries(indices_ptr, to_indices_ptr, token, mask_t, num_ids, BATCH)
            if weights_ptr is not None:
                _stage_entries(weights_ptr, to_weights_ptr, token, mask_t, num_ids, BATCH)
        else:
            _push_entries(bases, heap, indices_ptr, to_indices_ptr, token, slot, num_ids, BATCH, NUM_PES)
            if weights_ptr is not None:
                _push_entries(bases, heap, weights_ptr, to_weights_ptr, token, slot, num_ids, BATCH, NUM_PES)
        to_sources = at_peer(bases, heap, recv_sources_ptr, pe)[None, :] + slot
        tl.store(to_sources, (me * max_tokens + token)[:, None], mask=slot >= 0)
        # [T, NUM_PES] int64: where a row begins on each PE, 0 where it does not go
        row = at_peer(payload_bases_ptr, mine, recv_tokens_ptr, pe).to(tl.int64)[None, :]
        row = tl.where(slot >= 0, row + row_offset(slot, ROW_UNITS * ALIGN), 0)
        for start in range(0, ROW_WORDS, BLOCK):
            # the next piece; nothing after the last
            next_offs = start + BLOCK + offs
            ahead = tl.load(source + start + BLOCK, mask=mask_t[:, None] & (next_offs < ROW_WORDS)[None, :])
            for to_pe in tl.static_range(NUM_PES):
                to = tl.sum(tl.where(pe[None, :] == to_pe, row, 0), 1)
                to_row = tl.multiple_of(to.to(tl.pointer_type(words.dtype)), ALIGN)
                mask = (to != 0)[:, None] & (start + offs < ROW_WORDS)[None, :]
                tl.store(to_row[:, None] + start + offs[None, :], words, mask=mask, cache_modifier=".cs")
            words = ahead
    if works:
        last = signal_last(ctx, signals_ptr, control_ptr, DISPATCH_ARRIVALS, DISPATCH_EPOCH)
        if WAIT:  # noqa: SIM102 - Triton decides this one while compiling
            if last != 0:
                finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG)


@triton.jit(
    do_not_specialize=[
        "ctx", "sources_ptr", "total_ptr", "control_ptr", "staged_indices_ptr", "recv_indices_ptr", "recv_weights_ptr",
        "top_k", "max_tokens", "staged_weights_ptr",
    ]
)  # fmt: skip
def rdna4_pull_kernel(
    ctx,  # device context
    sources_ptr,  # int32 [capacity], local: source PE * max_tokens + token of each row
    total_ptr,  # int32 [1], local: rows received
    control_ptr,  # int64 [CONTROL_WORDS], local
    staged_indices_ptr,  # symmetric int32 [M, top_k]
    recv_indices_ptr,  # int32 [capacity, top_k], local, out
    recv_weights_ptr,  # float32 [capacity, top_k], local, out
    top_k,
    max_tokens,
    staged_weights_ptr,  # symmetric float32 [M, top_k], or None
    TOP_K: tl.constexpr,
    BATCH: tl.constexpr,
    BLOCK_R: tl.constexpr,  # rows of a program at a time
):
    """Fetch ids and weights of the rows received from what their sources have staged."""
    shmem.prefetch(ctx)
    gdc_wait()
    gdc_launch_dependents()
    num_ids = TOP_K if TOP_K != 0 else top_k
    if not is_broken(control_ptr):
        bases, heap = peer_table(ctx)
        total = tl.load(total_ptr)
        for block in range(tl.program_id(0), tl.cdiv(total, BLOCK_R), tl.num_programs(0)):
            row = block * BLOCK_R + tl.arange(0, BLOCK_R)
            source = tl.load(sources_ptr + row, mask=row < total, other=0)
            pe = source // max_tokens
            there = row_offset(source - pe * max_tokens, num_ids)[:, None]
            indices = at_peer(bases, heap, staged_indices_ptr, pe)[:, None] + there
            for first in range(0, num_ids, BATCH):
                column = first + tl.arange(0, BATCH)
                mask = (row < total)[:, None] & (column < num_ids)[None, :]
                here = row_offset(row, num_ids)[:, None] + column[None, :]
                # both loads before the first store
                ids = tl.load(indices + column[None, :], mask=mask)
                if staged_weights_ptr is not None:
                    weights = at_peer(bases, heap, staged_weights_ptr, pe)[:, None] + there
                    entries = tl.load(weights + column[None, :], mask=mask)
                    tl.store(recv_weights_ptr + here, entries, mask=mask)
                tl.store(recv_indices_ptr + here, ids, mask=mask)
