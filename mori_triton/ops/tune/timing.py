"""Clocks: how long a step of all PEs takes, and how fast this device copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mori_triton.host.state import PeState
from mori_triton.world import WorldGraph

# several times the cache of any GPU, so that a copy is of memory
COPY_BYTES = 1 << 30
_WARM_UP = 2


def copy_rate_gbs(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """10^9 bytes per second, read plus written, of a copy within the device's memory: the median of `repeats`."""
    source = torch.randint(-128, 128, (num_bytes,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    times_us = time_us(lambda: target.copy_(source), device, repeats)
    return 2 * num_bytes / statistics.median(times_us) / 1e3


def time_us(
    work: Callable[[], object], device: torch.device, repeats: int, give_up_us: float = float("inf")
) -> list[float]:
    """Microseconds of each of `repeats` runs of `work`, after two that do not count; only of the first two when these
    take more than `give_up_us`. By events on the current stream, on the CPU by the host's clock.
    """
    for _ in range(_WARM_UP):
        work()
    times: list[float] = []
    for count in (min(2, repeats), max(0, repeats - 2)):
        times += _clocked_us(work, count) if device.type == "cpu" else _event_times_us(work, count)
        if min(times) > give_up_us:
            break
    return times


def _clocked_us(work: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        start_s = time.perf_counter()
        work()
        times.append((time.perf_counter() - start_s) * 1e6)
    return times


def _event_times_us(work: Callable[[], object], count: int) -> list[float]:
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for start, end in events:
        start.record()
        work()
        end.record()
    torch.cuda.current_stream().synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def time_step_us(
    graph: WorldGraph, state: PeState, device: torch.device, repeats: int, give_up_us: float = float("inf")
) -> list[float]:
    """Microseconds of each replay of a world's graph, from the first PE's start to the last PE's end, on PE 0; an empty
    list on the others. Collective.

    On GPUs one thread replays while the others wait; on the CPU every PE replays and PE 0's clock runs from one meeting
    of all to the next.
    """
    if graph.cuda_graph is not None:
        state.driver.synchronize()
        state.bootstrap.barrier("tune: before the clock starts")
        times = time_us(graph.cuda_graph.replay, device, repeats, give_up_us) if state.pe == 0 else []
        state.bootstrap.barrier("tune: after the clock has stopped")
        return times

    def all_together() -> None:
        state.bootstrap.barrier("tune: start")
        graph.replay()
        state.bootstrap.barrier("tune: end")

    # no PE may stop before the others do, so nobody gives up
    times = time_us(all_together, device, repeats)
    return times if state.pe == 0 else []
