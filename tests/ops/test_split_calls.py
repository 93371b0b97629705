"""dispatch and combine in halves: send, then receive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError, PeerTimeout, StateError
from mori_triton.host import state as host_state
from tests.ops.cases import (
    Case,
    check_case,
    check_rounds,
    combine_round,
    dispatch_round,
    dispatched,
    experts,
    inputs_on,
    poison,
    round_of,
    start,
    to_numpy,
)

pytestmark = pytest.mark.cpu

CASE = Case(num_pes=3, scales=(5, 4), rounds=3, tokens="zero")
KERNEL_TYPES = (ops.EpDispatchCombineKernelType.IntraNode, ops.EpDispatchCombineKernelType.IntraNodeLL)


def combine_halves(op: ops.EpDispatchCombineOp, case: Case, pe: int, got: dict[str, Any]) -> tuple[Any, ...]:
    """The first half of a combine of what a dispatch brought; what it returned."""
    poison(op, "combine_out", "combine_out_weights")
    total, out, out_weights, given = (got.pop(name) for name in ("total", "out", "out_weights", "given"))
    got["total"] = total
    return op.combine_send(experts(pe, out[:total]), out_weights[:total] if case.weights else None, given[3])


def combined(got: dict[str, Any], result: tuple[Any, ...]) -> dict[str, Any]:
    got["combined"] = to_numpy(result[0])
    got["combined_weights"] = None if result[1] is None else to_numpy(result[1])
    return got


def one_op(pe: int, kernel_type: ops.EpDispatchCombineKernelType) -> list[list[dict[str, Any]]]:
    op, outcomes = start(CASE, pe, kernel_type=kernel_type), []
    for index in range(CASE.rounds):
        given = inputs_on(op, CASE, round_of(CASE, pe, index))
        result = op.dispatch_send(*given)
        assert op.dispatch_recv(call_local_expert_count=True) is None
        got = dispatched(op, given, result)
        ids = torch.from_numpy(got["indices"])
        assert op.local_expert_count.tolist() == ops.local_expert_count_torch(op.config, ids, got["total"]).tolist()
        sums = combine_halves(op, CASE, pe, got)
        assert op.combine_recv() is None
        outcomes.append(combined(got, sums))
    op.close()
    return [outcomes]


@pytest.mark.parametrize("kernel_type", KERNEL_TYPES, ids=lambda kind: kind.name)
def test_halves_do_what_the_whole_does(kernel_type: ops.EpDispatchCombineKernelType) -> None:
    check_case(CASE, local_world(CASE.num_pes, heap_size="16M").run(one_op, kernel_type))


@pytest.mark.parametrize("seed", range(8))
def test_halves_under_a_seed_in_weak_memory(seed: int) -> None:
    world = local_world(CASE.num_pes, heap_size="16M", seed=seed, weak_memory=True)
    check_case(CASE, world.run(one_op, KERNEL_TYPES[seed % 2]))


def two_ops(pe: int) -> list[list[dict[str, Any]]]:
    """Micro-batches on two ops: send A, send B, receive A, receive B. Inputs are gone when their rows are received."""
    both = [start(CASE, pe) for _ in range(2)]
    outcomes: list[list[dict[str, Any]]] = [[], []]
    for index in range(CASE.rounds):
        given = [inputs_on(op, CASE, round_of(CASE, pe, index, i)) for i, op in enumerate(both)]
        results = [op.dispatch_send(*one) for op, one in zip(both, given, strict=True)]
        watched = [weakref.ref(one[0]) for one in given]
        given = [(None, None, None, one[3]) for one in given]
        gc.collect()
        assert [ref() for ref in watched] == [None, None], "the op keeps nothing of the caller's"
        got = []
        for op, one, result in zip(both, given, results, strict=True):
            op.dispatch_recv()
            got.append(dispatched(op, one, result))
        sums = [combine_halves(op, CASE, pe, one) for op, one in zip(both, got, strict=True)]
        for i, op in enumerate(both):
            op.combine_recv()
            outcomes[i].append(combined(got[i], sums[i]))
    return outcomes


def test_c10_two_ops_in_halves_interleaved() -> None:
    results = local_world(CASE.num_pes, heap_size="16M").run(two_ops)
    for i in range(2):
        sent = [[round_of(CASE, pe, index, i) for pe in range(CASE.num_pes)] for index in range(CASE.rounds)]
        check_rounds(CASE, sent, [results[pe][i] for pe in range(CASE.num_pes)])


def other_dtype(pe: int) -> list[list[dict[str, Any]]]:
    """Half the configured width and another dtype: the receiving half goes by what was sent."""
    case = Case(num_pes=2, hidden=12, dtype="float16", rounds=1)
    op = start(Case(num_pes=2, hidden=24, dtype="bfloat16"), pe)
    given = inputs_on(op, case, round_of(case, pe, 0))
    result = op.dispatch_send(*given)
    op.dispatch_recv()
    got = dispatched(op, given, result)
    sums = combine_halves(op, case, pe, got)
    op.combine_recv()
    return [[combined(got, sums)]]


def test_c9_receiving_goes_by_what_was_sent() -> None:
    check_case(Case(num_pes=2, hidden=12, dtype="float16", rounds=1), local_world(2, heap_size="16M").run(other_dtype))


def out_of_order(pe: int) -> list[list[dict[str, Any]]]:
    case = Case(num_pes=2, rounds=1)
    op, mine = start(case, pe), round_of(case, pe, 0)
    given = inputs_on(op, case, mine)
    with pytest.raises(StateError, match="dispatch_recv: there was no dispatch_send"):
        op.dispatch_recv()
    with pytest.raises(StateError, match="combine_recv: there was no combine_send"):
        op.combine_recv()
    with pytest.raises(ArgumentError, match=r"indices\.shape"):
        op.dispatch_send(given[0], None, None, torch.zeros(len(given[0]) + 1, 3, dtype=torch.int32))
    result = op.dispatch_send(*given)
    # whatever else is called: the rows have to be received first
    rows = torch.zeros(0, case.hidden, dtype=torch.bfloat16)
    for call in (
        lambda: op.dispatch_send(*given),
        lambda: op.dispatch(*given),
        lambda: op.combine(rows, None, given[3]),
        lambda: op.combine_send(rows, None, given[3]),
        op.combine_recv,
        op.get_dispatch_src_token_pos,
    ):
        with pytest.raises(StateError, match="dispatch_send waits for dispatch_recv"):
            call()
    op.dispatch_recv()
    with pytest.raises(StateError, match="there was no dispatch_send"):
        op.dispatch_recv()
    got = dispatched(op, given, result)
    sums = combine_halves(op, case, pe, got)
    with pytest.raises(StateError, match="combine_send waits for combine_recv"):
        op.dispatch(*given)
    op.combine_recv()
    outcome = combined(got, sums)
    # reset forgets what was sent
    op.dispatch_send(*given)
    op.reset()
    with pytest.raises(StateError, match="there was no dispatch_send"):
        op.dispatch_recv()
    again = combine_round(op, case, pe, dispatch_round(op, case, mine))
    assert again["combined"][: len(mine.tokens)].tobytes() == outcome["combined"][: len(mine.tokens)].tobytes()
    return [[outcome]]


def test_halves_out_of_order() -> None:
    check_case(Case(num_pes=2, rounds=1), local_world(2, heap_size="16M").run(out_of_order))


def missing_peer(pe: int, half: str) -> None:
    case = Case(num_pes=2, rounds=1)
    op = start(case, pe)
    given = inputs_on(op, case, round_of(case, pe, 0))
    if half == "combine":
        got = dispatch_round(op, case, round_of(case, pe, 0))
    if pe == 0 and half == "dispatch":
        op.dispatch_send(*given)
        with pytest.raises(PeerTimeout, match=r"dispatch_recv_kernel.* on PE 0 waiting for PE 1"):
            op.dispatch_recv()
        with pytest.raises(StateError, match="reset"):
            op.dispatch(*given)
    elif pe == 0:
        op.combine_send(got["out"], None, got["given"][3])
        with pytest.raises(PeerTimeout, match=r"combine_recv_kernel.* on PE 0 waiting for PE 1"):
            op.combine_recv()
    host_state.current().bootstrap.barrier("given up")
    op.reset()


@pytest.mark.parametrize("half", ["dispatch", "combine"])
def test_a_missing_peer_is_named_by_the_receiving_half(half: str) -> None:
    local_world(2, heap_size="16M", timeout_s=1.0).run(missing_peer, half)
