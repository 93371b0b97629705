"""dispatch: every token to the PEs of its experts, once per PE. Argument checks, launches, reference.

Protocol: `route` gives every (token, destination PE) a slot in that PE's receive buffers, `copy` writes the rows,
signals, and waits for the signals of all PEs; see docs/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from mori_triton.errors import check_tensor, require
from mori_triton.ops import deterministic, dispatch_ll
from mori_triton.ops.calls import DispatchCall, DispatchInput, piece_grid, row_alignment
from mori_triton.ops.config import (
    EpDispatchCombineConfig,
    EpDispatchCombineKernelType,
    expert_owner,
)
from mori_triton.ops.kernels.dispatch import dispatch_copy_kernel, dispatch_recv_kernel, dispatch_route_kernel
from mori_triton.ops.plans import Step
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.dispatch (dispatch_copy_kernel)")
RECV_TAG = register_wait_site("EpDispatchCombineOp.dispatch_recv (dispatch_recv_kernel)")


def check_payload(
    name: str,
    tensor: torch.Tensor,
    config: EpDispatchCombineConfig,
    device: torch.device,
) -> None:
    """`[rows, h]` of a supported dtype, `h <= hidden_dim`, elements of at most `max_token_type_size` bytes."""
    check_tensor(name, tensor, config.payload_dtypes, (None, None), device)
    h = tensor.shape[1]
    require(1 <= h <= config.hidden_dim, f"{name}.shape[1]", f"in [1, hidden_dim = {config.hidden_dim}]", h)
    wide = config.max_token_type_size
    require(tensor.itemsize <= wide, f"{name}.dtype", f"at most max_token_type_size = {wide} bytes", tensor.dtype)


def is_absent(tensor: torch.Tensor | None, num_rows: int) -> bool:
    """None, or a tensor that holds nothing where `num_rows` rows would be due (`torch.empty(0)`, `[n, 0]`, `[0,
    k]`).
    """
    if not isinstance(tensor, torch.Tensor):
        return tensor is None
    # no rows of k entries is the whole of what a PE without tokens has
    whole = num_rows == 0 and tensor.dim() == 2 and tensor.shape[1] > 0
    return tensor.numel() == 0 and not whole


def check_dispatch(
    config: EpDispatchCombineConfig,
    device: torch.device,
    tokens: torch.Tensor,
    weights: torch.Tensor | None,
    scales: torch.Tensor | None,
    indices: torch.Tensor,
) -> DispatchInput:
    """Raise `ArgumentError` for anything that `dispatch` cannot take. Launches nothing, reads no contents."""
    check_payload("input", tokens, config, device)
    n, k, most = tokens.shape[0], config.num_experts_per_token, config.max_num_inp_token_per_rank
    require(n <= most, "input.shape[0]", f"<= max_num_inp_token_per_rank = {most}", n)
    check_tensor("indices", indices, torch.int32, (n, k), device)
    if is_absent(weights, n):
        weights = None
    else:
        check_tensor("weights", weights, torch.float32, (n, k), device)
    is_tensor = scales is None or isinstance(scales, torch.Tensor)
    require(is_tensor, "scales", "a torch.Tensor or None", type(scales).__name__)
    if scales is None or config.scale_bytes == 0 or is_absent(scales, n):
        empty = scales is None or scales.numel() == 0
        require(empty, "scales", "None, as the config has no scales", _describe(scales))
        scales = None
    else:
        check_tensor("scales", scales, scales.dtype, (n, config.scale_dim), device)
        size = config.scale_type_size
        require(scales.itemsize == size, "scales.dtype", f"scale_type_size = {size} bytes an entry", scales.dtype)
    return DispatchInput(
        tokens.detach(),
        None if weights is None else weights.detach(),
        None if scales is None else scales.detach(),
        indices,
    )


def _describe(tensor: torch.Tensor | None) -> str:
    return "None" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def plan_dispatch(call: DispatchCall) -> list[Step]:
    """The launches of a dispatch. Collective to run: every PE, same order, same `h` and payload dtype.

    Source: slot counters as in docs/protocol.md; reference: `dispatch_torch`.
    """
    config = call.config
    if config.kernel_type is EpDispatchCombineKernelType.IntraNodeLL and not (config.deterministic or call.replay):
        return dispatch_ll.dispatch_steps(call)
    steps = []
    if not call.replay:
        steps += deterministic.route_steps(call) if config.deterministic else route_steps(call)
    return [*steps, copy_step(call)]


def route_steps(call: DispatchCall) -> list[Step]:
    """Give every row of this PE a slot; without tokens there is nothing to route."""
    n, k, config = len(call.tokens), call.config.num_experts_per_token, call.config
    if n == 0:
        return []
    width = triton.next_power_of_2(k)
    # a program holds tokens * ids * PEs in registers
    tokens = max(1, min(call.shape.route_tokens, 256 // width))
    return [
        call.step(
            dispatch_route_kernel, (triton.cdiv(n, tokens),),
            call.ctx, call.given("indices"), call.given("forward"), call.slots, call.view("control"),
            n, k, config.num_experts_per_rank, config.max_recv,
            BLOCK_T=tokens, BLOCK_K=width, BLOCK_P=min(8, triton.next_power_of_2(config.world_size)),
            num_warps=call.shape.route_warps,
        )
    ]  # fmt: skip


def copy_step(call: DispatchCall) -> Step:
    """Write the routed rows and signal. A PE with no tokens copies nothing and signals as the others do."""
    n, k, config, shape, data = len(call.tokens), call.config.num_experts_per_token, call.config, call.shape, call.data
    row_bytes = data.tokens.shape[1] * data.tokens.itemsize
    align = row_alignment(row_bytes, data.tokens.data_ptr())
    grid = piece_grid(n, row_bytes, shape.piece_bytes, shape.num_programs)
    scales = call.given("scales")
    scale_align = 1 if data.scales is None else row_alignment(config.scale_bytes, data.scales.data_ptr())
    return call.step(
        dispatch_copy_kernel, grid,
        call.ctx, call.given("tokens"), call.given("indices"), call.given("forward"),
        call.view("recv_tokens"),
        call.view("recv_indices"),
        call.view("recv_weights"),
        call.view("recv_sources"),
        call.view("dispatch_signals"), call.view("control"), call.given("total"),
        n, *call.capacity, config.max_num_inp_token_per_rank, config.rank, config.scale_bytes // scale_align,
        call.slots, call.given("weights"), scales,
        None if scales is None else call.view("recv_scales"),
        ROW_UNITS=row_bytes // align, ALIGN=align, BLOCK=shape.piece_bytes // min(align, 4), TOP_K=k,
        BLOCK_K=call.block_k, CHUNK=call.chunk, SCALE_ALIGN=scale_align,
        SCALE_BLOCK=max(64, triton.next_power_of_2(config.scale_bytes // min(scale_align, 4))),
        SINGLE=grid == (triton.cdiv(row_bytes, shape.piece_bytes), n),
        WAIT=call.wait, TAG=WAIT_TAG, num_warps=shape.num_warps, waits=call.wait,
    )  # fmt: skip


def recv_steps(call: DispatchCall) -> list[Step]:
    """The launch that waits for the rows of a dispatch that only sent."""
    return [
        call.step(
            dispatch_recv_kernel, (1,),
            call.ctx, call.view("dispatch_signals"), call.given("total"), call.view("control"),
            call.config.max_recv, call.slots,
            TAG=RECV_TAG, num_warps=1, waits=True,
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class DispatchedRows:
    """What one PE receives, rows sorted by (source PE, token)."""

    sources: list[tuple[int, int]]  # (source PE, token) of each row
    tokens: torch.Tensor  # [rows, h]
    indices: torch.Tensor  # [rows, k]
    weights: torch.Tensor | None  # [rows, k]
    scales: torch.Tensor | None  # [rows, scale_dim]


def dispatch_torch(config: EpDispatchCombineConfig, given: list[DispatchInput]) -> list[DispatchedRows]:
    """Reference for all PEs at once: `given` is indexed by PE, and so is the result. Plain indexing, no overflow."""
    received: list[list[tuple[int, int]]] = [[] for _ in given]
    for pe, mine in enumerate(given):
        for token, row in enumerate(mine.indices.tolist()):
            for owner in {expert_owner(i, config) for i in row} - {-1}:
                received[owner].append((pe, token))

    def gather(columns: list[Any], sources: list[tuple[int, int]]) -> Any:
        if any(c is None for c in columns):
            return None
        return torch.stack([columns[p][t] for p, t in sources]) if sources else columns[0][:0]

    tokens, indices = [mine.tokens for mine in given], [mine.indices for mine in given]
    weights, scales = [mine.weights for mine in given], [mine.scales for mine in given]
    return [DispatchedRows(rows, *(gather(c, rows) for c in (tokens, indices, weights, scales))) for rows in received]
