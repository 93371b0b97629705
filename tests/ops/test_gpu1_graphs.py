"""On one GPU: rounds captured in a CUDA graph and replayed with other inputs. On the CPU a graph calls its step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mori_triton.host import state as host_state
from mori_triton.ops.kernels.finish import LAST, SYNC_EPOCH
from mori_triton.world import current_world
from tests.ops import hashed
from tests.ops.cases import control
from tests.ops.hashed import Problem, Round, all_sources, one_round, run_experts, wrong_in_combine
from tests.ops.on_both import DETERMINISTIC, HIDDEN, LL, TOP_K, needs_gpu, on_both, run, small, start


def static(problem: Problem, pe: int, device: torch.device) -> Round:
    """Inputs in memory that stays, with as many rows as a call may have."""
    assert problem.fixed_shape
    return Round(problem, pe, 0, device)


def refill(to: Round, problem: Problem, index: int) -> Round:
    """Put the inputs of another round there: other numbers, another number of tokens."""
    fresh = Round(problem, to.pe, index, to.ids.device)
    hashed.bits_of(to.tokens).copy_(hashed.bits_of(fresh.tokens))
    to.ids.copy_(fresh.ids)
    for name in ("weights", "scales"):
        mine, theirs = getattr(to, name), getattr(fresh, name)
        if mine is not None:
            hashed.bits_of(mine).copy_(hashed.bits_of(theirs))
    return fresh


def graph_program(pe: int, problem: Problem, rounds: int) -> int:
    op, wrong = start(pe, problem), []
    inputs = static(problem, pe, op.device)
    wrong.append(one_round(op, problem, inputs))

    def step() -> tuple[Any, ...]:
        result = op.dispatch(*inputs.given())
        # what dispatch brought is gone after combine: keep what the check looks at
        kept = tuple(None if t is None else t.clone() for t in result[:5])
        return kept, all_sources(op).clone(), run_experts(op, problem, inputs, result)

    graph = current_world().graph(step)
    for index in range(1, rounds):
        fresh = refill(inputs, problem, index)
        result, sources, combined = graph.replay()
        wrong.append(hashed.wrong_in_dispatch(problem, pe, index, result, sources, in_order=op.config.deterministic))
        wrong.append(wrong_in_combine(problem, fresh, combined))
        if index % 3 == 0:
            # a call between replays
            eager = refill(inputs, problem, 100 + index)
            eager.tokens, eager.ids, eager.weights, eager.scales = inputs.given()[0], inputs.ids, *inputs.given()[1:3]
            wrong.append(one_round(op, problem, eager))
    host_state.current().driver.synchronize()
    return int(sum(wrong))


@on_both
@pytest.mark.parametrize(
    "config", [(), LL, DETERMINISTIC, "registered"], ids=["IntraNode", "IntraNodeLL", "deterministic", "registered"]
)
def test_b1_e1_e3_a_replay_with_other_inputs_and_other_counts(config: Any, device: str) -> None:
    registered = config == "registered"
    problem = Problem(
        5, HIDDEN, TOP_K, max_tokens=64, routing="out_of_range", scales=(3, 4), fixed_shape=True,
        registered=registered, config=() if registered else config,
    )  # fmt: skip
    problem = small(problem, device)
    assert run(problem, device, graph_program, 12 if device == "cuda" else 4) == [0] * 5


def handles_program(pe: int, problem: Problem) -> int:
    """A routing handle made in the graph, used there by combine and by a dispatch along it again."""
    op, wrong = start(pe, problem), []
    inputs = static(problem, pe, op.device)

    def step() -> tuple[Any, ...]:
        *_, handle = op.dispatch(*inputs.given(), return_routing=True)
        result = op.dispatch(*inputs.given(), routing=handle)
        kept = tuple(None if t is None else t.clone() for t in result[:5])
        sources = handle.disp_tok_id_to_src_tok_id_local
        return kept, sources, run_experts(op, problem, inputs, result[:5], routing=handle)

    step()
    graph = current_world().graph(step)
    for index in range(1, 5):
        fresh = refill(inputs, problem, index)
        result, sources, combined = graph.replay()
        wrong.append(hashed.wrong_in_dispatch(problem, pe, index, result, sources))
        wrong.append(wrong_in_combine(problem, fresh, combined))
    host_state.current().driver.synchronize()
    return int(sum(wrong))


@on_both
def test_e5_a_routing_handle_made_in_the_graph(device: str) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=24, scales=(3, 4), fixed_shape=True), device)
    assert run(problem, device, handles_program) == [0] * 3


def graphs_program(pe: int, problem: Problem, batches: tuple[int, ...], rounds: int) -> int:
    """One graph for each batch size, replayed in random order, all on the same op."""
    op, wrong, graphs = start(pe, problem), [], []
    for batch in batches:
        mine = dataclasses.replace(problem, max_tokens=problem.max_tokens)
        inputs = Round(mine, pe, batch, op.device)
        inputs.tokens, inputs.ids = inputs.tokens[:batch].clone(), inputs.ids[:batch].clone()
        inputs.weights, inputs.n = inputs.weights[:batch].clone(), batch

        def step(inputs: Round = inputs) -> Any:
            result = op.dispatch(*inputs.given())
            return run_experts(op, problem, inputs, result)

        wrong.append(wrong_in_combine(problem, inputs, step()))
        graphs.append((inputs, current_world().graph(step)))
    rng = random.Random(5)
    for _ in range(rounds):
        inputs, graph = rng.choice(graphs)
        wrong.append(wrong_in_combine(problem, inputs, graph.replay()))
    host_state.current().driver.synchronize()
    return int(sum(wrong))


@on_both
def test_e4_several_graphs_on_one_op(device: str) -> None:
    problem = small(Problem(3, HIDDEN, TOP_K, max_tokens=8, tokens="full"), device)
    batches, rounds = ((1, 2, 4, 8), 50) if device == "cuda" else ((1, 4), 4)
    assert run(problem, device, graphs_program, batches, rounds) == [0] * 3


def own_graphs_program(pe: int, problem: Problem) -> list[list[int]]:
    """Graphs of half a round, captured one right behind the other; the second is replayed twice."""
    op, inputs = start(pe, problem), Round(problem, pe, 0, torch.device("cuda"))
    rows = torch.zeros(op.config.max_recv, problem.hidden, dtype=problem.dtype, device="cuda")

    def graph_of(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            call()
        return graph

    calls = (lambda: op.dispatch(*inputs.given()), lambda: op.combine(rows, None, inputs.ids))
    for call in calls:
        call()
    graphs, words = [graph_of(call) for call in calls], []
    for index in (0, 1, 1, 0, 0):
        graphs[index].replay()
        torch.cuda.synchronize()
        words.append(control(op, SYNC_EPOCH, LAST))
    return words


@pytest.mark.gpu1
@needs_gpu
def test_e4_graphs_of_torch_in_any_order() -> None:
    """Where a graph repeats what ran before, its PEs meet."""
    problem = Problem(1, HIDDEN, TOP_K, max_tokens=24, tokens="full", weights=False)
    assert run(problem, "cuda", own_graphs_program) == [[[0, 1], [0, 2], [1, 2], [1, 1], [2, 1]]]
