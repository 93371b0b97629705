"""combine: every token's rows back from the PEs that it went to, summed. Argument checks, launches, reference.

Protocol: `copy` puts this PE's rows where peers read them, signals and waits for all PEs, `reduce` pulls and sums; see
docs/protocol.md.
"""

from __future__ import annotations

import torch

from mori_triton.errors import check_tensor, require
from mori_triton.ops import combine_codec, formats
from mori_triton.ops.calls import CombineCall, piece_grid, row_alignment
from mori_triton.ops.config import EpDispatchCombineConfig, expert_owner
from mori_triton.ops.dispatch import check_payload
from mori_triton.ops.kernels.combine import combine_copy_kernel, combine_recv_kernel, combine_reduce_kernel
from mori_triton.ops.plans import Step
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.combine (combine_copy_kernel)")
RECV_TAG = register_wait_site("EpDispatchCombineOp.combine_recv (combine_recv_kernel)")


def check_combine(
    config: EpDispatchCombineConfig,
    device: torch.device,
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    *,
    num_tokens: int,
) -> None:
    """Raise `ArgumentError` for anything that `combine` cannot take, whatever is in the tensors. Launches nothing.

    Args:
        num_tokens: rows given to dispatch.
    """
    check_payload("input", rows, config, device)
    k = config.num_experts_per_token
    require(isinstance(indices, torch.Tensor), "indices", "a torch.Tensor", type(indices).__name__)
    require(
        indices.dim() == 2 and indices.shape[0] == num_tokens,
        "indices.shape[0]",
        f"{num_tokens}, the rows of the indices given to dispatch (not those that dispatch returned)",
        indices.shape[0] if indices.dim() else "a scalar",
    )
    check_tensor("indices", indices, torch.int32, (num_tokens, k), device)
    if weights is not None:
        check_tensor("weights", weights, torch.float32, (None, k), device)


def check_contents(
    rows: torch.Tensor,
    weights: torch.Tensor | None,
    indices: torch.Tensor,
    dispatched: torch.Tensor | None,
    num_received: int,
) -> None:
    """As `check_combine`, for what only memory tells: reads it, so only where that is cheap.

    Args:
        dispatched: `[num_tokens, k]` int32, a copy of the indices given to dispatch, where there is one.
        num_received: rows that dispatch received.
    """
    wanted = f">= total_recv = {num_received}, the rows that dispatch received"
    require(rows.shape[0] >= num_received, "input.shape[0]", wanted, rows.shape[0])
    if dispatched is not None and not torch.equal(indices, dispatched):
        row = int((indices != dispatched).any(1).nonzero()[0])
        require(False, f"indices[{row}]", f"{dispatched[row].tolist()}, as given to dispatch", indices[row].tolist())
    if weights is not None:
        require(weights.shape[0] >= num_received, "weights.shape[0]", f">= {num_received}", weights.shape[0])


def plan_combine(call: CombineCall) -> tuple[list[Step], list[Step]]:
    """The launches that send and the launches that sum, with no wait between them where the first wait themselves.

    Collective to run: every PE, same order, same `h` and dtype, weights on all or on none.

    Source: docs/protocol.md; reference: `combine_torch`.
    """
    if call.config.quant_type != "none":
        combine_codec.check_codec(call)
        return [combine_codec.encode_step(call)], [combine_codec.decode_step(call)]
    small = call.rows.dtype in formats.FORMAT_OF_DTYPE
    return [copy_step(call)], [combine_codec.decode_step(call) if small else reduce_step(call)]


def copy_step(call: CombineCall) -> Step:
    """Bring rows and weights to where peers read them, and signal."""
    shape, k = call.shape, call.config.num_experts_per_token
    row_bytes = call.hidden * call.rows.itemsize
    align = row_alignment(row_bytes, call.rows.data_ptr())
    copied = call.num_rows if not call.in_place or call.weights is not None else 0
    return call.step(
        combine_copy_kernel,
        piece_grid(copied, 1 if call.in_place else row_bytes, shape.stage_piece_bytes, shape.stage_programs),
        call.ctx, None if call.in_place else call.given("rows"), call.given("weights"),
        call.view("combine_in"),
        call.view("combine_in_weights"),
        call.given("total"), call.view("combine_signals"), call.view("control"),
        k, call.num_rows,
        ROW_UNITS=row_bytes // align, ALIGN=align, BLOCK=shape.stage_piece_bytes // min(align, 4), BLOCK_K=call.block_k,
        WAIT=call.wait, TAG=WAIT_TAG, num_warps=shape.stage_warps if copied else 1, waits=call.wait,
    )  # fmt: skip


def reduce_step(call: CombineCall) -> Step:
    """Pull and sum."""
    config, shape, n = call.config, call.shape, call.num_tokens
    row_bytes = call.hidden * call.rows.itemsize
    return call.step(
        combine_reduce_kernel, piece_grid(n, row_bytes, shape.piece_bytes, shape.num_programs),
        call.ctx, call.view("combine_in", config.max_recv, call.hidden, dtype=call.rows.dtype),
        call.given("forward"), call.view("control"), call.out, call.view("combine_out_weights"),
        n, *call.capacity, None if call.weights is None else call.view("combine_in_weights"),
        HIDDEN=call.hidden, TOP_K=config.num_experts_per_token, BLOCK=shape.piece_bytes // call.rows.itemsize,
        BLOCK_K=call.block_k, CHUNK=call.chunk, num_warps=shape.num_warps,
    )  # fmt: skip


def recv_step(call: CombineCall) -> Step:
    """The launch that waits for the rows of a combine that only sent."""
    return call.step(
        combine_recv_kernel,
        (1,),
        call.ctx,
        call.view("combine_signals"),
        call.view("control"),
        TAG=RECV_TAG,
        num_warps=1,
        waits=True,
    )


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
