"""The one-launch dispatch and the deterministic routing with one fence, order or scope weakened fail in weak memory.

As `test_mutations.py` for the other kernels: sites are found in the bitcode and the sources, and a mutant whose code is
the original's on one GPU is tried on the other. It says nothing where its code is the same on both.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest

from mori_triton import local_world
from mori_triton.device import launch as launch_module
from mori_triton.errors import Deadlock, KernelFault, PeerTimeout
from mori_triton.ops.kernels import deterministic as deterministic_kernels
from mori_triton.ops.kernels import dispatch_ll as dispatch_ll_kernels
from mori_triton.ops.kernels import finish as finish_kernels
from tests.ops.bare_ll import check_ll, ll_rounds
from tests.ops.cases import Case, ids_of, num_tokens
from tests.ops.mutants import Library, Mutant, SourceMutant, mutated_kernel, source_mutants
from tests.ops.routes import Routes, wanted_routes

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
SEEDS = range(16)
# both waves of a program move a part of each row, and there are several programs
CASE = Case(num_pes=2, hidden=300, top_k=2, dtype="float32", tokens="full", max_tokens=4, rounds=2, experts_per_pe=2)
CAPACITY = 8
SHAPE = {"block_t": 1, "block": 512}
MODULES = (dispatch_ll_kernels, deterministic_kernels)


def program(pe: int, launch: Any) -> tuple[list[Any], list[Any]]:
    rounds = ll_rounds(pe, CASE, CAPACITY, launch, SHAPE)
    routes, routed = Routes(CASE.max_tokens, CASE.top_k), []
    for index in range(CASE.rounds):
        ids = ids_of(CASE, pe, index, num_tokens(CASE, pe, index))
        routed.append(routes.run(launch, ids, experts_per_pe=CASE.experts_per_pe, capacity=CAPACITY, num_programs=2))
        routes.state.bootstrap.barrier("round")
    return rounds, routed


def check(results: list[tuple[list[Any], list[Any]]]) -> None:
    check_ll(CASE, CAPACITY, [rounds for rounds, _ in results])
    for index in range(CASE.rounds):
        ids = [ids_of(CASE, pe, index, num_tokens(CASE, pe, index)) for pe in range(CASE.num_pes)]
        forward, asked = wanted_routes(ids, CASE.experts_per_pe, CAPACITY)
        for pe, (_, routed) in enumerate(results):
            assert routed[index][1] == asked[pe], "rows asked for"
            assert routed[index][0].tolist() == forward[pe].tolist(), "forward map"


class Bench:
    """Runs the program in weak-memory worlds, with a library for some kernels and with kernels exchanged."""

    def __init__(self) -> None:
        self.library: Path | None = None
        self.users: frozenset[str] = frozenset()
        self.kernels: dict[str, Any] = {}
        self.symbols: dict[str, set[str]] = {}  # kernel -> functions of the library that it calls
        self.code: dict[str, str] = {}
        self.originals: dict[str, dict[str, str]] = {}  # by GPU
        self.lock = threading.Lock()

    def launch(self, kernel: Any, grid: Any, *args: Any, **named: Any) -> None:
        name = kernel.__name__
        kernel = self.kernels.get(name, kernel)
        libs = launch_module.get_extern_libs()
        # meetings between rounds and what reads the rows stay whole: they stand for other kernels
        mutable = name in KERNELS
        if mutable and self.library is not None and self.symbols.get(name, set()) & self.users:
            libs = {launch_module.abi.LIBRARY: str(self.library)}
        compiled = kernel[grid](*args, extern_libs=libs, enable_fp_fusion=launch_module.FP_FUSION, **named)
        with self.lock:
            if mutable and name not in self.code:
                self.code[name] = re.sub(r"\s*(;|//).*|^\s*\..*|^\S*:$", "", compiled.asm["amdgcn"], flags=re.MULTILINE)
                if self.library is None:
                    self.symbols[name] = set(re.findall(r'symbol = "(mori_shmem_\w+)"', compiled.asm["ttir"]))

    def run(self, arch: str, seed: int) -> str:
        """What went wrong, "" for nothing."""
        world = local_world(2, arch=arch, heap_size="1M", seed=seed, weak_memory=True, timeout_s=5.0)
        try:
            check(world.run(program, self.launch))
        except (AssertionError, KernelFault, Deadlock, PeerTimeout) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def original(self, arch: str) -> dict[str, str]:
        """The code of the protocol as it is, which no seed can break; run when first asked for."""
        if arch not in self.originals:
            changes, self.library, self.kernels, self.code = (self.library, self.kernels), None, {}, {}
            failures = {seed: what for seed in SEEDS if (what := self.run(arch, seed))}
            assert failures == {}, arch
            self.originals[arch] = self.code
            self.library, self.kernels = changes
        return self.originals[arch]

    def hunt(self) -> tuple[str, list[str]]:
        """How the mutant was caught ("" if not), and the GPUs on which its code differs."""
        differs = []
        for arch in ARCHS:
            original, self.code = self.original(arch), {}
            for seed in SEEDS:
                what = self.run(arch, seed)
                if what:
                    return f"{arch} seed {seed}: {what}", [*differs, arch]
                if seed == SEEDS[0] and original == self.code:
                    break
            else:
                differs.append(arch)
        return "", differs


KERNELS = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
# the meeting of the op's own `sync_kernel` is not run here
CALLED = {
    f"mori_shmem_ctx_{name}"
    for module in (*MODULES, finish_kernels)
    for name in re.findall(r"\bshmem\.([a-z]\w+)\(", Path(str(module.__file__)).read_text())
}
LIBRARY = Library("gfx1201")
# One promise of the library is not leaned on here: a signal covers what other waves have stored since the program
# arrived. What the last program sends, a row of sums, is stored by the wave that signals. `push_kernel` of
# test_mutations.py does lean on it.
NOT_NEEDED = ("signal_set_all", 'syncscope("agent") release')
BITCODE_MUTANTS = [
    mutant
    for mutant in LIBRARY.mutants({name for name in CALLED if name in LIBRARY.bodies and not name.endswith("report")})
    if not (str(mutant).startswith(NOT_NEEDED[0]) and NOT_NEEDED[1] in mutant.old)
]
SOURCE_MUTANTS = [(module, mutant) for module in MODULES for mutant in source_mutants(module)]


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize("arch", ARCHS)
def test_the_protocol_as_it_is(arch: str, bench: Bench) -> None:
    assert set(bench.original(arch)) == KERNELS


@pytest.mark.parametrize("mutant", BITCODE_MUTANTS, ids=str)
def test_weakened_library(mutant: Mutant, bench: Bench) -> None:
    for arch in ARCHS:
        bench.original(arch)
    bench.library, bench.users = LIBRARY.write(mutant), mutant.users
    try:
        caught, differs = bench.hunt()
    finally:
        bench.library = None
    assert caught, f"{mutant}: not caught; its code differs on {differs}, seeds {SEEDS}"


@pytest.mark.parametrize(("module", "mutant"), SOURCE_MUTANTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_weakened_kernel(module: Any, mutant: SourceMutant, bench: Bench, tmp_path: Path) -> None:
    for arch in ARCHS:
        bench.original(arch)
    bench.kernels = {mutant.kernel: mutated_kernel(module, mutant, tmp_path)}
    try:
        caught, differs = bench.hunt()
    finally:
        bench.kernels = {}
    assert caught, f"{mutant}: not caught on {differs} with seeds {SEEDS}"


def test_the_sites_are_found() -> None:
    functions = {str(m).split(":", maxsplit=1)[0] for m in BITCODE_MUTANTS}
    assert functions >= {"signal_set_all", "arrive_last", "signal_set_all_last", "wait_all_ge"}, functions
    assert [m.kernel for _, m in SOURCE_MUTANTS] == ["dispatch_ll_kernel"]
    assert {"dispatch_ll_kernel", "dispatch_count_kernel", "dispatch_assign_kernel"} == KERNELS
