"""Time stamps inside a stream's work, events around it, and what they say about phases that overlap on several PEs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

WARM_UPS = 3
# 200 us at 2 GHz, more than a host needs to enqueue a barrier and a few graphs
HOLD_CYCLES = 400_000


@triton.jit(do_not_specialize=["stamps_ptr", "index"])
def stamp_kernel(stamps_ptr, index):
    """Write the GPU's clock, in nanoseconds and the same for all streams, where the stream has come to."""
    tl.store(stamps_ptr + index, cuda.globaltimer())


@triton.jit(do_not_specialize=["stamps_ptr"])
def ticks_kernel(stamps_ptr, NUM: tl.constexpr):
    """Read the clock many times in a row: its smallest step is the resolution of a stamp."""
    for index in range(NUM):
        tl.store(stamps_ptr + index, cuda.globaltimer())


def hold() -> None:
    """Keep the current stream busy. What the host enqueues meanwhile, to be timed, does not wait for the host.

    By torch, on every GPU that it knows.
    """
    torch.cuda._sleep(HOLD_CYCLES)


def stamp(stamps: torch.Tensor, index: int) -> None:
    """`stamps[index]` = now, in nanoseconds, in the order of the current stream; on the CPU the host's clock."""
    if stamps.device.type == "cpu":
        stamps[index] = time.perf_counter_ns()
    else:
        stamp_kernel[(1,)](stamps, index, num_warps=1)


def resolution_ns(device: torch.device) -> float:
    """The smallest step between two stamps."""
    stamps = torch.zeros(4096, dtype=torch.int64, device=device)
    if device.type == "cpu":
        for index in range(len(stamps)):
            stamp(stamps, index)
    else:
        ticks_kernel[(1,)](stamps, NUM=len(stamps), num_warps=1)
    steps = np.diff(stamps.cpu().numpy())
    return float(steps[steps > 0].min())


@dataclass(frozen=True)
class Times:
    """Microseconds, one entry per repeat."""

    us: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.us))

    @property
    def p90(self) -> float:
        return float(np.percentile(self.us, 90))


@dataclass(frozen=True)
class Phase:
    """A phase of a chain on all PEs: what its stamps say, one entry per repeat and round."""

    span: Times  # from the first PE's start to the last PE's end
    share: Times  # from the last PE's end of the phase before to the last PE's end: the shares add up to the whole
    skew: Times  # from the first PE's end to the last PE's


def chain_times(stamps: np.ndarray, chain: int) -> Times:
    """From the first PE's first stamp to the last PE's last one, per round.

    Args:
        stamps: nanoseconds `[repeats, PEs, stamps]`.
    """
    return Times((stamps[:, :, -1].max(1) - stamps[:, :, 0].min(1)) / 1e3 / chain)


def phases(stamps: np.ndarray, num_phases: int) -> list[Phase]:
    """One `Phase` for each of the `num_phases` that a round has.

    Args:
        stamps: nanoseconds `[repeats, PEs, 1 + rounds * num_phases]`: the start, then the end of each phase, where the
            next one starts.
    """
    last_end, first_start, first_end = stamps.max(1), stamps.min(1)[:, :-1], stamps.min(1)[:, 1:]
    # [repeats, rounds * num_phases]; before the first phase nobody is late
    before = np.concatenate([stamps.min(1)[:, :1], last_end[:, 1:-1]], axis=1)
    last_end = last_end[:, 1:]

    def times(ns: np.ndarray, phase: int) -> Times:
        return Times(ns[:, phase::num_phases].reshape(-1) / 1e3)

    return [
        Phase(times(last_end - first_start, i), times(last_end - before, i), times(last_end - first_end, i))
        for i in range(num_phases)
    ]


def event_times(launch: Callable[[], None], repeats: int, after: Callable[[], None] = lambda: None) -> Times:
    """Time between events around `launch` on the current stream, with an idle GPU before; `after` is not timed."""
    times = []
    for _ in range(WARM_UPS + repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        launch()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
        after()
    return Times(np.array(times[WARM_UPS:]))


def host_times(launch: Callable[[], None], repeats: int, after: Callable[[], None] = lambda: None) -> Times:
    """As `event_times` with the host's clock; `launch` returns when it is done."""
    times = []
    for _ in range(WARM_UPS + repeats):
        start = time.perf_counter()
        launch()
        times.append((time.perf_counter() - start) * 1e6)
        after()
    return Times(np.array(times[WARM_UPS:]))
