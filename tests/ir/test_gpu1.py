"""The program that knows only MORI's names on one GPU: PEs that share it, foreign hooks, other heaps, one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton

import mori_triton as mori
from mori_triton import abi, shmem
from mori_triton.host import state
from mori_triton.ir.triton import get_extern_libs, install_hook
from tests.ir.kernels import count_kernel
from tests.ir.programs import check, user_program

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]

DEVICE = "hip" if torch.version.hip else "cuda"


def world(n: int, heap_size: str = "4M") -> mori.LocalWorld:
    return mori.local_world(n, device=DEVICE, heap_size=heap_size, timeout_s=10.0)


def load(launches: list[tuple]) -> None:
    """Load a PE's kernels when it is its turn: loading waits for kernels that run, and some wait for peers."""

    def turn() -> None:
        for _, kernel, _, args, meta in launches:
            kernel.warmup(*args, grid=(1,), extern_libs=get_extern_libs(), **meta)._init_handles()

    mori.current_world().preload(turn)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that somebody else's hook, a plain function, was told of."""
    loaded: list[str] = []

    def hook(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        loaded.append(name)

    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", hook)
    return loaded


def test_results_are_numpys_under_a_foreign_hook(foreign: list[str]) -> None:
    user = user_program()
    # a size that no other test has, so that it is loaded here
    check(world(4).run(lambda pe: user.run(block=128, before=load)))
    # a module for each PE, and the other hook was told of all
    assert foreign.count("allreduce_put_kernel") == 4


@pytest.mark.parametrize("n", [1, 2])
def test_the_size_of_moris_example(n: int) -> None:
    user = user_program()
    check(world(n, "16M").run(lambda pe: user.run(numel=64 * 7168, block=32768, before=load)))


def test_after_finalize_and_with_another_heap() -> None:
    user = user_program()

    def program(pe: int) -> tuple[Any, Any, str]:
        first = user.run(before=load)
        shmem.shmem_finalize()
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, bytes(128))
        # another place of every buffer
        shmem.shmem_malloc(1 << 16)
        # nothing is loaded any more
        return first, user.run(), get_extern_libs()[abi.LIBRARY]

    for heap_size in ("2M", "8M"):
        results = world(2, heap_size).run(program)
        check([first for first, _, _ in results])
        check([second for _, second, _ in results])
        assert len({path for _, _, path in results}) == 2


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    user = user_program()
    install_hook()
    who = torch.full((2,), -9, dtype=torch.int32, device="cuda")

    def ask() -> list[int]:
        user.who_kernel[(1,)](who, extern_libs=get_extern_libs())
        return who.tolist()

    # loaded before there is a PE: it is refused everything, and is told later
    assert ask() == [-1, 0]
    for heap_size in ("2M", "8M"):
        monkeypatch.setenv("MORI_SHMEM_HEAP_SIZE", heap_size)
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, 0, 1, shmem.shmem_get_unique_id())
        try:
            assert state.current().driver.name == DEVICE
            assert ask() == [0, 1]
            check([user.run()])
        finally:
            shmem.shmem_finalize()
        assert ask() == [-1, 0]


def run_counting(programs: int, num_warps: int) -> Callable[[int], Any]:
    """Adds of a 64-bit word of PE 0 by `programs` programs of every PE."""

    def program(pe: int) -> Any:
        install_hook()
        word = shmem.mori_shmem_create_tensor((1,), torch.int64)
        word.zero_()
        out = torch.full((programs, 256), -1, dtype=torch.int64, device=word.device)
        meta = {"BLOCK": 256, "num_warps": num_warps}
        load([("count", count_kernel, (programs,), (word, out), meta)])
        shmem.shmem_barrier_all()
        count_kernel[(programs,)](word, out, extern_libs=get_extern_libs(), **meta)
        shmem.shmem_barrier_all()
        return word.item(), out.cpu()

    return program


@pytest.mark.parametrize("num_warps", [4, 8])
def test_a_fetch_is_one_operation_and_reaches_every_thread(num_warps: int) -> None:
    programs, n = 16, 2
    results = world(n).run(run_counting(programs, num_warps))
    assert [count for count, _ in results] == [n * programs, 0]
    got = torch.cat([out for _, out in results])
    assert bool((got == got[:, :1]).all())
    assert sorted(got[:, 0].tolist()) == list(range(n * programs))
