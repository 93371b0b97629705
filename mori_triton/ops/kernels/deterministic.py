"""Slots in the order (source PE, token): the two kernels that route for `deterministic=True`.

Protocol, argued in docs/protocol.md: `count` finds how many rows each block of tokens sends to each PE; its last
program turns them into where each block begins, sends the PE's sums to all PEs, waits for theirs and adds up what the
PEs before this one send. `assign` then needs nothing from anyone. Both cut the tokens into the same blocks.
"""

import triton
import triton.language as tl

from mori_triton.device import shmem
from mori_triton.device.launches import gdc_launch_dependents, gdc_wait
from mori_triton.ops.kernels.carriers import find_carriers, load_ids, store_forward, sums_before
from mori_triton.ops.kernels.finish import COUNT_ARRIVALS, DISPATCH_EPOCH, STATUS, is_broken
from mori_triton.ops.kernels.rows import row_offset


@triton.jit
def _begin_blocks(counts_ptr, begins_ptr, num_blocks, num_pes, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr):
    """Write for each block the sums `[num_pes]` of the blocks before it; returns the sums `[BLOCK_P]` of all."""
    pe = tl.arange(0, BLOCK_P)
    total = tl.zeros([BLOCK_P], tl.int32)
    for start in range(0, num_blocks, BLOCK_B):
        block = start + tl.arange(0, BLOCK_B)
        offs = row_offset(block, num_pes)[:, None] + pe[None, :]
        mask = (block < num_blocks)[:, None] & (pe < num_pes)[None, :]
        # [BLOCK_B, BLOCK_P]
        count = tl.load(counts_ptr + offs, mask=mask, other=0)
        tl.store(begins_ptr + offs, total[None, :] + sums_before(count, BLOCK_B), mask=mask)
        total += tl.sum(count, 0)
    return total


@triton.jit(
    do_not_specialize=[
        "ctx", "indices_ptr", "counts_ptr", "begins_ptr", "bases_ptr", "matrix_ptr", "signals_ptr", "slots_ptr",
        "control_ptr", "num_tokens", "top_k", "num_experts_per_rank",
    ]
)  # fmt: skip
def dispatch_count_kernel(
    ctx,  # device context
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    counts_ptr,  # int32 [num_blocks, n_pes], local, scratch
    begins_ptr,  # int32 [num_blocks, n_pes], local, out: rows of this PE's earlier blocks, by destination
    bases_ptr,  # int32 [n_pes], local, out: rows of earlier PEs, by destination
    matrix_ptr,  # symmetric int32 [n_pes, n_pes]: row p is written by PE p: its rows for each PE
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    slots_ptr,  # symmetric int32 [1], this PE's own, out: rows that all PEs send here
    control_ptr,  # int64, local: the op's control words
    num_tokens,
    top_k,
    num_experts_per_rank,
    BLOCK_T: tl.constexpr,  # tokens of a block, as in dispatch_assign_kernel
    BLOCK_K: tl.constexpr,  # >= top_k
    BLOCK_P: tl.constexpr,  # >= n_pes
    BLOCK_B: tl.constexpr,  # blocks that the last program takes at a time
    TAG: tl.constexpr,  # names this wait in error records
):
    """Count by block and PE; the last program exchanges the sums with all PEs. Without tokens there is one program."""
    me = shmem.my_pe(ctx)
    num_pes = shmem.n_pes(ctx)
    num_blocks = tl.cdiv(num_tokens, BLOCK_T)
    pe = tl.arange(0, BLOCK_P)
    mask_p = pe < num_pes
    gdc_wait()
    if is_broken(control_ptr) == 0:
        for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
            token = block * BLOCK_T + tl.arange(0, BLOCK_T)
            ids = load_ids(indices_ptr, token, token < num_tokens, top_k, BLOCK_K)
            carrier = find_carriers(ids, num_experts_per_rank, num_pes, BLOCK_K, BLOCK_P)
            num_sent = tl.sum((carrier < BLOCK_K).to(tl.int32), 0)
            tl.store(counts_ptr + row_offset(block, num_pes) + pe, num_sent, mask=mask_p)
        if shmem.arrive_last(ctx, control_ptr + COUNT_ARRIVALS, tl.num_programs(0)) != 0:
            # [BLOCK_P]
            total = _begin_blocks(counts_ptr, begins_ptr, num_blocks, num_pes, BLOCK_B, BLOCK_P)
            # [BLOCK_P, BLOCK_P]: the same row to every PE
            mask = mask_p[:, None] & mask_p[None, :]
            my_row = shmem.remote_ptr(ctx, matrix_ptr + me * num_pes, pe)[:, None] + pe[None, :]
            tl.store(my_row, tl.broadcast_to(total[None, :], [BLOCK_P, BLOCK_P]), mask=mask)
            # the epoch is advanced by the end of the dispatch, not here
            epoch = tl.load(control_ptr + DISPATCH_EPOCH) + 1
            shmem.signal_set_all(ctx, signals_ptr + me, epoch)
            seen = shmem.wait_all_ge(ctx, signals_ptr, num_pes, epoch, TAG)
            gdc_launch_dependents()
            if seen >= epoch:
                # [source, destination]
                sends = tl.load(matrix_ptr + pe[:, None] * num_pes + pe[None, :], mask=mask, other=0)
                tl.store(bases_ptr + pe, tl.sum(tl.where(pe[:, None] < me, sends, 0), 0), mask=mask_p)
                tl.store(slots_ptr, tl.sum(tl.where(pe == me, tl.sum(sends, 0), 0), 0))
            else:
                tl.store(control_ptr + STATUS, 1)


@triton.jit(
    do_not_specialize=[
        "ctx", "indices_ptr", "begins_ptr", "bases_ptr", "forward_ptr", "control_ptr", "num_tokens", "top_k",
        "num_experts_per_rank", "capacity",
    ]
)  # fmt: skip
def dispatch_assign_kernel(
    ctx,  # device context
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    begins_ptr,  # int32 [num_blocks, n_pes], local: of the count kernel
    bases_ptr,  # int32 [n_pes], local: of the count kernel
    forward_ptr,  # int32 [M, top_k], local, out: destination PE * capacity + slot, -1: not sent
    control_ptr,  # int64, local: the op's control words
    num_tokens,
    top_k,
    num_experts_per_rank,
    capacity,  # rows of a receive buffer
    BLOCK_T: tl.constexpr,  # tokens of a block, as in dispatch_count_kernel
    BLOCK_K: tl.constexpr,  # >= top_k
    BLOCK_P: tl.constexpr,  # >= n_pes
):
    """Each row's slot: rows of earlier PEs, of this PE's earlier blocks, of earlier tokens of the block. The first
    `capacity` are placed.
    """
    num_pes = shmem.n_pes(ctx)
    pe = tl.arange(0, BLOCK_P)
    mask_p = pe < num_pes
    gdc_wait()
    gdc_launch_dependents()
    if is_broken(control_ptr) == 0:
        base = tl.load(bases_ptr + pe, mask=mask_p, other=0)
        for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK_T), tl.num_programs(0)):
            token = block * BLOCK_T + tl.arange(0, BLOCK_T)
            mask_t = token < num_tokens
            ids = load_ids(indices_ptr, token, mask_t, top_k, BLOCK_K)
            carrier = find_carriers(ids, num_experts_per_rank, num_pes, BLOCK_K, BLOCK_P)
            first = base + tl.load(begins_ptr + row_offset(block, num_pes) + pe, mask=mask_p, other=0)
            sent = (carrier < BLOCK_K).to(tl.int32)
            slot = first[None, :] + sums_before(sent, BLOCK_T)
            slot = tl.where((sent > 0) & (slot < capacity), slot, -1)
            store_forward(forward_ptr, token, mask_t, carrier, slot, top_k, capacity, BLOCK_K, BLOCK_P)
