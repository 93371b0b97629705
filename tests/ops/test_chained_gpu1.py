"""Rounds whose input is the round before's output, with nothing between them: a launch that began before the one that
it follows is done would read what is not there yet. On one GPU, in a graph and in calls; small on the emulated device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mori_triton.host import state as host_state
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from mori_triton.world import current_world
from tests.ops.hashed import Problem
from tests.ops.on_both import DETERMINISTIC, LL, on_both, run, start

RDNA4 = (("kernel_type", KernelType.IntraNodeRDNA4),)
LAYERS = 20


def chain_program(pe: int, problem: Problem, replays: int) -> list[bool]:
    """Layers that add 1 to every token: each token goes to one PE, whose row of it is the sum. Exact in bfloat16."""
    op, device = start(pe, problem), host_state.current().heap.ctx.device
    n = problem.max_tokens
    generator = torch.Generator().manual_seed(pe)
    experts = problem.num_pes * problem.experts_per_pe
    ids = [torch.randint(experts, (n, 1), generator=generator, dtype=torch.int32).to(device) for _ in range(LAYERS)]
    first = torch.randint(0, 100, (n, problem.hidden), generator=generator).to(device, torch.bfloat16)
    x = first.clone()

    def step() -> torch.Tensor:
        rows = x
        for layer in range(LAYERS):
            given = op.dispatch(rows, None, None, ids[layer])
            # of a PE's rows only the first ones are anyone's; the kernel that adds is launched right behind dispatch
            rows = op.combine(given[0] + 1, None, ids[layer])[0]
        return rows.clone()

    right = [torch.equal(step(), first + LAYERS)]
    graph = current_world().graph(step)
    for index in range(replays):
        x.copy_(first + index)
        out: Any = graph.replay()
        host_state.current().driver.synchronize()
        right.append(torch.equal(out, first + index + LAYERS))
    op.close()
    return right


@on_both
@pytest.mark.parametrize(
    "config", [(), LL, DETERMINISTIC, RDNA4], ids=["IntraNode", "IntraNodeLL", "deterministic", "IntraNodeRDNA4"]
)
@pytest.mark.parametrize("tokens", [1, 64])
def test_rounds_on_the_output_of_the_round_before(tokens: int, config: Any, device: str) -> None:
    problem = Problem(2, 1024, 1, max_tokens=tokens, experts_per_pe=4, weights=False, config=config)
    if device == "cpu":
        problem = dataclasses.replace(problem, hidden=64, max_tokens=min(tokens, 4))
    replays = 20 if device == "cuda" else 1
    assert run(problem, device, chain_program, replays) == [[True] * (replays + 1)] * problem.num_pes
