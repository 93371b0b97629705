"""Host time of an eager dispatch and combine and of a graph replay, beside that of launching an empty kernel.

    python bench/bench_host_overhead.py --out docs/measurements     # PYTHONPATH=. where not installed

Each call is timed by the host's clock on every PE; the GPU is synchronised between a few rounds, outside of the times.
PEs are threads of one process on one core: they take turns, and meet where kernels wait for each other, so a call of 8
PEs takes what 8 of them do. With one PE nobody is waited for: that is the op's own cost. Every element is compared
before and after. On the CPU a launch runs the kernel: numbers there only show that the command works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import triton
import typer

import mori_triton as mori
from bench import plot, problem
from bench.problem import Problem
from bench.report import Column, Results, console, environment, show
from mori_triton import ops
from mori_triton.device.launch import FP_FUSION
from mori_triton.device.prepared import prepare
from mori_triton.errors import require
from mori_triton.host import state as host_state

NUM_ARGUMENTS = 25
# rounds between two synchronisations: the GPU's queue of launches never fills
ROUNDS = 8
COLUMNS = (
    Column("pes", "PEs"),
    Column("kernel_type", "kernel type"),
    Column("what"),
    Column("median_us", "median, µs", ".1f"),
    Column("p90_us", "p90, µs", ".1f"),
    Column("least_us", "least, µs", ".1f"),
    Column("calls"),
)


@triton.jit(do_not_specialize=["out_ptr"])
def one_kernel(out_ptr):
    pass


@triton.jit(do_not_specialize=[f"p{i}" for i in range(18)] + [f"n{i}" for i in range(7)])
def many_kernel(
    p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, p10, p11, p12, p13, p14, p15, p16, p17,
    n0, n1, n2, n3, n4, n5, n6,
):  # fmt: skip
    pass


class Timings:
    """Microseconds of calls, by what was called."""

    def __init__(self) -> None:
        self.us: dict[str, list[float]] = {}

    def time(self, what: str, call: Callable[[], Any]) -> Any:
        """Call, and take down how long it took."""
        start = time.perf_counter_ns()
        result = call()
        self.us.setdefault(what, []).append((time.perf_counter_ns() - start) / 1e3)
        return result

    def summary(self) -> list[dict[str, Any]]:
        """Median, 90th percentile and least for everything timed."""
        found = []
        for what, us in self.us.items():
            found.append(
                {
                    "what": what,
                    "median_us": float(np.median(us)),
                    "p90_us": float(np.percentile(us, 90)),
                    "least_us": float(np.min(us)),
                    "calls": len(us),
                }
            )
        return found


def together(all_timings: list[Timings]) -> Timings:
    """One call of all PEs takes as long as the slowest PE's."""
    joint = Timings()
    for what in all_timings[0].us:
        joint.us[what] = [max(us) for us in zip(*(timings.us[what] for timings in all_timings), strict=True)]
    return joint


def launches(device: torch.device, calls: int) -> Timings:
    """Launch empty kernels with 1 and with 25 arguments: prepared with addresses, and as Triton does with tensors."""
    timings = Timings()
    tensor = torch.zeros(64, dtype=torch.int32, device=device)
    # on the emulated device too: the kernels touch nothing
    address = tensor.data_ptr()
    tensors: dict[str, tuple[Any, ...]] = {"1 argument": (tensor,)}
    tensors[f"{NUM_ARGUMENTS} arguments"] = (*[tensor] * 18, *range(7))
    for name, args in tensors.items():
        kernel = one_kernel if len(args) == 1 else many_kernel
        prepared = prepare(kernel, *args, num_warps=4)
        plain = [address if value is tensor else value for value in args]
        ways = {
            f"prepared, {name}": lambda prepared=prepared, plain=plain: prepared((1,), *plain),
            f"by @triton.jit, {name}": lambda kernel=kernel, args=args: kernel[(1,)](
                *args, num_warps=4, enable_fp_fusion=FP_FUSION
            ),
        }
        for what, way in ways.items():
            for _ in range(5):
                way()
            for number in range(calls):
                if number % (2 * ROUNDS) == 0:
                    synchronize(device)
                timings.time(what, way)
    return timings


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)


class Pe:
    """One PE: rounds checked, timed eagerly, timed as replays of a graph, checked again."""

    def __init__(self, pe: int, world: Any, this: Problem, calls: int, shared: dict[str, list[Any]]) -> None:
        self.pe, self.world, self.problem, self.calls, self.shared = pe, world, this, calls, shared
        self.barrier = host_state.current().bootstrap.barrier
        self.op = ops.EpDispatchCombineOp(this.config(pe))
        self.device = self.op.device
        self.mine = problem.inputs(this, pe, self.device)
        self.rows = self.op.get_registered_combine_input_buffer(torch.bfloat16, this.hidden)
        self.timings = Timings()
        self.out: Any = None
        self.result: Any = None

    def meet(self, what: str) -> None:
        """All PEs, everything launched so far done."""
        synchronize(self.device)
        self.barrier(what)

    def dispatch(self) -> None:
        self.out = self.op.dispatch(*self.mine.args())

    def combine(self) -> None:
        self.result = self.op.combine(self.rows, None, self.mine.indices)[0]

    def step(self) -> None:
        self.dispatch()
        self.combine()

    def checked_round(self) -> None:
        """From poisoned buffers, every element compared."""
        self.shared["inputs"][self.pe] = self.mine
        self.meet("inputs are there")
        problem.poison(self.op)
        self.meet("poisoned")
        self.dispatch()
        self.meet("dispatched")
        everyone = self.shared["inputs"]
        problem.check_dispatch(self.problem, everyone, self.pe, self.sources(), self.out, poisoned=True)
        problem.run_experts(self.pe, self.out[0], self.rows, int(self.out[-1]))
        self.combine()
        self.meet("combined")
        problem.check_combine(self.problem, self.mine, self.result)
        self.meet("checked")

    def sources(self) -> torch.Tensor:
        """int32 `[R]`: source PE * M + token of each row."""
        return self.op._buffers.view("recv_sources", torch.int32, self.op.max_num_tokens_to_recv())

    def check_replayed(self) -> None:
        """What the last replay left: the same rows as any dispatch."""
        self.meet("replayed")
        everyone = self.shared["inputs"]
        problem.check_dispatch(self.problem, everyone, self.pe, self.sources(), self.out, poisoned=False)
        self.meet("checked")

    def run(self) -> Timings:
        self.checked_round()
        self.step()
        for number in range(self.calls):
            if number % ROUNDS == 0:
                self.meet("before calls")
            self.timings.time("dispatch", self.dispatch)
            self.timings.time("combine", self.combine)
        self.meet("eager")
        graph = self.world.graph(self.step)
        for number in range(self.calls):
            if number % ROUNDS == 0:
                self.meet("before replays")
            self.timings.time("replay of both", graph.replay)
        self.check_replayed()
        if graph.cuda_graph is not None:
            if self.pe == 0:
                for number in range(self.calls):
                    if number % ROUNDS == 0:
                        synchronize(self.device)
                    self.timings.time("replay of all PEs' graph", graph.cuda_graph.replay)
            self.check_replayed()
        self.checked_round()
        self.op.close()
        return self.timings


def measure(this: Problem, device: str, calls: int) -> Timings:
    """Run a problem; of a call of all PEs the slowest counts."""
    shared: dict[str, list[Any]] = {"inputs": [None] * this.num_pes}
    world = mori.local_world(this.num_pes, device=device, heap_size=this.heap_bytes(), timeout_s=300.0)
    found = world.run(lambda pe: Pe(pe, world, this, calls, shared).run())
    alone = found[0].us.pop("replay of all PEs' graph", None)
    joint = together(found)
    if alone is not None:
        joint.us["replay of all PEs' graph"] = alone
    return joint


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device, to try the command itself")] = "cuda",
    pes: Annotated[str, typer.Option(help="worlds to measure")] = "1,8",
    kernel_type: Annotated[str, typer.Option(help="IntraNode, IntraNodeLL")] = "IntraNode,IntraNodeLL",
    tokens: Annotated[int, typer.Option(help="per PE; few, so that the GPU keeps up")] = 8,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    calls: Annotated[int, typer.Option(help="timed calls of each kind")] = 400,
    cores: Annotated[int, typer.Option(help="of the host, 0: all")] = 1,
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file and a plot")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Measure host time; print a table; write each measurement and a plot to `out`."""
    require(device in ("cuda", "hip", "cpu"), "device", "cuda, hip or cpu", device)
    if cores:
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))
    results = Results("host-overhead", out, environment(commit, device))
    emulated = mori.emulator.activate() if device == "cpu" else None
    try:
        for row in launches(torch.device("cpu" if emulated else "cuda"), calls).summary():
            results.add("launch", cores=cores, **row)
    finally:
        if emulated is not None:
            emulated.deactivate()
    show("Host time of one launch of an empty kernel", results.of("launch"), COLUMNS[2:])
    for num_pes in (int(part) for part in pes.split(",")):
        for kind in kernel_type.split(","):
            this = Problem(num_pes, tokens, hidden, topk, experts, kernel_type=kind)
            where = {"pes": num_pes, "kernel_type": kind, "tokens": tokens, "hidden": hidden, "top_k": topk}
            for row in measure(this, device, calls).summary():
                results.add("call", cores=cores, **where, **row)
    title = (
        f"Host time of a call, {tokens} tokens of {hidden} bf16 a PE, top-{topk} of {experts}, {cores or 'all'} core(s)"
    )
    show(title, results.of("call"), COLUMNS)
    if results.path is not None:
        console().print(f"wrote {results.path}")
        drawn = plot.host(results.rows, results.path.with_suffix(".png"), results.environment)
        console().print(f"wrote {drawn}" if drawn else "no plot: matplotlib is not installed (the extra `plot`)")


if __name__ == "__main__":
    typer.run(main)
