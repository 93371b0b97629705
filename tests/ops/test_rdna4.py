"""Kernel type IntraNodeRDNA4: 2 and 4 PEs against numpy, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.ops.kernels.finish import COMBINE_EPOCH, DISPATCH_EPOCH, SYNC_EPOCH
from tests.ops import reference
from tests.ops.cases import (
    Case,
    check_case,
    check_rounds,
    combine_round,
    control,
    dispatch_round,
    dispatched,
    experts,
    inputs_on,
    poison,
    round_of,
    run_case,
    start,
    to_numpy,
)
from tests.ops.test_routing_handles import with_payload

pytestmark = pytest.mark.cpu

RDNA4 = ops.EpDispatchCombineKernelType.IntraNodeRDNA4
# one width for all: kernels are shared
EP2 = Case(num_pes=2, hidden=72, top_k=3, config=(("kernel_type", RDNA4),))
EP4 = dataclasses.replace(EP2, num_pes=4)
BOTH = (EP2, EP4)


def world(case: Case, **options: Any) -> Any:
    return local_world(case.num_pes, heap_size="16M", **options)


def variants(case: Case) -> list[Case]:
    """As little to compile as can be: a kernel serves every number of ids but 8."""
    change = lambda **changes: dataclasses.replace(case, **{"rounds": 2, **changes})  # noqa: E731
    # one number of PEs each
    usual = [change(dtype="float16", top_k=8, routing="out_of_range")] if case.num_pes == 4 else [change(weights=False)]
    return [
        *(change(routing=routing, tokens=tokens) for routing, tokens in (
            ("random", "uneven"), ("to_one", "full"), ("none_to_last", "uneven"), ("duplicates", "zero"),
            ("padded", "zero"), ("out_of_range", "uneven"), ("nowhere", "full"), ("spread", "one"),
        )),
        *(change(top_k=k, experts_per_pe=16, routing="padded", rounds=1) for k in (1, 31, 32, 33, 64)),
        change(num_ops=2),
        change(registered=True),
        *usual,
    ]  # fmt: skip


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_rounds_are_exact(case: Case) -> None:
    for this in variants(case):
        check_case(this, world(this).run(run_case, this))


@pytest.mark.parametrize(("case", "hidden"), [(EP2, 516), (EP2, 71), (EP4, 70)], ids=["16", "2", "4"])
def test_rows_of_any_width(case: Case, hidden: int) -> None:
    """A tile and a bit, words of 4 and 2 bytes, and an input that is not aligned as its rows are."""

    def program(pe: int) -> None:
        this = dataclasses.replace(case, hidden=hidden, rounds=1)
        op = start(this, pe, hidden_dim=hidden + 8)
        mine = round_of(this, pe, 0)
        tokens, weights, _, indices = inputs_on(op, this, mine)
        shifted = torch.empty(tokens.numel() + 1, dtype=tokens.dtype)[1:].view(tokens.shape)
        shifted.copy_(tokens)
        out, out_weights, _, _, total = op.dispatch(shifted, weights, None, indices)
        rows = torch.empty(int(total) * hidden + 1, dtype=tokens.dtype)[1:].view(-1, hidden)
        rows.copy_(experts(pe, out[: int(total)]))
        got = {"combined": to_numpy(op.combine(rows, out_weights, indices)[0][: len(tokens)])}
        want = reference.combined(pe, mine.tokens, mine.indices, case.num_pes, case.experts_per_pe)
        assert got["combined"].tobytes() == want.tobytes()
        op.close()

    world(case).run(program)


def many_tokens(pe: int, case: Case) -> list[list[dict[str, Any]]]:
    """More tokens than those whose rows are cut into tiles, on one PE; few on the others."""
    op, outcomes = start(case, pe), []
    for index in range(case.rounds):
        got = dispatch_round(op, case, round_of(case, pe, index))
        outcomes.append(combine_round(op, case, pe, got))
    op.close()
    return outcomes


def test_whole_rows_where_tokens_are_many() -> None:
    for case in BOTH:
        this = dataclasses.replace(case, max_tokens=300, tokens="uneven", rounds=1)
        sent = [[round_of(this, pe, 0) for pe in range(this.num_pes)]]
        check_rounds(this, sent, world(this).run(many_tokens, this))


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
@pytest.mark.parametrize("weak_memory", [False, True], ids=["strong", "weak"])
def test_seeds(case: Case, weak_memory: bool) -> None:
    this = dataclasses.replace(case, rounds=2, tokens="zero", routing="padded")
    for seed in range(4):
        check_case(this, world(this, seed=seed, weak_memory=weak_memory).run(run_case, this))


def handles(pe: int, case: Case) -> list[list[dict[str, Any]]]:
    """Three layers forward with a handle each, then along them in another order, two combines of each in a row.

    Every dispatch but the first follows another dispatch, every combine but the first another combine.
    """
    op = start(case, pe)
    layers, outcomes = range(case.rounds), []
    made: list[Any] = []
    for index in layers:
        given = inputs_on(op, case, round_of(case, pe, index))
        result = op.dispatch(*given, return_routing=True)
        made.append((result[5], dispatched(op, given, result)))
        # these are gone with the next dispatch
        for name in ("out", "out_weights"):
            made[-1][1][name] = made[-1][1][name].clone()
    for index in (1, 2, 0):
        handle, got = made[index]
        again = dict(got)
        outcomes.append((index, combine_round(op, case, pe, got, routing=handle)))
        outcomes.append((index, combine_round(op, case, pe, again, routing=handle)))
    assert control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH) == [3, 6, 7]
    # in the order of the dispatches, in which rows were poisoned
    outcomes.sort(key=lambda outcome: outcome[0])
    for index in (2, 0, 1):
        handle, before = made[index][0], [tensor.clone() for tensor in made[index][0].tensors()]
        handle = ops.EpDispatchRoutingHandle.from_tensors(handle.tensors(), handle.cur_rank_num_token)
        given = inputs_on(op, case, with_payload(case, round_of(case, pe, index), pe, 10 + index))
        got = dispatched(op, given, op.dispatch(*given, routing=handle))
        # the same rows in the same places, with what is in them now
        assert got["sources"] == made[index][1]["sources"]
        outcomes.append((10 + index, combine_round(op, case, pe, got)))
        assert all(torch.equal(a, b) for a, b in zip(before, handle.tensors(), strict=True))
    op.close()
    return outcomes


def check_handles(case: Case, results: list[Any]) -> None:
    pes = range(case.num_pes)
    order = [index for index, _ in results[0]]
    sent = []
    for index in order:
        mine = [round_of(case, pe, index % 10) for pe in pes]
        sent.append([with_payload(case, mine[pe], pe, index) for pe in pes] if index >= 10 else mine)
    check_rounds(case, sent, [[got for _, got in result] for result in results])


HANDLES = {"tokens": "zero", "routing": "padded", "rounds": 3}


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_handles_interleave_and_calls_of_a_kind_follow_each_other(case: Case) -> None:
    this = dataclasses.replace(case, **HANDLES)
    check_handles(this, world(this).run(handles, this))
    for seed in range(2):
        check_handles(this, world(this, seed=seed, weak_memory=True).run(handles, this))


def halves(pe: int, case: Case) -> list[list[dict[str, Any]]]:
    op, outcomes = start(case, pe), []
    for index in range(case.rounds):
        given = inputs_on(op, case, round_of(case, pe, index))
        result = op.dispatch_send(*given)
        for tensor in given[:3]:
            # what was given may be gone
            if tensor is not None:
                tensor.fill_(float("nan"))
        op.dispatch_recv()
        got = dispatched(op, given, result)
        poison(op, "combine_out", "combine_out_weights")
        rows, weights = experts(pe, got["out"][: got["total"]]), got["out_weights"][: got["total"]].clone()
        sums, sum_weights = op.combine_send(rows, weights, given[3])
        rows.fill_(float("nan"))
        weights.fill_(float("nan"))
        op.combine_recv()
        got |= {"combined": to_numpy(sums), "combined_weights": to_numpy(sum_weights)}
        outcomes.append({name: got[name] for name in got if name not in ("out", "out_weights", "given")})
    op.close()
    return outcomes


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_halves_take_nothing_along(case: Case) -> None:
    sent = [[round_of(case, pe, index) for pe in range(case.num_pes)] for index in range(case.rounds)]
    check_rounds(case, sent, world(case).run(halves, case))


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_experts_that_return_what_dispatch_brought(case: Case) -> None:
    """A peer may send the next rows over it as soon as it has those of this combine; the own ones are summed later."""

    def program(pe: int, seed: int) -> None:
        op = start(case, pe)
        for index in range(3):
            mine = round_of(case, pe, index)
            given = inputs_on(op, case, mine)
            out, out_weights, *_ = op.dispatch(*given)
            sums, _ = op.combine(out, out_weights, given[3])
            want = np.zeros(mine.tokens.shape, np.float32)
            for token, row in enumerate(mine.indices):
                for _ in reference.owners(row, case.num_pes, case.experts_per_pe):
                    want[token] += reference.to_float32(mine.tokens[token])
            got = to_numpy(sums[: len(want)])
            assert got.tobytes() == reference.from_float32(want, mine.tokens.dtype).tobytes(), (seed, index)
            # and a round on what the last one left
            op.dispatch(sums[: len(want)], *given[1:])
            op.combine(op.get_registered_combine_input_buffer(sums.dtype), None, given[3])
        op.close()

    for seed in range(6):
        world(case, seed=seed).run(program, seed)


@pytest.mark.parametrize("case", BOTH, ids=["ep2", "ep4"])
def test_two_hundred_rounds_of_one_op(case: Case) -> None:
    """Epochs only grow; every eighth round is two dispatches in a row, every ninth two combines."""
    rounds = 200

    def program(pe: int) -> list[int]:
        op = start(case, pe)
        for index in range(rounds):
            mine = round_of(case, pe, index % 5)
            given = inputs_on(op, case, mine)
            if index % 8 == 7:
                op.dispatch(*given)
            out, out_weights, _, _, total = op.dispatch(*given)
            rows = experts(pe, out[: int(total)])
            if index % 9 == 8:
                op.combine(rows.flip(0), out_weights[: int(total)], given[3])
            sums, sum_weights = op.combine(rows, out_weights[: int(total)], given[3])
            got = {"combined": to_numpy(sums), "combined_weights": to_numpy(sum_weights)}
            got = {name: table[: len(mine.tokens)] for name, table in got.items()}
            want = reference.combined(pe, mine.tokens, mine.indices, case.num_pes, case.experts_per_pe)
            assert got["combined"].tobytes() == want.tobytes(), index
            want = reference.combined_weights(mine.weights, mine.indices, case.num_pes, case.experts_per_pe)
            assert got["combined_weights"].tobytes() == want.tobytes(), index
        words = control(op, DISPATCH_EPOCH, COMBINE_EPOCH, SYNC_EPOCH)
        op.close()
        return words

    assert world(case).run(program) == [[rounds + rounds // 8, rounds + rounds // 9, 25 + 22]] * case.num_pes
