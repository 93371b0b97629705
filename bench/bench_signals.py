"""How long an all-to-all of signals takes: every PE tells every PE, and waits until all have told it.

    python bench/bench_signals.py     # PYTHONPATH=. where the package is not installed

A kernel of one program does many rounds, so a round is a release, the way of a signal, a poll and an acquire; a graph
of kernels of one round each adds what a launch inside a graph costs. Every round is checked: its wait has to see it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import triton
import triton.language as tl
import typer

import mori_triton as mori
from bench import clock
from bench.clock import Times
from bench.report import Column, Results, console, environment, show
from mori_triton.device import shmem
from mori_triton.device.prepared import prepare
from mori_triton.host import state as host_state

COLUMNS = (
    Column("pes", "PEs"),
    Column("num_warps", "warps"),
    Column("what"),
    Column("median_us", "median, µs", ".2f"),
    Column("p90_us", "p90, µs", ".2f"),
)


@triton.jit(do_not_specialize=["ctx", "signals_ptr", "epoch_ptr", "rounds"])
def signal_kernel(
    ctx,  # device context
    signals_ptr,  # symmetric int64 [n_pes]: word p holds PE p's newest epoch here
    epoch_ptr,  # int64 [1], local: rounds done
    rounds,
):
    """One program: `rounds` times tell all and wait for all; stops at a time-out."""
    me = shmem.my_pe(ctx)
    n_pes = shmem.n_pes(ctx)
    epoch = tl.load(epoch_ptr)
    good = epoch >= 0
    done = 0
    while (done < rounds) & good:
        shmem.signal_set_all(ctx, signals_ptr + me, epoch + 1)
        good = shmem.wait_all_ge(ctx, signals_ptr, n_pes, epoch + 1) > epoch
        epoch += good.to(tl.int64)
        done += 1
    tl.store(epoch_ptr, epoch)


def program(pe: int, world: Any, rounds: int, replays: int, num_warps: int, times: dict[str, Times]) -> None:
    """What a PE runs; PE 0 takes the times down, in microseconds of a round."""
    here = host_state.current()
    heap, device = here.heap, here.heap.ctx.device
    signals = heap.tensor((here.n_pes,), torch.int64, "bench_signals")
    signals.zero_()
    epoch = torch.zeros(1, dtype=torch.int64, device=device)
    args = heap.ctx, signals, epoch
    kernel = prepare(signal_kernel, *args, 1, num_warps=num_warps)
    cpu, barrier = device.type == "cpu", here.bootstrap.barrier

    def meet(what: str) -> None:
        if not cpu:
            torch.cuda.synchronize(device)
        barrier(what)

    expected = 0
    for what, each, kernels in (("round in a kernel", rounds, 1), ("kernel of one round", 1, 20)):

        def step(each: int = each, kernels: int = kernels) -> None:
            for _ in range(kernels):
                kernel((1,), *args, each)

        meet("before the first")
        step()
        barrier("all are launched")
        meet("first")
        graph = world.graph(step)
        meet("captured")
        count = each * kernels
        if graph.cuda_graph is None:
            found = clock.host_times(graph.replay, replays)
        elif pe == 0:
            found = clock.event_times(graph.cuda_graph.replay, replays)
        meet("timed")
        expected += count * (1 + clock.WARM_UPS + replays)
        got = int(epoch)
        assert got == expected, f"PE {pe}: {got} rounds of {expected} were seen"
        if pe == 0:
            times[what] = Times(found.us / count)
    heap.check_errors()


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device, to try the command itself")] = "cuda",
    pes: Annotated[str, typer.Option(help="worlds to measure")] = "1,2,8",
    warps: Annotated[str, typer.Option(help="of the program")] = "1,4,8",
    rounds: Annotated[int, typer.Option(help="in one kernel")] = 1000,
    replays: Annotated[int, typer.Option(help="timed replays of each graph")] = 20,
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Measure an all-to-all of signals; print a table; write each measurement to `out`."""
    results = Results("signals", out, environment(commit, device))
    for num_pes in (int(part) for part in pes.split(",")):
        for num_warps in (int(part) for part in warps.split(",")):
            times: dict[str, Times] = {}
            world = mori.local_world(num_pes, device=device, heap_size="1M", timeout_s=20.0)
            world.run(program, world, rounds, replays, num_warps, times)
            for what, found in times.items():
                row = {"pes": num_pes, "num_warps": num_warps, "what": what, "repeats": len(np.atleast_1d(found.us))}
                results.add("signals", median_us=found.median, p90_us=found.p90, **row)
    show("All-to-all of signals, and a wait for all", results.rows, COLUMNS)
    if results.path is not None:
        console().print(f"wrote {results.path}")


if __name__ == "__main__":
    typer.run(main)
