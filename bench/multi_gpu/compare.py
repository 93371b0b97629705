"""Parts (b) and (d): rounds beside torch.distributed's, and beside the rate of copies between the GPUs of this host.

    torchrun --standalone --nproc-per-node N -m bench.multi_gpu.compare --out docs/measurements

Every way is checked before anything is timed and again afterwards. Samples of all ways alternate; each starts at a
barrier of all PEs on the stream, and counts as long as the slowest PE takes. Graphs are enqueued before their PE comes
to the barrier, so what the host takes to launch them is not in their times; it is in those of eager calls.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from bench import clock
from bench import problem as problems
from bench.multi_gpu.group import Group, PeerRates, join, leave, peer_rates
from bench.multi_gpu.ways import AllToAll, Collectives, GatherScatter, Op, Way
from bench.problem import Inputs, Problem, numbers
from bench.report import Column, Results, console, environment, show
from mori_triton import shmem

# rounds in one graph of the "chain" samples
CHAIN = 5
_WARM_UPS = 3
PHASES = ("dispatch", "combine", "dispatch + combine")
COLUMNS = (
    Column("way"), Column("how"), Column("what"),
    Column("median_us", "p50, µs", ".1f"), Column("p90_us", "p90, µs", ".1f"),
    Column("link_gbs", "GB/s over links", ".0f"), Column("link_ratio", "of peer copy", ".3f"),
    Column("speedup", "times all-gather + reduce-scatter", ".2f"),
)  # fmt: skip

# starts and ends of phases: samples [2 or 3] of one sample, in µs
Sample = Callable[[], Callable[[], list[float]]]


def eager(way: Way, group: Group) -> Sample:
    """Calls from the host: dispatch, combine, and both."""
    return _marked(group, [way.dispatch, way.combine])


def _marked(group: Group, parts: list[Callable[[], Any]], *, enqueued: bool = False) -> Sample:
    """A sample of `parts` one after the other: microseconds of each, and of all. `enqueued`: before one begins."""

    def sample_on_host() -> Callable[[], list[float]]:
        group.meet()
        marks = [time.perf_counter()]
        for part in parts:
            part()
            marks.append(time.perf_counter())
        return lambda: _differences([m * 1e6 for m in marks])

    def sample() -> Callable[[], list[float]]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]
        if enqueued:
            clock.hold()
        shmem.shmem_barrier_on_stream()
        events[0].record()
        for part, event in zip(parts, events[1:], strict=True):
            part()
            event.record()
        return lambda: _differences([events[0].elapsed_time(event) * 1e3 for event in events])

    return sample_on_host if group.device.type == "cpu" else sample


def _differences(marks: list[float]) -> list[float]:
    parts = [b - a for a, b in itertools.pairwise(marks)]
    return [*parts, marks[-1] - marks[0]] if len(parts) > 1 else parts


def _replayed(work: Callable[[], Any], group: Group) -> torch.cuda.CUDAGraph:
    """`work`, which has run before, as a graph; replayed once."""
    group.meet()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread may call CUDA meanwhile
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    group.meet()
    graph.replay()
    group.meet()
    return graph


def samples_of(way: Way, group: Group, direct: bool) -> dict[str, tuple[Sample, tuple[str, ...], float]]:
    """By how: a sample, what its numbers are, and by what to divide them. Collective."""
    found: dict[str, tuple[Sample, tuple[str, ...], float]] = {"eager": (eager(way, group), PHASES, 1.0)}
    # collectives through the host cannot be captured
    if group.device.type != "cpu" and (direct or isinstance(way, Op)):
        # each is replayed once in its turn: the host's and the devices' idea of what came last stay the same
        way.dispatch()
        way.combine()
        graphs = [_replayed(work, group) for work in (way.dispatch, way.combine)]
        way.dispatch()
        way.combine()
        chain = _replayed(lambda: [(way.dispatch(), way.combine()) for _ in range(CHAIN)], group)
        found["graph"] = (_marked(group, [g.replay for g in graphs], enqueued=True), PHASES, 1.0)
        found[f"graph of {CHAIN}"] = (_marked(group, [chain.replay], enqueued=True), PHASES[2:], float(CHAIN))
    return found


def link_bytes(problem: Problem, everyone: list[Inputs]) -> dict[str, int]:
    """Bytes of rows that the busiest PE sends to others (dispatch) and takes from others (combine)."""
    to = torch.stack([problems.destinations(problem, mine.indices).sum(0).cpu() for mine in everyone])
    to.fill_diagonal_(0)
    payload = problem.hidden * problems.DTYPES[problem.dtype].itemsize + 4 * problem.scale_dim
    sent = max(int(to.sum(1).max()), int(to.sum(0).max()))
    both = sent * payload, sent * 2 * problem.hidden
    return dict(zip(PHASES, (*both, sum(both)), strict=True))


def compare(
    group: Group, problem: Problem, wire: Collectives, rates: PeerRates, num_samples: int, results: Results
) -> None:
    """Check and time every way on one problem. Rows are written on rank 0."""
    everyone = [problems.inputs(problem, pe, group.device) for pe in range(group.size)]
    ways: list[Way] = [Op(group, problem, everyone, zero_copy=True), Op(group, problem, everyone, zero_copy=False)]
    ways.append(Op(group, replace(problem, kernel_type="IntraNodeLL"), everyone, zero_copy=True))
    ways += [GatherScatter(group, problem, everyone, wire), AllToAll(group, problem, everyone, wire)]
    for way in ways:
        way.check()
    kinds = [(way, how, *rest) for way in ways for how, rest in samples_of(way, group, wire.direct).items()]
    taken: list[list[Callable[[], list[float]]]] = [[] for _ in kinds]
    for number in range(_WARM_UPS + num_samples):
        for kind, (_, _, sample, _, _) in enumerate(kinds):
            read = sample()
            if number >= _WARM_UPS:
                taken[kind].append(read)
        # the host stays close behind the devices, all PEs' hosts alike
        group.meet()
    shmem.shmem_barrier_all()
    times = [np.array([read() for read in reads]) for reads in taken]
    # [PEs][kind][samples, numbers] -> the slowest PE's
    slowest = [np.max(np.stack(of_all), axis=0) for of_all in zip(*group.gather(times), strict=True)]
    for way in ways:
        way.check()
    for way in ways:
        way.close()
    if group.rank == 0:
        _take_down(results, group, problem, rates, link_bytes(problem, everyone), kinds, slowest)


def _take_down(
    results: Results, group: Group, problem: Problem, rates: PeerRates, over_links: dict[str, int],
    kinds: list[Any], slowest: list[np.ndarray],
) -> None:  # fmt: skip
    medians = {}
    for (way, how, _, whats, divisor), us in zip(kinds, slowest, strict=True):
        for column, what in enumerate(whats):
            medians[way.name, how, what] = float(np.median(us[:, column])) / divisor
    write_read = {"dispatch": rates.write_gbs, "combine": rates.read_gbs}
    for (way, how, _, whats, divisor), us in zip(kinds, slowest, strict=True):
        for column, what in enumerate(whats):
            mine = medians[way.name, how, what]
            gathered = [us for (name, *rest), us in medians.items() if "all-gather" in name and rest == [how, what]]
            gbs = over_links[what] / mine / 1e3 if isinstance(way, Op) else None
            results.add(
                "compare", pes=group.size, gpus=group.num_gpus, tokens=problem.tokens, hidden=problem.hidden,
                top_k=problem.top_k, experts=problem.experts, dtype=problem.dtype, mode=group.state.settings.heap_mode,
                way=way.name, ours=isinstance(way, Op), how=how, what=what, samples=len(us), median_us=mine,
                p90_us=float(np.percentile(us[:, column], 90)) / divisor, link_bytes=over_links[what], link_gbs=gbs,
                link_ratio=gbs / write_read[what] if gbs is not None and what in write_read else None,
                speedup=gathered[0] / mine if gathered else None,
                peer_write_gbs=rates.write_gbs, peer_read_gbs=rates.read_gbs,
            )  # fmt: skip


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """What the run had to show, and whether it did: single rounds in graphs, the best of our ways."""
    rows, lines, gains = [row for row in rows if row["how"] == "graph"], [], []
    for tokens, dtype in sorted({(row["tokens"], row["dtype"]) for row in rows}):
        here = [row for row in rows if (row["tokens"], row["dtype"]) == (tokens, dtype)]

        def best(what: str, ours: bool, here: list[dict[str, Any]] = here) -> dict[str, Any]:
            return min((r for r in here if r["what"] == what and r["ours"] == ours), key=lambda r: r["median_us"])

        if tokens >= 4096:
            for what in PHASES[:2]:
                mine = best(what, True)
                ratio, way = mine["link_ratio"], mine["way"]
                text = f"{tokens} tokens, {dtype}, {what} ({way}): {ratio:.3f} of the peer copy rate, want 0.85"
                lines.append(f"{_met(ratio >= 0.85)}: {text}")
        mine, theirs = best(PHASES[2], True), best(PHASES[2], False)
        gains.append(mine["speedup"])
        lines.append(
            f"{_met(mine['median_us'] < theirs['median_us'])}: {tokens} tokens, {dtype}, dispatch + combine: "
            f"{mine['median_us']:.1f} µs, the best of the others {theirs['median_us']:.1f} µs"
        )
    if gains:
        mean = statistics.geometric_mean(gains)
        lines.append(f"{mean:.2f} times as fast as all-gather + reduce-scatter, geometric mean of {len(gains)}")
    return lines


def _met(good: bool) -> str:
    return "met" if good else "NOT met"


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device")] = "cuda",
    tokens: Annotated[str, typer.Option(help="tokens per PE")] = "128,4096",
    hidden: int = 7168,
    topk: int = 8,
    experts: int = 256,
    dtype: Annotated[str, typer.Option(help="of dispatch: bf16, fp8 (with scales); combine is bf16")] = "bf16,fp8",
    samples: Annotated[int, typer.Option(help="timed samples of each way")] = 60,
    peer_bytes: Annotated[int, typer.Option(help="bytes of the copies between GPUs")] = 512 << 20,
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file and a plot")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Compare the ways on every problem; rank 0 prints tables and writes `out`."""
    group = join(device)
    first = group.rank == 0
    results = Results("multi-gpu", out if first else None, environment(commit, device))
    rates, wire = peer_rates(group, peer_bytes), Collectives(group)
    say = console().print if first else (lambda *_, **__: None)
    where = f"{group.num_gpus} GPUs" if group.num_gpus else "emulated devices"
    copies = f"{rates.write_gbs:.0f} GB/s to a peer, {rates.read_gbs:.0f} from it"
    say(f"{group.size} PEs on {where}; all copying at once, the slowest brings {copies}")
    if group.shares_gpu or not group.num_gpus:
        say("the PEs have no GPU each: this tries the command, its times say nothing")
    for num_tokens in numbers(tokens):
        for name in dtype.split(","):
            problem = Problem(group.size, num_tokens, hidden, topk, experts, name)
            compare(group, problem, wire, rates, samples, results)
            rows = results.of("compare", tokens=num_tokens, dtype=name)
            if first:
                show(f"{group.size} PEs, {num_tokens} tokens each, hidden {hidden}, top-{topk}, {name}", rows, COLUMNS)
    if first:
        for line in verdicts(results.of("compare")) if wire.direct else ():
            say(line, highlight=False)
        if results.path is not None:
            from bench.multi_gpu.plot import draw

            say(f"wrote {results.path}")
            drawn = draw(results.rows, results.path.with_suffix(".png"), results.environment)
            say(f"wrote {drawn}" if drawn else "no plot: matplotlib is not installed (the extra `plot`)")
    leave(group)


if __name__ == "__main__":
    typer.run(main)
