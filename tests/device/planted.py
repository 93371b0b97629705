"""The device library with something planted in its source, and programs that many run at once on few queue pairs."""

from __future__ import annotations

import functools
import importlib.util
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mori_triton import bitcode, local_world
from mori_triton import shmem as host
from mori_triton.device.launch import launch
from mori_triton.errors import MoriError
from tests.device.network_kernels import crowd_kernel

CLANG = shutil.which("clang++-19") or shutil.which("clang++")
ROOT = Path(__file__).parents[2]

PROGRAMS, ROUNDS, WIDTH, SEEDS = 6, 2, 64, 12
# by the clock of the emulated device: what waits for ever is stopped after a few seconds
TIMEOUT_S = 0.5
# a program may be stopped between any two instructions: where that matters it is, for long enough that others get far
PAUSE = "  for (u32 i = 0; i < 4000; ++i) pause_by_one(0);\n"

Program = Callable[[int, Callable[..., Any]], None]


class Edit(NamedTuple):
    """A text of a file, what stands there when it is wrong, and when it is right; None: the text itself."""

    file: str
    old: str
    wrong: str
    right: str | None = None


def crowd(pe: int, run: Callable[..., Any], programs: int = PROGRAMS, rounds: int = ROUNDS) -> None:
    """Every program of PE 0 puts rows with signals to PE 1, and draws numbers there; AssertionError for a wrong one."""
    data = host.mori_shmem_create_tensor((2, programs, WIDTH), torch.int32)
    counter, signal = (host.mori_shmem_create_tensor((1,), torch.int64) for _ in range(2))
    for tensor in (data, counter, signal):
        tensor.zero_()
    out = torch.full((programs, rounds), -2, dtype=torch.int64)
    host.shmem_barrier_all()
    if pe == 0:
        run(crowd_kernel, (programs,), host.context(), out, data, counter, signal, rounds, 1, N=WIDTH, num_warps=1)
    # what PE 0 has found wrong says more than what has not come
    host.shmem_barrier_all()
    assert pe == 1 or sorted(out.flatten().tolist()) == list(range(programs * rounds)), "numbers drawn"
    host.shmem_barrier_all()
    rows = [torch.arange(WIDTH) + 1000 * (rounds - 1) + 100000 * program for program in range(programs)]
    assert pe == 0 or torch.equal(data[1], torch.stack(rows).int()), "rows"
    assert pe == 0 or signal.tolist() == counter.tolist() == [programs * rounds], "signals"


def planted(edits: tuple[Edit, ...], *, wrong: bool, directory: Path) -> Path:
    """The amdgcn library with every edit, as it is wrong or as it is right."""
    shutil.copytree(ROOT / "hip_src", directory / "hip_src")
    for edit in edits:
        path = directory / "hip_src" / edit.file
        text = path.read_text()
        assert text.count(edit.old) == 1, f"{edit.file}: {text.count(edit.old)} times {edit.old!r}"
        right = edit.old if edit.right is None else edit.right
        path.write_text(text.replace(edit.old, edit.wrong if wrong else right))
    spec = importlib.util.spec_from_file_location("bitcode_build_of_planted", ROOT / "bitcode" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    builder.ROOT = directory
    library = "amdgcn/libmori_shmem_device.bc"
    builder.compile_one(CLANG, library, directory / library)
    return directory / library


def both(edits: tuple[Edit, ...], directory: Path) -> tuple[Path, Path]:
    """The library as it is wrong, and as it is right."""
    wrong, right = (planted(edits, wrong=which, directory=directory / str(which)) for which in (True, False))
    return wrong, right


def failures(
    library: Path, program: Program, *, arch: str, provider: str = "mlx5", seeds: int = SEEDS, **network: Any
) -> Iterator[str]:
    """For each seed what has gone wrong, empty if nothing has."""
    built = bitcode.specialize(library, provider=provider)
    run = functools.partial(launch, extern_libs={"mori_shmem": str(built)})
    for seed in range(seeds):
        options = {"late": True, "seed": seed, "num_wqes": 4, **network}
        world = local_world(
            2, arch=arch, transport=provider, heap_size="1M", seed=seed, weak_memory=True, network=options,
            timeout_s=TIMEOUT_S,
        )  # fmt: skip
        try:
            world.run(program, run)
            yield ""
        except (MoriError, AssertionError) as error:
            yield "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])])
