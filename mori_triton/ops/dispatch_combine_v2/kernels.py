"""The kernels of a dispatch that stages: stage (give out slots, gather the small rows by destination), send.

Protocol, argued in docs/ep_v2.md: `stage` takes a run of slots on each PE for each block of tokens, and lays ids,
weights, sources and scale rows down in the order of those slots. A kernel boundary joins the programs of one PE. `send`
copies every run to its PE as it lies, and every payload row straight from the caller's memory to its slots; its program
that arrives last signals every peer, waits for all of them and finishes, as in every dispatch.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.carriers import find_carriers, load_ids, store_forward, sums_before
from mori_triton.ops.kernels.finish import DISPATCH_ARRIVALS, DISPATCH_EPOCH, finish_dispatch, is_broken, signal_last
from mori_triton.ops.kernels.rows import as_words, at_peer, load_targets, peer_table, row_offset, split_target


@triton.jit
def region_at(staging_ptr, AT: tl.constexpr):
    """A region of the staging buffer (whose base is aligned to 128 bytes, as `AT` is) as 32-bit words."""
    return as_words(staging_ptr + AT, 16)


@triton.jit(
    do_not_specialize=[
        "ctx", "indices_ptr", "staging_ptr", "forward_ptr", "slots_ptr", "control_ptr", "num_tokens", "top_k",
        "num_experts_per_rank", "capacity", "max_tokens", "scale_units", "weights_ptr", "scales_ptr",
    ]
)  # fmt: skip
def dispatch_stage_kernel(
    ctx,  # device context
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    staging_ptr,  # bytes, local, out: regions of `staging.staging_layout`
    forward_ptr,  # int32 [M, top_k], local, out: destination PE * capacity + slot, -1: not sent
    slots_ptr,  # symmetric int32 [1]: rows given out by all PEs so far in this round
    control_ptr,  # int64 [CONTROL_WORDS], local
    num_tokens,
    top_k,
    num_experts_per_rank,
    capacity,  # rows of a receive buffer
    max_tokens,
    scale_units,  # bytes of a caller's scale row / SCALE_ALIGN
    weights_ptr,  # float32 [num_tokens, top_k], local, or None
    scales_ptr,  # [num_tokens, scale row], bytes, local, or None
    INDICES_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    SOURCES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BASES_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    MAX_K: tl.constexpr,  # ids that a staged row has room for, a power of two
    SCALE_STRIDE: tl.constexpr,  # bytes of a staged scale row
    BLOCK_T: tl.constexpr,  # tokens handled at a time
    BLOCK_P: tl.constexpr,  # >= n_pes
    SCALE_ALIGN: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,  # >= words of a staged scale row
):
    """Route a block of tokens, one slot for each (token, distinct PE), and stage what travels beside the payload.

    Programs are blocks. A block takes all its slots on a PE by one add, so that they are a run.
    """
    gdc_wait()
    gdc_launch_dependents()
    if not is_broken(control_ptr):
        num_pes = shmem.n_pes(ctx)
        pe = tl.arange(0, BLOCK_P)
        column = tl.arange(0, MAX_K)
        share = tl.cdiv(num_tokens, tl.num_programs(0))
        first = tl.program_id(0) * share
        end = tl.minimum(first + share, num_tokens)
        num_sent = tl.zeros([BLOCK_P], tl.int32)
        for start in range(first, end, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            ids = load_ids(indices_ptr, token, token < end, top_k, MAX_K)
            num_sent += tl.sum(
                (find_carriers(ids, num_experts_per_rank, num_pes, MAX_K, BLOCK_P) < MAX_K).to(tl.int32), 0
            )
        bases_ptr, heap = peer_table(ctx)
        # from an address in this PE's heap to the same one in each PE's. An op reaches all PEs.
        shift = tl.load(bases_ptr + pe, mask=pe < num_pes, other=0) - heap
        counters = (slots_ptr.to(tl.int64) + shift).to(slots_ptr.dtype)
        # only the sum matters and the signal orders it, so relaxed; the words are the peers', so system scope
        base = tl.atomic_add(counters, num_sent, mask=num_sent > 0, sem="relaxed", scope="sys")
        # slots past the end are given out but not used: the receiver sees how many were asked for
        kept = tl.where(num_sent > 0, tl.minimum(num_sent, tl.maximum(capacity - base, 0)), 0)
        run = tl.program_id(0) * num_pes + pe
        tl.store(region_at(staging_ptr, BASES_AT) + run, base, mask=pe < num_pes)
        tl.store(region_at(staging_ptr, COUNTS_AT) + run, kept, mask=pe < num_pes)
        staged_ids = region_at(staging_ptr, INDICES_AT)
        for start in range(first, end, BLOCK_T):
            token = start + tl.arange(0, BLOCK_T)
            mask_t = token < end
            ids = load_ids(indices_ptr, token, mask_t, top_k, MAX_K)
            carrier = find_carriers(ids, num_experts_per_rank, num_pes, MAX_K, BLOCK_P)
            sent = (carrier < MAX_K).to(tl.int32)
            slot = base[None, :] + sums_before(sent, BLOCK_T)
            base += tl.sum(sent, 0)
            slot = tl.where((sent > 0) & (slot < capacity), slot, -1)
            store_forward(forward_ptr, token, mask_t, carrier, slot, top_k, capacity, MAX_K, BLOCK_P)
            # [BLOCK_T, BLOCK_P]: rows of the pool; a PE's part has room for MAX_K ids a row, rows lie closely in it
            part = pe[None, :] * capacity
            mask = slot >= 0
            # [BLOCK_T, BLOCK_P, MAX_K]
            mask_k = mask[:, :, None] & (column < top_k)[None, None, :]
            to_k = (row_offset(part, MAX_K) + row_offset(slot, top_k))[:, :, None] + column[None, None, :]
            tl.store(staged_ids + to_k, ids[:, None, :], mask=mask_k)
            if weights_ptr is not None:
                from_k = row_offset(token, top_k)[:, None] + column[None, :]
                weights = tl.load(weights_ptr + from_k, mask=mask_t[:, None] & (column < top_k)[None, :])
                staged_weights = tl.cast(staging_ptr + WEIGHTS_AT, tl.pointer_type(tl.float32), bitcast=True)
                tl.store(staged_weights + to_k, weights[:, None, :], mask=mask_k)
            source = (shmem.my_pe(ctx) * max_tokens + token)[:, None]
            tl.store(region_at(staging_ptr, SOURCES_AT) + part + slot, source, mask=mask)
            if scales_ptr is not None:
                UNIT: tl.constexpr = (SCALE_ALIGN + 3) // 4
                STRIDE: tl.constexpr = SCALE_STRIDE // SCALE_ALIGN * UNIT
                offs = tl.arange(0, SCALE_BLOCK)
                from_s = row_offset(token, scale_units * UNIT)[:, None] + offs[None, :]
                # what pads a row is 0
                scales = tl.load(
                    as_words(scales_ptr, SCALE_ALIGN) + from_s,
                    mask=mask_t[:, None] & (offs < scale_units * UNIT)[None, :],
                    other=0,
                )
                staged_scales = as_words(staging_ptr + SCALES_AT, SCALE_ALIGN)
                for to_pe in range(num_pes):
                    row = tl.max(tl.where(pe[None, :] == to_pe, slot, -1), 1)
                    to_s = row_offset(to_pe * capacity + row, STRIDE)[:, None] + offs[None, :]
                    tl.store(staged_scales + to_s, scales, mask=(row >= 0)[:, None] & (offs < STRIDE)[None, :])


# what a run consists of
KINDS = tl.constexpr(4)


@triton.jit
def send_run(
    ctx, staging_ptr, recv_indices_ptr, recv_weights_ptr, recv_sources_ptr, recv_scales_ptr,
    kind, pe, slot, count, top_k, capacity,
    INDICES_AT: tl.constexpr, WEIGHTS_AT: tl.constexpr, SOURCES_AT: tl.constexpr, SCALES_AT: tl.constexpr,
    MAX_K: tl.constexpr, SCALE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Put one kind of the `count` staged rows from `slot` on to `pe`. The put stands here once: it is most of the
    kernel's code.
    """
    part = pe * capacity
    there = row_offset(slot, top_k) * 4
    here = row_offset(part, MAX_K) * 4 + there
    # sources, which every row has
    src = SOURCES_AT + row_offset(part + slot, 4)
    dst = recv_sources_ptr.to(tl.int64) + row_offset(slot, 4)
    num_bytes = row_offset(count, 4)
    if kind == 1:
        src, dst, num_bytes = INDICES_AT + here, recv_indices_ptr.to(tl.int64) + there, row_offset(count, top_k) * 4
    if kind == 2:
        if recv_weights_ptr is not None:
            src, dst, num_bytes = WEIGHTS_AT + here, recv_weights_ptr.to(tl.int64) + there, row_offset(count, top_k) * 4
        else:
            num_bytes = row_offset(0, 4)
    if kind == 3:
        if recv_scales_ptr is not None:
            src = SCALES_AT + row_offset(part + slot, SCALE_STRIDE)
            dst = recv_scales_ptr.to(tl.int64) + row_offset(slot, SCALE_STRIDE)
            num_bytes = row_offset(count, SCALE_STRIDE)
        else:
            num_bytes = row_offset(0, 4)
    if num_bytes > 0:
        shmem.put_nbi(ctx, dst, staging_ptr + src, num_bytes, pe)


@triton.jit(
    do_not_specialize=[
        "ctx", "tokens_ptr", "forward_ptr", "staging_ptr", "recv_tokens_ptr", "recv_indices_ptr", "recv_sources_ptr",
        "signals_ptr", "slots_ptr", "control_ptr", "total_ptr", "num_tokens", "num_blocks", "top_k", "capacity",
        "inverse", "shift", "row_units", "recv_weights_ptr", "recv_scales_ptr",
    ]
)  # fmt: skip
def dispatch_send_kernel(
    ctx,  # device context
    tokens_ptr,  # [num_tokens, row], bytes, local, 16-byte aligned
    forward_ptr,  # int32 [M, top_k], local, of the stage kernel
    staging_ptr,  # bytes, local, of the stage kernel
    recv_tokens_ptr,  # symmetric [capacity, row], bytes
    recv_indices_ptr,  # symmetric int32 [capacity, top_k]
    recv_sources_ptr,  # symmetric int32 [capacity]: source PE * M + token
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    slots_ptr,  # symmetric int32 [1], this PE's own
    control_ptr,  # int64 [CONTROL_WORDS], local
    total_ptr,  # int32 [1], local, out: rows received
    num_tokens,
    num_blocks,  # of the stage kernel, 0: there was none
    top_k,
    capacity,
    inverse,  # of `ops.calls.inverse_of(capacity)`
    shift,
    row_units,  # bytes of a row / 16
    # these may be None; the words before them are 29, so that no number of them makes 30, which gfx1250 cannot preload
    recv_weights_ptr,  # symmetric float32 [capacity, top_k], or None: no weights travel
    recv_scales_ptr,  # symmetric [capacity, SCALE_STRIDE], bytes, or None: no scales travel
    INDICES_AT: tl.constexpr,
    WEIGHTS_AT: tl.constexpr,
    SOURCES_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    BASES_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    MAX_K: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,  # words of a row moved at a time
    CHUNK: tl.constexpr,  # ids of a token whose targets are loaded at a time
    TAG: tl.constexpr,  # names this wait in error records
):
    """Send the staged runs and the payload; the last program tells every peer, waits for all of them and finishes.

    Programs (piece, token); a run is one program's, whichever it is.
    """
    gdc_wait()
    if not is_broken(control_ptr):
        num_pes = shmem.n_pes(ctx)
        mine = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        for item in range(mine, num_blocks * num_pes * KINDS, tl.num_programs(0) * tl.num_programs(1)):
            run = item // KINDS
            count = tl.load(region_at(staging_ptr, COUNTS_AT) + run)
            slot = tl.load(region_at(staging_ptr, BASES_AT) + run)
            send_run(
                ctx, staging_ptr, recv_indices_ptr, recv_weights_ptr, recv_sources_ptr, recv_scales_ptr,
                item % KINDS, run % num_pes, slot, count, top_k, capacity,
                INDICES_AT, WEIGHTS_AT, SOURCES_AT, SCALES_AT, MAX_K, SCALE_STRIDE,
            )  # fmt: skip
        bases, heap = peer_table(ctx)
        row_words = row_units * 4
        for piece in range(tl.program_id(0), tl.cdiv(row_words, BLOCK), tl.num_programs(0)):
            offs = piece * BLOCK + tl.arange(0, BLOCK)
            mask = offs < row_words
            for token in range(tl.program_id(1), num_tokens, tl.num_programs(1)):
                row = tl.load(as_words(tokens_ptr, 16) + row_offset(token, row_words) + offs, mask=mask)
                for first in range(0, top_k, CHUNK):
                    targets = load_targets(forward_ptr, token, top_k, first, CHUNK)
                    # every address before the first store, which could be to the table for all the compiler knows
                    rows = ()
                    for j in tl.static_range(CHUNK):
                        pe, slot = split_target(tl.maximum(targets[j], 0), capacity, inverse, shift)
                        there = as_words(at_peer(bases, heap, recv_tokens_ptr, pe), 16)
                        rows += (there + row_offset(slot, row_words),)  # type: ignore[assignment]
                    for j in tl.static_range(CHUNK):
                        if targets[j] >= 0:
                            tl.store(rows[j] + offs, row, mask=mask, cache_modifier=".cs")
        if signal_last(ctx, signals_ptr, control_ptr, DISPATCH_ARRIVALS, DISPATCH_EPOCH) != 0:
            finish_dispatch(ctx, signals_ptr, slots_ptr, total_ptr, control_ptr, capacity, TAG)
