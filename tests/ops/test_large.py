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


# rows of an odd number of 2-byte elements, which are moved and summed in units of 2 bytes, and of 128 ids of 4 bytes:
# both pass 2^31 of what their offsets count
FAR_ROWS = 17_000_000


def far_program(pe: int, way: str) -> list[int]:
    """Three tokens in the last of many slots: the wrong elements there, and in what combine makes of them."""
    problem = Problem(
        1, 127, 128, torch.bfloat16, max_tokens=FAR_ROWS, experts_per_pe=128, registered=True, config=WAYS[way]
    )
    assert (FAR_ROWS - 3) * problem.hidden > 2**31
    op, first, token = ops.EpDispatchCombineOp(op_config(problem, pe)), FAR_ROWS - 3, torch.arange(3)
    source = torch.zeros_like(token)
    tokens, weights = hashed.payload(problem, 0, source, token), hashed.weights_of(problem, 0, source, token)
    ids = hashed.ids_of(problem, 0, source, token)
    # as if others had taken all slots before
    op._buffers.region("recv_slots").fill_(first)
    out, out_weights, _, out_ids, total = op.dispatch(tokens, weights, None, ids)
    assert int(total) == FAR_ROWS
    order = hashed.all_sources(op)[first:].long()
    assert sorted(order.tolist()) == [0, 1, 2]
    pairs = [(out, tokens), (out_weights, weights), (out_ids, ids)]
    wrong = [int((got[first:] != given[order]).sum()) for got, given in pairs]
    rows = op.get_registered_combine_input_buffer(problem.dtype)
    rows[first:] = tokens[order] * 2
    back, _ = op.combine(rows, None, ids)
    return [*wrong, int((back[:3] != tokens * 2).sum())]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["IntraNode", "IntraNodeLL"])
def test_f1_f2_slots_past_two_to_the_31(way: str) -> None:
    """A narrow product would be negative, and end outside of the heap. Only the pages that are written are there."""
    assert local_world(1, heap_size="60G").run(far_program, way) == [[0, 0, 0, 0]]
