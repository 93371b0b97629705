"""EPv2 on one GPU: several PEs as streams of it. Graphs also on the emulated device, which calls their step."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import StateError
from mori_triton.host import state as host_state
from mori_triton.ops.dispatch_combine_v2 import EpArena, EpDispatchPlan
from mori_triton.world import current_world
from tests.ops import reference
from tests.ops.cases import Case, inputs_on, round_of, to_numpy
from tests.ops.on_both import needs_gpu, on_both
from tests.ops.v2.rounds import config_of, run, start
from tests.ops.v2.test_rounds import MATRIX, SMALL

LARGE = (
    Case(num_pes=4, hidden=7168, top_k=8, scales=(56, 4), tokens="uneven", max_tokens=300, experts_per_pe=32),
    Case(num_pes=2, hidden=2880, top_k=16, dtype="float16", tokens="full", routing="to_one", max_tokens=700),
)


@pytest.mark.gpu1
@needs_gpu
@pytest.mark.parametrize("case", [*MATRIX, *LARGE], ids=str)
def test_rounds(case: Case) -> None:
    run(case, device="cuda", timeout_s=20.0)


@pytest.mark.gpu1
@needs_gpu
@pytest.mark.parametrize("blocks", [1, 7, 512])
def test_any_number_of_blocks(blocks: int) -> None:
    run(LARGE[0], {"dispatch_block_num": blocks, "warp_num_per_block": 2}, device="cuda", timeout_s=20.0)


@on_both
def test_graphs(device: str) -> None:
    """A round is captured once and replayed with other inputs."""
    case = dataclasses.replace(SMALL, tokens="full", routing="random", rounds=5)

    def program(pe: int) -> list[tuple[Any, ...]]:
        op, state = start(case, pe), host_state.current()
        inputs, outcomes = inputs_on(op.arena, case, round_of(case, pe, 0)), []

        def step() -> tuple[Any, ...]:
            out, _, _, _, _, routing = op.dispatch(*inputs, return_routing=True)
            op.combine_in_view().copy_(out)
            return op.combine(op.combine_in_view(), True, routing=routing)

        step()
        graph = current_world().graph(step)
        for index in range(case.rounds):
            fresh = inputs_on(op.arena, case, round_of(case, pe, index))
            for to, new in zip(inputs, fresh, strict=True):
                if to is not None:
                    to.copy_(new)
            out, out_weights = graph.replay()
            state.driver.synchronize()
            outcomes.append((to_numpy(out), to_numpy(out_weights)))
        op.close()
        return outcomes

    for pe, outcomes in enumerate(local_world(2, device, heap_size="8M", timeout_s=20.0).run(program)):
        for index, (out, out_weights) in enumerate(outcomes):
            mine = round_of(case, pe, index)
            for token, row in enumerate(mine.indices):
                count = len(reference.owners(row, 2, case.experts_per_pe))
                # rows came back as they went: bfloat16 sums of up to two equal rows are exact
                want = reference.from_float32(reference.to_float32(mine.tokens[token]) * count, mine.tokens.dtype)
                assert (reference.to_float32(out[token]) == reference.to_float32(want)).all()
            want = reference.combined_weights(mine.weights, mine.indices, 2, case.experts_per_pe)
            assert out_weights.tobytes() == want.tobytes()


@pytest.mark.gpu1
@needs_gpu
def test_no_staging_buffer_is_allocated_while_torch_captures() -> None:
    case = dataclasses.replace(SMALL, num_pes=1, tokens="full", routing="random")

    def program(pe: int) -> None:
        arena = EpArena(config_of(case, pe))
        tokens, weights, _, indices = inputs_on(arena, case, round_of(case, pe, 0))
        given = {"input": tokens, "weights": weights, "indices": indices}
        first, second = EpDispatchPlan(arena), EpDispatchPlan(arena)
        with pytest.raises(StateError, match="while a graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            first.launch(**given)
        first.launch(**given)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            second.launch(**given)
        assert second._default is first._default
        arena.recv_tokens().fill_(0)
        graph.replay()
        torch.cuda.synchronize()
        sources = arena.get_dispatch_src_token_pos().long()
        assert len(sources) == case.max_tokens
        assert torch.equal(arena.recv_tokens()[: len(sources)].view(torch.int16), tokens[sources].view(torch.int16))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        local_world(1, "cuda", heap_size="8M", timeout_s=20.0).run(program)
