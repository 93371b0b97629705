"""Wrong arguments: an exception that says what was wanted and what came, nothing launched, the op as good as before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

from mori_triton import local_world, ops
from mori_triton import shmem as host_shmem
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import ArgumentError, HeapError, PeerTimeout, StateError
from mori_triton.host import state as host_state
from tests.ops.cases import Case, check_case, combine_round, config_of, dispatch_round, round_of, run_case, start

pytestmark = pytest.mark.cpu

CASE = Case(num_pes=2, hidden=24, top_k=3, max_tokens=5, tokens="full", scales=(5, 4), rounds=2)
N, K, H = CASE.max_tokens, CASE.top_k, CASE.hidden


def good() -> dict[str, Any]:
    return {
        "input": torch.ones(N, H, dtype=torch.bfloat16),
        "weights": torch.ones(N, K),
        "scales": torch.ones(N, 5),
        "indices": torch.zeros(N, K, dtype=torch.int32),
    }


def changed(**what: Any) -> dict[str, Any]:
    return {**good(), **what}


def sized(n: int, h: int = H, k: int = K) -> dict[str, Any]:
    return {
        "input": torch.ones(n, h, dtype=torch.bfloat16),
        "weights": torch.ones(n, k),
        "scales": torch.ones(n, 5),
        "indices": torch.zeros(n, k, dtype=torch.int32),
    }


# arguments of dispatch, and what the message has to hold
BAD_DISPATCH: dict[str, tuple[Callable[[], dict[str, Any]], tuple[str, ...]]] = {
    "input dtype": (lambda: changed(input=torch.ones(N, H, dtype=torch.float64)), ("input.dtype", "float64")),
    "input too wide an element": (lambda: changed(input=torch.ones(N, H)), ("input.dtype", "2 bytes", "float32")),
    "input rank": (lambda: changed(input=torch.ones(N, 2, H, dtype=torch.bfloat16)), ("input.shape", f"[{N}, 2, {H}]")),
    "not a tensor": (lambda: changed(input=[[1.0]]), ("input", "torch.Tensor", "list")),
    "c8 hidden above the config's": (lambda: sized(N, H + 1), ("input.shape[1]", f"hidden_dim = {H}", str(H + 1))),
    "no columns": (lambda: sized(N, 0), ("input.shape[1]", "got 0")),
    "strided input": (
        lambda: changed(input=torch.ones(N, 2 * H, dtype=torch.bfloat16)[:, ::2]),
        ("input", "contiguous", "strides"),
    ),
    "device": (lambda: changed(input=torch.ones(N, H, dtype=torch.bfloat16, device="meta")), ("input.device", "meta")),
    "a8 more tokens than M": (
        lambda: sized(N + 1),
        ("input.shape[0]", f"max_num_inp_token_per_rank = {N}", str(N + 1)),
    ),
    "a8 indices of another length": (
        lambda: changed(indices=torch.zeros(N - 1, K, dtype=torch.int32)),
        ("indices.shape", f"[{N}, {K}]", f"[{N - 1}, {K}]"),
    ),
    "top-k": (lambda: changed(indices=torch.zeros(N, K + 1, dtype=torch.int32)), ("indices.shape", f"[{N}, {K + 1}]")),
    "b5 int64 indices": (
        lambda: changed(indices=torch.zeros(N, K, dtype=torch.int64)),
        ("indices.dtype", "int32", "int64"),
    ),
    "b5 int16 indices": (
        lambda: changed(indices=torch.zeros(N, K, dtype=torch.int16)),
        ("indices.dtype", "int32", "int16"),
    ),
    "strided indices": (lambda: changed(indices=torch.zeros(K, N, dtype=torch.int32).T), ("indices", "contiguous")),
    "weights dtype": (
        lambda: changed(weights=torch.ones(N, K, dtype=torch.float16)),
        ("weights.dtype", "float32", "float16"),
    ),
    "weights shape": (lambda: changed(weights=torch.ones(N, K - 1)), ("weights.shape", f"[{N}, {K - 1}]")),
    "scales shape": (lambda: changed(scales=torch.ones(N, 4)), ("scales.shape", f"[{N}, 5]", f"[{N}, 4]")),
    "scales dtype": (
        lambda: changed(scales=torch.ones(N, 5, dtype=torch.float16)),
        ("scales.dtype", "4 bytes", "float16"),
    ),
    "routing": (lambda: changed(routing=torch.zeros(1)), ("routing", "EpDispatchRoutingHandle", "Tensor")),
    "routing and return_routing": (lambda: changed(routing=1, return_routing=True), ("routing", "return_routing")),
    "block_num": (lambda: changed(block_num=0), ("block_num", "got 0")),
    "warp_per_block": (lambda: changed(warp_per_block=3), ("warp_per_block", "got 3")),
}


def bad_dispatches(pe: int) -> list[list[dict[str, Any]]]:
    op = start(CASE, pe)
    outcomes = []
    for index in range(CASE.rounds):
        for name, (make, parts) in BAD_DISPATCH.items():
            with pytest.raises(ArgumentError) as caught:
                op.dispatch(**make())
            assert all(part in str(caught.value) for part in parts), (name, str(caught.value))
        # a real round right after it, bit for bit, with poisoned buffers: nothing was written or counted
        outcomes.append(combine_round(op, CASE, pe, dispatch_round(op, CASE, round_of(CASE, pe, index))))
    op.close()
    return [outcomes]


def test_dispatch_refuses() -> None:
    check_case(CASE, local_world(CASE.num_pes, heap_size="16M").run(bad_dispatches))


def refuses(call: Callable[[], Any], error: type[Exception], *parts: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def bad_combines(pe: int) -> list[list[dict[str, Any]]]:
    op = start(CASE, pe)
    outcomes = []
    for index in range(CASE.rounds):
        mine = round_of(CASE, pe, index)
        if index == 0:
            refuses(
                lambda: op.combine(torch.ones(N, H), None, good()["indices"]), StateError, "combine", "no dispatch came"
            )
        got = dispatch_round(op, CASE, mine)
        total, out, out_weights, indices = got["total"], got["out"], got["out_weights"], got["given"][3]
        refuses(op.dispatch_recv, StateError, "dispatch_recv", "no dispatch_send")
        refuses(op.combine_recv, StateError, "combine_recv", "no combine_send")
        rows = out[:total]
        other = indices.clone()
        other[1, 2] += 1

        def combine(*given: Any, **named: Any) -> None:
            op.combine(*given, **named)

        for parts, given, named in (
            (("input.dtype", "int32"), (rows.int(), None, indices), {}),
            (("input.dtype", "2 bytes"), (rows.float(), None, indices), {}),
            (("input.shape[0]", f"total_recv = {total}", f"got {total - 1}"), (rows[:-1], None, indices), {}),
            (("input.shape[1]", str(H + 1)), (torch.ones(total, H + 1, dtype=out.dtype), None, indices), {}),
            (("input", "contiguous"), (torch.ones(total, 2 * H, dtype=out.dtype)[:, ::2], None, indices), {}),
            (("input.device", "meta"), (rows.to("meta"), None, indices), {}),
            (("indices.shape[0]", f"want {N}", str(len(out))), (rows, None, torch.zeros(len(out), K).int()), {}),
            (("indices.shape[0]", f"want {N}", f"got {N - 1}"), (rows, None, indices[:-1]), {}),
            (("indices.dtype", "int64"), (rows, None, indices.long()), {}),
            (("indices.shape", f"[{N}, {K + 1}]"), (rows, None, torch.zeros(N, K + 1).int()), {}),
            (("indices[1]", str(other[1].tolist()), str(indices[1].tolist())), (rows, None, other), {}),
            (("weights.dtype", "float16"), (rows, out_weights[:total].half(), indices), {}),
            (("weights.shape", f"[{total}, {K - 1}]"), (rows, torch.ones(total, K - 1), indices), {}),
            (("weights", "torch.Tensor", "list"), (rows, [1.0], indices), {}),
            (("weights.shape[0]", f">= {total}"), (rows, out_weights[: total - 1], indices), {}),
            (("use_external_inp_buf", "got 2"), (rows, None, indices), {"use_external_inp_buf": 2}),
            (("input", "get_registered_combine_input_buffer"), (rows, None, indices), {"use_external_inp_buf": 0}),
            (("routing", "EpDispatchRoutingHandle", "object"), (rows, None, indices), {"routing": object()}),
            (("input", "from its start"), (op.get_registered_combine_input_buffer(out.dtype)[1:], None, indices), {}),
            (("block_num", "got -2"), (rows, None, indices), {"block_num": -2}),
        ):
            with pytest.raises(ArgumentError) as caught:
                combine(*given, **named)
            assert all(part in str(caught.value) for part in parts), (parts, str(caught.value))
        outcomes.append(combine_round(op, CASE, pe, got))
        # peers may be in the next round, and writing here
        for name, value in (("input", out[:N]), ("weights", out_weights[:N]), ("indices", out_indices_of(op)[:N])):
            refuses(lambda: op.dispatch(**changed(**{name: value})), ArgumentError, name, "dispatch's own output")  # noqa: B023
        refuses(op.get_dispatch_src_token_pos, StateError, "between dispatch and combine")
    op.close()
    return [outcomes]


def out_indices_of(op: ops.EpDispatchCombineOp) -> torch.Tensor:
    return op._buffers.view("recv_indices", torch.int32, op.max_num_tokens_to_recv(), K)


def test_combine_refuses() -> None:
    check_case(CASE, local_world(CASE.num_pes, heap_size="16M").run(bad_combines))


def test_before_init() -> None:
    with pytest.raises(StateError, match="init"):
        ops.EpDispatchCombineOp(config_of(CASE, 0))


def closed_and_finalized(pe: int) -> list[list[dict[str, Any]]]:
    with start(CASE, pe) as op:
        pass
    op.close()
    for call in (
        lambda: op.dispatch(**good()),
        lambda: op.combine(good()["input"], None, good()["indices"]),
        op.reset,
        op.get_dispatch_src_token_pos,
        lambda: op.get_registered_combine_input_buffer(torch.bfloat16),
    ):
        refuses(call, StateError, "closed")
    used = host_state.current().heap.used_bytes
    outcomes = run_case(pe, CASE)
    assert host_state.current().heap.used_bytes == used, "close gives the memory back"
    late = start(CASE, pe)
    host_shmem.shmem_finalize()
    refuses(lambda: late.dispatch(**good()), StateError, "init")
    late.close()
    return outcomes


def test_closed_op_and_finalized_world() -> None:
    check_case(CASE, local_world(CASE.num_pes, heap_size="16M").run(closed_and_finalized))


def wrong_worlds(pe: int) -> list[list[dict[str, Any]]]:
    refuses(lambda: start(Case(num_pes=3), pe), ArgumentError, "config.world_size", "2", "3")
    refuses(lambda: start(CASE, 1 - pe), ArgumentError, "config.rank", str(pe), str(1 - pe))
    refuses(lambda: start(CASE, pe, hidden_dim=H + pe), ArgumentError, "config.hidden_dim", f"PE 1: {H + 1}")
    big = config_of(CASE, pe, max_num_inp_token_per_rank=2**20)
    need = str(ops.ep_buffer_layout(big).num_bytes)
    refuses(lambda: ops.EpDispatchCombineOp(big), HeapError, need, "MORI_SHMEM_HEAP_SIZE", "heap_size")
    op = start(CASE, pe)
    sizes = op.max_num_tokens_to_recv(), op.max_num_tokens_to_recv_per_rank()
    assert (*sizes, op.max_num_tokens_to_send(), op.max_num_tokens_to_send_per_rank()) == (2 * N, N, 2 * N, N)
    refuses(op.get_dispatch_src_token_pos, StateError, "between dispatch and combine")
    refuses(lambda: op.get_registered_combine_input_buffer(torch.int8), ArgumentError, "dtype", "int8")
    refuses(lambda: op.get_registered_combine_input_buffer(torch.float32), ArgumentError, "dtype", "2 bytes")
    refuses(lambda: op.get_registered_combine_input_buffer(torch.bfloat16, H + 1), ArgumentError, "hidden_dim")
    op.close()
    return run_case(pe, CASE)


def test_config_of_another_world_and_heap_too_small() -> None:
    check_case(CASE, local_world(CASE.num_pes, heap_size="16M").run(wrong_worlds))


def far_apart(pe: int) -> None:
    refuses(lambda: start(CASE, pe), ArgumentError, "kernel_type", f"PEs [{1 - pe}] are not reachable")


def test_peers_on_other_nodes() -> None:
    local_world(2, heap_size="16M", gpus_per_node=1).run(far_apart)


def other_pe(pe: int, ops_made: list[Any]) -> None:
    ops_made[pe] = start(CASE, pe)
    host_state.current().bootstrap.barrier("made")
    refuses(ops_made[1 - pe].reset, StateError, "another PE")
    host_state.current().bootstrap.barrier("tried")
    ops_made[pe].close()


def test_an_op_of_another_pe() -> None:
    local_world(2, heap_size="16M").run(other_pe, [None, None])


def raises_inside(pe: int) -> None:
    with pytest.raises(ZeroDivisionError), start(CASE, pe) as op:
        _ = 1 / 0
    refuses(op.reset, StateError, "closed")


def test_context_manager_does_not_wait_for_peers_after_an_exception() -> None:
    local_world(2, heap_size="16M").run(raises_inside)


ONE_ROUND = dataclasses.replace(CASE, rounds=1)


@triton.jit
def hopeless_kernel(ctx, sig_ptr):
    """A caller's own kernel, which waits for what never comes."""
    shmem.wait_ge(ctx, sig_ptr, 1, 0, 77)


def fails_before(pe: int) -> list[list[dict[str, Any]]]:
    op, heap = start(ONE_ROUND, pe), host_state.current().heap
    word = heap.tensor((1,), torch.int64)
    word.zero_()
    launch(hopeless_kernel, (1,), heap.ctx, word, num_warps=1)
    with pytest.raises(PeerTimeout, match="77"):
        op.dispatch(**good())
    got = dispatch_round(op, ONE_ROUND, round_of(ONE_ROUND, pe, 0))
    launch(hopeless_kernel, (1,), heap.ctx, word, num_warps=1)
    with pytest.raises(PeerTimeout, match="77"):
        op.combine(got["out"], None, got["given"][3])
    return [[combine_round(op, ONE_ROUND, pe, got)]]


def test_a_failed_kernel_of_the_caller_does_not_spoil_the_round() -> None:
    # compiled before a second counts
    local_world(ONE_ROUND.num_pes, heap_size="16M").run(run_case, ONE_ROUND)
    world = local_world(ONE_ROUND.num_pes, heap_size="16M", timeout_s=1.0)
    check_case(ONE_ROUND, world.run(fails_before))
