"""Faults of group B that users met in public (docs/bug_cases.md): ids that are none, any top-k, several on one PE."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mori_triton import ops
from tests.ops.cases import Case, check_case, config_of, run_case, start
from tests.ops.given_ids import run_sent, with_ids, world

pytestmark = pytest.mark.cpu


def test_b1_b6_ids_past_the_end_and_below_zero() -> None:
    case = Case(num_pes=2, top_k=4, experts_per_pe=3)
    rows = [[-1, 0, 6, 5], [6, 11, 2**31 - 1, -(2**31)], [-2, 3, 3, 6], [-1, -1, -1, 2]]
    results = run_sent(case, [with_ids(case, [rows, rows[::-1]])] * 2)
    assert [results[pe][0]["total"] for pe in range(2)] == [4, 4]


def test_b2_padding_counts_for_no_expert() -> None:
    def program(pe: int) -> None:
        config = config_of(Case(num_pes=2, top_k=3, experts_per_pe=4), pe)
        ids = torch.tensor([[0, 3, -1], [-1, -1, -1], [7, 7, 4], [8, -2, 3], [1, 1, 1]], dtype=torch.int32)
        for rows in (0, 3, 4, 5):
            counts = torch.full((4,), -7, dtype=torch.int32)
            ops.local_expert_count(config, ids, torch.tensor([rows], dtype=torch.int32), counts)
            valid = ids[:rows][ids[:rows] >= 0].numpy()
            want = np.bincount(valid, minlength=12)[4 * pe : 4 * pe + 4]
            assert counts.tolist() == want.tolist()
            assert ops.local_expert_count_torch(config, ids, rows).tolist() == want.tolist()

    world(2).run(program)


def test_b2_counts_of_a_real_dispatch() -> None:
    case = Case(num_pes=2, top_k=4, experts_per_pe=3, weights=False)
    sent = with_ids(case, [[[0, 0, 5, -1], [1, 2, 3, 4]], [[5, 5, 5, 6], [-1, -1, -1, -1], [2, 3, 3, 3]]])

    def program(pe: int) -> list[int]:
        op = start(case, pe)
        tokens = torch.zeros(len(sent[pe].indices), case.hidden, dtype=torch.bfloat16)
        indices = torch.from_numpy(sent[pe].indices)
        *_, total = op.dispatch(tokens, None, None, indices, call_local_expert_count=True)
        op.combine(torch.zeros(int(total), case.hidden, dtype=torch.bfloat16), None, indices)
        return op.local_expert_count.tolist()

    # of all ids that a PE received, those of its own experts
    assert world(2).run(program) == [[2, 1, 2], [4, 1, 4]]


@pytest.mark.parametrize("top_k", [3, 5, 6, 7, 9, 10, 12])
def test_b8_top_k_that_does_not_divide_a_wave(top_k: int) -> None:
    case = Case(num_pes=3, top_k=top_k, max_tokens=21, tokens="full", rounds=1, hidden=8, experts_per_pe=16)
    check_case(case, world(3).run(run_case, case))


def test_b11_several_experts_on_one_pe_send_once() -> None:
    case = Case(num_pes=2, top_k=4, experts_per_pe=4)
    results = run_sent(case, [with_ids(case, [[[4, 5, 6, 7], [4, 4, 4, 4]], [[0, 4, 1, 5]] * 2])])
    assert [results[pe][0]["total"] for pe in range(2)] == [2, 4]
