"""What the tests for one GPU share: they run there in full, and in a small form on the emulated device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from tests.ops import hashed
from tests.ops.hashed import Problem, op_config

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
on_both = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=[pytest.mark.gpu1, needs_gpu])]
)

# on a GPU each row width, top-k and dtype is a set of kernels to compile, which takes far longer than to run them
slowly_on_a_gpu = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.cpu),
        pytest.param("cuda", marks=[pytest.mark.gpu1, pytest.mark.slow, needs_gpu]),
    ],
)
# so most tests share one
HIDDEN, TOP_K = 1024, 4

LL = (("kernel_type", KernelType.IntraNodeLL),)
DETERMINISTIC = (("deterministic", True),)
every_way = pytest.mark.parametrize(
    "config", [(), LL, DETERMINISTIC], ids=["IntraNode", "IntraNodeLL", "deterministic"]
)


def heap_bytes(problem: Problem, num_ops: int = 1) -> int:
    layout = ops.ep_buffer_layout(op_config(problem, 0))
    return num_ops * (layout.num_bytes + (1 << 20)) + (4 << 20)


def run(problem: Problem, device: str, program: Callable[..., Any], *args: Any, num_ops: int = 1) -> list[Any]:
    """`program(pe, problem, *args)` on every PE."""
    world = local_world(problem.num_pes, device, heap_size=heap_bytes(problem, num_ops), timeout_s=20.0)
    return world.run(program, problem, *args)


def start(pe: int, problem: Problem) -> ops.EpDispatchCombineOp:
    op = ops.EpDispatchCombineOp(op_config(problem, pe))
    hashed.poison(op)
    return op


def small(problem: Problem, device: str) -> Problem:
    """As it is on a GPU; with short rows and few tokens on the emulated device."""
    if device != "cpu":
        return problem
    return dataclasses.replace(problem, hidden=min(problem.hidden, 72), max_tokens=min(problem.max_tokens, 6))
