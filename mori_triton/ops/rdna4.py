"""dispatch and combine of kernel type IntraNodeRDNA4: 2 or 4 PEs that reach each other through PCIe.

Protocol: rows travel by stores alone, there and back, each to memory that the PE that reads it has of its own. That is
the fast way over PCIe, where a load waits for its answer. docs/rdna4_ep.md has the whole of it. References are
`ops.dispatch.dispatch_torch` and `ops.combine.combine_torch`.
"""

from __future__ import annotations

from typing import Any

import triton

from mori_triton.ops.calls import CombineCall, DispatchCall, EpCall, piece_grid, row_alignment
from mori_triton.ops.dispatch import recv_steps as wait_steps
from mori_triton.ops.kernels.rdna4_combine import rdna4_push_kernel, rdna4_sum_kernel
from mori_triton.ops.kernels.rdna4_dispatch import rdna4_dispatch_kernel, rdna4_pull_kernel
from mori_triton.ops.plans import Step
from mori_triton.ops.tuning import RDNA4_FEW_TOKENS
from mori_triton.wait_sites import register_wait_site

DISPATCH_TAG = register_wait_site("EpDispatchCombineOp.dispatch (rdna4_dispatch_kernel)")
COMBINE_TAG = register_wait_site("EpDispatchCombineOp.combine (rdna4_push_kernel)")

# as many PEs pull ids and weights from where they are staged once; fewer are pushed theirs
_PULLING_PES = 4
# the one number of ids that kernels are made for; others are handled 32 at a time
_USUAL_TOP_K = 8
_BATCH = 32
# words of rows that a dispatch program, and a warp that pushes, holds at a time; more would not stay in registers
_MOST_WORDS = 8192
_MOST_PUSHED_WORDS = 2048
# rows of a program at a time, whose loads are in flight together
_PULLED_ROWS = 64
_PUSHED_ROWS = 4
# where a combine's input stays as it is until the sums are made: peers, or the sums, write the other buffers of the op
_KEPT_IN = (None, "combine_in")


def is_pulling(call: EpCall) -> bool:
    """Whether ids and weights are pulled."""
    return call.config.world_size >= _PULLING_PES


def _ids(call: EpCall) -> dict[str, Any]:
    usual = call.config.num_experts_per_token == _USUAL_TOP_K
    return {"TOP_K": _USUAL_TOP_K if usual else 0, "BATCH": _USUAL_TOP_K if usual else _BATCH}


def dispatch_steps(call: DispatchCall) -> list[Step]:
    """The launches of a dispatch. Every PE makes them, also without tokens."""
    return [_dispatch_step(call), *(_pull_steps(call) if call.wait else [])]


def dispatch_rest_steps(call: DispatchCall) -> list[Step]:
    """The launches of a `dispatch_recv`."""
    return [*wait_steps(call), *_pull_steps(call)]


def _dispatch_step(call: DispatchCall) -> Step:
    config, shape = call.config, call.shape
    n, k = call.indices.shape
    row_bytes = call.tokens.shape[1] * call.tokens.itemsize
    align = row_alignment(row_bytes, call.tokens.data_ptr())
    unit = min(align, 4)
    block = min(shape.piece_bytes // unit, triton.next_power_of_2(row_bytes // unit))
    # fewer words would be spread over all threads, and each would move less than 16 bytes at a time
    block = max(block, 16 // unit * 32 * shape.num_warps)
    block_t = shape.route_tokens
    while block_t > 1 and block_t * block > _MOST_WORDS:
        block_t //= 2
    to = ("staged_indices", "staged_weights") if is_pulling(call) else ("recv_indices", "recv_weights")
    return call.step(
        rdna4_dispatch_kernel, (max(1, min(triton.cdiv(n, block_t), shape.num_programs)),),
        call.ctx, call.view("payload_bases"), call.given("tokens"), call.given("indices"), call.given("forward"),
        call.view("recv_tokens"), call.view("recv_sources"), call.view("dispatch_signals"), call.view("control"),
        call.view(to[0]), call.view(to[1]),
        n, k, config.num_experts_per_rank, *call.capacity, config.max_num_inp_token_per_rank,
        call.given("total"), call.slots, call.given("weights"),
        **_ids(call), NUM_PES=config.world_size, STAGED=is_pulling(call),
        ROW_UNITS=row_bytes // align, ALIGN=align, BLOCK=block, BLOCK_T=block_t,
        WAIT=call.wait, TAG=DISPATCH_TAG, num_warps=shape.num_warps, waits=call.wait,
    )  # fmt: skip


def _pull_steps(call: DispatchCall) -> list[Step]:
    if not is_pulling(call):
        return []
    config = call.config
    # a PE without tokens need not say whether weights travel
    pulls_weights = call.weights is not None or len(call.indices) == 0
    programs = max(1, min(triton.cdiv(config.max_recv, _PULLED_ROWS), call.shape.stage_programs))
    return [
        call.step(
            rdna4_pull_kernel, (programs,),
            call.ctx, call.view("recv_sources"), call.given("total"), call.view("control"),
            call.view("staged_indices"), call.view("recv_indices"), call.view("recv_weights"),
            config.num_experts_per_token, config.max_num_inp_token_per_rank,
            call.view("staged_weights") if pulls_weights else None,
            **_ids(call), BLOCK_R=_PULLED_ROWS, num_warps=call.shape.stage_warps,
        )
    ]  # fmt: skip


def combine_steps(call: CombineCall) -> tuple[list[Step], list[Step]]:
    """The launches that send and the launches that sum, as `ops.combine.plan_combine`."""
    config, shape, n, k = call.config, call.shape, call.num_tokens, call.config.num_experts_per_token
    row_bytes = call.hidden * call.rows.itemsize
    align, from_align = row_alignment(row_bytes), row_alignment(row_bytes, call.rows.data_ptr())
    # own rows are summed where the caller has them; but a `combine_recv` takes nothing of the caller's
    keeps_own = call.wait and call.region in _KEPT_IN and align == from_align
    weights = call.given("weights")

    def grid(num_rows: int, piece_bytes: int, most: int) -> tuple[int, int]:
        return piece_grid(num_rows, row_bytes if n <= RDNA4_FEW_TOKENS else 1, piece_bytes, most)

    block = shape.stage_piece_bytes // min(from_align, 4)
    block_r = _PUSHED_ROWS
    while block_r > 1 and block_r * block > _MOST_PUSHED_WORDS * shape.stage_warps:
        block_r //= 2
    push = call.step(
        rdna4_push_kernel, grid(triton.cdiv(call.num_rows, block_r), shape.stage_piece_bytes, shape.stage_programs),
        call.ctx, call.view("payload_bases"), call.given("rows"), call.given("sources"), call.given("total"),
        call.view("staging"), call.view("staging_weights"), call.view("combine_signals"), call.view("control"),
        k, call.num_rows, weights,
        MAX_TOKENS=config.max_num_inp_token_per_rank, KEEPS_OWN=keeps_own, **_ids(call),
        ROW_UNITS=row_bytes // from_align, ALIGN=from_align, BLOCK=block,
        BLOCK_R=block_r, WAIT=call.wait, TAG=COMBINE_TAG, num_warps=shape.stage_warps, waits=call.wait,
    )  # fmt: skip
    rows = config.world_size * config.max_num_inp_token_per_rank
    add = call.step(
        rdna4_sum_kernel, grid(n, shape.piece_bytes, shape.num_programs),
        call.ctx, call.view("staging", rows, call.hidden, dtype=call.rows.dtype), call.given("forward"),
        call.view("control"), call.out, call.view("combine_out_weights"),
        n, k, config.max_recv, config.max_num_inp_token_per_rank, call.num_rows,
        call.given("elements") if keeps_own else None, None if weights is None else call.view("staging_weights"),
        NUM_PES=config.world_size, HIDDEN=call.hidden, ALIGN=align, **_ids(call),
        BLOCK=shape.piece_bytes // call.rows.itemsize, num_warps=shape.num_warps,
    )  # fmt: skip
    return [push], [add]
