"""A whole dispatch in one launch, for batches so small that launches take most of the time (kernel type IntraNodeLL).

Protocol, argued in docs/protocol.md: a program gives its tokens their slots and writes them to the peers; the one that
arrives last signals, waits for all PEs and finishes. No other program waits.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_wait
from mori_triton.ops.kernels.carriers import find_carriers, load_ids, store_forward, sums_before
from mori_triton.ops.kernels.finish import DISPATCH_ARRIVALS, DISPATCH_EPOCH, finish_dispatch, is_broken, signal_last
from mori_triton.ops.kernels.rows import as_words, peer_table, row_offset


@triton.jit
def _store_pieces(row, words, offs, num_pes, ROW_WORDS: tl.constexpr, ALIGN: tl.constexpr, BLOCK_P: tl.constexpr):
    """Write a piece of each token's row, `[T, BLOCK]` words, to all its PEs. `row`: `[T, BLOCK_P]` int64, where the row
    begins on each PE, 0 where it does not go.
    """
    pe = tl.arange(0, BLOCK_P)
    for to_pe in range(num_pes):
        to = tl.sum(tl.where(pe[None, :] == to_pe, row, 0), 1)
        to_row = tl.multiple_of(to.to(tl.pointer_type(words.dtype)), ALIGN)
        mask = (to != 0)[:, None] & (offs < ROW_WORDS)[None, :]
        tl.store(to_row[:, None] + offs[None, :], words, mask=mask, cache_modifier=".cs")


@triton.jit(
    do_not_specialize=[
        "ctx", "tokens_ptr", "indices_ptr", "forward_ptr", "recv_tokens_ptr", "recv_indices_ptr", "recv_weights_ptr",
        "recv_sources_ptr", "signals_ptr", "slots_ptr", "control_ptr", "total_ptr", "num_tokens",
        "num_experts_per_rank", "capacity", "max_tokens", "scale_units", "weights_ptr", "scales_ptr",
        "recv_scales_ptr",
    ]
)  # fmt: skip
def dispatch_ll_kernel(
    ctx,  # device context
    tokens_ptr,  # [num_tokens, ROW], bytes, local
    indices_ptr,  # int32 [num_tokens, TOP_K], local: global expert ids
    forward_ptr,  # int32 [M, TOP_K], local, out: destination PE * capacity + slot, -1: not sent
    recv_tokens_ptr,  # symmetric [capacity, ROW], bytes
    recv_indices_ptr,  # symmetric int32 [capacity, TOP_K]
    recv_weights_ptr,  # symmetric float32 [capacity, TOP_K]
    recv_sources_ptr,  # symmetric int32 [capacity]: source PE * max_tokens + token
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    slots_ptr,  # symmetric int32 [1]: rows given out by all PEs so far in this round
    control_ptr,  # int64, local: the op's control words
    total_ptr,  # int32 [1], local, out: rows received
    num_tokens,
    num_experts_per_rank,
    capacity,
    max_tokens,
    scale_units,  # bytes of a scale row / SCALE_ALIGN
    # the words before this are 29, see test_gfx1250_whatever_arguments_are_absent
    weights_ptr,  # float32 [num_tokens, TOP_K], local, or None
    scales_ptr,  # [num_tokens, scale row], bytes, local, or None
    recv_scales_ptr,  # symmetric [capacity, scale row], bytes, or None
    ROW: tl.constexpr,  # bytes of a row; known to the compiler, as every instruction before the first store counts
    TOP_K: tl.constexpr,
    ALIGN: tl.constexpr,  # 16, 8, 4, 2 or 1: divides a row's bytes and the address of every row
    BLOCK: tl.constexpr,  # words (of min(ALIGN, 4) bytes) of a row moved at a time
    BLOCK_T: tl.constexpr,  # tokens of a program at a time
    BLOCK_K: tl.constexpr,  # >= TOP_K
    BLOCK_P: tl.constexpr,  # >= n_pes
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # >= words of a scale row
    WAIT: tl.constexpr,  # off: another launch waits for the peers
    TAG: tl.constexpr,  # names this wait in error records
):
    """Route blocks of tokens and write them to their PEs; the last program tells every peer and waits for all."""
    ROW_WORDS: tl.constexpr = ROW // ALIGN * ((ALIGN + 3) // 4)
    SCALE_UNIT: tl.constexpr = (SCALE_ALIGN + 3) // 4
    pe = tl.arange(0, BLOCK_P)
    offs = tl.arange(0, BLOCK)
    column = tl.arange(0, BLOCK_K)
    gdc_wait()
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
        token = block * BLOCK_T + tl.arange(0, BLOCK_T)
        mask_t = token < num_tokens
        # all loads first, those of the rows' first piece too: they are on their way while slots are given out
        ids = load_ids(indices_ptr, token, mask_t, TOP_K, BLOCK_K)
        source = as_words(tokens_ptr, ALIGN) + row_offset(token, ROW_WORDS)[:, None] + offs[None, :]
        words = tl.load(source, mask=mask_t[:, None] & (offs < ROW_WORDS)[None, :])
        if weights_ptr is not None:
            from_k = row_offset(token, TOP_K)[:, None] + column[None, :]
            weights = tl.load(weights_ptr + from_k, mask=mask_t[:, None] & (column < TOP_K)[None, :])
        # a broken op reads, but gives out no slot and writes nothing
        works = is_broken(control_ptr) == 0
        num_pes = shmem.n_pes(ctx)
        # [BLOCK_P]: from an address in this PE's heap to the same one in each PE's. An op reaches all PEs.
        bases_ptr, heap = peer_table(ctx)
        shift = tl.load(bases_ptr + pe, mask=pe < num_pes, other=0) - heap
        carrier = find_carriers(ids, num_experts_per_rank, num_pes, BLOCK_K, BLOCK_P)
        sent = ((carrier < BLOCK_K) & works).to(tl.int32)
        num_sent = tl.sum(sent, 0)
        # an add for each PE, all in flight at once; only the sum matters and the signal orders it, so relaxed
        counters = (slots_ptr.to(tl.int64) + shift).to(slots_ptr.dtype)
        first = tl.atomic_add(counters, num_sent, mask=num_sent > 0, sem="relaxed", scope="sys")
        slot = first[None, :] + sums_before(sent, BLOCK_T)
        # a slot past the end is given out but not used: the receiver sees how many were asked for
        slot = tl.where((sent > 0) & (slot < capacity), slot, -1)
        # what is small goes while the rows are still on their way here, and holds no registers afterwards
        if works:
            store_forward(forward_ptr, token, mask_t, carrier, slot, TOP_K, capacity, BLOCK_K, BLOCK_P)
        # the small rows of all PEs at once: [BLOCK_T, BLOCK_P, BLOCK_K]
        mask_k = (slot >= 0)[:, :, None] & (column < TOP_K)[None, None, :]
        to_k = row_offset(slot, TOP_K)[:, :, None] + column[None, None, :]
        recv_indices = (recv_indices_ptr.to(tl.int64) + shift).to(recv_indices_ptr.dtype)
        tl.store(recv_indices[None, :, None] + to_k, ids[:, None, :], mask=mask_k)
        if weights_ptr is not None:
            recv_weights = (recv_weights_ptr.to(tl.int64) + shift).to(recv_weights_ptr.dtype)
            tl.store(recv_weights[None, :, None] + to_k, weights[:, None, :], mask=mask_k)
        recv_sources = (recv_sources_ptr.to(tl.int64) + shift).to(recv_sources_ptr.dtype)
        me = shmem.my_pe(ctx)
        tl.store(recv_sources[None, :] + slot, (me * max_tokens + token)[:, None], mask=slot >= 0)
        # [BLOCK_T, BLOCK_P]
        row = recv_tokens_ptr.to(tl.int64) + shift[None, :] + row_offset(slot, ROW)
        row = tl.where(slot >= 0, row, 0)
        for start in range(0, ROW_WORDS, BLOCK):
            # the next piece; nothing after the last
            next_offs = start + BLOCK + offs
            ahead = tl.load(source + start + BLOCK, mask=mask_t[:, None] & (next_offs < ROW_WORDS)[None, :])
            _store_pieces(row, words, start + offs, num_pes, ROW_WORDS, ALIGN, BLOCK_P)
            words = ahead
        if scales_ptr is not None:
            offs_s = tl.arange(0, SCALE_BLOCK)
            scale_words = scale_units * SCALE_UNIT
            from_scales = as_words(scales_ptr, SCALE_ALIGN) + row_offset(token, scale_words)[:, None] + offs_s[None, :]
            scales = tl.load(from_scales, mask=mask_t[:, None] & (offs_s < scale_words)[None, :])
            for to_pe in range(num_pes):
                to_slot = tl.max(tl.where(pe[None, :] == to_pe, slot, -1), 1)
                to_scales = as_words(shmem.remote_ptr(ctx, recv_scales_ptr, to_pe), SCALE_ALIGN)
                to_scales += row_offset(to_slot, scale_words)[:, None] + offs_s[None, :]
                tl.store(to_scales, scales, mask=(to_slot >= 0)[:, None] & (offs_s < scale_words)[None, :])
    if is_broken(control_ptr) == 0:  # noqa: SIM102 - `and` would evaluate both sides: a broken op must not arrive
        if signal_last(ctx, signals_ptr, control_ptr, DISPATCH_ARRIVALS, DISPATCH_EPOCH) != 0:  # noqa: SIM102
            if WAIT:
                finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG)
