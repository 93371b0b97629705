"""The launches of a dispatch that stages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton

from mori_triton.ops.buffers import EpBufferLayout
from mori_triton.ops.calls import DispatchCall, piece_grid, row_alignment
from mori_triton.ops.dispatch_combine_v2.kernels import dispatch_send_kernel, dispatch_stage_kernel
from mori_triton.ops.dispatch_combine_v2.staging import MAX_TOP_K, staging_constants
from mori_triton.ops.plans import Given, Step, as_bytes
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchPlan.launch (dispatch_send_kernel)")
# entries [tokens, PEs, ids], and words of scale rows, that a thread of `stage` holds at a time
_MOST_A_THREAD = 8


@dataclass(frozen=True)
class StagedCall(DispatchCall):
    """A dispatch through a staging buffer."""

    layout: EpBufferLayout
    num_blocks: int  # of `stage`; 0 without tokens
    source_scale_bytes: int  # of a scale row as the caller has it; `config.scale_bytes`: as it lies in the buffers

    def staging(self) -> Given:
        """The argument "staging" of each call, bytes."""
        return Given("staging", as_bytes(self.tokens))

    def constants(self) -> dict[str, Any]:
        """Constants of both kernels."""
        return {**staging_constants(self.layout), "MAX_K": MAX_TOP_K, "SCALE_STRIDE": self.config.scale_bytes}


def stage_steps(call: StagedCall) -> list[Step]:
    """Give every row of this PE a slot and stage what is small; without tokens there is nothing to stage."""
    (n, k), config, scales = call.indices.shape, call.config, call.scales
    if n == 0:
        return []
    block_p = max(2, triton.next_power_of_2(config.world_size))
    align = 16 if scales is None else row_alignment(call.source_scale_bytes, scales.data_ptr())
    scale_block = max(64, triton.next_power_of_2(config.scale_bytes // min(align, 4)))
    most = _MOST_A_THREAD * 32 * call.shape.route_warps
    most = min(most // (block_p * MAX_TOP_K), most // scale_block, call.shape.route_tokens)
    return [
        call.step(
            dispatch_stage_kernel, (call.num_blocks,),
            call.ctx, call.given("indices"), call.staging(), call.given("forward"), call.slots, call.view("control"),
            n, k, config.num_experts_per_rank, config.max_recv, config.max_num_inp_token_per_rank,
            call.source_scale_bytes // align,
            call.given("weights"), call.given("scales"),
            **call.constants(),
            BLOCK_T=1 << (max(1, most).bit_length() - 1), BLOCK_P=block_p, SCALE_ALIGN=align, SCALE_BLOCK=scale_block,
            num_warps=call.shape.route_warps,
        )
    ]  # fmt: skip


def send_step(call: StagedCall) -> Step:
    """Send the runs and the payload, signal, wait for the peers' and finish. Every PE has it, also without tokens."""
    n, config, shape = len(call.tokens), call.config, call.shape
    row_bytes = call.tokens.shape[1] * call.tokens.itemsize
    has_weights, has_scales = call.weights is not None, call.scales is not None
    return call.step(
        dispatch_send_kernel, piece_grid(n, row_bytes, shape.piece_bytes, shape.num_programs),
        call.ctx, call.given("tokens"), call.given("forward"), call.staging(),
        call.view("recv_tokens"), call.view("recv_indices"), call.view("recv_sources"),
        call.view("dispatch_signals"), call.slots, call.view("control"), call.given("total"),
        n, call.num_blocks, config.num_experts_per_token, *call.capacity, row_bytes // 16,
        call.view("recv_weights") if has_weights else None, call.view("recv_scales") if has_scales else None,
        **call.constants(),
        BLOCK=shape.piece_bytes // 4, CHUNK=8, TAG=WAIT_TAG, num_warps=shape.num_warps, waits=True,
    )  # fmt: skip
