"""Kernel type IntraNodeRDNA4 on one GPU, 2 and 4 PEs as streams of it; in a small form on the emulated device."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from tests.ops.hashed import Problem
from tests.ops.on_both import on_both, run, small
from tests.ops.test_gpu1 import matrix_program
from tests.ops.test_gpu1_graphs import graph_program, handles_program

RDNA4 = (("kernel_type", KernelType.IntraNodeRDNA4),)
# the emulated device compiles no more for these than for `test_rdna4.py`
EP2 = Problem(2, 7168, 3, max_tokens=300, experts_per_pe=32, config=RDNA4)
EP4 = dataclasses.replace(EP2, num_pes=4)
MATRIX = (
    dataclasses.replace(EP2, routing="out_of_range", tokens="zero"),
    dataclasses.replace(EP2, top_k=64, hidden=2048, max_tokens=33, routing="duplicates"),
    dataclasses.replace(EP4, top_k=8, registered=True),
    dataclasses.replace(EP4, dtype=torch.float16, top_k=8, max_tokens=1024, tokens="full"),
    dataclasses.replace(EP4, top_k=33, weights=False, max_tokens=128, routing="padded"),
)


@on_both
@pytest.mark.parametrize("problem", MATRIX, ids=str)
def test_matrix(problem: Problem, device: str) -> None:
    problem = small(problem, device)
    assert run(problem, device, matrix_program) == [(0, 0)] * problem.num_pes


@on_both
@pytest.mark.parametrize("problem", [EP2, EP4], ids=str)
def test_replays_with_other_inputs_and_calls_between_them(problem: Problem, device: str) -> None:
    problem = small(dataclasses.replace(problem, routing="out_of_range", fixed_shape=True), device)
    assert run(problem, device, graph_program, 12 if device == "cuda" else 4) == [0] * problem.num_pes


@on_both
@pytest.mark.parametrize("problem", [EP2, EP4], ids=str)
def test_a_handle_made_in_the_graph(problem: Problem, device: str) -> None:
    problem = small(dataclasses.replace(problem, fixed_shape=True), device)
    assert run(problem, device, handles_program) == [0] * problem.num_pes
