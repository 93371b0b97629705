"""The device library by itself: puts by size and scope, a signal's way there and back, a barrier; and its instructions.

    python bench/bench_shmem.py --out docs/measurements     # PYTHONPATH=. where the package is not installed

Each operation is repeated inside a kernel, so a figure is of the operation and not of a launch. What came is compared
with what was sent before anything is timed, and afterwards. docs/benchmarks.md says what is timed and how.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import triton
import triton.language as tl
import typer

import mori_triton as mori
from bench import clock, sass
from bench.clock import Times
from bench.floor import Rates, floor_us, rates
from bench.problem import numbers
from bench.report import Column, Results, console, environment, show
from mori_triton.device import externs, shmem
from mori_triton.device.prepared import prepare
from mori_triton.errors import require
from mori_triton.host import state as host_state

# and the most bytes that are tried: one thread would take all day over more
SCOPES = {"thread": 1 << 16, "warp": 1 << 20, "block": 1 << 62}
# puts in one kernel move no more than this, or are one
_MOST_BYTES = 1 << 28
BARRIER_BAR_US = 3.0
_MICROSECONDS = (Column("median_us", "slowest PE, median, µs", ".2f"), Column("p90_us", "p90, µs", ".2f"))
PUT_COLUMNS = (
    *(Column("scope"), Column("bytes", "bytes, all programs", ",d"), Column("programs"), *_MICROSECONDS),
    *(
        Column("gbs", "GB/s", ".1f"),
        Column("floor_us", "copy, µs", ".2f"),
        Column("of_copy", "of the copy rate", ".2f"),
    ),
)
SIGNAL_COLUMNS = (Column("what"), Column("pes", "PEs"), Column("num_warps", "warps"), *_MICROSECONDS, Column("bar_us"))
COLUMNS = {"put": PUT_COLUMNS, "signal": SIGNAL_COLUMNS, "sass": sass.COLUMNS}


@triton.jit(do_not_specialize=["ctx", "to_ptr", "from_ptr", "part", "rounds"])
def put_kernel(
    ctx,  # device context
    to_ptr,  # int8 [programs * part], symmetric, of the next PE
    from_ptr,  # the same of mine
    part,  # bytes of a program
    rounds,
    SCOPE: tl.constexpr,
):
    """Each program puts its part, `rounds` times."""
    pe = (shmem.my_pe(ctx) + 1) % shmem.n_pes(ctx)
    first = tl.program_id(0).to(tl.int64) * part
    for _ in range(rounds):
        if SCOPE == "thread":
            externs.ctx_put_thread(ctx, to_ptr + first, from_ptr + first, part, pe, 0)
        elif SCOPE == "warp":
            externs.ctx_put_warp(ctx, to_ptr + first, from_ptr + first, part, pe, 0)
        else:
            externs.ctx_put_block(ctx, to_ptr + first, from_ptr + first, part, pe, 0)


@triton.jit(do_not_specialize=["ctx", "word_ptr", "epoch_ptr", "rounds"])
def ping_kernel(ctx, word_ptr, epoch_ptr, rounds):
    """word: int64 [1], symmetric; epoch: int64 [1], local: round trips seen. PE 0 signals first, PE 1 answers."""
    me = shmem.my_pe(ctx)
    epoch = tl.load(epoch_ptr)
    good, done = epoch >= 0, 0
    while (done < rounds) & good:
        if me == 0:
            shmem.signal_set(ctx, word_ptr, epoch + 1, 1)
            good = shmem.wait_ge(ctx, word_ptr, epoch + 1, 1) > epoch
        else:
            good = shmem.wait_ge(ctx, word_ptr, epoch + 1, 0) > epoch
            shmem.signal_set(ctx, word_ptr, epoch + 1, 0)
        epoch += good.to(tl.int64)
        done += 1
    tl.store(epoch_ptr, epoch)


@triton.jit(do_not_specialize=["ctx", "word_ptr", "epoch_ptr", "rounds"])
def barrier_kernel(ctx, word_ptr, epoch_ptr, rounds, CHECKED: tl.constexpr):
    """`rounds` barriers. CHECKED: between two of them each PE tells the next one the round; epoch counts those seen."""
    epoch = tl.load(epoch_ptr)
    pe = (shmem.my_pe(ctx) + 1) % shmem.n_pes(ctx)
    for _ in range(rounds):
        if CHECKED:
            shmem.signal_set(ctx, word_ptr, epoch + 1, pe)
        shmem.barrier_all(ctx)
        if CHECKED:
            epoch += (tl.load(word_ptr, volatile=True) == epoch + 1).to(tl.int64)
            shmem.barrier_all(ctx)
        else:
            epoch += 1
    tl.store(epoch_ptr, epoch)


class Timed:
    """What a PE's run needs to time a kernel on all PEs: `times` is shared, stamps in nanoseconds by what and PE."""

    def __init__(self, world: Any, replays: int, stamps: dict[Any, dict[int, np.ndarray]]) -> None:
        self.here = host_state.current()
        self.world, self.replays, self.stamps = world, replays, stamps
        self.device = self.here.heap.ctx.device

    def meet(self, what: str) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize(self.device)
        self.here.bootstrap.barrier(what)

    def __call__(self, what: Any, launch: Callable[[], None]) -> None:
        """Time `launch` between two stamps on this PE's stream, all PEs in one graph."""
        now = torch.zeros(2, dtype=torch.int64, device=self.device)

        def step() -> None:
            clock.stamp(now, 0)
            launch()
            clock.stamp(now, 1)

        self.meet("before the first")
        step()
        self.meet("first")
        graph = self.world.graph(step)
        self.meet("captured")
        found = []
        for _ in range(clock.WARM_UPS + self.replays):
            if graph.cuda_graph is None:
                graph.replay()
            elif self.here.pe == 0:
                graph.cuda_graph.replay()
            self.meet("replayed")
            found.append(now.tolist())
            self.meet("read")
        self.stamps.setdefault(what, {})[self.here.pe] = np.array(found[clock.WARM_UPS :])


def slowest(stamps: dict[int, np.ndarray], rounds: int) -> Times:
    """Microseconds of a round on the PE that took longest, for each replay."""
    spans = [ends[:, 1] - ends[:, 0] for _, ends in sorted(stamps.items())]
    return Times(np.max(spans, axis=0) / 1e3 / rounds)


def repeats(num: int, rounds: int) -> int:
    """How many puts of `num` bytes a kernel makes."""
    return max(1, min(rounds, _MOST_BYTES // num))


def put_program(pe: int, timed: Callable[[], Timed], sizes: list[int], programs: int, rounds: int) -> None:
    """Time every size and scope; every byte is compared before and after."""
    here, most = host_state.current(), max(sizes)
    run = timed()
    source = here.heap.tensor((most,), torch.int8, "bench source")
    target = here.heap.tensor((most,), torch.int8, "bench target")
    before = (pe - 1) % here.n_pes

    def contents(of: int, num: int) -> torch.Tensor:
        return (torch.arange(num, device=run.device) * 7 + of * 31 + num).to(torch.int8)

    def check(num: int) -> None:
        run.meet("put")
        right = torch.equal(target[:num], contents(before, num)) and bool((target[num:] == -1).all())
        assert right, f"PE {pe}: {num} bytes are not what PE {before} has put"
        run.meet("compared")

    for scope, largest in SCOPES.items():
        kernel = prepare(put_kernel, here.heap.ctx, target, source, 1, 1, SCOPE=scope, num_warps=4)
        for num in (size for size in sizes if size <= largest):
            grid = max(1, min(programs, num // 4096)) if scope == "block" else 1
            grid = next(g for g in range(grid, 0, -1) if num % (16 * g) == 0)

            def launch(count: int, kernel: Any = kernel, grid: int = grid, num: int = num) -> None:
                kernel((grid,), here.heap.ctx, target, source, num // grid, count)

            source[:num] = contents(pe, num)
            target.fill_(-1)
            run.meet("filled")
            launch(1)
            check(num)
            target.fill_(-1)
            run.meet("filled again")
            run((scope, num, grid), lambda launch=launch, num=num: launch(repeats(num, rounds)))
            check(num)
    here.heap.check_errors()


def signal_program(pe: int, timed: Callable[[], Timed], rounds: int, num_warps: int) -> None:
    """Time a signal's way there and back if there are two PEs, and the barrier; every round is counted."""
    here, run = host_state.current(), timed()
    word = here.heap.tensor((1,), torch.int64, "bench word")
    epoch = torch.zeros(1, dtype=torch.int64, device=run.device)
    args = here.heap.ctx, word, epoch
    whats = {"barrier": prepare(barrier_kernel, *args, 1, CHECKED=False, num_warps=num_warps)}
    checked = prepare(barrier_kernel, *args, 1, CHECKED=True, num_warps=num_warps)
    if here.n_pes == 2:
        whats["round trip"] = prepare(ping_kernel, *args, 1, num_warps=num_warps)
    for what, kernel in whats.items():
        word.zero_()
        epoch.zero_()
        if what == "barrier":
            run.meet("before the checked barriers")
            checked((1,), *args, rounds)
            run.meet("after them")
            assert int(epoch) == rounds, f"PE {pe}: {int(epoch)} of {rounds} barriers kept a signal's order"
            epoch.zero_()
        run((what, num_warps), lambda kernel=kernel: kernel((1,), *args, rounds))
        expected = rounds * (1 + clock.WARM_UPS + run.replays)
        assert int(epoch) == expected, f"PE {pe}: {int(epoch)} rounds of {expected} were seen"
    here.heap.check_errors()


def measure_puts(
    results: Results, device: str, sizes: list[int], programs: int, method: tuple[int, int], memory: Rates
):
    """Two PEs put to each other at once: all bytes are read once and written once."""
    rounds, replays = method
    world = mori.local_world(2, device=device, heap_size=f"{2 * max(sizes) + (2 << 20)}", timeout_s=60.0)
    stamps: dict[Any, dict[int, np.ndarray]] = {}
    world.run(put_program, lambda: Timed(world, replays, stamps), sizes, programs, rounds)
    for (scope, num, grid), of in stamps.items():
        count, moved = repeats(num, rounds), 2 * 2 * num
        times = slowest(of, count)
        least = floor_us(moved, memory.copy_gbs)
        results.add(
            "put", scope=scope, bytes=num, programs=grid, pes=2, rounds=count, repeats=replays, median_us=times.median,
            p90_us=times.p90, gbs=moved / times.median / 1e3, floor_us=least, of_copy=least / times.median,
        )  # fmt: skip


def measure_signals(results: Results, device: str, num_pes: int, num_warps: int, rounds: int, replays: int) -> None:
    """Of one world."""
    world = mori.local_world(num_pes, device=device, heap_size="1M", timeout_s=60.0)
    stamps: dict[Any, dict[int, np.ndarray]] = {}
    world.run(signal_program, lambda: Timed(world, replays, stamps), rounds, num_warps)
    for (what, warps), of in stamps.items():
        times = slowest(of, rounds)
        bar = BARRIER_BAR_US if what == "barrier" and num_pes == 8 else None
        results.add(
            "signal", what=what, pes=num_pes, num_warps=warps, rounds=rounds, repeats=replays, median_us=times.median,
            p90_us=times.p90, bar_us=bar,
        )  # fmt: skip


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu: the emulated device, to try the command itself")] = "cuda",
    sizes: Annotated[str, typer.Option(help="bytes of a put, multiples of 16")] = "16,256,4096,65536,1048576,67108864",
    programs: Annotated[int, typer.Option(help="at most, that share a put of blocks; else there is one")] = 264,
    pes: Annotated[str, typer.Option(help="worlds for signals and barriers")] = "2,4,8",
    warps: Annotated[str, typer.Option(help="of a signalling program")] = "1,4",
    rounds: Annotated[int, typer.Option(help="signals and barriers in one kernel; puts: a tenth of it")] = 1000,
    replays: Annotated[int, typer.Option(help="timed replays of each graph")] = 30,
    only_sass: Annotated[bool, typer.Option(help="count instructions, time nothing: needs no GPU")] = False,
    out: Annotated[Path | None, typer.Option(help="directory for a JSONL file")] = None,
    commit: Annotated[str | None, typer.Option(help="of the sources, where they have no .git")] = None,
) -> None:
    """Measure; print tables; write each measurement to `out`."""
    results = Results("shmem", out, environment(commit, "cpu" if only_sass else device))
    for size in numbers(sizes):
        require(size > 0 and size % 16 == 0, "sizes", "multiples of 16", size)
    for row in sass.rows():
        results.add("sass", **row)
    show("Instructions of a put-with-signal, sm_90", results.of("sass"), COLUMNS["sass"])
    if not only_sass:
        where = torch.device(device)
        memory = rates(where) if device != "cpu" else rates(where, 1 << 20, 3)
        results.add("memory", copy_gbs=memory.copy_gbs, clock_step_ns=clock.resolution_ns(where))
        measure_puts(results, device, numbers(sizes), programs, (max(1, rounds // 10), replays), memory)
        show(f"Puts of two PEs to each other; copy {memory.copy_gbs:.0f} GB/s", results.of("put"), COLUMNS["put"])
        for num_pes in numbers(pes):
            for num_warps in numbers(warps):
                measure_signals(results, device, num_pes, num_warps, rounds, replays)
        show("A signal there and back, a barrier of all", results.of("signal"), COLUMNS["signal"])
    if results.path is not None:
        console().print(f"wrote {results.path}")


if __name__ == "__main__":
    typer.run(main)
