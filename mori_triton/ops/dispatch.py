"""dispatch: every token to the PEs of its experts, once per PE. Argument checks, launches, reference.

Protocol: `route` gives every (token, destination PE) a slot in that PE's receive buffers, `copy` writes the rows and
signals, `wait` waits for the signals of all PEs; see docs/protocol.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from mori_triton.device.launch import launch
from mori_triton.errors import check_tensor, require
from mori_triton.ops.buffers import EpBuffers
from mori_triton.ops.config import PAYLOAD_DTYPES, EpDispatchCombineConfig, expert_owner
from mori_triton.ops.kernels.dispatch import dispatch_copy_kernel, dispatch_route_kernel, dispatch_wait_kernel
from mori_triton.ops.tuning import EpLaunchConfig
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.dispatch (dispatch_wait_kernel)")


@dataclass(frozen=True)
class DispatchInput:
    """A dispatch's arguments after `check_dispatch`: empty weights and scales have become None."""

    tokens: torch.Tensor  # [n, h]
    weights: torch.Tensor | None  # float32 [n, k]
    scales: torch.Tensor | None  # [n, scale_dim]
    indices: torch.Tensor  # int32 [n, k]


def row_alignment(row_bytes: int, *addresses: int) -> int:
    """The widest access, at most 16 bytes, that keeps every row of `row_bytes` at these addresses aligned."""
    return math.gcd(16, row_bytes, *addresses)


def block_k(top_k: int) -> int:
    """The power of two that a row of `top_k` entries is handled in: one compiled kernel serves the usual ones."""
    return max(16, triton.next_power_of_2(top_k))


def check_payload(name: str, tensor: torch.Tensor, config: EpDispatchCombineConfig, device: torch.device) -> None:
    """`[rows, h]` of a supported dtype, `h <= hidden_dim`, elements of at most `max_token_type_size` bytes."""
    check_tensor(name, tensor, PAYLOAD_DTYPES, (None, None), device)
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


def launch_dispatch(
    buffers: EpBuffers, ctx: torch.Tensor, config: EpDispatchCombineConfig, given: DispatchInput, shape: EpLaunchConfig
) -> None:
    """Launch the three kernels. Collective: every PE, same order, same `h` and payload dtype.

    Args:
        buffers: this PE's buffers; receives land in them.
        ctx: `[16]` int64, `SymmetricHeap.ctx`.
        config: the problem.
        given: what `check_dispatch` returned.
        shape: launch shape only.

    Source: slot counters as in docs/protocol.md; reference: `dispatch_torch`.
    """
    n, k, rows = given.tokens.shape[0], config.num_experts_per_token, config.max_recv
    i32, i64 = torch.int32, torch.int64
    forward = buffers.view("forward", i32, config.max_num_inp_token_per_rank, k)
    slots, epoch = buffers.view("recv_slots", i32, 1), buffers.view("epoch", i64, 1)
    signals = buffers.view("dispatch_signals", i64, config.world_size)
    # a PE with no tokens has nothing to route, but copies (nothing) and signals as the others do
    if n > 0:
        launch(
            dispatch_route_kernel, (triton.cdiv(n, shape.route_tokens),),
            ctx, given.indices, forward, slots, n, k, config.num_experts_per_rank, rows,
            BLOCK_T=shape.route_tokens, BLOCK_K=block_k(k), num_warps=shape.num_warps,
        )  # fmt: skip
    row_bytes = given.tokens.shape[1] * given.tokens.itemsize
    align = row_alignment(row_bytes, given.tokens.data_ptr())
    block = shape.piece_bytes // min(align, 4)
    num_pieces = triton.cdiv(row_bytes, shape.piece_bytes)
    scales, scale_align = None, 1
    if given.scales is not None:
        # an opaque row: its dtype may be one that no kernel can name
        scales = (
            given.scales.view(torch.uint8)
            if n > 0
            else given.scales.new_empty((0, config.scale_bytes), dtype=torch.uint8)
        )
        scale_align = row_alignment(config.scale_bytes, scales.data_ptr())
    launch(
        dispatch_copy_kernel, (max(1, min(n * num_pieces, shape.num_programs)),),
        ctx, given.tokens, given.indices, forward,
        buffers.view("recv_tokens", given.tokens.dtype, rows, given.tokens.shape[1]),
        buffers.view("recv_indices", i32, rows, k),
        buffers.view("recv_weights", torch.float32, rows, k),
        buffers.view("recv_sources", i32, rows),
        signals, epoch, buffers.view("dispatch_arrivals", i32, 1),
        n, k, rows, config.max_num_inp_token_per_rank, row_bytes // align, num_pieces,
        config.scale_bytes // scale_align,
        given.weights, scales,
        None if scales is None else buffers.view("recv_scales", torch.uint8, rows, config.scale_bytes),
        ALIGN=align, BLOCK=block, BLOCK_K=block_k(k), SCALE_ALIGN=scale_align,
        SCALE_BLOCK=max(64, triton.next_power_of_2(config.scale_bytes // min(scale_align, 4))),
        num_warps=shape.num_warps,
    )  # fmt: skip
    launch(
        dispatch_wait_kernel, (1,),
        ctx, signals, slots, epoch, buffers.view("total_recv", i32, 1), buffers.view("overflow", i64, 1), rows,
        TAG=WAIT_TAG, num_warps=1,
    )  # fmt: skip


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
