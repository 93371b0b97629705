"""The protocol with one release, acquire or scope weakened fails in weak-memory mode; as it is, it does not.

A mutant whose code is the same as the original's on a GPU says nothing there, and is tried on another one: gfx1201's
first cache writes through, so some device-scope fences are nothing but a wait that a barrier has too.
"""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mori_triton import local_world, ops
from mori_triton.device import launch as launch_module
from mori_triton.device import shmem
from mori_triton.errors import Deadlock, KernelFault, PeerTimeout
from mori_triton.host import state as host_state
from mori_triton.ops import plans
from mori_triton.ops.kernels import combine as combine_kernels
from mori_triton.ops.kernels import dispatch as dispatch_kernels
from mori_triton.ops.kernels import finish
from tests.ops import reference
from tests.ops.cases import Case, config_of, start
from tests.ops.mutants import Library, Mutant, SourceMutant, mutated_kernel, source_mutants

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
SEEDS = range(16)
ROUNDS = 2
# rows wide enough that both waves of a program move a part of each, tokens enough for several programs
CASE = Case(num_pes=2, hidden=300, top_k=2, dtype="float32", max_tokens=3, experts_per_pe=2)


@triton.jit
def expert_kernel(rows_ptr, total_ptr, out_ptr, factor, H: tl.constexpr, BLOCK: tl.constexpr):
    """Expert of a PE: out = rows * factor. On the device, so that it sees what a load there may see."""
    offs = tl.arange(0, BLOCK)
    for row in range(tl.program_id(0), tl.load(total_ptr), tl.num_programs(0)):
        value = tl.load(rows_ptr + row * H + offs, mask=offs < H)
        tl.store(out_ptr + row * H + offs, value * factor, mask=offs < H)


# The library promises more than the protocol leans on: its last arriver never reads what the others wrote, and its
# signals follow stores that arriving has already released. These kernels take the promises at their word.


@triton.jit
def grid_sum_kernel(ctx, parts_ptr, arrivals_ptr, out_ptr, first, BLOCK: tl.constexpr):
    """Every program writes a row, the last one adds them up."""
    offs = tl.arange(0, BLOCK)
    tl.store(parts_ptr + tl.program_id(0) * BLOCK + offs, first + tl.program_id(0) + offs)
    if shmem.arrive_last(ctx, arrivals_ptr, tl.num_programs(0)) != 0:
        total = tl.zeros([BLOCK], tl.int32)
        for row in range(tl.num_programs(0)):
            total += tl.load(parts_ptr + row * BLOCK + offs)
        tl.store(out_ptr + offs, total)


@triton.jit
def push_kernel(ctx, values_ptr, staging_ptr, signals_ptr, epoch, BLOCK: tl.constexpr):
    """One program writes a row to every PE and signals."""
    offs = tl.arange(0, BLOCK)
    me = shmem.my_pe(ctx)
    for pe in range(shmem.n_pes(ctx)):
        tl.store(shmem.remote_ptr(ctx, staging_ptr, pe) + me * BLOCK + offs, tl.load(values_ptr + offs))
    shmem.signal_set_all(ctx, signals_ptr + me, epoch)


@triton.jit
def pull_kernel(ctx, staging_ptr, signals_ptr, out_ptr, epoch, BLOCK: tl.constexpr):
    """One program waits for all PEs and reads what they wrote."""
    offs = tl.arange(0, BLOCK)
    if shmem.wait_all_ge(ctx, signals_ptr, shmem.n_pes(ctx), epoch) >= epoch:
        for pe in range(shmem.n_pes(ctx)):
            tl.store(out_ptr + pe * BLOCK + offs, tl.load(staging_ptr + pe * BLOCK + offs))


def promises(pe: int, launch: Callable[..., Any]) -> None:
    """A grid that sums, and rows sent round; AssertionError when anything is not what it should be."""
    heap, width = host_state.current().heap, 256
    ctx, ints = heap.ctx, {"dtype": torch.int32}
    staging, signals = heap.tensor((ROUNDS, 2, width), torch.int32), heap.tensor((2,), torch.int64)
    signals.zero_()
    staging.fill_(-1)
    host_state.current().bootstrap.barrier("cleared")
    parts, arrivals, total = (
        torch.full((4, width), -1, **ints),
        torch.zeros(1, **ints),
        torch.full((width,), -1, **ints),
    )
    columns = torch.arange(width, **ints)
    for index in range(ROUNDS):
        launch(grid_sum_kernel, (4,), ctx, parts, arrivals, total, 10 * index, BLOCK=width, num_warps=2)
        assert torch.equal(total, 4 * columns + 40 * index + 6), "grid sum"
        values, got = columns + 1000 * (pe + 2 * index), torch.full((2, width), -1, **ints)
        launch(push_kernel, (1,), ctx, values, staging[index], signals, index + 1, BLOCK=width, num_warps=2)
        launch(pull_kernel, (1,), ctx, staging[index], signals, got, index + 1, BLOCK=width, num_warps=2)
        assert torch.equal(got, torch.stack([columns + 1000 * (p + 2 * index) for p in range(2)])), "rows sent round"


def inputs(pe: int, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every token goes to both PEs in one round and to the other PE in the next."""
    n, k = CASE.max_tokens, CASE.top_k
    rng = np.random.default_rng([pe, index])
    there = np.full(n, 1 - pe) * 2
    ids = np.stack([there, there + 1 if index % 2 else pe * 2 + np.zeros(n, int)], 1).astype(np.int32)
    return rng.standard_normal((n, CASE.hidden)).astype(np.float32), ids, rng.random((n, k)).astype(np.float32)


def factor(pe: int) -> float:
    return 1.5 + pe


def rounds(pe: int, launch: Callable[..., Any]) -> None:
    """Some rounds of dispatch and combine; AssertionError when anything is not what numpy says.

    The second in halves, and with a dispatch before it whose rows nobody wants back.
    """
    op = start(CASE, pe)
    for index in range(ROUNDS):
        tokens, ids, weights = inputs(pe, index)
        indices = torch.from_numpy(ids)
        given = torch.from_numpy(tokens), torch.from_numpy(weights), None, indices
        halves = index % 2 == 1
        if halves:
            op.dispatch(*(None if t is None else t.flip(0).contiguous() for t in given))
        out, out_weights, _, _, total = (op.dispatch_send if halves else op.dispatch)(*given)
        if halves:
            op.dispatch_recv()
        rows = torch.full(out.shape, float("nan"))
        launch(expert_kernel, (4,), out, total, rows, factor(pe), H=CASE.hidden, BLOCK=512, num_warps=2)
        result, result_weights = (op.combine_send if halves else op.combine)(rows, out_weights, indices)
        if halves:
            op.combine_recv()
        assert int(total) == len(reference.received([inputs(p, index)[1] for p in range(2)], 2)[pe])
        want, want_weights = np.zeros_like(tokens), np.zeros_like(weights)
        for token, row in enumerate(ids):
            for owner in reference.owners(row, 2, 2):
                want[token] += tokens[token] * np.float32(factor(owner))
                want_weights[token] += weights[token]
        assert result.numpy().tobytes() == want.tobytes(), "tokens"
        assert result_weights is not None
        assert result_weights.numpy().tobytes() == want_weights.tobytes(), "weights"


def program(pe: int, launch: Callable[..., Any]) -> None:
    rounds(pe, launch)
    promises(pe, launch)


MODULES = (dispatch_kernels, combine_kernels, finish)
OWN_KERNELS = (expert_kernel, grid_sum_kernel, push_kernel, pull_kernel)


class Bench:
    """Runs the program in weak-memory worlds, with a library for some kernels and with kernels exchanged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.library: Path | None = None
        self.users: frozenset[str] = frozenset()
        self.kernels: dict[str, Any] = {}
        self.symbols: dict[str, set[str]] = {}  # kernel -> functions of the library that it calls
        self.code: dict[str, list[str]] = {}  # kernel -> instructions
        self.lock, self.links = threading.Lock(), threading.local()
        self.real_prepare, real_libs = plans.prepare, launch_module.get_extern_libs
        monkeypatch.setattr(plans, "prepare", self.prepare)

        def libs(target: Any = None) -> dict[str, str]:
            library = getattr(self.links, "library", None)
            return real_libs(target) if library is None else {launch_module.abi.LIBRARY: str(library)}

        monkeypatch.setattr(launch_module, "get_extern_libs", libs)

    def prepare(self, kernel: Any, *examples: Any, **named: Any) -> Any:
        """A kernel of the op, which later launches as it is."""
        name = self.choose(kernel)
        try:
            prepared = self.real_prepare(self.kernels.get(name, kernel), *examples, **named)
        finally:
            self.links.library = None
        self.note(name, prepared.compiled)
        return prepared

    def launch(self, kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        """One of the test's own."""
        name = self.choose(kernel)
        try:
            compiled = launch_module.launch(kernel, grid, *args, **named)
        finally:
            self.links.library = None
        self.note(name, compiled)

    def choose(self, kernel: Any) -> str:
        """Decide what this thread's next kernel is linked with; its name."""
        name = kernel.__name__
        self.links.library = self.library if self.symbols.get(name, set()) & self.users else None
        return name

    def note(self, name: str, compiled: Any) -> None:
        with self.lock:
            if name not in self.code:
                self.code[name] = instructions(compiled.asm["amdgcn"])
                if self.library is None:
                    self.symbols[name] = set(re.findall(r'symbol = "(mori_shmem_\w+)"', compiled.asm["ttir"]))

    def run(self, arch: str, seed: int) -> str:
        """What went wrong, "" for nothing."""
        world = local_world(2, arch=arch, heap_size="1M", seed=seed, weak_memory=True, timeout_s=5.0)
        try:
            world.run(program, self.launch)
        except (AssertionError, KernelFault, Deadlock, PeerTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return ""


def instructions(text: str) -> list[str]:
    """The instructions of a kernel: no comments, debug lines or labels' numbers."""
    lines = (re.sub(r"\s*(;|//).*", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(".") and not line.endswith(":")]


@pytest.fixture(scope="module")
def bench() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        yield Bench(patch)


class Originals:
    """By GPU, the code of the protocol as it is, which no seed can break; run when first asked for."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.code: dict[str, dict[str, list[str]]] = {}

    def __getitem__(self, arch: str) -> dict[str, list[str]]:
        if arch not in self.code:
            bench = self.bench
            changes, bench.code = (bench.library, bench.kernels), {}
            bench.library, bench.kernels = None, {}
            failures = {seed: what for seed in SEEDS if (what := bench.run(arch, seed))}
            assert failures == {}, arch
            self.code[arch] = bench.code
            bench.library, bench.kernels = changes
        return self.code[arch]


@pytest.fixture(scope="module")
def originals(bench: Bench) -> Originals:
    return Originals(bench)


@pytest.mark.parametrize("arch", ARCHS)
def test_the_protocol_as_it_is(arch: str, originals: Originals) -> None:
    assert set(originals[arch]) == {*protocol_kernels(), *(k.__name__ for k in OWN_KERNELS)}


def library(arch: str = "gfx1201") -> Library:
    return Library(arch)


def protocol_kernels() -> set[str]:
    names = {name for module in MODULES for name in vars(module)}
    return {name for name in names if name.endswith("_kernel")}


def protocol_functions() -> set[str]:
    """What kernels of the ops call by way of `shmem`, from their sources, and what `promises` asks of more."""
    names = {"arrive_last"}
    for module in MODULES:
        names |= set(re.findall(r"\bshmem\.(\w+)\(", Path(module.__file__).read_text()))
    # runs when rows are lost only
    names.remove("report")
    return {f"mori_shmem_ctx_{'ptr' if name == 'remote_ptr' else name}" for name in names}


BITCODE_MUTANTS = library().mutants(protocol_functions())
SOURCE_MUTANTS = [(module, m) for module in MODULES for m in source_mutants(module)]


def hunt(bench: Bench, originals: Originals) -> tuple[str, list[str]]:
    """How the mutant was caught ("" if not), and the GPUs on which its code differs."""
    differs = []
    for arch in ARCHS:
        original, bench.code = originals[arch], {}
        for seed in SEEDS:
            what = bench.run(arch, seed)
            if what:
                return f"{arch} seed {seed}: {what}", [*differs, arch]
            if seed == SEEDS[0] and original == bench.code:
                break
        else:
            differs.append(arch)
    return "", differs


@pytest.mark.parametrize("mutant", BITCODE_MUTANTS, ids=str)
def test_weakened_library(mutant: Mutant, bench: Bench, originals: Originals) -> None:
    bench.library, bench.users = library().write(mutant), mutant.users
    try:
        caught, differs = hunt(bench, originals)
    finally:
        bench.library = None
    assert caught, f"{mutant}: not caught; its code differs on {differs}, seeds {SEEDS}"


@pytest.mark.parametrize(("module", "mutant"), SOURCE_MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_weakened_kernel(module: Any, mutant: SourceMutant, bench: Bench, originals: Originals, tmp_path: Path) -> None:
    bench.kernels = {mutant.kernel: mutated_kernel(module, mutant, tmp_path)}
    try:
        caught, differs = hunt(bench, originals)
    finally:
        bench.kernels = {}
    assert caught, f"{mutant}: not caught on {differs} with seeds {SEEDS}"


def test_the_sites_are_found() -> None:
    """The protocol has at least these; names are those of the library's source."""
    functions = {str(m).split(":", maxsplit=1)[0] for m in BITCODE_MUTANTS}
    assert functions >= {"signal_set_all", "arrive_last", "signal_set_all_last", "wait_all_ge"}, functions
    assert len(BITCODE_MUTANTS) >= 10
    assert [m.kernel for _, m in SOURCE_MUTANTS] == ["dispatch_route_kernel"]
    assert dataclasses.is_dataclass(ops.EpDispatchCombineConfig)
    assert config_of(CASE, 0).max_recv == 6
