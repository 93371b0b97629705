"""combine: every token's rows back from the PEs that it went to, summed. Argument checks, launches, reference.

Protocol: `copy` puts this PE's rows where peers read them and signals, every program of `reduce` waits for all PEs,
pulls and sums; see docs/protocol.md.
"""

from __future__ import annotations

import torch
import triton

from mori_triton.device.launch import launch
from mori_triton.errors import check_tensor, require
from mori_triton.ops.buffers import EpBuffers
from mori_triton.ops.config import EpDispatchCombineConfig, expert_owner
from mori_triton.ops.dispatch import block_k, check_payload, row_alignment
from mori_triton.ops.kernels.combine import combine_copy_kernel, combine_reduce_kernel
from mori_triton.ops.tuning import EpLaunchConfig
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.combine (combine_reduce_kernel)")


def check_combine(
    config: EpDispatchCombineConfig,
    device: torch.device,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    dispatched: torch.Tensor,
    num_tokens: int,
    num_received: int | None,
) -> None:
    """Raise `ArgumentError` for anything that `combine` cannot take. Launches nothing.

    Args:
        dispatched: `[num_tokens, k]` int32, a copy of the indices given to dispatch, or an empty tensor where comparing
            is dear.
        num_tokens: rows given to dispatch.
        num_received: rows that dispatch received, None where only the device knows.
    """
    check_payload("input", rows, config, device)
    k = config.num_experts_per_token
    if num_received is not None:
        wanted = f">= total_recv = {num_received}, the rows that dispatch received"
        require(rows.shape[0] >= num_received, "input.shape[0]", wanted, rows.shape[0])
    require(isinstance(indices, torch.Tensor), "indices", "a torch.Tensor", type(indices).__name__)
    require(
        indices.dim() == 2 and indices.shape[0] == num_tokens,
        "indices.shape[0]",
        f"{num_tokens}, the rows of the indices given to dispatch (not those that dispatch returned)",
        indices.shape[0] if indices.dim() else "a scalar",
    )
    check_tensor("indices", indices, torch.int32, (num_tokens, k), device)
    if len(dispatched) == num_tokens and not torch.equal(indices, dispatched):
        row = int((indices != dispatched).any(1).nonzero()[0])
        require(False, f"indices[{row}]", f"{dispatched[row].tolist()}, as given to dispatch", indices[row].tolist())
    if weights is not None:
        at_least = rows.shape[0] if num_received is None else num_received
        check_tensor("weights", weights, torch.float32, (None, k), device)
        require(weights.shape[0] >= at_least, "weights.shape[0]", f">= {at_least}", weights.shape[0])


def launch_combine(
    buffers: EpBuffers,
    ctx: torch.Tensor,
    config: EpDispatchCombineConfig,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    num_tokens: int,
    shape: EpLaunchConfig,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the two kernels. Collective: every PE, same order, same `h` and dtype, weights on all or on none.

    Args:
        buffers: this PE's buffers.
        ctx: `[16]` int64, `SymmetricHeap.ctx`.
        config: the problem.
        rows: `[>= total_recv, h]`; the registered buffer itself is not copied.
        weights: `[>= total_recv, k]` float32 or None.
        num_tokens: rows given to dispatch.
        shape: launch shape only.

    Returns:
        `[M, h]` of the dtype of `rows` and `[M, k]` float32 (None without weights), views of this PE's buffers; rows
        from `num_tokens` on hold anything.

    Source: docs/protocol.md; reference: `combine_torch`.
    """
    h, k, most = rows.shape[1], config.num_experts_per_token, config.max_num_inp_token_per_rank
    i32, i64 = torch.int32, torch.int64
    registered = buffers.view("combine_in", rows.dtype, config.max_recv, h)
    registered_weights = buffers.view("combine_in_weights", torch.float32, config.max_recv, k)
    signals, epoch = buffers.view("combine_signals", i64, config.world_size), buffers.view("epoch", i64, 1)
    num_rows = min([config.max_recv, len(rows)] + ([] if weights is None else [len(weights)]))
    in_place = len(rows) > 0 and rows.data_ptr() == registered.data_ptr()
    row_bytes = h * rows.itemsize
    align = row_alignment(row_bytes, rows.data_ptr())
    num_pieces = triton.cdiv(row_bytes, shape.piece_bytes)
    # only the device knows how many rows there are; a program without a row ends at once
    copies = num_rows * num_pieces if not in_place else num_rows if weights is not None else 1
    launch(
        combine_copy_kernel, (max(1, min(copies, shape.num_programs)),),
        ctx, None if in_place else rows.detach(), None if weights is None else weights.detach(),
        registered, registered_weights,
        buffers.view("total_recv", i32, 1), signals, epoch, buffers.view("combine_arrivals", i32, 1),
        k, num_rows, row_bytes // align, num_pieces,
        ALIGN=align, BLOCK=shape.piece_bytes // min(align, 4), BLOCK_K=block_k(k), num_warps=shape.num_warps,
    )  # fmt: skip
    out = buffers.view("combine_out", rows.dtype, most, h)
    out_weights = buffers.view("combine_out_weights", torch.float32, most, k)
    align = row_alignment(row_bytes)
    # launched for no tokens too: the wait keeps this PE from running ahead of its peers
    launch(
        combine_reduce_kernel, (max(1, min(num_tokens * num_pieces, shape.num_programs)),),
        ctx, registered, None if weights is None else registered_weights, buffers.view("forward", i32, most, k),
        signals, epoch,
        out, out_weights,
        num_tokens, k, config.max_recv, row_bytes // align, num_pieces,
        ALIGN=align, BLOCK=shape.piece_bytes // rows.itemsize, BLOCK_K=block_k(k), TAG=WAIT_TAG,
        num_warps=shape.num_warps,
    )  # fmt: skip
    return out, None if weights is None else out_weights


def combine_torch(
    config: EpDispatchCombineConfig, indices: list[torch.Tensor], rows: list[dict[tuple[int, int], torch.Tensor]]
) -> list[torch.Tensor]:
    """Reference for all PEs at once.

    Args:
        indices: by PE, `[n, k]` as given to dispatch.
        rows: by PE, its output row for each (source PE, token) that it received, all of one shape and dtype.

    Returns:
        By PE, `[n, h]`: the float32 sum over the distinct destination PEs in the order of the ids, rounded once.
    """
    sample = next(row for mine in rows for row in mine.values())
    results = []
    for pe, mine in enumerate(indices):
        out = torch.zeros(len(mine), len(sample), dtype=torch.float32)
        for token, ids in enumerate(mine.tolist()):
            for owner in dict.fromkeys(expert_owner(i, config) for i in ids):
                if owner >= 0:
                    out[token] += rows[owner][pe, token].float()
        results.append(out.to(sample.dtype))
    return results
