"""Long rows, many ids and large offsets, for every way of dispatching."""

from __future__ import annotations

import ast
import inspect
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from mori_triton.ops.kernels import carriers, deterministic, dispatch_ll
from tests.ops import hashed
from tests.ops.hashed import Problem, Round, one_round, op_config

pytestmark = pytest.mark.cpu

WAYS = {
    "IntraNode": (),
    "IntraNodeLL": (("kernel_type", KernelType.IntraNodeLL),),
    "deterministic": (("deterministic", True),),
}


def program(pe: int, problem: Problem) -> int:
    op, wrong = ops.EpDispatchCombineOp(op_config(problem, pe)), []
    hashed.poison(op)
    for index in range(2):
        mine = Round(problem, pe, index, op.device)
        wrong.append(one_round(op, problem, mine, deterministic=op.config.deterministic))
    return int(sum(wrong))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("hidden", "top_k"), [(7168, 5), (16384, 10), (64, 64)])
def test_long_rows_and_many_ids(hidden: int, top_k: int, way: str) -> None:
    problem = Problem(
        3, hidden, top_k, torch.bfloat16, max_tokens=3, tokens="full", experts_per_pe=32, scales=(56, 4),
        config=WAYS[way],
    )  # fmt: skip
    assert local_world(3, heap_size="4M").run(program, problem) == [0] * 3


def products(module: Any) -> set[str]:
    tree = ast.parse(inspect.getsource(module))
    return {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)}


def test_f1_f2_no_kernel_multiplies_for_an_address_by_itself() -> None:
    """Products are `row_offset`'s (64 bits wide: test_offsets.py), or small by their meaning: these and no other."""
    small = {
        "pe * num_experts_per_rank",  # < 2^31 by the config, as the next three, for PEs that there are
        "tl.arange(0, BLOCK_P)[None, :] * capacity",
        "me * max_tokens",
        "block * BLOCK_T",  # token
        "ROW // ALIGN * ((ALIGN + 3) // 4)",  # words of a row
        "scale_units * SCALE_UNIT",
        "pe[:, None] * num_pes",  # within a matrix of PEs
        "me * num_pes",
    }
    found = set().union(*(products(module) for module in (carriers, deterministic, dispatch_ll)))
    assert found <= small, found - small
