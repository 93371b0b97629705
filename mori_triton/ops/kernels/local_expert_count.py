"""Count how many received (token, id) pairs each local expert has."""

import triton
import triton.language as tl

from mori_triton.ops.kernels.rows import row_offset


@triton.jit(do_not_specialize=["top_k", "first_expert"])
def local_expert_count_kernel(
    indices_ptr,  # int32 [R, top_k], local: global expert ids of the rows received
    total_ptr,  # int32 [1], local: rows received
    counts_ptr,  # int32 [num_experts_per_rank], local, out
    top_k,
    first_expert,  # id of this PE's first expert
    BLOCK: tl.constexpr,
):
    """Program e counts expert `first_expert + e`; an id that a row holds twice counts twice."""
    expert = tl.program_id(0)
    num_ids = row_offset(tl.load(total_ptr), top_k)
    hits = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_ids, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        ids = tl.load(indices_ptr + offs, mask=offs < num_ids, other=-1)
        hits += (ids == first_expert + expert).to(tl.int32)
    tl.store(counts_ptr + expert, tl.sum(hits, 0))
