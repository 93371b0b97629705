"""`deterministic=True`: rows sorted by source PE, then token, exactly as numpy sorts them, whatever runs first."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mori_triton import local_world
from mori_triton.device.launch import launch
from mori_triton.errors import PeerTimeout
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from tests.ops import reference
from tests.ops.cases import Case, check_case, dispatch_round, ids_of, num_tokens, round_of, run_case, start
from tests.ops.routes import Routes, wanted_routes

pytestmark = pytest.mark.cpu

ROUNDS = 3


def route_rounds(pe: int, case: Case, capacity: int) -> list[tuple[np.ndarray, int]]:
    routes, got = Routes(case.max_tokens, case.top_k), []
    for index in range(case.rounds):
        ids = ids_of(case, pe, index, num_tokens(case, pe, index))
        got.append(routes.run(launch, ids, experts_per_pe=case.experts_per_pe, capacity=capacity))
        # the rounds of an op are kept apart by its copy kernel's signals
        routes.state.bootstrap.barrier("round")
    return got


def check_routes(case: Case, capacity: int, results: list[list[tuple[np.ndarray, int]]]) -> None:
    for index in range(case.rounds):
        ids = [ids_of(case, pe, index, num_tokens(case, pe, index)) for pe in range(case.num_pes)]
        forward, asked = wanted_routes(ids, case.experts_per_pe, capacity)
        for pe in range(case.num_pes):
            got, rows = results[pe][index]
            assert rows == asked[pe], (pe, index)
            assert got.tolist() == forward[pe].tolist(), (pe, index)


KERNEL_CASES = (
    Case(num_pes=1, top_k=1, tokens="full", max_tokens=7),
    Case(num_pes=2, top_k=3, tokens="uneven", max_tokens=9, routing="padded"),
    Case(num_pes=3, top_k=5, tokens="zero", max_tokens=13, routing="out_of_range"),
    Case(num_pes=4, top_k=8, tokens="full", max_tokens=11, routing="duplicates"),
    Case(num_pes=5, top_k=6, tokens="uneven", max_tokens=8, routing="to_one"),
    Case(num_pes=2, top_k=64, tokens="full", max_tokens=5, experts_per_pe=40),
)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("case", KERNEL_CASES, ids=str)
def test_slots_are_sorted_by_source_and_token(case: Case, arch: str) -> None:
    capacity = case.num_pes * case.max_tokens
    results = local_world(case.num_pes, heap_size="1M", arch=arch).run(route_rounds, case, capacity)
    check_routes(case, capacity, results)


def test_the_first_rows_are_kept_when_more_come_than_fit() -> None:
    case = Case(num_pes=3, top_k=4, tokens="full", max_tokens=10)
    results = local_world(3, heap_size="1M").run(route_rounds, case, 7)
    assert all(rows > 7 for rounds in results for _, rows in rounds)
    check_routes(case, 7, results)


@pytest.mark.parametrize("seed", range(6))
def test_weak_memory(seed: int) -> None:
    case = dataclasses.replace(KERNEL_CASES[1 + seed % 2], rounds=2)
    capacity = case.num_pes * case.max_tokens
    arch = ("gfx1201", "gfx942")[seed // 2 % 2]
    world = local_world(case.num_pes, heap_size="1M", arch=arch, seed=seed, weak_memory=True)
    check_routes(case, capacity, world.run(route_rounds, case, capacity))


# -- the op


OPS = (
    Case(num_pes=3, hidden=24, top_k=5, tokens="zero", routing="padded", scales=(3, 1), max_tokens=20),
    Case(
        num_pes=4, hidden=24, top_k=3, tokens="uneven", routing="duplicates", registered=True, max_tokens=40, rounds=2
    ),
    Case(num_pes=2, hidden=24, top_k=10, tokens="full", routing="out_of_range", weights=False),
)


@pytest.mark.parametrize("kernel_type", [KernelType.IntraNode, KernelType.IntraNodeLL], ids=lambda t: t.name)
@pytest.mark.parametrize("case", OPS, ids=str)
def test_rows_of_an_op_are_sorted(case: Case, kernel_type: KernelType) -> None:
    case = dataclasses.replace(case, config=(("deterministic", True), ("kernel_type", kernel_type)))
    results = local_world(case.num_pes, heap_size="2M").run(run_case, case)
    check_case(case, results)
    for index in range(case.rounds):
        ids = [ids_of(case, pe, index, num_tokens(case, pe, index)) for pe in range(case.num_pes)]
        for pe, rows in enumerate(reference.received(ids, case.experts_per_pe)):
            assert results[pe][0][index]["sources"] == sorted(rows)


@pytest.mark.parametrize("seed", range(6))
def test_an_op_in_weak_memory(seed: int) -> None:
    case = dataclasses.replace(OPS[0], max_tokens=4, rounds=2, config=(("deterministic", True),))
    arch = ("gfx1201", "gfx942")[seed % 2]
    check_case(case, local_world(3, heap_size="2M", arch=arch, seed=seed, weak_memory=True).run(run_case, case))


def missing_program(pe: int) -> None:
    """PE 1 does not come: the wait for its counts is the first."""
    op, mine = start(OPS[2], pe, deterministic=True), round_of(OPS[2], pe, 0)
    if pe == 0:
        with pytest.raises(PeerTimeout, match=r"dispatch_count_kernel\) on PE 0 waiting for PE 1"):
            dispatch_round(op, OPS[2], mine)
    op.reset()
    assert dispatch_round(op, OPS[2], mine)["total"] > 0


def test_a_missing_peer_is_named_and_reset_recovers() -> None:
    local_world(2, heap_size="2M", timeout_s=1.0).run(missing_program)
