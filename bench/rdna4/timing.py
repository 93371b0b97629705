"""Samples of a pair on all PEs: as a graph of all PEs of a world, or as each process's own graph; and their rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench import clock
from bench.rdna4.backends import Backend, Team
from mori_triton import shmem

# microseconds that this PE's pair took, once; collective
Sample = Callable[[], float]


@dataclass(frozen=True)
class Method:
    """How often."""

    warmup: int
    rounds: int
    samples: int


def sample_in_world(world: Any, backend: Backend, team: Team) -> Sample:
    """All PEs' pairs in one graph; a stamp of the GPU's clock before and after the pair on each PE's stream."""
    stamps = torch.zeros(2, dtype=torch.int64, device=team.device)

    def step() -> None:
        clock.stamp(stamps, 0)
        backend.pair()
        clock.stamp(stamps, 1)

    clock.stamp(stamps, 0)
    team.meet()
    graph = world.graph(step)
    team.meet()

    def sample() -> float:
        team.meet()
        if graph.cuda_graph is None:
            graph.replay()
        elif team.rank == 0:
            graph.cuda_graph.replay()
        team.meet()
        start, end = stamps.tolist()
        return (end - start) / 1e3

    return sample


def sample_in_process(backend: Backend, team: Team, *, capture: bool) -> Sample:
    """This process's pair, from a barrier of all PEs on the stream: as a graph, or (`capture` off) as calls.

    A graph is enqueued before its PE comes to the barrier: what the host takes to launch it is not part of the pair.
    """
    run: Callable[[], Any] = backend.pair
    if capture:
        team.meet()
        graph = torch.cuda.CUDAGraph()
        # NCCL's own thread may call CUDA meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            backend.pair()
        run = graph.replay
        team.meet()

    def on_host() -> float:
        team.meet()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e6

    def on_gpu() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if capture:
            clock.hold()
        shmem.shmem_barrier_on_stream()
        start.record()
        run()
        end.record()
        team.meet()
        return start.elapsed_time(end) * 1e3

    return on_host if team.device.type == "cpu" else on_gpu


def order_of(names: Sequence[str], number: int) -> list[str]:
    """Who comes after whom in round `number`: forth and back."""
    return list(names) if number % 2 == 0 else list(names)[::-1]


def alternate(
    samples: Mapping[str, Sample], method: Method, gather: Callable[[Any], list[Any]]
) -> dict[str, np.ndarray]:  # fmt: skip
    """Microseconds `[rounds, samples]` of the slowest PE, by name. `gather`: everybody's value."""
    mine: dict[str, list[list[float]]] = {name: [] for name in samples}
    for sample in samples.values():
        for _ in range(method.warmup):
            sample()
    for number in range(method.rounds):
        for name in order_of(list(samples), number):
            mine[name].append([samples[name]() for _ in range(method.samples)])
    return {name: np.max([theirs[name] for theirs in gather(mine)], axis=0) for name in mine}
