"""Count how many received (token, id) pairs each local expert has, reading every id once."""

import triton
import triton.language as tl

from mori_triton.ops.kernels.rows import row_offset


@triton.jit(do_not_specialize=["counts_ptr", "num_experts"])
def clear_counts_kernel(
    counts_ptr,  # int32 [num_experts], local, out: zeros
    num_experts,
    BINS: tl.constexpr,  # >= num_experts
):
    """One program, before those of `local_expert_count_kernel` that add."""
    expert = tl.arange(0, BINS)
    tl.store(counts_ptr + expert, tl.zeros([BINS], tl.int32), mask=expert < num_experts)


@triton.jit(do_not_specialize=["indices_ptr", "total_ptr", "counts_ptr", "top_k", "first_expert", "num_experts"])
def local_expert_count_kernel(
    indices_ptr,  # int32 [R, top_k], local: global expert ids of the rows received
    total_ptr,  # int32 [1], local: rows received
    counts_ptr,  # int32 [num_experts], local, out
    top_k,
    first_expert,  # id of this PE's first expert
    num_experts,
    ALONE: tl.constexpr,  # one program, which stores; else each adds to counts, cleared before
    BLOCK: tl.constexpr,  # ids at a time
    BINS: tl.constexpr,  # > num_experts, a power of two
):
    """A histogram of this PE's ids, one BLOCK after the other; an id that a row holds twice counts twice."""
    num_ids = row_offset(tl.load(total_ptr), top_k)
    hits = tl.zeros([BINS], tl.int32)
    first = row_offset(tl.program_id(0), BLOCK)
    for start in range(first, num_ids, row_offset(tl.num_programs(0), BLOCK)):
        offs = start + tl.arange(0, BLOCK)
        ids = tl.load(indices_ptr + offs, mask=offs < num_ids, other=-1)
        # compared before the subtraction, which could leave 32 bits
        local = (ids >= first_expert) & (ids < first_expert + num_experts)
        # the bin after the last expert takes what is not counted
        hits += tl.histogram(tl.where(local, ids - first_expert, num_experts), BINS)
    expert = tl.arange(0, BINS)
    mine = expert < num_experts
    if ALONE:
        tl.store(counts_ptr + expert, hits, mask=mine)
    elif first < num_ids:
        tl.atomic_add(counts_ptr + expert, hits, mask=mine & (hits > 0), sem="relaxed", scope="gpu")
