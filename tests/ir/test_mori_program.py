"""A program that knows only MORI's names, on the emulated device: unmodified, again, and under other hooks."""

from __future__ import annotations

from typing import Any

import pytest
import triton

import mori_triton as mori
from mori_triton import shmem
from tests.ir.programs import check, user_program

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(("n", "arch"), [(1, "gfx1201"), (2, "gfx942"), (3, "gfx1201"), (4, "gfx1250")])
def test_results_are_numpys(n: int, arch: str) -> None:
    user = user_program()
    check(mori.local_world(n, arch=arch, heap_size="4M").run(lambda pe: user.run()))


def test_the_size_of_moris_example() -> None:
    user = user_program()
    check(mori.local_world(2, heap_size="8M").run(lambda pe: user.run(numel=64 * 7168, block=8192)))


@pytest.mark.parametrize("seed", range(3))
def test_every_value_is_released_and_acquired(seed: int) -> None:
    user = user_program()
    world = mori.local_world(3, heap_size="1M", seed=seed, weak_memory=True)
    check(world.run(lambda pe: user.run(numel=300, block=256)))


def test_after_finalize_and_with_another_heap() -> None:
    user = user_program()

    def program(pe: int) -> tuple[Any, Any]:
        first, old = user.run(), shmem.context()
        shmem.shmem_finalize()
        # the world is the same, so MORI's arguments for finding it are ignored
        shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, bytes(128))
        assert shmem.context().data_ptr() != old.data_ptr()
        return first, user.run()

    results = mori.local_world(2, heap_size="2M").run(program)
    check([first for first, _ in results])
    check([second for _, second in results])
    # another world, another heap, kernels that were loaded before
    check(mori.local_world(2, heap_size="8M").run(lambda pe: user.run()))


def test_a_hook_that_was_there_before_is_still_called(monkeypatch: pytest.MonkeyPatch) -> None:
    user, loaded = user_program(), []

    def foreign(module: Any, function: Any, name: str, metadata_group: Any, hash: str) -> None:
        loaded.append(name)

    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_end_hook", foreign)
    check(mori.local_world(2, heap_size="4M").run(lambda pe: user.run()))
    assert loaded.count("who_kernel") == 2
