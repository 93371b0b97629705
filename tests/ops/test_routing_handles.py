"""Routing handles: several alive, replayed with other payloads, combined later; and calls of one kind in a row."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError, StateError
from mori_triton.ops.kernels.finish import COMBINE_EPOCH, DISPATCH_EPOCH, STATUS, SYNC_EPOCH
from tests.ops.cases import (
    Case,
    check_rounds,
    combine_round,
    control,
    dispatched,
    inputs_on,
    round_of,
    start,
)

pytestmark = pytest.mark.cpu

CASE = Case(num_pes=3, scales=(5, 4), tokens="zero", routing="padded", rounds=3)


def with_payload(case: Case, mine: Any, pe: int, index: int) -> Any:
    """The same ids, and tokens, weights and scales of a round of their own."""
    n, rng = len(mine.indices), np.random.default_rng([pe, index])
    tokens = rng.integers(0, 0x7F00, (n, case.hidden)).astype(np.uint16)
    weights = rng.random((n, case.top_k)).astype(np.float32)
    scale_bytes = case.scales[0] * case.scales[1]
    scales = rng.integers(0, 256, (n, scale_bytes)).astype(np.uint8) if scale_bytes else None
    return dataclasses.replace(mine, tokens=tokens, weights=weights, scales=scales)


def forward_and_backward(pe: int, seed: int, changes: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Three layers forward, then backward in reverse order, each along its own handle: 12 calls of one op."""
    op = start(CASE, pe, **changes)
    layers = range(CASE.rounds)
    handles, outcomes = [], []
    for index in layers:
        given = inputs_on(op, CASE, round_of(CASE, pe, index))
        result = op.dispatch(*given, return_routing=True)
        assert len(result) == 6
        assert result[4] is result[5].total_recv_token_num
        handles.append(result[5])
        got = dispatched(op, given, result)
        flat = result[5].disp_tok_id_to_src_tok_id_local[: got["total"]]
        assert torch.equal(flat, op.get_dispatch_src_token_pos())
        outcomes.append(combine_round(op, CASE, pe, got, routing=handles[-1]))
    saved = [(handle.tensors(), handle.cur_rank_num_token) for handle in handles]
    for index in reversed(layers):
        handle = ops.EpDispatchRoutingHandle.from_tensors(*saved[index])
        before = [tensor.clone() for tensor in handle.tensors()]
        mine = with_payload(CASE, round_of(CASE, pe, index), pe, 10 + index)
        given = inputs_on(op, CASE, mine)
        result = op.dispatch(*given, routing=handle)
        assert len(result) == 5
        got = dispatched(op, given, result)
        # the same rows in the same places, with what is in them now
        assert got["sources"] == outcomes[index]["sources"]
        outcomes.append(combine_round(op, CASE, pe, got, **({"routing": handle} if seed % 2 else {})))
        assert all(torch.equal(a, b) for a, b in zip(before, handle.tensors(), strict=True))
    assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH) == [6, 6, 0]
    op.close()
    return outcomes


def sent_rounds() -> list[list[Any]]:
    pes, layers = range(CASE.num_pes), range(CASE.rounds)
    forward = [[round_of(CASE, pe, index) for pe in pes] for index in layers]
    backward = [
        [with_payload(CASE, round_of(CASE, pe, index), pe, 10 + index) for pe in pes] for index in reversed(layers)
    ]
    return forward + backward


CHANGES = (
    {},
    {"kernel_type": ops.EpDispatchCombineKernelType.IntraNodeLL},
    {"deterministic": True},
)


@pytest.mark.parametrize("changes", CHANGES, ids=["IntraNode", "IntraNodeLL", "deterministic"])
def test_handles_stay_good_and_replay_moves_the_payload(changes: dict[str, Any]) -> None:
    for seed in range(2):
        results = local_world(CASE.num_pes, heap_size="16M").run(forward_and_backward, seed, changes)
        check_rounds(CASE, sent_rounds(), results)


@pytest.mark.parametrize("seed", range(6))
def test_handles_under_a_seed_in_weak_memory(seed: int) -> None:
    world = local_world(CASE.num_pes, heap_size="16M", seed=seed, weak_memory=True)
    check_rounds(CASE, sent_rounds(), world.run(forward_and_backward, seed, CHANGES[seed % 3]))


def in_a_row(pe: int) -> list[list[dict[str, Any]]]:
    """Dispatch all, then combine all: what a pipeline would do that keeps the experts' outputs to itself."""
    op, got, handles = start(CASE, pe), [], []
    for index in range(CASE.rounds):
        given = inputs_on(op, CASE, round_of(CASE, pe, index))
        result = op.dispatch(*given, return_routing=True)
        handles.append(result[5])
        got.append(dispatched(op, given, result))
        # these are gone with the next dispatch
        got[-1]["out"], got[-1]["out_weights"] = got[-1]["out"].clone(), got[-1]["out_weights"].clone()
    assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH) == [3, 0, 2]
    # in an order of their own
    order = (1, 2, 0)
    for index in order:
        combine_round(op, CASE, pe, got[index], routing=handles[index])
    assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH) == [3, 3, 4]
    return got


def test_dispatches_in_a_row_and_combines_in_a_row() -> None:
    sent = [[round_of(CASE, pe, index) for pe in range(CASE.num_pes)] for index in range(CASE.rounds)]
    check_rounds(CASE, sent, local_world(CASE.num_pes, heap_size="16M").run(in_a_row))


@pytest.mark.parametrize("seed", range(6))
def test_calls_in_a_row_under_a_seed_in_weak_memory(seed: int) -> None:
    sent = [[round_of(CASE, pe, index) for pe in range(CASE.num_pes)] for index in range(CASE.rounds)]
    world = local_world(CASE.num_pes, heap_size="16M", seed=seed, weak_memory=True)
    check_rounds(CASE, sent, world.run(in_a_row))


def refused(pe: int) -> None:
    op = start(CASE, pe)
    given = inputs_on(
        op, dataclasses.replace(CASE, tokens="full"), round_of(dataclasses.replace(CASE, tokens="full"), pe, 0)
    )
    *_, handle = op.dispatch(*given, return_routing=True)
    rows = op.get_registered_combine_input_buffer(torch.bfloat16)
    op.combine(rows, None, given[3])
    fewer = [None if tensor is None else tensor[1:].contiguous() for tensor in given]
    ids = given[3].clone()
    ids[0, 0] += 1
    other = ops.EpDispatchRoutingHandle.from_tensors([t.long() for t in handle.tensors()], handle.cur_rank_num_token)
    for call, text in (
        (lambda: op.dispatch(*fewer, routing=handle), "routing: want of a dispatch of 4 tokens, got one of 5"),
        (lambda: op.dispatch(*given, routing=other), "routing.disp_dest_tok_id_map.dtype"),
        (lambda: op.dispatch(*given, routing=handle, return_routing=True), "return_routing"),
        (lambda: op.combine(rows, None, fewer[3], routing=handle), "indices.shape"),
        (lambda: op.combine(rows.clone(), None, ids, routing=handle), "as given to dispatch"),
        (lambda: ops.EpDispatchRoutingHandle.from_tensors(handle.tensors()[:4], 5), "tensors: want the 5"),
        (lambda: ops.EpDispatchRoutingHandle.from_tensors(handle.tensors(), None), "cur_rank_num_token"),
    ):
        with pytest.raises(ArgumentError, match=text):
            call()
    # peers may be reading it for the first combine
    with pytest.raises(StateError, match="peers may still read the registered buffer"):
        op.combine(rows, None, given[3], routing=handle)
    op.combine(rows.clone(), None, given[3], routing=handle)


def test_what_handles_are_refused_for() -> None:
    local_world(CASE.num_pes, heap_size="16M").run(refused)


def silent(pe: int) -> int:
    op = start(CASE, pe)
    given = inputs_on(op, CASE, round_of(CASE, pe, 0))
    # of a time-out that a GPU's host has not looked at yet
    op._buffers.region("control")[STATUS.value] = 1
    return int(op.dispatch(*given, return_routing=True)[4])


def test_d20_a_new_handle_counts_no_rows_before_its_dispatch_does() -> None:
    """A broken op's kernels do nothing, and the caller's are launched behind them: they read the count."""
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        assert local_world(CASE.num_pes, heap_size="16M").run(silent) == [0] * CASE.num_pes
    finally:
        torch.use_deterministic_algorithms(False)
