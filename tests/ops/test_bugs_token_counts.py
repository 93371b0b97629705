"""Faults of group A that users met in public (docs/bug_cases.md): no tokens, few of them, too many."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton.errors import ReceiveOverflow
from mori_triton.ops import plans
from tests.ops.cases import Case, check_combine, combine_round, dispatch_round, is_poison, round_of, start
from tests.ops.given_ids import run_sent, with_ids, world

pytestmark = pytest.mark.cpu


def test_a1_a_pe_without_tokens_returns_what_peers_sent() -> None:
    case = Case(num_pes=2)
    sent = with_ids(case, [[], [[0, 1, 5], [2, 2, 2], [4, 5, 3]]])

    def program(pe: int) -> list[dict[str, Any]]:
        op, outcomes = start(case, pe), []
        for _ in range(2):
            # the PE without tokens has no weights to give at all
            weights = torch.from_numpy(sent[pe].weights) if pe else None
            indices = torch.from_numpy(sent[pe].indices)
            tokens = torch.from_numpy(sent[pe].tokens.view(np.int16)).view(torch.bfloat16)
            _, out_weights, _, _, total = op.dispatch(tokens, weights, None, indices)
            sources = op.get_dispatch_src_token_pos().tolist()
            outcomes.append({"total": int(total), "sources": sources, "weights": out_weights[: int(total)].clone()})
            # nothing to give may also be an empty tensor
            rows = torch.ones(int(total), case.hidden, dtype=torch.bfloat16)
            assert op.combine(rows, torch.empty(0), indices)[1] is None
        return outcomes

    for got in world(2).run(program)[0]:
        assert got["total"] == 2
        assert sorted(got["sources"]) == [5, 6]
        for source, row in zip(got["sources"], got["weights"], strict=True):
            assert row.tolist() == sent[1].weights[source - 5].tolist()


@pytest.mark.parametrize("with_tokens", [0, 2])
@pytest.mark.parametrize("shape", [None, (0,), (-1, 0)])
def test_a1_empty_weights_and_scales_are_none(shape: tuple[int, ...] | None, with_tokens: int) -> None:
    """Whatever their dtype, also on a PE without tokens, where `[n, 0]` is `[0, 0]`."""
    case = Case(num_pes=2, scales=(3, 1))

    def program(pe: int) -> None:
        op, n = start(case, pe), with_tokens
        nothing = None if shape is None else torch.empty([n if s < 0 else s for s in shape])
        indices = torch.zeros(n, case.top_k, dtype=torch.int32)
        _, weights, scales, _, total = op.dispatch(
            torch.ones(n, case.hidden, dtype=torch.bfloat16), nothing, nothing, indices
        )
        assert scales is None
        assert is_poison(weights.numpy())
        assert int(total) == (0 if pe else 2 * n)
        rows = torch.ones(int(total), case.hidden, dtype=torch.bfloat16)
        out, out_weights = op.combine(rows, nothing if n == 0 else None, indices)
        assert out_weights is None
        assert out[:n].tolist() == [[1.0] * case.hidden] * n

    world(2).run(program)


def test_a3_a_pe_without_tokens_signals_as_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: dict[str, list[str]] = {}
    real = plans.Step.launch

    def recording(step: plans.Step, given: Any) -> None:
        launched.setdefault(threading.current_thread().name, []).append(step.prepared.name)
        real(step, given)

    monkeypatch.setattr(plans.Step, "launch", recording)
    case = Case(num_pes=2)
    run_sent(case, [with_ids(case, [[], [[0, 1, 5]]])])
    signalling = ["dispatch_copy_kernel", "combine_copy_kernel", "combine_reduce_kernel"]
    calls = sorted(launched.values(), key=len)
    assert calls == [signalling, ["dispatch_route_kernel", *signalling]]


def test_a7_pes_that_receive_nothing() -> None:
    case = Case(num_pes=3, rounds=12)
    results = run_sent(case, [with_ids(case, [[[0, 1, 2]] * 3] * 3)] * case.rounds)
    assert [got["total"] for got in results[1] + results[2]] == [0] * 24


def test_a9_the_maximum_does_not_change_numbers() -> None:
    outcomes = []
    for most in (1, 2, 8, 16, 64, 256):
        case = Case(max_tokens=most, tokens="one", top_k=3, rounds=2, hidden=24)
        case_in = Case(max_tokens=5, tokens="one", top_k=3, rounds=2, hidden=24)
        sent = [[round_of(case_in, pe, index) for pe in range(2)] for index in range(2)]
        results = run_sent(case, sent)
        outcomes.append([got["combined"][:1].tobytes() for pe in range(2) for got in results[pe]])
    assert outcomes == [outcomes[0]] * len(outcomes)


def test_a12_overflow_is_dropped_and_reported() -> None:
    # everything goes to PE 0, which has room for a share of 2 tokens from each of 2 PEs
    case = Case(num_pes=2, max_tokens=5, top_k=1, config=(("max_total_recv_tokens", 4),))
    sent = with_ids(case, [[[0]] * 5, [[1]] * 5])
    one_each = with_ids(case, [[[5]], [[0]]])

    def program(pe: int) -> dict[str, Any]:
        op = start(case, pe)
        tokens = torch.from_numpy(sent[pe].tokens.view(np.int16)).view(torch.bfloat16)
        indices = torch.from_numpy(sent[pe].indices)
        message = ""
        try:
            op.dispatch(tokens, None, None, indices)
        except ReceiveOverflow as error:
            message = str(error)
        total = 4 if pe == 0 else 0
        sources = op.get_dispatch_src_token_pos().tolist()
        rows = torch.ones(total, case.hidden, dtype=torch.bfloat16)
        out, _ = op.combine(rows, None, indices)
        came_back = out[:5].float().sum(1).tolist()
        # and the next round is a good one
        got = dispatch_round(op, case, one_each[pe])
        return {"message": message, "sources": sources, "back": came_back, "next": combine_round(op, case, pe, got)}

    first, second = world(2).run(program)
    assert "PE 0 was sent 10 rows, 6 more" in first["message"]
    assert "R = 4" in first["message"]
    assert second["message"] == ""
    assert second["sources"] == []
    assert len(set(first["sources"])) == 4
    # rows that found a slot come back, dropped ones are 0
    back = {(pe, token): value for pe, got in enumerate((first, second)) for token, value in enumerate(got["back"])}
    kept = {(flat // 5, flat % 5) for flat in first["sources"]}
    assert back == {source: float(case.hidden) if source in kept else 0.0 for source in back}
    for pe, got in enumerate((first["next"], second["next"])):
        # the other PE's one token, into room for 4
        assert got["total"] == 1
        assert got["sources"] == [(1 - pe, 0)]
        for name in ("tokens", "indices", "weights"):
            assert got[name][0].tobytes() == getattr(one_each[1 - pe], name)[0].tobytes(), name
        check_combine(case, pe, got, one_each[pe])
