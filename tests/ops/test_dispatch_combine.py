"""Dispatch and combine, bit for bit against numpy, in one process on the emulated GPUs."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from tests.ops.cases import Case, check_case, config_of, run_case

pytestmark = pytest.mark.cpu

# every pair of values of two of these occurs in some case
AXES: dict[str, tuple[Any, ...]] = {
    "num_pes": (1, 2, 3, 4, 8),
    "routing": ("random", "to_one", "none_to_last", "duplicates", "padded", "out_of_range", "nowhere"),
    "top_k": (1, 3, 8, 9),
    "hidden": (8, 24, 2880),
    "dtype": ("float32", "bfloat16", "float16"),
    "tokens": ("uneven", "zero", "full", "one"),
    "scales": ((0, 0), (5, 4), (3, 1), (24, 2)),
    "weights": (True, False),
    "registered": (False, True),
}


def pairwise(axes: dict[str, tuple[Any, ...]], seed: int = 1) -> list[dict[str, Any]]:
    """A small list of combinations that has every pair: greedy, the best of a few random completions each time."""
    rng = random.Random(seed)
    names = list(axes)
    todo = {
        ((a, x), (b, y)) for a, b in itertools.combinations(names, 2) for x in axes[a] for y in axes[b]
    }  # fmt: skip
    chosen = []

    def gain(case: dict[str, Any]) -> int:
        return sum(pair in todo for pair in itertools.combinations(case.items(), 2))

    while todo:
        # start from a pair that is missing, so that every step helps
        seeds = dict(min(todo, key=str))
        tries = [{n: seeds[n] if n in seeds else rng.choice(axes[n]) for n in names} for _ in range(60)]
        best = max(tries, key=gain)
        todo -= set(itertools.combinations(best.items(), 2))
        chosen.append(best)
    return chosen


MATRIX = [Case(**values) for values in pairwise(AXES)]


def run(case: Case, **options: Any) -> None:
    results = local_world(case.num_pes, heap_size="16M", **options).run(run_case, case)
    check_case(case, results)


def test_the_matrix_has_every_pair() -> None:
    for a, b in itertools.combinations(AXES, 2):
        for x, y in itertools.product(AXES[a], AXES[b]):
            assert any(getattr(c, a) == x and getattr(c, b) == y for c in MATRIX), (a, x, b, y)


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_matrix_gfx1201(case: Case) -> None:
    run(case)


OTHER_GPUS = (
    Case(num_pes=4, hidden=2880, top_k=8, dtype="bfloat16", scales=(5, 4), routing="padded"),
    Case(num_pes=3, hidden=24, top_k=9, dtype="float16", tokens="zero", routing="out_of_range", registered=True),
    Case(num_pes=2, hidden=7, top_k=1, dtype="float32", weights=False, routing="duplicates", scales=(3, 1)),
)


ARCHS = ("gfx942", "gfx950", "gfx1250")


@pytest.mark.parametrize("arch", ARCHS)
def test_other_gpus(arch: str) -> None:
    # every case on two of the three
    for index in range(2):
        run(OTHER_GPUS[(ARCHS.index(arch) + index) % 3], arch=arch)


@pytest.mark.parametrize("num_pes", [2, 3])
def test_two_ops_interleaved(num_pes: int) -> None:
    run(Case(num_pes=num_pes, num_ops=2, rounds=4, scales=(5, 4)))


def test_row_bytes_of_every_alignment() -> None:
    """Rows of 2, 4, 8 and 16 bytes' alignment take other instructions."""
    for hidden in (5, 6, 12):
        run(Case(hidden=hidden, rounds=2, max_tokens=9))


def columns(pe: int) -> None:
    """One column, as the transpose of a row: contiguous, and no view of it as bytes is to be had."""
    op = ops.EpDispatchCombineOp(config_of(Case(num_pes=1, hidden=1, top_k=1, scales=(1, 4)), pe))
    tokens, scales = torch.tensor([[1.0, 2, 3]], dtype=torch.bfloat16).t(), torch.tensor([[4.0, 5, 6]]).t()
    indices = torch.zeros(3, 1, dtype=torch.int32)
    assert tokens.is_contiguous()
    out, _, out_scales, *_ = op.dispatch(tokens, None, scales, indices)
    order = op.get_dispatch_src_token_pos().long()
    assert torch.equal(out[:3], tokens[order])
    assert torch.equal(out_scales[:3], scales[order])
    rows = torch.empty(1, 3, dtype=torch.bfloat16).t()
    rows[:] = 2 * out[:3]
    assert torch.equal(op.combine(rows, None, indices)[0][:3], 2 * tokens)


def test_columns_of_any_stride() -> None:
    local_world(1, heap_size="1M").run(columns)


SMALL = (
    Case(num_pes=2, hidden=24, top_k=3, rounds=3),
    Case(num_pes=3, hidden=8, top_k=2, rounds=2, tokens="zero", routing="padded", scales=(3, 1)),
)


@pytest.mark.parametrize("seed", range(50))
def test_seeds(seed: int) -> None:
    """One scheduler decides every interleaving of host threads, programs and waves."""
    run(SMALL[seed % 2], seed=seed)


@pytest.mark.parametrize("seed", range(12))
def test_weak_memory(seed: int) -> None:
    """Stores become visible late and loads may be stale, as far as the fences allow."""
    run(dataclasses.replace(SMALL[seed % 2], rounds=2), seed=seed, weak_memory=True)


@pytest.mark.parametrize("seed", range(3))
def test_weak_memory_two_ops(seed: int) -> None:
    run(Case(num_pes=2, num_ops=2, rounds=2), seed=seed, weak_memory=True)
