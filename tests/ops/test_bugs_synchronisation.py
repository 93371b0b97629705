"""Faults of group D that users met in public (docs/bug_cases.md): epochs, counters, reuse of buffers, reset."""

from __future__ import annotations

import ast
import inspect
import time
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import ops
from mori_triton.errors import StateError
from mori_triton.host import state as host_state
from mori_triton.ops.kernels import combine as combine_kernels
from mori_triton.ops.kernels import dispatch as dispatch_kernels
from mori_triton.ops.kernels import finish
from mori_triton.ops.kernels.finish import COMBINE_EPOCH, DISPATCH_EPOCH, STATUS, SYNC_EPOCH
from tests.ops.cases import (
    Case,
    check_case,
    check_rounds,
    combine_round,
    config_of,
    control,
    dispatch_round,
    round_of,
    run_case,
    start,
)
from tests.ops.given_ids import world

pytestmark = pytest.mark.cpu

ARRIVALS = (finish.DISPATCH_ARRIVALS, finish.COMBINE_ARRIVALS, finish.COUNT_ARRIVALS)


def test_d1_d2_exact_with_a_late_pe() -> None:
    case = Case(num_pes=3, rounds=1)

    def program(pe: int) -> list[list[dict[str, Any]]]:
        rng, op, got = np.random.default_rng(pe), start(case, pe), []
        for index in range(15):
            time.sleep(rng.choice([0.0, 0.0, 0.004]))
            dispatched = dispatch_round(op, case, round_of(case, pe, index))
            time.sleep(rng.choice([0.0, 0.0, 0.004]))
            got.append(combine_round(op, case, pe, dispatched))
        return got

    results = world(3).run(program)
    sent = [[round_of(case, pe, index) for pe in range(3)] for index in range(15)]
    check_rounds(case, sent, results)


def test_d3_d9_epoch_counts_rounds_and_counters_end_at_zero() -> None:
    case = Case(num_pes=2)

    def words(op: ops.EpDispatchCombineOp, name: str, dtype: torch.dtype) -> list[int]:
        return op._buffers.view(name, dtype, op._layout[name].num_bytes // dtype.itemsize).tolist()

    def program(pe: int) -> None:
        op = start(case, pe)
        for index in range(3):
            combine_round(op, case, pe, dispatch_round(op, case, round_of(case, pe, index)))
            host_state.current().bootstrap.barrier("round is over")
            assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH, STATUS) == [index + 1, index + 1, 0, 0]
            for name in ("dispatch_signals", "combine_signals"):
                assert words(op, name, torch.int64) == [index + 1] * 2
            assert words(op, "recv_slots", torch.int32) == [0]
            assert control(op, *ARRIVALS) == [0, 0, 0]
            host_state.current().bootstrap.barrier("looked")
        # reset is collective and real
        op.reset()
        for name in ("control", "dispatch_signals", "combine_signals", "sync_signals"):
            assert set(words(op, name, torch.int64)) == {0}
        with pytest.raises(StateError, match="between dispatch and combine"):
            op.get_dispatch_src_token_pos()
        op.close()

    world(2).run(program)


def test_d3_epochs_are_written_by_the_one_program_that_waits() -> None:
    writers = []
    for module in (finish, dispatch_kernels, combine_kernels):
        for function in ast.parse(inspect.getsource(module)).body:
            if isinstance(function, ast.FunctionDef):
                calls = [n for n in ast.walk(function) if isinstance(n, ast.Call)]
                stores = [ast.unparse(c) for c in calls if ast.unparse(c.func) in ("tl.store", "tl.atomic_add")]
                writers += [function.name for text in stores if "EPOCH" in text.split(",")[0]]
    assert writers == ["wait_peers"]


def test_d5_no_wait_compares_for_equality() -> None:
    assert "wait_all_ge" in inspect.getsource(finish)
    for module in (finish, dispatch_kernels, combine_kernels):
        source = inspect.getsource(module)
        assert "wait_eq" not in source
        assert "wait_ne" not in source
        assert not [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.While)]


def test_d7_dispatch_alone_in_a_loop_counts_alike_each_time() -> None:
    case = Case(num_pes=2)

    def program(pe: int) -> list[dict[str, Any]]:
        op, mine = start(case, pe), round_of(case, pe, 0)
        got = [dispatch_round(op, case, mine) for _ in range(4)]
        assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH) == [4, 0, 3]
        assert [g["total"] for g in got] == [got[0]["total"]] * 4
        assert [sorted(g["sources"]) for g in got] == [sorted(got[0]["sources"])] * 4
        return [combine_round(op, case, pe, got[-1])]

    results = world(2).run(program)
    assert sum(got[0]["total"] for got in results) > 0
    check_rounds(case, [[round_of(case, pe, 0) for pe in range(2)]], results)


def test_d8_the_constructor_clears_before_anyone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(pe: int) -> list[str]:
        state, log = host_state.current(), []

        def record(owner: Any, name: str) -> None:
            real = getattr(owner, name)
            setattr(owner, name, lambda *a, **k: (log.append(name), real(*a, **k))[1])

        for owner, name in (
            (state.heap, "malloc"),
            (state.driver, "memset"),
            (state.driver, "synchronize"),
            (state.bootstrap, "barrier"),
        ):
            record(owner, name)
        if pe == 1:
            time.sleep(0.05)
        ops.EpDispatchCombineOp(config_of(Case(num_pes=2), pe))
        return list(log)

    for log in world(2).run(program):
        kept = [name for i, name in enumerate(log) if i == 0 or log[i - 1] != name]
        assert kept == ["malloc", "memset", "synchronize", "barrier"]


def test_d10_any_number_of_programs() -> None:
    case = Case(num_pes=2, max_tokens=40, tokens="full", hidden=2880, rounds=1)

    def program(pe: int) -> list[list[dict[str, Any]]]:
        got = []
        for block_num, warps in ((1, 2), (4096, 4)):
            op, mine = start(case, pe), round_of(case, pe, 0)
            assert op.get_launch_config(True, block_num, 0, warps) == (block_num, 0, warps)
            real_dispatch, real_combine = op.dispatch, op.combine
            op.dispatch = lambda *a: real_dispatch(*a, block_num=block_num, warp_per_block=warps)  # noqa: B023
            op.combine = lambda *a: real_combine(*a, block_num=block_num, warp_per_block=warps)  # noqa: B023
            got.append(combine_round(op, case, pe, dispatch_round(op, case, mine)))
            op.close()
        return got

    results = world(2).run(program)
    for index in range(2):
        check_case(case, [[[results[pe][index]]] for pe in range(2)])


def test_d15_one_round_at_a_time_on_one_op_two_ops_overlap() -> None:
    case = Case(num_pes=2, num_ops=2, rounds=2)
    check_case(case, world(2).run(run_case, case))


def test_call_reset_after_combine() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> dict[str, Any]:
        op, mine = start(case, pe), round_of(case, pe, 0)
        indices = torch.from_numpy(mine.indices)
        for _ in range(2):
            tokens = torch.from_numpy(mine.tokens.view(np.int16)).view(torch.bfloat16)
            *_, total = op.dispatch(tokens, None, None, indices)
            op.combine(torch.ones(int(total), case.hidden, dtype=torch.bfloat16), None, indices, call_reset=True)
            assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH) == [0, 0]
        return combine_round(op, case, pe, dispatch_round(op, case, mine))

    results = world(2).run(program)
    for pe in range(2):
        assert results[pe]["total"] == len(results[pe]["sources"])
