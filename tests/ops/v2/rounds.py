"""Rounds of an EPv2 op on a PE, and the check of what came out on all of them, against tests/ops/reference.py."""

from __future__ import annotations

from typing import Any

import torch

from mori_triton import local_world
from mori_triton.host import state as host_state
from mori_triton.ops.dispatch_combine_v2 import EpDispatchCombineConfig, EpDispatchCombineOp
from tests.ops import cases, reference
from tests.ops.cases import Case, Round, round_of, to_numpy


def config_of(case: Case, pe: int, **changes: Any) -> EpDispatchCombineConfig:
    fields = {
        "rank": pe,
        "world_size": case.num_pes,
        "hidden_dim": case.hidden,
        "max_num_inp_token_per_rank": case.max_tokens,
        "num_experts_per_rank": case.experts_per_pe,
        "num_experts_per_token": case.top_k,
        "data_type": getattr(torch, case.dtype),
        "scale_dim": case.scales[0],
        "scale_type_size": case.scales[1],
    }
    return EpDispatchCombineConfig(**{**fields, **dict(case.config), **changes})


def start(case: Case, pe: int, **changes: Any) -> EpDispatchCombineOp:
    """An op whose buffers hold NaNs, or the sentinel, on every PE before any PE goes on."""
    op = EpDispatchCombineOp(config_of(case, pe, **changes))
    cases.poison(op.arena)
    op._staging.fill_(255)
    host_state.current().driver.synchronize()
    host_state.current().bootstrap.barrier("poisoned")
    return op


def dispatch_round(op: EpDispatchCombineOp, case: Case, mine: Round) -> dict[str, Any]:
    given = cases.inputs_on(op.arena, case, mine)
    result = op.dispatch(*given, return_routing=True)
    assert [r is None or r.data_ptr() for r in result[:4]] == [
        view is None or view.data_ptr()
        for view in (op.recv_tokens(), op.recv_weights(), op.recv_scales(), op.recv_indices())
    ]
    got = cases.dispatched(op.arena, given, result)
    got["routing"] = result[5]
    return got


def combine_round(op: EpDispatchCombineOp, case: Case, pe: int, got: dict[str, Any]) -> dict[str, Any]:
    """Run this PE's experts on what dispatch brought, combine, and drop what only this PE may hold."""
    cases.poison(op.arena, "combine_out", "combine_out_weights")
    rows = cases.experts(pe, got.pop("out")[: got["total"]])
    if case.registered:
        op.combine_in_view()[: got["total"]] = rows
        rows = op.combine_in_view()
    given, routing = got.pop("given"), got.pop("routing")
    del got["out_weights"]
    out, out_weights = op.combine(rows, case.weights, given[3], routing=routing)
    got["combined"] = to_numpy(out)
    got["combined_weights"] = None if out_weights is None else to_numpy(out_weights)
    return got


def run_case(pe: int, case: Case, changes: dict[str, Any]) -> list[dict[str, Any]]:
    outcomes = []
    with start(case, pe, **changes) as op:
        for index in range(case.rounds):
            got = dispatch_round(op, case, round_of(case, pe, index))
            outcomes.append(combine_round(op, case, pe, got))
    return outcomes


def check_case(case: Case, results: list[list[dict[str, Any]]]) -> None:
    highest = [0] * case.num_pes
    for index in range(case.rounds):
        sent = [round_of(case, pe, index) for pe in range(case.num_pes)]
        wanted = reference.received([r.indices for r in sent], case.experts_per_pe)
        for pe, mine in enumerate(sent):
            got = results[pe][index]
            highest[pe] = max(highest[pe], got["total"])
            cases.check_dispatch(case, pe, got, sent, wanted[pe], highest[pe])
            check_combine(case, pe, got, mine)


def check_combine(case: Case, pe: int, got: dict[str, Any], mine: Round) -> None:
    want = reference.combined(pe, mine.tokens, mine.indices, case.num_pes, case.experts_per_pe)
    assert got["combined"].shape == want.shape
    assert got["combined"].tobytes() == want.tobytes(), (pe, got["combined"], want)
    if case.weights:
        assert mine.weights is not None
        want = reference.combined_weights(mine.weights, mine.indices, case.num_pes, case.experts_per_pe)
        assert got["combined_weights"].tobytes() == want.tobytes()
    else:
        assert got["combined_weights"] is None


def run(case: Case, changes: dict[str, Any] | None = None, device: str = "cpu", **options: Any) -> None:
    results = local_world(case.num_pes, device, heap_size="64M", **options).run(run_case, case, changes or {})
    check_case(case, results)
