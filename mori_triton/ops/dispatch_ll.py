"""dispatch of kernel type IntraNodeLL: one launch for small batches.

Protocol: as `IntraNode`'s, with slots, rows, signals and the wait in one kernel; see docs/protocol.md. Any number of
tokens is fine, it is only made for few. Replays and `deterministic=True` need no slots given out by the kernel that
copies, and take `IntraNode`'s kernels.
"""

from __future__ import annotations

import triton

from mori_triton.ops.calls import DispatchCall, row_alignment
from mori_triton.ops.kernels.dispatch_ll import dispatch_ll_kernel
from mori_triton.ops.plans import Step
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.dispatch (dispatch_ll_kernel)")

# words of rows that a program holds at a time; more would not stay in registers
_MOST_WORDS = 16384


def dispatch_steps(call: DispatchCall) -> list[Step]:
    """The launch of a dispatch that is neither a replay nor deterministic. Every PE makes it, also without tokens.

    Source: docs/protocol.md; reference: `ops.dispatch.dispatch_torch`.
    """
    config, shape = call.config, call.shape
    n, k = call.indices.shape
    row_bytes = call.tokens.shape[1] * call.tokens.itemsize
    align = row_alignment(row_bytes, call.tokens.data_ptr())
    block = min(shape.piece_bytes // min(align, 4), triton.next_power_of_2(row_bytes // min(align, 4)))
    # fewer words would be spread over all threads, and each would move less than 16 bytes at a time
    block = max(block, 4 * 32 * shape.num_warps)
    block_t = shape.route_tokens
    while block_t > 1 and block_t * block > _MOST_WORDS:
        block_t //= 2
    scale_align = 1 if call.scales is None else row_alignment(config.scale_bytes, call.scales.data_ptr())
    return [
        call.step(
            dispatch_ll_kernel, (max(1, min(triton.cdiv(n, block_t), shape.num_programs)),),
            call.ctx, call.given("tokens"), call.given("indices"), call.given("forward"),
            call.view("recv_tokens"), call.view("recv_indices"), call.view("recv_weights"), call.view("recv_sources"),
            call.view("dispatch_signals"), call.view("recv_slots"), call.view("control"), call.given("total"),
            n, config.num_experts_per_rank, config.max_recv, config.max_num_inp_token_per_rank,
            config.scale_bytes // scale_align,
            call.given("weights"), call.given("scales"),
            None if call.scales is None else call.view("recv_scales"),
            waits=call.wait,
            ROW=row_bytes, TOP_K=k, ALIGN=align, BLOCK=block, BLOCK_T=block_t,
            BLOCK_K=max(8, triton.next_power_of_2(k)), BLOCK_P=triton.next_power_of_2(config.world_size),
            SCALE_ALIGN=scale_align,
            SCALE_BLOCK=max(64, triton.next_power_of_2(config.scale_bytes // min(scale_align, 4))),
            WAIT=call.wait, TAG=WAIT_TAG, num_warps=shape.num_warps,
        )
    ]  # fmt: skip
