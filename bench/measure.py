"""One problem on one world: check, time, check again. What each PE of `bench_intranode.py` runs.

Every timed graph holds the work of all PEs, each on its own stream, forked from and joined to one. A graph's time is
taken by events around its launch, and by stamps of the GPU's clock inside it on every PE's stream; that of a phase only
by stamps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import mori_triton as mori
from bench import clock, problem
from bench.clock import Times
from bench.floor import PEER_GPU, PEERS, Rates, Traffic, floor_us
from bench.problem import Inputs, Problem
from mori_triton import ops
from mori_triton.host import state as host_state

# a first launch compiles on one PE while the others wait for it
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Method:
    """How to time a problem."""

    device: str = "cuda"
    chain: int = 5  # rounds in a graph
    replays: int = 30
    alone: bool = True  # also time each phase by itself, single rounds, and eager calls


class Measured:
    """What a problem's run brings, and what its PEs show each other meanwhile: lists that are indexed by PE."""

    def __init__(self, problem: Problem, method: Method, rates: Rates) -> None:
        self.problem, self.method, self.rates = problem, method, rates
        self.rows: list[dict[str, Any]] = []
        self.traffic: Traffic | None = None
        self.inputs: list[Any] = [None] * problem.num_pes
        self.stamps: list[Any] = [None] * problem.num_pes
        # of the last round: its reverse maps, and the rows that combine took
        self.sources: list[Any] = [None] * problem.num_pes
        self.combined: list[Any] = [None] * problem.num_pes

    def add(self, what: str, how: str, times: Times, **more: Any) -> None:
        """Take down microseconds per round of `what`."""
        assert self.traffic is not None
        this, num_bytes = self.problem, self.traffic.bytes_of(what)
        least = floor_us(num_bytes, self.rates.copy_gbs)
        # the peer's times are of its kernels, not of the threads of one Python process taking turns
        peer_us = None if how.startswith("eager") else _peer_us(this, what)
        self.rows.append(
            {
                "pes": this.num_pes,
                "tokens": this.tokens,
                "hidden": this.hidden,
                "top_k": this.top_k,
                "experts": this.experts,
                "dtype": this.dtype,
                "kernel_type": this.kernel_type,
                "codec": this.codec,
                "seed": this.seed,
                "what": what,
                "how": how,
                "median_us": times.median,
                "p90_us": times.p90,
                "repeats": len(times.us),
                "floor_us": least,
                "ratio": times.median / least,
                "gbs": num_bytes / times.median / 1e3,
                "ps_per_byte": times.median * 1e6 / num_bytes,
                "bytes": num_bytes,
                "write_us": floor_us(self.traffic.written_bytes_of(what), self.rates.fill_gbs),
                "rows": self.traffic.num_rows,
                "copy_gbs": self.rates.copy_gbs,
                "fill_gbs": self.rates.fill_gbs,
                "peer_us": peer_us,
                "peer_ratio": None if peer_us is None else peer_us / times.median,
                **more,
            }
        )


def _peer_us(this: Problem, what: str) -> float | None:
    """What the peer needs for the same work, measured elsewhere on the same kind of GPU."""
    same = this == Problem(8, this.tokens, kernel_type=this.kernel_type, seed=this.seed)
    if not same or not torch.cuda.is_available() or torch.cuda.get_device_name(0) != PEER_GPU:
        return None
    them = {peer.what: peer.us for peer in PEERS if peer.tokens == this.tokens}
    # it has one combine, which copies its input
    parts = [them.get(part.removeprefix("external ")) for part in what.split(" + ")]
    return None if None in parts else float(sum(part for part in parts if part is not None))


def measure(this: Problem, method: Method, memory: Rates) -> list[dict[str, Any]]:
    """Run the problem on a world of its own and return its measurements; raises AssertionError on a wrong element.

    Args:
        memory: what floors are made of, measured in the same run.
    """
    measured = Measured(this, method, memory)
    world = mori.local_world(this.num_pes, device=method.device, heap_size=this.heap_bytes(), timeout_s=TIMEOUT_S)
    world.run(lambda pe: _Pe(pe, world, measured).run())
    return measured.rows


class _Pe:
    """One PE's part."""

    def __init__(self, pe: int, world: Any, measured: Measured) -> None:
        self.pe, self.world, self.measured = pe, world, measured
        self.problem, self.method = measured.problem, measured.method
        self.state = host_state.current()
        self.op = ops.EpDispatchCombineOp(self.problem.config(pe))
        self.device = self.op.device
        self.mine: Inputs = problem.inputs(self.problem, pe, self.device)
        most = self.op.max_num_tokens_to_recv()
        self.rows = {
            "external combine": torch.empty(most, self.problem.hidden, dtype=torch.bfloat16, device=self.device)
        }
        # a codec encodes rows on their way from the caller's memory: there is no zero copy
        if self.problem.codec == "none":
            registered = self.op.get_registered_combine_input_buffer(torch.bfloat16, self.problem.hidden)
            self.rows = {"combine": registered, **self.rows}
        self.stamps = torch.zeros(1 + 2 * self.method.chain, dtype=torch.int64, device=self.device)
        self.out: Any = None
        self.result: Any = None

    def run(self) -> None:
        measured, chain = self.measured, self.method.chain
        measured.inputs[self.pe], measured.stamps[self.pe] = self.mine, self.stamps
        self.meet("inputs are there")
        if self.pe == 0:
            measured.traffic = self.problem.traffic(measured.inputs)
        clock.stamp(self.stamps, 0)
        for what in self.rows:
            self.checked_round(what)
        pairs = [f"dispatch + {what}" for what in self.rows]
        if self.method.alone:
            # before there is a graph: afterwards a call has a meeting of all PEs before it, as a replay is not seen
            for pair in pairs:
                self.time_eager(pair)
        for pair in pairs:
            self.time_graph(pair, chain)
            self.time_phases(pair)
            if self.method.alone:
                self.time_graph(pair, 1)
        if self.method.alone:
            for what in ("dispatch", *self.rows):
                self.time_graph(what, 1)
                if what != "combine":
                    self.time_graph(what, chain)
        for what in self.rows:
            self.checked_round(what)
        self.op.close()

    def meet(self, what: str) -> None:
        """All PEs, everything launched so far done."""
        self.state.driver.synchronize()
        self.state.bootstrap.barrier(what)

    # ------------------------------------------------------------------------------------------------------- checks
    def checked_round(self, what: str) -> None:
        """Dispatch, experts, combine, from poisoned buffers, every element compared."""
        self.meet("before poison")
        problem.poison(self.op)
        self.meet("poisoned")
        self.dispatch()
        self.meet("dispatched")
        total = int(self.out[-1])
        problem.check_dispatch(self.problem, self.measured.inputs, self.pe, self.all_sources(), self.out, poisoned=True)
        problem.run_experts(self.pe, self.out[0], self.rows[what], total)
        self.combine(what)
        self.meet("combined")
        problem.check_combine(self.problem, self.mine, self.result)
        self.meet("checked")

    def check_replayed(self, what: str) -> None:
        """What the last replay of a timed graph left: rows received, and sums of whatever lay in the buffers."""
        self.meet("replayed")
        total, sources = int(self.out[-1]), self.all_sources()
        problem.check_dispatch(self.problem, self.measured.inputs, self.pe, sources, self.out, poisoned=False)
        last = what.rsplit(" + ", maxsplit=1)[-1]
        if last != "dispatch":
            self.measured.sources[self.pe] = sources[:total]
            self.measured.combined[self.pe] = self.rows[last]
            self.meet("rows are there")
            problem.check_summed(
                self.problem, self.pe, self.measured.sources, self.measured.combined, self.mine, self.result
            )
        self.meet("checked")

    def all_sources(self) -> torch.Tensor:
        """int32 `[R]`: the op's reverse map, also after combine, when nobody writes it here."""
        return self.op._buffers.view("recv_sources", torch.int32, self.op.max_num_tokens_to_recv())

    # -------------------------------------------------------------------------------------------------------- steps
    def dispatch(self) -> None:
        self.out = self.op.dispatch(*self.mine.args())

    def combine(self, what: str) -> None:
        self.result = self.op.combine(self.rows[what], None, self.mine.indices)[0]

    def step(self, what: str, chain: int, *, every_phase: bool = False) -> Callable[[], None]:
        """`chain` rounds of `what`, stamped at both ends or at the end of every phase."""
        parts = what.split(" + ")

        def run() -> None:
            clock.stamp(self.stamps, 0)
            for number in range(chain * len(parts)):
                part = parts[number % len(parts)]
                if part == "dispatch":
                    self.dispatch()
                else:
                    self.combine(part)
                if every_phase:
                    clock.stamp(self.stamps, number + 1)
            if not every_phase:
                clock.stamp(self.stamps, 1)

        return run

    # ------------------------------------------------------------------------------------------------------- timing
    def replay(
        self, step: Callable[[], None], num_stamps: int, before: Callable[[], None] = lambda: None
    ) -> tuple[Times, np.ndarray]:
        """Time replays of all PEs' steps in one graph; on the CPU the steps themselves. Only PE 0's result counts.

        Args:
            before: what the step wants to find done; called before the step is called or captured, not between replays.

        Returns: microseconds by events, and stamps `[replays, PEs, num_stamps]`.
        """
        before()
        # loads every kernel; a graph is captured after it
        step()
        before()
        self.meet("eager")
        taken: list[np.ndarray] = []

        def take() -> None:
            if self.pe == 0:
                taken.append(np.stack([s[:num_stamps].cpu().numpy() for s in self.measured.stamps]))

        graph, times = self.world.graph(step), Times(np.zeros(1))
        self.meet("captured")
        if graph.cuda_graph is None:

            def together() -> None:
                before()
                self.state.bootstrap.barrier("start")
                graph.replay()
                self.state.bootstrap.barrier("end")

            times = clock.host_times(together, self.method.replays, take)
        elif self.pe == 0:
            times = clock.event_times(graph.cuda_graph.replay, self.method.replays, take)
        self.meet("timed")
        return times, np.stack(taken[clock.WARM_UPS :]) if taken else np.zeros((1, 1, num_stamps))

    def time_graph(self, what: str, chain: int) -> None:
        """Rounds of `what`, all in one graph, divided by their number."""
        # the rows of a zero-copy combine are the caller's from dispatch to combine only: it wants a dispatch before it
        before = {"before": self.dispatch} if what == "combine" else {}
        times, stamps = self.replay(self.step(what, chain), 2, **before)
        if self.pe == 0:
            how, by = f"graph of {chain}", "host clock" if self.device.type == "cpu" else "events"
            self.measured.add(what, f"{how}, {by}", Times(times.us / chain), chain=chain)
            self.measured.add(what, f"{how}, stamps", clock.chain_times(stamps, chain), chain=chain)
        self.check_replayed(what)

    def time_phases(self, pair: str) -> None:
        """Each phase of chained rounds, and the whole: the stamps between phases cost something too."""
        parts, chain = pair.split(" + "), self.method.chain
        _, stamps = self.replay(self.step(pair, chain, every_phase=True), 1 + len(parts) * chain)
        if self.pe == 0:
            how = f"phase in a graph of {chain}"
            for part, phase in zip(parts, clock.phases(stamps, len(parts)), strict=True):
                more = {"share_us": phase.share.median, "skew_us": phase.skew.median, "chain": chain, "pair": pair}
                self.measured.add(part, how, phase.span, **more)
            self.measured.add(pair, f"graph of {chain}, all stamps", clock.chain_times(stamps, chain), chain=chain)
        self.check_replayed(pair)

    def time_eager(self, pair: str) -> None:
        """Calls from every PE's thread: the host's clock, from a common start until the device is done everywhere."""
        combine, rounds, times = pair.split(" + ")[1], 4 * self.method.chain, []
        for _ in range(clock.WARM_UPS + 3):
            self.meet("eager rounds")
            start = time.perf_counter()
            for _ in range(rounds):
                self.dispatch()
                self.combine(combine)
            self.meet("eager rounds are done")
            times.append((time.perf_counter() - start) * 1e6 / rounds)
        if self.pe == 0:
            self.measured.add(pair, "eager, host clock", Times(np.array(times[clock.WARM_UPS :])), chain=rounds)
        self.check_replayed(pair)
