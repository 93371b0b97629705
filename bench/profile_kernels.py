"""Each kernel of a round once, at full size, none waiting for another: a run for Nsight Compute.

    python3 bench/profile_kernels.py                             # compiles; PYTHONPATH=. where not installed
    ncu --clock-control none --kernel-name 'regex:dispatch|combine' --csv \\
        --metrics gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,smsp__inst_executed.sum,\\
launch__registers_per_thread,sm__warps_active.avg.pct_of_peak_sustained_active python3 bench/profile_kernels.py

A profiler runs one kernel at a time, so the PEs use the split calls, as `sanitize.py` does: what a kernel takes here is
its time alone on the GPU, without its peers' beside it. These counters fit one pass: with more the profiler saves and
restores all memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import torch
import typer

import mori_triton as mori
from bench import problem
from bench.problem import DTYPES, Inputs, Problem
from bench.report import Column, console, show
from mori_triton import ops
from mori_triton.host import state as host_state

TIMEOUT_S = 120.0


def run_rounds(pe: int, this: Problem, everyone: dict[int, Inputs]) -> None:
    """A zero-copy round and one with an external input, checked."""
    op = ops.EpDispatchCombineOp(this.config(pe))
    mine = everyone[pe] = problem.inputs(this, pe, op.device)

    def meet(what: str) -> None:
        host_state.current().driver.synchronize()
        host_state.current().bootstrap.barrier(what)

    registered = op.get_registered_combine_input_buffer(torch.bfloat16, this.hidden)
    external = torch.empty_like(registered)
    for rows in (registered, external):
        meet("begin")
        out = op.dispatch_send(*mine.args())
        meet("dispatch is sent")
        op.dispatch_recv()
        meet("dispatched")
        problem.run_experts(pe, out[0], rows, int(out[4]))
        meet("experts are done")
        result = op.combine_send(rows, None, mine.indices)[0]
        meet("combine is sent")
        op.combine_recv()
        meet("combined")
        problem.check_combine(this, mine, result)
    if pe == 0:
        traffic = this.traffic([everyone[other] for other in range(this.num_pes)])
        parts = ("dispatch", "combine", "external combine")
        bytes_per_pe = [{"what": part, "mb": traffic.bytes_of(part) / this.num_pes / 1e6} for part in parts]
        show("What must move, per PE", bytes_per_pe, [Column("what"), Column("mb", "10^6 bytes", ".1f")])
    op.close()


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu to try the command itself")] = "cuda",
    pes: int = 8,
    tokens: int = 4096,
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    dtype: Annotated[str, typer.Option(help=" or ".join(DTYPES))] = "bf16",
    kernel_type: str = "IntraNode",
) -> None:
    """Run a zero-copy round and one with an external input in split calls."""
    this = replace(Problem(pes, tokens, hidden, topk, experts), dtype=dtype, kernel_type=kernel_type)
    everyone: dict[int, Inputs] = {}
    world = mori.local_world(pes, device=device, heap_size=this.heap_bytes(), timeout_s=TIMEOUT_S)
    world.run(lambda pe: run_rounds(pe, this, everyone))
    console().print("right")


if __name__ == "__main__":
    typer.run(main)
