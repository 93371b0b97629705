"""Fences of docs/queue_pairs.md that are left out: found where memory is weak, cards are late and programs are put off.

A program may be stopped between any two instructions; the planted pauses are where that matters. With the fence and the
pause nothing is wrong.
"""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mori_triton import bitcode, local_world
from mori_triton import shmem as host
from mori_triton.device.launch import launch
from mori_triton.errors import MoriError
from tests.device.network_kernels import crowd_kernel
from tests.device.test_network import read_again_kernel

CLANG = shutil.which("clang++-19") or shutil.which("clang++")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.skipif(CLANG is None, reason="fences are left out of the sources: no clang here to build them"),
]

PROGRAMS, ROUNDS, WIDTH, SEEDS = 6, 2, 64, 12


def crowd(pe: int, run: Callable[..., Any]) -> None:
    """Every program of PE 0 puts rows with signals to PE 1, and draws numbers there; AssertionError for a wrong one."""
    data = host.mori_shmem_create_tensor((2, PROGRAMS, WIDTH), torch.int32)
    counter, signal = (host.mori_shmem_create_tensor((1,), torch.int64) for _ in range(2))
    for tensor in (data, counter, signal):
        tensor.zero_()
    out = torch.full((PROGRAMS, ROUNDS), -2, dtype=torch.int64)
    host.shmem_barrier_all()
    if pe == 0:
        run(crowd_kernel, (PROGRAMS,), host.context(), out, data, counter, signal, ROUNDS, 1, N=WIDTH, num_warps=1)
    host.shmem_barrier_all()
    if pe == 0:
        assert sorted(out.flatten().tolist()) == list(range(PROGRAMS * ROUNDS))
    else:
        rows = [torch.arange(WIDTH) + 1000 * (ROUNDS - 1) + 100000 * program for program in range(PROGRAMS)]
        assert torch.equal(data[1], torch.stack(rows).int())
        assert signal.tolist() == counter.tolist() == [PROGRAMS * ROUNDS]


def read_again(pe: int, run: Callable[..., Any]) -> None:
    """PE 0 reads a row, gets PE 1's over it, and reads it again."""
    rows = host.mori_shmem_create_tensor((2, 64), torch.int32)
    rows[0], rows[1] = 1000 + torch.arange(64), 2000 + 100 * pe
    out = torch.full((2, 64), -1, dtype=torch.int32)
    host.shmem_barrier_all()
    run(read_again_kernel, (1,), host.context(), rows[0], rows[1], out, WAIT=True, num_warps=2)
    host.shmem_barrier_all()
    assert pe == 1 or out[1].tolist() == [2100] * 64


class Fence(NamedTuple):
    """Texts of files, each with what stands there without the fence, and with it; who finds it, on which GPU."""

    edits: tuple[tuple[str, str, str, str], ...]
    program: Callable[..., None]
    arch: str


_RELEASE = "  release_to_system(warm(call.ctx));\n"
_READY = """#pragma clang loop unroll(disable)
  for (u32 i = 0; i < n; ++i, ++index) store_system<u64>(word_at(ready, index & mask), index + 1);
"""
_SEEN = "  // whoever rings and sees that I have come sees this too\n" + _RELEASE
_PAUSE = "  for (u32 i = 0; i < 200; ++i) pause_by_one(0);\n"
_STATUS, _THREADS = "    acquire_from_system();\n    return result;\n", "  acquire_after_barrier();\n  return status;\n"
_DONE = "  acquire_from_system();\n  return 0;\n"
FENCES = {
    "bytes of a request, ready": Fence(
        (("queue.h", _RELEASE + _READY + _SEEN, _READY + _PAUSE + _SEEN, _RELEASE + _READY + _PAUSE + _SEEN),),
        crowd,
        "gfx942",
    ),
    # each of the three covers what the model of memory asks for
    "done reached, data read": Fence(
        (
            ("queue.h", _DONE, "  return 0;\n", _DONE),
            ("p2p.h", _STATUS, "    return result;\n", _STATUS),
            ("p2p.h", _THREADS, "  return status;\n", _THREADS),
        ),
        read_again,
        "gfx1201",
    ),
}


def planted(fence: Fence, *, left_out: bool, directory: Path) -> Path:
    """The amdgcn library without the fence, or with it and the pause."""
    shutil.copytree(ROOT / "hip_src", directory / "hip_src")
    for file, old, without, whole in fence.edits:
        path = directory / "hip_src" / file
        text = path.read_text()
        assert text.count(old) == 1, f"{file}: {text.count(old)} times {old!r}"
        path.write_text(text.replace(old, without if left_out else whole))
    spec = importlib.util.spec_from_file_location("bitcode_build_of_fences", ROOT / "bitcode" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    builder.ROOT = directory
    library = "amdgcn/libmori_shmem_device.bc"
    builder.compile_one(CLANG, library, directory / library)
    return directory / library


def found(fence: Fence, *, left_out: bool, directory: Path) -> bool:
    """Whether some seed shows that something is wrong."""
    library = bitcode.specialize(planted(fence, left_out=left_out, directory=directory), provider="mlx5")
    run = functools.partial(launch, extern_libs={"mori_shmem": str(library)})
    for seed in range(SEEDS):
        network = {"late": True, "seed": seed, "num_wqes": 4}
        world = local_world(
            2, arch=fence.arch, transport="mlx5", heap_size="1M", seed=seed, weak_memory=True, network=network
        )
        try:
            world.run(fence.program, run)
        except (MoriError, AssertionError):
            return True
    return False


@pytest.mark.parametrize("name", FENCES)
def test_a_fence_that_is_left_out_is_found(name: str, tmp_path: Path) -> None:
    assert found(FENCES[name], left_out=True, directory=tmp_path / "without")
    assert not found(FENCES[name], left_out=False, directory=tmp_path / "whole")
