"""Dispatch + combine of the RDNA4 op beside dense all-gather + reduce-scatter, in rounds that alternate.

    python bench/bench_rdna4_ep.py --output FILE.jsonl                                # PEs of one process
    torchrun --standalone --nproc-per-node 4 bench/bench_rdna4_ep.py --output FILE.jsonl

docs/benchmarks.md says what is timed and how. Every element of every backend is compared before anything is timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import mori_triton as mori
from bench.floor import floor_us, rates
from bench.multi_gpu.group import join, leave, peer_rates
from bench.multi_gpu.ways import Collectives
from bench.problem import numbers
from bench.rdna4 import summary
from bench.rdna4.backends import Backend, Op, Team, dense_in_heaps, dense_of_processes
from bench.rdna4.dense import FORMS
from bench.rdna4.timing import Method, Sample, alternate, sample_in_process, sample_in_world
from bench.report import Column, Results, console, environment, show
from mori_triton.errors import require
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import DTYPES, Point, Sent

# a first launch compiles on one PE while the others wait for it
_TIMEOUT_S = 60.0
# elements of all PEs' receive rows; the emulated device is there to try the command, not to be timed
_MOST_EMULATED = 1 << 24
COLUMNS = (
    Column("hidden_size", "hidden"), Column("tokens", "tokens/PE"), Column("baseline"),
    Column("mori_us", "dispatch + combine, µs", ".2f"), Column("baseline_us", "baseline, µs", ".2f"),
    Column("reduction_percent", "reduction, %", "+.2f"), Column("floor_us", "floor, µs", ".1f"),
    Column("ratio", "/ floor", ".3f"), Column("spread", "spread", ".3f"),
    Column("mori_bytes", "bytes", ",.0f"), Column("baseline_bytes", "its bytes", ",.0f"), Column("error"),
)  # fmt: skip

# from a PE's team, a point and everybody's input: the backends, ours first
Make = Callable[[Team, Point, list[Sent]], list[Callable[[], Backend]]]


def measure(
    team: Team, point: Point, seed: int, method: Method, make: Make, sample_of: Callable[[Backend, Team], Sample]
) -> list[dict[str, Any]]:
    """Check every backend, time those that are right, check again; a row for each. Collective; equal on all PEs."""
    everyone = [checks.draw(point, pe, seed, point.capacity, device=team.device) for pe in range(team.size)]
    rows: list[dict[str, Any]] = []
    backends: dict[str, Backend] = {}
    for create in make(team, point, everyone):
        backend = create()
        backends[backend.name] = backend
        rows.append({"backend": backend.name, "error": _error(backend), "moved": backend.moved})
    right = {row["backend"]: backends[row["backend"]] for row in rows if row["error"] is None}
    for backend in right.values():
        # a first call compiles, and a graph is captured after it
        for _ in range(method.warmup):
            backend.pair()
        team.meet()
    times = alternate({name: sample_of(backend, team) for name, backend in right.items()}, method, team.gather)
    for row in rows:
        backend = backends[row["backend"]]
        if row["error"] is None:
            row["us"], row["error"] = times[backend.name], _error(backend)
        backend.close()
    return rows


def _error(backend: Backend) -> str | None:
    """What is wrong with it on any PE."""
    try:
        backend.check()
    except AssertionError as error:
        return str(error)
    return None


def take_down(results: Results, point: Point, rows: Sequence[dict[str, Any]], copy_gbs: float, links: bool) -> None:
    """Raw samples of each backend, and a line for each baseline beside ours.

    Args:
        copy_gbs: what the floor is made of: bytes of memory, or (`links`) bytes that leave a PE, over this.
    """
    about = {
        "world_size": point.world_size, "dtype": point.dtype, "topk": point.top_k, "hidden_size": point.hidden,
        "tokens": point.capacity, "experts": point.experts, "weights": point.weights,
    }  # fmt: skip
    timed: dict[str, np.ndarray] = {}
    for row in rows:
        us = row.get("us") if row["error"] is None else None
        if us is not None:
            timed[row["backend"]] = us
        results.add(
            "samples", **about, backend=row["backend"], correct=row["error"] is None, error=row["error"],
            p50_us=None if us is None else summary.p50(us),
            round_p50_us=None if us is None else np.median(us, axis=1).tolist(),
            samples_us=None if us is None else us.tolist(),
            memory_bytes=row["moved"].memory, link_bytes=row["moved"].links,
        )  # fmt: skip
    ours, baselines = rows[0], rows[1:]
    moved = ours["moved"].links / point.world_size if links else ours["moved"].memory
    least = floor_us(moved, copy_gbs)
    for row in baselines:
        both = [timed.get(name) for name in (ours["backend"], row["backend"])]
        mori_us, baseline_us = (None if us is None else summary.p50(us) for us in both)
        of_rounds = max((summary.spread(us) for us in both if us is not None), default=1.0)
        entry = summary.Entry(point.world_size, point.hidden, point.capacity, mori_us, baseline_us, of_rounds)
        results.add(
            "pair", **about, baseline=row["backend"], mori_us=mori_us, baseline_us=baseline_us, spread=entry.spread,
            reduction_percent=entry.reduction_percent if entry.correct else None,
            speedup=entry.speedup if entry.correct else None,
            floor_us=least, ratio=None if mori_us is None else mori_us / least, copy_gbs=copy_gbs,
            mori_bytes=ours["moved"].memory, baseline_bytes=row["moved"].memory,
            mori_link_bytes=ours["moved"].links, baseline_link_bytes=row["moved"].links,
            error=ours["error"] or row["error"],
        )  # fmt: skip


def report(results: Results, picture: Path | None) -> bool:
    """Print tables and summaries, draw the heat map; whether everything was right."""
    say, pairs = console().print, results.of("pair")
    groups = summary.groups_of(pairs)
    for key, entries in groups.items():
        names = "world_size", "dtype", "topk", "weights", "baseline"
        rows = results.of("pair", **dict(zip(names, key, strict=True)))
        columns = [column for column in COLUMNS if any(row.get(column.key) is not None for row in rows)]
        show(summary.title_of(key), rows, columns)
        for row in rows:
            if row["spread"] > summary.SPREAD_LIMIT:
                where = f"hidden {row['hidden_size']}, {row['tokens']} tokens"
                say(f"unstable: {where}: p50 of rounds differ by {row['spread']:.3f} times", highlight=False)
        found = summary.summarise(entries)
        say(f"{summary.title_of(key)}: {found}", highlight=False)
        results.add("summary", **dict(zip(names, key, strict=True)), **dataclasses.asdict(found))
    if picture is not None:
        env = results.environment
        text = (
            f"{env['gpu'] or 'emulated device'}; torch {env['torch']}, Triton {env['triton']}, commit {env['commit']}"
        )
        drawn = summary.heat_map(groups, picture, text)
        say(f"wrote {drawn}" if drawn else "no plot: matplotlib is not installed (the extra `plot`)")
    return all(row["error"] is None for row in pairs)


def in_processes(
    points: Callable[[int], list[Point]], results: Results, seed: int, method: Method, device: str
) -> None:
    """Under torchrun: this process is a PE."""
    group = join(device)
    wire = Collectives(group)
    copy_gbs = peer_rates(group, 64 << 20 if device != "cpu" else 1 << 16).write_gbs
    copy_gbs = min(group.gather(copy_gbs))
    team = Team()

    def make(team: Team, point: Point, everyone: list[Sent]) -> list[Callable[[], Backend]]:
        return [lambda: Op(team, point, everyone), lambda: dense_of_processes(team, point, everyone, wire)]

    def sample_of(backend: Backend, team: Team) -> Sample:
        # gloo goes through the host, which no graph can
        return sample_in_process(backend, team, capture=device != "cpu" and (wire.direct or isinstance(backend, Op)))

    for point in points(group.size):
        rows = measure(team, point, seed, method, make, sample_of)
        if group.rank == 0:
            take_down(results, point, rows, copy_gbs, links=True)
    leave(group)


def in_world(
    points: list[Point], results: Results, seed: int, method: Method, device: str, copy_gbs: float
) -> None:  # fmt: skip
    """PEs are threads of this process; each point has a world of its own."""

    def make(team: Team, point: Point, everyone: list[Sent]) -> list[Callable[[], Backend]]:
        dense = [lambda form=form: dense_in_heaps(team, point, everyone, form) for form in FORMS]
        return [lambda: Op(team, point, everyone), *dense]

    for point in points:
        heap = checks.heap_bytes(point) + 6 * point.world_size * point.capacity * 2 * point.hidden
        world = mori.local_world(point.world_size, device=device, heap_size=heap, timeout_s=_TIMEOUT_S)

        def program(pe: int, world: Any = world, point: Point = point) -> list[dict[str, Any]]:
            return measure(Team(), point, seed, method, make, lambda b, team: sample_in_world(world, b, team))

        take_down(results, point, world.run(program)[0], copy_gbs, links=False)
        if device != "cpu":
            torch.cuda.empty_cache()


def main(
    topks: str = "8",
    dtypes: Annotated[str, typer.Option(help="bf16, fp16")] = "bf16",
    hidden_sizes: str = "2048,3072,4096,5120,7168,8192",
    tokens: Annotated[str, typer.Option(help="per PE")] = "8,32,64,128,256,512,1024,4096,8192,16384",
    experts: int = 256,
    weights: Annotated[str, typer.Option(help="on, off")] = "on",
    warmup: Annotated[int, typer.Option(help="calls, and then replays, of each backend that are not timed")] = 10,
    rounds: Annotated[int, typer.Option(help="of each backend; they alternate")] = 4,
    samples: Annotated[int, typer.Option(help="in a round")] = 30,
    seed: int = 20261225,
    output: Annotated[Path | None, typer.Option(help="JSONL file to make; beside it a picture")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device, to try the command itself")] = "cuda",
    pes: Annotated[str, typer.Option(help="worlds, where torchrun has started no processes")] = "2,4",
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Measure every point; print tables, summaries; write raw samples, results and a heat map. Status 1: wrong."""
    for name, given, known in (("dtypes", dtypes, DTYPES), ("weights", weights, ("on", "off"))):
        for part in given.split(","):
            require(part in known, name, " or ".join(known), part)
    for name, number in (("warmup", warmup), ("rounds", rounds), ("samples", samples)):
        require(number >= 1, name, "at least 1", number)
    processes = dist.is_torchelastic_launched()

    def points(size: int) -> list[Point]:
        require(experts % size == 0, "experts", f"a multiple of {size} PEs", experts)
        every = itertools.product(
            dtypes.split(","), numbers(topks), weights.split(","), numbers(hidden_sizes), numbers(tokens)
        )
        return [Point(size, dtype, k, h, n, on == "on", experts) for dtype, k, on, h, n in every]

    worlds = [point for size in numbers(pes) for point in points(size)] if not processes else []
    if device == "cpu":
        most = max((p.world_size**2 * p.capacity * p.hidden for p in worlds), default=0)
        require(most <= _MOST_EMULATED, "PEs * PEs * tokens * hidden on the CPU", f"at most {_MOST_EMULATED}", most)
    results = Results("rdna4-ep", None, environment(commit, device))
    first = not processes or int(dist.get_node_local_rank(0)) == 0
    if output is not None and first:
        output.parent.mkdir(parents=True, exist_ok=True)
        # FileExistsError: measurements are never overwritten
        output.open("x").close()
        results.path = output
    method = Method(warmup, rounds, samples)
    if processes:
        in_processes(points, results, seed, method, device)
    else:
        where = torch.device(device)
        copy_gbs = (rates(where) if device != "cpu" else rates(where, 1 << 20, 3)).copy_gbs
        in_world(worlds, results, seed, method, device, copy_gbs)
    if first and not report(results, output and output.with_suffix(".png")):
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
