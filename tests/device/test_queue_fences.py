"""Fences of docs/queue_pairs.md that are left out: found where memory is weak, cards are late and programs are put off.

A program may be stopped between any two instructions; the planted pauses are where that matters. With the fence and the
pause nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mori_triton import shmem as host
from tests.device.planted import CLANG, PAUSE, Edit, Program, both, crowd, failures
from tests.device.test_network import read_again_kernel

pytestmark = [
    pytest.mark.cpu,
    pytest.mark.slow,
    pytest.mark.skipif(CLANG is None, reason="fences are left out of the sources: no clang here to build them"),
]


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
    """What stands there without the fence, and with it; who finds it, on which GPU."""

    edits: tuple[Edit, ...]
    program: Program
    arch: str


_RELEASE = "  release_to_system(warm(call.ctx));\n"
_READY = """#pragma clang loop unroll(disable)
  for (u32 i = 0; i < n; ++i, ++index) store_system<u64>(word_at(ready, index & mask), index + 1);
"""
_SEEN = "  // whoever rings and sees that I have come sees this too\n" + _RELEASE
_STATUS, _THREADS = "    acquire_from_system();\n    return result;\n", "  acquire_after_barrier();\n  return status;\n"
_DONE = "  acquire_from_system();\n  return 0;\n"
FENCES = {
    "bytes of a request, ready": Fence(
        (Edit("queue.h", _RELEASE + _READY + _SEEN, _READY + PAUSE + _SEEN, _RELEASE + _READY + PAUSE + _SEEN),),
        crowd,
        "gfx942",
    ),
    # each of the three covers what the model of memory asks for
    "done reached, data read": Fence(
        (
            Edit("queue.h", _DONE, "  return 0;\n"),
            Edit("p2p.h", _STATUS, "    return result;\n"),
            Edit("p2p.h", _THREADS, "  return status;\n"),
        ),
        read_again,
        "gfx1201",
    ),
}


@pytest.mark.parametrize("name", FENCES)
def test_a_fence_that_is_left_out_is_found(name: str, tmp_path: Path) -> None:
    fence = FENCES[name]
    without, whole = both(fence.edits, tmp_path)
    assert any(failures(without, fence.program, arch=fence.arch))
    assert not any(failures(whole, fence.program, arch=fence.arch))
