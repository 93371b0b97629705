"""Faults that users of expert-parallel libraries met in public, as tests named after the case's letter and number."""

from __future__ import annotations

import ast
import inspect
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import abi, local_world, ops
from mori_triton.errors import ArgumentError, Deadlock, PeerTimeout, ReceiveOverflow, StateError
from mori_triton.host import state as host_state
from mori_triton.ops import plans
from mori_triton.ops.kernels import combine as combine_kernels
from mori_triton.ops.kernels import dispatch as dispatch_kernels
from mori_triton.ops.kernels import finish
from mori_triton.ops.kernels.finish import COMBINE_EPOCH, DISPATCH_EPOCH, STATUS, SYNC_EPOCH
from tests.ops.cases import (
    STORED,
    Case,
    Round,
    check_case,
    check_combine,
    check_rounds,
    combine_round,
    config_of,
    control,
    dispatch_round,
    inputs_on,
    is_poison,
    payload,
    poison,
    round_of,
    run_case,
    run_rounds,
    start,
)

pytestmark = pytest.mark.cpu


def world(num_pes: int, **options: Any) -> Any:
    return local_world(num_pes, heap_size="16M", **options)


def with_ids(case: Case, ids: list[list[list[int]]]) -> list[Round]:
    """A round with these ids on each PE."""
    rounds = []
    for pe, rows in enumerate(ids):
        rng = np.random.default_rng(pe)
        indices = np.array(rows, np.int32).reshape(-1, case.top_k)
        tokens = payload(rng, (len(rows), case.hidden), STORED[case.dtype])
        weights = rng.random((len(rows), case.top_k)).astype(np.float32) if case.weights else None
        rounds.append(Round(tokens, indices, weights, None))
    return rounds


def run_sent(case: Case, sent: list[list[Round]], **options: Any) -> list[list[dict[str, Any]]]:
    """Run rounds given as [round][PE] on one op and check them; outcomes as [PE][round]."""

    def program(pe: int) -> list[list[dict[str, Any]]]:
        return run_rounds(pe, case, [[given[pe] for given in sent]])

    results = [result[0] for result in world(case.num_pes, **options).run(program)]
    check_rounds(case, sent, results)
    return results


# -- A: token counts


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


# -- B: expert indices


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


# -- C: combine contract


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


# -- D: synchronisation, reset


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


ARRIVALS = (finish.DISPATCH_ARRIVALS, finish.COMBINE_ARRIVALS, finish.COUNT_ARRIVALS)


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


def says_who_waits(message: str) -> bool:
    return all(part in message for part in ("dispatch_copy_kernel", "on PE 0", "PE 1", "expected >= 1", "saw 0"))


def test_d20_a_missing_peer_is_named_and_reset_recovers() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> dict[str, Any]:
        op = start(case, pe)
        if pe == 0:
            with pytest.raises(PeerTimeout) as caught:
                dispatch_round(op, case, round_of(case, pe, 0))
            assert says_who_waits(str(caught.value))
            with pytest.raises(StateError, match="reset"):
                dispatch_round(op, case, round_of(case, pe, 0))
        op.reset()
        poison(op)
        host_state.current().bootstrap.barrier("poisoned")
        return combine_round(op, case, pe, dispatch_round(op, case, round_of(case, pe, 0)))

    results = world(2, timeout_s=1.0).run(program)
    check_case(case, [[[results[pe]]] for pe in range(2)])


def test_d20_a_time_out_that_somebody_else_raised_breaks_the_op_too() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> dict[str, Any]:
        op, bystander, heap = start(case, pe), start(case, pe), host_state.current().heap
        if pe == 0:
            # as on a GPU, where the call does not wait for its kernels
            op._on_host = False
            op._argument = op._outside = lambda *given: given[-1]  # type: ignore[method-assign]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
                op.dispatch(*inputs_on(op, case, round_of(case, pe, 0)))
                with pytest.raises(PeerTimeout):
                    heap.check_errors()
                with pytest.raises(StateError, match="dispatch: the op is broken"):
                    op.dispatch(*inputs_on(op, case, round_of(case, pe, 0)))
            del op._argument, op._outside
            op._on_host = True
        op.reset()
        # the other op is none the worse
        got = dispatch_round(bystander, case, round_of(case, pe, 0))
        combine_round(bystander, case, pe, got)
        poison(op)
        host_state.current().bootstrap.barrier("poisoned")
        return combine_round(op, case, pe, dispatch_round(op, case, round_of(case, pe, 0)))

    results = world(2, timeout_s=1.0).run(program)
    check_case(case, [[[results[pe]]] for pe in range(2)])


def test_d20_a_time_out_that_found_the_error_log_full_breaks_the_op_too() -> None:
    """Behind replays of a graph that all overflowed, say, and that nobody has looked at."""
    case = Case(num_pes=1, hidden=8, tokens="full", max_tokens=3, config=(("max_total_recv_tokens", 1),))

    def program(pe: int) -> None:
        op, heap = start(case, pe), host_state.current().heap
        given = inputs_on(op, case, with_ids(case, [[[0] * 3] * 3])[0])
        op._on_host = False
        op._argument = op._outside = lambda *given: given[-1]  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            patch.setattr(heap, "errors_pending", lambda: False)
            for _ in range(abi.ERROR_CAPACITY + 1):
                op.dispatch(*given)
            op._buffers.region("control")[STATUS.value] = 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            with pytest.raises(ReceiveOverflow, match="and 1 more"):
                op.dispatch(*given)
            with pytest.raises(StateError, match="dispatch: the op is broken"):
                op.dispatch(*given)

    world(1).run(program)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kernel_type": ops.EpDispatchCombineKernelType.IntraNodeLL},
        {"deterministic": True},
        {"quant_type": "fp8_blockwise"},
    ],
    ids=["IntraNode", "IntraNodeLL", "deterministic", "fp8_blockwise"],
)
def test_d20_kernels_of_a_broken_op_touch_nothing(changes: dict[str, Any], replay: bool) -> None:
    """Whatever a dispatch that failed has left where rows would be addressed from."""
    case = Case(num_pes=2, tokens="full", scales=(5, 4))

    def program(pe: int) -> None:
        op = start(case, pe, **changes)
        given = inputs_on(op, case, round_of(case, pe, 0))
        *_, handle = op.dispatch(*given, return_routing=True)
        rows = torch.ones(10, case.hidden, dtype=torch.bfloat16)
        host_state.current().bootstrap.barrier("dispatched")
        poison(op)
        op._buffers.region("control")[STATUS.value] = 1
        handle.disp_dest_tok_id_map.fill_(2**31 - 1)
        op._buffers.region("forward").fill_(2**31 - 1)
        host_state.current().bootstrap.barrier("broken")
        watched = (
            "recv_tokens",
            "recv_indices",
            "recv_weights",
            "recv_scales",
            "recv_sources",
            "combine_in",
            "control",
        )
        before = {name: op._buffers.region(name).clone() for name in watched}
        op.dispatch(*given, routing=handle if replay else None)
        op.combine(rows, None, given[3], routing=handle)
        host_state.current().bootstrap.barrier("tried")
        for name, tensor in before.items():
            assert torch.equal(op._buffers.region(name).view(torch.uint8), tensor.view(torch.uint8)), name

    world(2).run(program)


def test_d20_a_missing_peer_with_virtual_time() -> None:
    case = Case(num_pes=2, rounds=1)

    def program(pe: int) -> None:
        op = start(case, pe)
        if pe == 0:
            dispatch_round(op, case, round_of(case, pe, 0))
        op.reset()

    with pytest.raises(Deadlock) as caught:
        world(2, seed=3).run(program)
    assert says_who_waits(str(caught.value))


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
