"""Dispatch and combine of PEs on the GPUs of this machine, beside the time that memory allows.

    python bench/bench_intranode.py --out docs/measurements     # PYTHONPATH=. where the package is not installed

docs/benchmarks.md says what is timed and how. Every element is compared before anything is timed and afterwards.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from bench import clock, plot
from bench.floor import Rates, rates
from bench.measure import Method, measure
from bench.problem import DTYPES, Problem, numbers
from bench.record import COLUMNS, phases_of
from bench.report import Results, console, environment, show
from mori_triton.errors import require
from mori_triton.ops.formats import QUANT_TYPES

# elements; the emulated device is there to try the command, not to be timed
_MOST_EMULATED = 1 << 24


def run(results: Results, kind: str, problem: Problem, method: Method, memory: Rates) -> list[dict[str, Any]]:
    """Measure a problem and take it down."""
    rows = [results.add(kind, **row) for row in measure(problem, method, memory)]
    if method.device != "cpu":
        torch.cuda.empty_cache()
    return rows


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device, to try the command itself")] = "cuda",
    pes: Annotated[int, typer.Option(help="PEs, spread over the visible GPUs")] = 8,
    tokens: Annotated[str, typer.Option(help="tokens per PE")] = "128,4096",
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    dtype: Annotated[str, typer.Option(help="of dispatch: bf16, fp8 (e4m3 with scales); combine is bf16")] = "bf16,fp8",
    kernel_type: Annotated[str, typer.Option(help="IntraNode, IntraNodeLL")] = "IntraNode,IntraNodeLL",
    codec: Annotated[str, typer.Option(help="of external combines: none, fp8_direct_cast, ...")] = "none",
    chain: Annotated[int, typer.Option(help="rounds in one graph")] = 5,
    replays: Annotated[int, typer.Option(help="timed replays of each graph")] = 30,
    seed: int = 0,
    scaling: Annotated[str, typer.Option(help="tokens per PE of the scaling table, empty: none")] = (
        "1024,2048,4096,8192,16384"
    ),
    worlds: Annotated[str, typer.Option(help="numbers of PEs of the world size table, empty: none")] = "2,4,8,16",
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file and a plot")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Measure dispatch and combine; print tables; write each measurement and a plot to `out`."""
    for name in dtype.split(","):
        require(name in DTYPES, "dtype", " or ".join(DTYPES), name)
    for name in codec.split(","):
        require(name in QUANT_TYPES, "codec", " or ".join(QUANT_TYPES), name)
    for num_pes in (pes, *numbers(worlds)):
        require(experts % num_pes == 0, "experts", f"a multiple of {num_pes} PEs", experts)
    if device == "cpu":
        # every PE has a receive buffer for every PE's tokens, and a row takes the emulated device a while
        most = max([pes, *numbers(worlds)]) ** 2 * max([1, *numbers(tokens), *numbers(scaling)]) * hidden
        require(most <= _MOST_EMULATED, "PEs * PEs * tokens * hidden on the CPU", f"at most {_MOST_EMULATED}", most)
    where = torch.device(device)
    results = Results("intranode", out, environment(commit, device))
    resolution = clock.resolution_ns(where)
    memory = rates(where) if device != "cpu" else rates(where, 1 << 20, 3)
    if device != "cpu":
        torch.cuda.empty_cache()
    results.add("memory", copy_gbs=memory.copy_gbs, fill_gbs=memory.fill_gbs, clock_step_ns=resolution)
    method = Method(device, chain, replays)
    say = console().print
    say(
        f"{results.environment['gpu'] or 'emulated device'}; stamps in steps of {resolution:.0f} ns; "
        f"copy {memory.copy_gbs:.0f} GB/s, fill {memory.fill_gbs:.0f} GB/s"
    )

    def problem(num_pes: int, num_tokens: int, dtype: str, kernel_type: str, codec: str = "none") -> Problem:
        fields = () if codec == "none" else (("quant_type", codec),)
        return Problem(num_pes, num_tokens, hidden, topk, experts, dtype, kernel_type, seed, fields)

    every = itertools.product(numbers(tokens), kernel_type.split(","), dtype.split(","), codec.split(","))
    for num_tokens, kind, name, quant_type in every:
        rows = run(results, "round", problem(pes, num_tokens, name, kind, quant_type), method, memory)
        title = f"{pes} PEs, {num_tokens} tokens each, hidden {hidden}, top-{topk} of {experts}, {name}, {kind}"
        if quant_type != "none":
            title += f", combine {quant_type}"
        show(title, rows, COLUMNS["round"])
    first_dtype, first_kind = dtype.split(",")[0], kernel_type.split(",")[0]
    brief = Method(device, chain, replays, alone=False)
    for num_tokens in numbers(scaling):
        run(results, "scaling", problem(pes, num_tokens, first_dtype, first_kind), brief, memory)
    for num_pes in numbers(worlds):
        for num_tokens in numbers(tokens):
            run(results, "worlds", problem(num_pes, num_tokens, first_dtype, first_kind), brief, memory)
    for kind, title in (("scaling", "Tokens"), ("worlds", "PEs")):
        rows = phases_of(results.of(kind))
        if rows:
            show(f"{title}: {first_dtype}, {first_kind}, phases in a graph of {chain}", rows, COLUMNS[kind])
    if results.path is not None:
        say(f"wrote {results.path}")
        drawn = plot.intranode(results.rows, results.path.with_suffix(".png"), results.environment)
        say(f"wrote {drawn}" if drawn else "no plot: matplotlib is not installed (the extra `plot`)")


if __name__ == "__main__":
    typer.run(main)
