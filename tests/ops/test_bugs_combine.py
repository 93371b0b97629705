"""Faults of group C that users met in public (docs/bug_cases.md): what combine is given, weights, widths and dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mori_triton.errors import ArgumentError
from mori_triton.host import state as host_state
from tests.ops.cases import (
    Case,
    Round,
    check_case,
    check_rounds,
    combine_round,
    dispatch_round,
    is_poison,
    poison,
    round_of,
    start,
)
from tests.ops.given_ids import run_sent, with_ids, world

pytestmark = pytest.mark.cpu


def test_c1_combine_given_the_indices_that_dispatch_returned() -> None:
    case = Case(num_pes=2, max_tokens=4)
    # each PE gets as many rows as it sends tokens, but not the same ones
    sent = with_ids(case, [[[3, 4, 5]] * 4, [[0, 1, 2]] * 4])

    def program(pe: int) -> dict[str, Any]:
        op = start(case, pe)
        got = dispatch_round(op, case, sent[pe])
        returned = torch.from_numpy(got["indices"])
        rows = got["out"][: got["total"]]
        with pytest.raises(ValueError, match=r"indices.shape\[0\]: want 4, .* got 8") as caught:
            op.combine(rows, None, returned)
        assert isinstance(caught.value, ArgumentError)
        with pytest.raises(ArgumentError, match=r"indices\[0\]: want .* as given to dispatch, got"):
            op.combine(rows, None, returned[: got["total"]].contiguous())
        return combine_round(op, case, pe, got)

    check_rounds(case, [sent], [[got] for got in world(2).run(program)])


@pytest.mark.parametrize("top_k", [1, 2, 4, 6, 8, 9, 10])
def test_c2_c3_weights_or_none_give_the_same_tokens(top_k: int) -> None:
    sent = [round_of(Case(top_k=top_k, experts_per_pe=5), pe, 0) for pe in range(2)]
    outputs = []
    for weights in (True, False):
        case = Case(top_k=top_k, experts_per_pe=5, weights=weights)
        given = [Round(r.tokens, r.indices, r.weights if weights else None, None) for r in sent]
        results = run_sent(case, [given])
        outputs.append([results[pe][0]["combined"].tobytes() for pe in range(2)])
    assert outputs[0] == outputs[1]


def test_c7_rows_beyond_the_tokens_are_not_written() -> None:
    case = Case(max_tokens=64)
    many, few = [[[0, 3, 1]] * 64] * 2, [[[5, 3, 1]] * 8] * 2
    results = run_sent(case, [with_ids(case, many), with_ids(case, few)])
    for pe in range(2):
        assert results[pe][1]["combined"].shape == (64, case.hidden)
        assert is_poison(results[pe][1]["combined"][8:])


def test_c8_hidden_smaller_than_configured() -> None:
    case = Case(rounds=1)

    def program(pe: int) -> list[dict[str, Any]]:
        op = start(case, pe, hidden_dim=2880)
        got = []
        for hidden in (2880, 24, 8, 7, 1000, 2880):
            host_state.current().bootstrap.barrier("nobody reads rows of the last round")
            poison(op)
            host_state.current().bootstrap.barrier("poisoned")
            width = Case(hidden=hidden, rounds=1)
            got.append(combine_round(op, width, pe, dispatch_round(op, width, round_of(width, pe, 0))))
        return got

    results = world(2).run(program)
    for index, hidden in enumerate((2880, 24, 8, 7, 1000, 2880)):
        width = Case(hidden=hidden, rounds=1)
        check_case(width, [[[results[pe][index]]] for pe in range(2)])


def test_combine_dtype_may_differ_from_dispatch() -> None:
    """As an expert kernel that takes float16 and gives float32 would have it."""
    case = Case(dtype="float16", hidden=24)

    def program(pe: int) -> tuple[torch.Tensor, Round]:
        op, mine = start(case, pe, max_token_type_size=4), round_of(case, pe, 0)
        indices = torch.from_numpy(mine.indices)
        out, *_, total = op.dispatch(torch.from_numpy(mine.tokens), None, None, indices)
        result, none = op.combine(out[: int(total), :16].float().contiguous() * 0.1, None, indices)
        assert none is None
        assert result.dtype == torch.float32
        assert result.shape == (case.max_tokens, 16)
        return result[: len(mine.tokens)].clone(), mine

    for result, mine in world(2).run(program):
        for token, row in enumerate(mine.indices):
            pes = len(set(row.tolist()) - {-1} and {e // 3 for e in row.tolist()})
            term = mine.tokens[token, :16].astype(np.float32) * np.float32(0.1)
            want = term if pes == 1 else term + term
            assert result[token].numpy().tobytes() == want.tobytes()


def test_tensors_that_need_gradients_are_fine() -> None:
    def program(pe: int) -> None:
        op = start(Case(num_pes=1, dtype="float32"), pe)
        tokens = torch.ones(2, 24, requires_grad=True)
        weights = torch.ones(2, 3, requires_grad=True)
        indices = torch.zeros(2, 3, dtype=torch.int32)
        out, *_, total = op.dispatch(tokens, weights, None, indices)
        result, _ = op.combine(tokens * 2, weights, indices)
        assert not result.requires_grad
        assert int(total) == 2
        assert not out.requires_grad
        assert result[:2].tolist() == [[2.0] * 24] * 2

    world(1).run(program)
