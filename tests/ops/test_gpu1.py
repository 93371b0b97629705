"""The IntraNode contract on one GPU: several PEs as streams of it, every element checked where it is.

Each test also runs in a small form on the emulated device, so that a fault of the test itself shows without a GPU.
"""

from __future__ import annotations

import dataclasses
import random
import time
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.host import state as host_state
from tests.ops import hashed
from tests.ops.hashed import Problem, Round, all_sources, one_round, op_config, run_experts, wrong_in_combine
from tests.ops.on_both import (
    DETERMINISTIC,
    HIDDEN,
    LL,
    TOP_K,
    every_way,
    needs_gpu,
    on_both,
    run,
    slowly_on_a_gpu,
    small,
    start,
)

FP4 = getattr(torch, "float4_e2m1fn_x2", torch.float8_e4m3fn)

# -- the matrix


def P(num_pes: int, hidden: int, top_k: int, dtype: torch.dtype, tokens: str, routing: str, **more: Any) -> Problem:
    return Problem(num_pes, hidden, top_k, dtype, tokens=tokens, routing=routing, **{"max_tokens": 33, **more})


BF16 = torch.bfloat16
MATRIX = (
    P(8, 7168, 8, BF16, "uneven", "random", experts_per_pe=32, max_tokens=128),
    P(1, 7168, 8, BF16, "full", "random"),
    P(3, 7168, 8, BF16, "zero", "out_of_range", scales=(56, 4)),
    P(5, 7168, 8, BF16, "uneven", "duplicates", weights=False, registered=True),
    P(2, 7168, 10, BF16, "uneven", "padded"),
    P(3, 7168, 5, BF16, "one", "to_one"),
    P(8, 16384, 64, BF16, "full", "random", experts_per_pe=32),
    P(8, 7168, 8, torch.float8_e4m3fn, "uneven", "random", scales=(56, 4), experts_per_pe=32),
    P(3, 7168, 8, torch.float8_e4m3fnuz, "full", "padded", scales=(56, 4)),
    P(8, 3584, 8, FP4, "uneven", "random", scales=(56, 4), experts_per_pe=32),
    P(2, 2880, 8, torch.float16, "zero", "none_to_last"),
    P(2, 2880, 8, torch.float32, "full", "spread"),
    P(8, 7168, 8, BF16, "uneven", "random", config=LL, experts_per_pe=32, max_tokens=128),
    P(3, 7168, 8, BF16, "zero", "padded", config=LL, scales=(56, 4), registered=True),
    P(2, 16384, 64, BF16, "full", "duplicates", config=LL, experts_per_pe=40),
    P(8, 7168, 8, BF16, "uneven", "random", config=DETERMINISTIC, experts_per_pe=32, max_tokens=128),
    P(5, 7168, 8, BF16, "full", "padded", config=DETERMINISTIC + LL, registered=True),
)
MORE = (
    P(8, 7168, 1, BF16, "one", "to_one", registered=True),
    P(8, 2880, 9, torch.float16, "zero", "none_to_last", scales=(3, 1)),
    P(2, 2880, 6, torch.float32, "full", "spread", scales=(24, 2)),
    P(5, 24, 3, torch.float32, "uneven", "nowhere"),
    P(3, 7168, 8, torch.float8_e4m3fnuz, "full", "padded", scales=(7, 8)),
    P(2, 1001, 8, torch.float8_e4m3fn, "full", "random", weights=False),
    P(5, 2880, 10, torch.float16, "zero", "out_of_range", config=LL, registered=True),
    P(3, 7168, 5, torch.float8_e4m3fn, "uneven", "padded", config=LL, scales=(3, 1)),
    P(1, 24, 7, torch.float32, "full", "random", config=LL),
    P(3, 2880, 64, torch.float16, "zero", "out_of_range", config=DETERMINISTIC, registered=True),
)


def matrix_program(pe: int, problem: Problem) -> tuple[int, int]:
    op, wrong, highest = start(pe, problem), [], []
    for index in range(3):
        mine = Round(problem, pe, index, op.device)
        wrong.append(one_round(op, problem, mine, deterministic=op.config.deterministic))
        highest.append(int(op._buffers.view("total_recv", torch.int32, 1)))
        host_state.current().bootstrap.barrier("looked")
    # slots that no round has used
    untouched = 0
    for region in op._layout.regions:
        name = region.name
        received = name in ("recv_tokens", "recv_weights", "recv_scales", "recv_indices", "recv_sources")
        num_bytes = region.num_bytes // op.config.max_recv if received else 0
        if num_bytes:
            rows = op._buffers.view(name, torch.uint8, op.config.max_recv, num_bytes)
            rest = rows.view(-1)[max(highest) * used_bytes(problem, name) :]
            untouched += int((rest != 255).sum())
    op.close()
    return int(sum(wrong)), untouched


def used_bytes(problem: Problem, name: str) -> int:
    """Bytes of a row of a buffer, as dispatch packs them."""
    row = {"recv_tokens": problem.hidden * problem.dtype.itemsize, "recv_sources": 4}
    row |= {"recv_scales": problem.scales[0] * problem.scales[1]}
    return row.get(name, problem.top_k * 4)


@on_both
@pytest.mark.parametrize("problem", MATRIX, ids=str)
def test_matrix(problem: Problem, device: str) -> None:
    problem = small(problem, device)
    assert run(problem, device, matrix_program) == [(0, 0)] * problem.num_pes


@slowly_on_a_gpu
@pytest.mark.parametrize("problem", MORE, ids=str)
def test_more_of_the_matrix(problem: Problem, device: str) -> None:
    problem = small(problem, device)
    assert run(problem, device, matrix_program) == [(0, 0)] * problem.num_pes


@pytest.mark.cpu
def test_the_matrix_has_every_value() -> None:
    for name, values in (
        ("num_pes", {1, 2, 3, 5, 8}),
        ("tokens", {"uneven", "zero", "full", "one"}),
        ("weights", {False, True}),
        ("registered", {False, True}),
    ):
        assert {getattr(p, name) for p in MATRIX + MORE} == values
    assert {p.top_k for p in MATRIX + MORE} >= {1, 5, 8, 10, 64}
    assert {p.hidden for p in MATRIX + MORE} >= {24, 2880, 7168, 16384}
    assert {p.dtype for p in MATRIX + MORE} == set(ops.config.PAYLOAD_DTYPES)
    routings = {"random", "to_one", "none_to_last", "duplicates", "padded", "out_of_range", "nowhere", "spread"}
    assert {p.routing for p in MATRIX + MORE} == routings


# -- sizes


@pytest.mark.gpu1
@needs_gpu
@pytest.mark.parametrize(("num_tokens", "hidden"), [(65537, 7168), (300_000, 7167)])
def test_f1_f2_more_than_65536_tokens(num_tokens: int, hidden: int) -> None:
    """More rows than a grid may be high. Of 300,000, which are moved in units of 2 bytes, offsets pass 2^31 units: at
    the receiver, in combine's input and in its output.
    """
    problem = Problem(1, hidden, 8, torch.bfloat16, max_tokens=num_tokens, tokens="full", experts_per_pe=2)
    assert (num_tokens * hidden > 2**31) == (num_tokens > 65537)
    assert run(problem, "cuda", big_program) == [0]


def big_program(pe: int, problem: Problem) -> int:
    op = ops.EpDispatchCombineOp(op_config(problem, pe))
    mine = Round(problem, pe, 0, op.device)
    return int(one_round(op, problem, mine))


@on_both
def test_f1_f2_the_large_case_in_small(device: str) -> None:
    problem = Problem(1, 8, 2, torch.bfloat16, max_tokens=70, tokens="full", experts_per_pe=2)
    assert run(problem, device, big_program) == [0]


# -- many rounds


def rounds_program(pe: int, problem: Problem, rounds: int, delays: bool) -> tuple[int, list[int]]:
    op, rng = start(pe, problem), random.Random(pe)
    wrong = torch.zeros((), dtype=torch.int64, device=op.device)
    failed: list[int] = []

    def late() -> None:
        if delays and rng.random() < 0.5:
            if op.device.type == "cuda":
                torch.cuda._sleep(rng.randrange(1, 200_000))
            else:
                time.sleep(0.002)

    for index in range(rounds):
        mine = Round(problem, pe, index, op.device)
        late()
        result = op.dispatch(*mine.given())
        late()
        in_order = op.config.deterministic
        wrong += hashed.wrong_in_dispatch(problem, pe, index, result, all_sources(op), in_order=in_order)
        wrong += wrong_in_combine(problem, mine, run_experts(op, problem, mine, result))
        if index % 100 == 99 and int(wrong):
            failed.append(index)
    return int(wrong), failed


@on_both
@every_way
def test_rounds_of_random_counts_on_one_op(config: tuple, device: str) -> None:
    gpu = device == "cuda"
    problem = Problem(
        8 if gpu else 3, 264 if gpu else 24, 4, torch.bfloat16, max_tokens=17 if gpu else 4, config=config
    )
    rounds = (1000 if config == () else 200) if gpu else 6
    assert run(problem, device, rounds_program, rounds, False) == [(0, [])] * problem.num_pes


@on_both
def test_a7_most_pes_receive_nothing(device: str) -> None:
    """All tokens to one PE, another one each round, and half of the PEs have none to send."""
    problem = Problem(5 if device == "cuda" else 3, HIDDEN, TOP_K, max_tokens=6, tokens="zero", routing="to_one")
    assert run(problem, device, rounds_program, 100 if device == "cuda" else 6, False) == [(0, [])] * problem.num_pes


@on_both
def test_a9_any_maximum(device: str) -> None:
    """The room that there is for tokens does not change what becomes of one."""
    for most in (1, 2, 8, 16, 64, 256) if device == "cuda" else (1, 16):
        problem = Problem(2, HIDDEN, TOP_K, max_tokens=most, tokens="one")
        assert run(problem, device, sizes_program, (problem.hidden,)) == [0, 0], most


@on_both
def test_d1_d2_exact_with_late_pes(device: str) -> None:
    """Random delays before and after dispatch, on every PE by itself."""
    gpu = device == "cuda"
    problem = Problem(5 if gpu else 3, HIDDEN if gpu else 24, TOP_K, max_tokens=40 if gpu else 4)
    assert run(problem, device, rounds_program, 200 if gpu else 8, True) == [(0, [])] * problem.num_pes


# -- d: synchronisation


def many_dispatches(pe: int, problem: Problem) -> tuple[int, list[int]]:
    op, wrong, totals = start(pe, problem), [], []
    for _ in range(3):
        mine = Round(problem, pe, 0, op.device)
        result = op.dispatch(*mine.given())
        wrong.append(hashed.wrong_in_dispatch(problem, pe, 0, result, all_sources(op)))
        totals.append(int(result[4]))
    # any of them may be combined
    wrong.append(wrong_in_combine(problem, mine, run_experts(op, problem, mine, result)))
    wrong.append(one_round(op, problem, Round(problem, pe, 1, op.device)))
    return int(sum(wrong)), totals


@on_both
@every_way
def test_d7_dispatch_without_combine_counts_from_zero(config: tuple, device: str) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=30, config=config), device)
    for wrong, totals in run(problem, device, many_dispatches):
        assert wrong == 0
        assert len(set(totals)) == 1


def grids_program(pe: int, problem: Problem, grids: tuple[tuple[int, int], ...]) -> int:
    op, wrong = start(pe, problem), []
    for index, (block_num, warps) in enumerate(grids):
        mine = Round(problem, pe, index, op.device)
        shape = {"block_num": block_num, "warp_per_block": warps}
        result = op.dispatch(*mine.given(), **shape)
        wrong.append(hashed.wrong_in_dispatch(problem, pe, index, result, all_sources(op)))
        wrong.append(wrong_in_combine(problem, mine, run_experts(op, problem, mine, result, **shape)))
    return int(sum(wrong))


@on_both
@pytest.mark.parametrize("config", [(), LL], ids=["IntraNode", "IntraNodeLL"])
def test_d10_grids_larger_than_the_gpu(config: tuple, device: str) -> None:
    """Programs that cannot all be there at once are no danger: none waits for another of its grid."""
    problem = small(Problem(5, 7168, 8, max_tokens=600, tokens="full", config=config), device)
    grids = ((1, 4), (4 * 132, 4), (16384, 4)) if device == "cuda" else ((1, 1), (64, 4))
    assert run(problem, device, grids_program, grids) == [0] * 5


# -- other sizes and numbers of ids


ODD_SIZES = (1, 7, 64, 96, 100, 120, 1000, 1536, 2880, 4095, 4104, 6144)


def sizes_program(pe: int, problem: Problem, sizes: tuple[int, ...]) -> int:
    op, wrong = start(pe, problem), []
    for index, hidden in enumerate(sizes):
        narrow = dataclasses.replace(problem, hidden=hidden)
        wrong.append(one_round(op, narrow, Round(narrow, pe, index, op.device)))
    return int(sum(wrong))


def change_sizes(dtype: torch.dtype, device: str, sizes: tuple[int, ...]) -> None:
    order = [size for pair in zip(sizes, reversed(sizes), strict=True) for size in pair][: len(sizes)]
    problem = Problem(2, max(sizes), TOP_K, dtype, max_tokens=9, tokens="full")
    assert run(problem, device, sizes_program, tuple(order)) == [0, 0]


@on_both
def test_c8_e6_g1_g2_any_hidden_size_from_call_to_call(device: str) -> None:
    """Large after small and small after large, odd ones and tails of a vector."""
    change_sizes(torch.bfloat16, device, (1, 7, 100, 2880, 4095) if device == "cuda" else (1, 7, 100, 24))


@slowly_on_a_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_g1_g2_g6_every_hidden_size(dtype: torch.dtype, device: str) -> None:
    change_sizes(dtype, device, ODD_SIZES if device == "cuda" else (1, 3, 60))


def each_top_k(device: str, top_ks: tuple[int, ...], config: tuple) -> None:
    for top_k in top_ks:
        problem = Problem(3, HIDDEN, top_k, max_tokens=64, tokens="full", experts_per_pe=48, config=config)
        problem = small(problem, device)
        assert run(problem, device, sizes_program, (problem.hidden,)) == [0] * 3, top_k


@on_both
def test_b8_g5_top_k_and_expert_counts_of_no_power_of_two(device: str) -> None:
    each_top_k(device, (6, 10) if device == "cuda" else (6,), LL)


@slowly_on_a_gpu
@every_way
def test_b8_every_top_k(config: tuple, device: str) -> None:
    each_top_k(device, (3, 5, 6, 7, 9, 10, 12) if device == "cuda" else (9,), config)


# -- the checks themselves


@pytest.mark.cpu
def test_the_checks_see_one_wrong_bit() -> None:
    problem = Problem(2, 24, 3, max_tokens=6, tokens="full", scales=(3, 1))

    def program(pe: int) -> None:
        op = start(pe, problem)
        mine = Round(problem, pe, 0, op.device)
        result = tuple(t.clone() for t in op.dispatch(*mine.given()))
        sources = all_sources(op).clone()

        def wrong(*changed: torch.Tensor) -> int:
            return int(hashed.wrong_in_dispatch(problem, pe, 0, changed[:5], changed[5]))

        assert wrong(*result, sources) == 0
        for which in range(6):
            changed = [t.clone() for t in (*result, sources)]
            hashed.bits_of(changed[which]).view(-1)[:1] += 1
            assert wrong(*changed) > 0, which
        combined = run_experts(op, problem, mine, result)
        assert int(wrong_in_combine(problem, mine, combined)) == 0
        hashed.bits_of(combined[0])[5, 23] ^= 1
        assert int(wrong_in_combine(problem, mine, combined)) == 1

    local_world(2, heap_size="2M").run(program)
