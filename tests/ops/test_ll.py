"""The one-launch dispatch (kernel type IntraNodeLL), bit for bit against numpy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import local_world
from mori_triton.device.launch import launch
from mori_triton.errors import PeerTimeout, StateError
from mori_triton.host import state as host_state
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from mori_triton.ops.kernels.finish import STATUS
from tests.ops.bare_ll import BareLL, check_ll, ll_rounds
from tests.ops.cases import Case, check_case, combine_round, dispatch_round, poison, round_of, run_case, start

pytestmark = pytest.mark.cpu

SCALES = (6, 1)
BASE = Case(num_pes=2, hidden=20, top_k=3, dtype="float32", tokens="uneven", scales=SCALES, max_tokens=7, rounds=2)
CASES = (
    (BASE, {"block_t": 1, "block": 64}),
    (dataclasses.replace(BASE, num_pes=3, top_k=5, routing="out_of_range", tokens="zero"), {"block_t": 2, "block": 8}),
    (dataclasses.replace(BASE, num_pes=4, top_k=8, routing="padded", hidden=300, tokens="full"), {"block_t": 4}),
    (dataclasses.replace(BASE, num_pes=1, top_k=1, hidden=7, weights=False, scales=(0, 0)), {"num_warps": 8}),
    (dataclasses.replace(BASE, num_pes=5, top_k=6, routing="duplicates", hidden=6), {"num_programs": 1}),
    (dataclasses.replace(BASE, top_k=64, experts_per_pe=40, tokens="full"), {"num_warps": 4}),
    (dataclasses.replace(BASE, num_pes=3, routing="nowhere"), {}),
)


def run(case: Case, shape: dict[str, int], capacity: int, **options: object) -> None:
    world = local_world(case.num_pes, heap_size="2M", **options)  # type: ignore[arg-type]
    check_ll(case, capacity, world.run(ll_rounds, case, capacity, launch, shape))


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize(("case", "shape"), CASES, ids=str)
def test_every_row_in_a_slot_of_its_own(case: Case, shape: dict[str, int], arch: str) -> None:
    run(case, shape, case.num_pes * case.max_tokens, arch=arch)


@pytest.mark.parametrize("top_k", [2, 3, 4, 5, 6, 7, 9, 10, 12, 64, 128])
def test_b8_every_top_k(top_k: int) -> None:
    case = dataclasses.replace(BASE, top_k=top_k, experts_per_pe=48, tokens="full", max_tokens=9, rounds=1)
    run(case, {"block_t": 4}, case.num_pes * case.max_tokens)


def test_rows_that_do_not_fit_are_left_out() -> None:
    case = dataclasses.replace(BASE, num_pes=3, tokens="full", max_tokens=8, top_k=4)
    run(case, {}, 6)


@pytest.mark.parametrize("seed", range(8))
def test_weak_memory(seed: int) -> None:
    case = dataclasses.replace(CASES[1 + seed % 2][0], rounds=2)
    arch = ("gfx1201", "gfx942")[seed // 2 % 2]
    run(case, {"block_t": 2}, case.num_pes * case.max_tokens, arch=arch, seed=seed, weak_memory=True)


def silent_program(pe: int) -> dict[str, bool]:
    """A dispatch after a wait has failed: whether anything has changed."""
    bare = BareLL(BASE, 14)
    bare.control[STATUS.value] = 1
    before = {name: getattr(bare, name).clone() for name in ("control", "total", "forward", "signals", "slots", "rows")}
    bare.dispatch(launch, round_of(BASE, pe, 0))
    host_state.current().bootstrap.barrier("both have tried")
    return {name: not torch.equal(getattr(bare, name), was) for name, was in before.items()}


def test_a_pe_that_has_failed_writes_nothing_and_is_silent() -> None:
    for changed in local_world(2, heap_size="1M").run(silent_program):
        assert not any(changed.values()), changed


FAR = dataclasses.replace(BASE, num_pes=1, hidden=256, top_k=128, tokens="full", max_tokens=3, scales=(0, 0), rounds=1)
FAR_ROWS = 4_300_000


def far_program(pe: int) -> list[int]:
    """Rows whose slots are the last of many: bytes that differ from what they have to be, and from 0 where a 32-bit
    offset would have gone.
    """
    bare, mine = BareLL(FAR, FAR_ROWS, untouched=False), round_of(FAR, pe, 0)
    first = FAR_ROWS - 3
    bare.slots.fill_(first)
    bare.launch_dispatch(launch, mine)
    wrong = []
    tokens = bare.sources[first:].tolist()
    assert sorted(tokens) == [0, 1, 2]
    for buffer, given in ((bare.rows, mine.tokens), (bare.ids, mine.indices), (bare.weights, mine.weights)):
        assert given is not None
        wanted = torch.from_numpy(given.view(np.uint8).copy())[tokens]
        rows = buffer.view(torch.uint8).view(FAR_ROWS, -1)
        size = rows.shape[1]
        assert first * size > 2**31
        wrapped = (first * size + 2**31) % 2**32 - 2**31
        near = [rows.view(-1)[wrapped : wrapped + 3 * size]] if wrapped >= 0 else []
        wrong.append(int((rows[first:] != wanted).sum()) + sum(int(n.count_nonzero()) for n in near))
    return wrong


def test_f1_f2_offsets_past_two_to_the_31() -> None:
    """Only the pages that are written are there."""
    assert local_world(1, heap_size="9G").run(far_program) == [[0, 0, 0]]


# -- the op


OP = Case(
    num_pes=3,
    hidden=24,
    top_k=5,
    tokens="zero",
    routing="padded",
    scales=(3, 1),
    rounds=2,
    config=(("kernel_type", KernelType.IntraNodeLL),),
)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "gfx950", "gfx1250"])
def test_an_op(arch: str) -> None:
    check_case(OP, local_world(3, heap_size="2M", arch=arch).run(run_case, OP))


@pytest.mark.parametrize("seed", range(8))
def test_an_op_in_weak_memory(seed: int) -> None:
    arch = ("gfx1201", "gfx942")[seed % 2]
    check_case(OP, local_world(3, heap_size="2M", arch=arch, seed=seed, weak_memory=True).run(run_case, OP))


def missing_program(pe: int) -> dict[str, Any]:
    """PE 1 is late by more than the limit; both start anew."""
    op, mine = start(OP_OF_TWO, pe), round_of(OP_OF_TWO, pe, 0)
    if pe == 0:
        with pytest.raises(PeerTimeout, match=r"dispatch_ll_kernel\) on PE 0 waiting for PE 1"):
            dispatch_round(op, OP_OF_TWO, mine)
        with pytest.raises(StateError, match="reset"):
            dispatch_round(op, OP_OF_TWO, mine)
    op.reset()
    poison(op)
    host_state.current().bootstrap.barrier("poisoned")
    return combine_round(op, OP_OF_TWO, pe, dispatch_round(op, OP_OF_TWO, mine))


OP_OF_TWO = dataclasses.replace(OP, num_pes=2, rounds=1)


def test_a_missing_peer_is_named_and_reset_recovers() -> None:
    results = local_world(2, heap_size="2M", timeout_s=1.0).run(missing_program)
    check_case(OP_OF_TWO, [[[result]] for result in results])
