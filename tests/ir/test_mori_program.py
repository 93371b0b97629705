"""A program that knows only MORI's names, on the emulated device: unmodified, again, and under other hooks."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

import mori_triton as mori
from mori_triton import shmem
from tests.host.proxy.ucx import needs_ucx
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


@pytest.mark.parametrize(
    "transport",
    [
        "mlx5",
        pytest.param("bnxt_re", marks=pytest.mark.slow),
        pytest.param("ionic", marks=pytest.mark.slow),
        pytest.param("proxy", marks=[needs_ucx, pytest.mark.slow]),
    ],
)
def test_over_a_network(transport: str) -> None:
    user = user_program()
    world = mori.local_world(2, heap_size="4M", transport=transport, timeout_s=20)
    check(world.run(lambda pe: user.run(mapped=False)), mapped=False)


PROCESS = """
import pickle, sys
from mori_triton import shmem
from tests.ir.programs import user_program

pe, mapped, path = int(sys.argv[1]), sys.argv[2] == "True", sys.argv[3]
unique_id = shmem.shmem_get_unique_id() if pe == 0 else bytes.fromhex(sys.argv[4])
if pe == 0:
    print(unique_id.hex(), flush=True)
shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, pe, 2, unique_id)
result = user_program().run(mapped=mapped)
shmem.shmem_finalize()
with open(path, "wb") as file:
    pickle.dump(result, file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["p2p", pytest.param("proxy", marks=needs_ucx)])
def test_two_processes(transport: str, tmp_path: Path) -> None:
    mapped = transport == "p2p"
    environ = os.environ | {
        "MORI_TRITON_DEVICE": "cpu", "MORI_TRITON_TRANSPORT": transport, "MORI_DISABLE_P2P": str(int(not mapped)),
        "MORI_SHMEM_HEAP_SIZE": "4M", "MORI_SOCKET_IFNAME": "lo", "MORI_TRITON_WAIT_TIMEOUT": "30",
    }  # fmt: skip

    def start(pe: int, *unique_id: str) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", PROCESS, str(pe), str(mapped), str(tmp_path / str(pe)), *unique_id]
        root = Path(__file__).parents[2]
        return subprocess.Popen(words, env=environ, cwd=root, stdout=subprocess.PIPE, text=True)

    first = start(0)
    assert first.stdout is not None
    second = start(1, first.stdout.readline().strip())
    try:
        assert [process.wait(200) for process in (first, second)] == [0, 0]
    finally:
        for process in (first, second):
            process.kill()
            process.wait()
    check([pickle.loads((tmp_path / str(pe)).read_bytes()) for pe in range(2)], mapped=mapped)
