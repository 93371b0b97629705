"""Routing for `deterministic=True`: receive rows sorted by source PE, then token, so that a run repeats bit for bit.

Protocol: `count` exchanges how many rows each PE sends to each PE (it waits for all of them), `assign` gives every row
its slot; see docs/protocol.md. The rest of the dispatch is the same as without.
"""

from __future__ import annotations

import triton

from mori_triton.ops.buffers import COUNT_TOKENS
from mori_triton.ops.calls import DispatchCall
from mori_triton.ops.kernels.deterministic import dispatch_assign_kernel, dispatch_count_kernel
from mori_triton.ops.plans import Step
from mori_triton.wait_sites import register_wait_site

WAIT_TAG = register_wait_site("EpDispatchCombineOp.dispatch (dispatch_count_kernel)")

# what one step over the blocks compares, pairs of blocks by PE
_MOST_PAIRS = 8192


def route_steps(call: DispatchCall) -> list[Step]:
    """The launches that write `forward` and this PE's `recv_slots`. Every PE counts, also without tokens.

    Where more rows come than fit, the first `R` in the order of (source PE, token) are kept.
    """
    config, shape = call.config, call.shape
    n, k = call.indices.shape
    counts, begins = call.view("block_counts").view(2, -1)
    control = call.view("control")
    bases = call.view("route_bases")
    grid = (max(1, min(triton.cdiv(n, COUNT_TOKENS), shape.num_programs)),)
    sizes = {
        "BLOCK_T": COUNT_TOKENS,
        "BLOCK_K": max(8, triton.next_power_of_2(k)),
        "BLOCK_P": triton.next_power_of_2(config.world_size),
    }
    at_a_time = 8
    while at_a_time < 64 and 4 * at_a_time * at_a_time * sizes["BLOCK_P"] <= _MOST_PAIRS:
        at_a_time *= 2
    steps = [
        call.step(
            dispatch_count_kernel, grid,
            call.ctx, call.given("indices"), counts, begins, bases,
            call.view("count_matrix"), call.view("count_signals"), call.view("recv_slots"), control,
            n, k, config.num_experts_per_rank,
            waits=True, **sizes, BLOCK_B=at_a_time, TAG=WAIT_TAG, num_warps=shape.route_warps,
        )
    ]  # fmt: skip
    if n > 0:
        steps.append(
            call.step(
                dispatch_assign_kernel, grid,
                call.ctx, call.given("indices"), begins, bases, call.given("forward"), control,
                n, k, config.num_experts_per_rank, config.max_recv,
                **sizes, num_warps=shape.route_warps,
            )
        )  # fmt: skip
    return steps
