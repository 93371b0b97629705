"""Which of a token's ids carries it to which PE, for a block of tokens and all PEs at once, in registers."""

import triton
import triton.language as tl

from mori_triton.ops.kernels.rows import row_offset


@triton.jit
def load_ids(
    indices_ptr,  # int32 [num_tokens, top_k], local: global expert ids
    token,  # int32 [T]
    mask_t,  # bool [T]: tokens that are there
    top_k,
    BLOCK_K: tl.constexpr,  # >= top_k
):
    """The ids `[T, BLOCK_K]`, -1 where there is none."""
    column = tl.arange(0, BLOCK_K)
    offs = row_offset(token, top_k)[:, None] + column[None, :]
    return tl.load(indices_ptr + offs, mask=mask_t[:, None] & (column < top_k)[None, :], other=-1)


@triton.jit
def find_carriers(
    ids,  # int32 [T, BLOCK_K]
    num_experts_per_rank,
    num_pes,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,  # >= num_pes
):
    """By PE `[T, BLOCK_P]` the column of the first id that lives there, BLOCK_K for a PE that the token does not go
    to.
    """
    column = tl.arange(0, BLOCK_K)
    pe = tl.arange(0, BLOCK_P)[None, :, None]
    # ids of a PE are a range, so that no id is divided; as unsigned numbers those below the range are large
    within = (ids[:, None, :] - pe * num_experts_per_rank).to(tl.uint32, bitcast=True)
    here = (within < num_experts_per_rank.to(tl.uint32)) & (pe < num_pes)
    return tl.min(tl.where(here, column[None, None, :], BLOCK_K), 2)


@triton.jit
def sums_before(count, SIZE: tl.constexpr):
    """`[SIZE, P]` int32: for each row the sum of the rows before it.

    Not `tl.cumsum`: Triton 3.6 fails to compile a scan of fewer rows than the threads that it is laid out over.
    """
    row = tl.arange(0, SIZE)
    return tl.sum(tl.where(row[:, None, None] > row[None, :, None], count[None, :, :], 0), 1)


@triton.jit
def store_forward(
    forward_ptr,  # int32 [M, top_k], local, out: destination PE * capacity + slot, -1: not sent
    token,  # int32 [T]
    mask_t,  # bool [T]
    carrier,  # int32 [T, BLOCK_P]
    slot,  # int32 [T, BLOCK_P], -1: not sent
    top_k,
    capacity,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the forward map of a block of tokens: at each carrier its PE and slot, -1 elsewhere."""
    column = tl.arange(0, BLOCK_K)
    target = tl.where(slot >= 0, tl.arange(0, BLOCK_P)[None, :] * capacity + slot, -1)
    # [T, BLOCK_P, BLOCK_K]: an id carries to one PE at most
    forward = tl.max(tl.where(carrier[:, :, None] == column[None, None, :], target[:, :, None], -1), 1)
    offs = row_offset(token, top_k)[:, None] + column[None, :]
    tl.store(forward_ptr + offs, forward, mask=mask_t[:, None] & (column < top_k)[None, :])
