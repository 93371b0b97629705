"""Many programs on one queue pair of the soft HCA in seeded worlds, where every interleaving is the seed's, memory is
weak and the card is late; and that a request that is not released is found there.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import mori_triton as mori
from mori_triton import abi, bitcode, shmem
from mori_triton.device.launch import launch
from mori_triton.errors import NetworkError, WeakMemoryError
from tests.device import network_kernels as kernels
from tests.device.queue_pairs import PROVIDERS

pytestmark = pytest.mark.cpu

PROGRAMS, ROUNDS, WIDTH = 6, 3, 32


def crowd(pe: int, options: dict | None = None) -> list[list[int]]:
    """PE 0's programs put rows to PE 1, which checks them; what PE 0's fetches returned."""
    data = shmem.mori_shmem_create_tensor((2, PROGRAMS, WIDTH), torch.int32)
    words = shmem.mori_shmem_create_tensor((2,), torch.int64)
    data.zero_()
    words.zero_()
    shmem.shmem_barrier_all()
    out = torch.full((PROGRAMS, ROUNDS), -2, dtype=torch.int64)
    if pe == 0:
        args = (shmem.context(), out, data, words, words[1:], ROUNDS, 1)
        launch(kernels.crowd_kernel, (PROGRAMS,), *args, N=WIDTH, num_warps=1, **(options or {}))
    shmem.shmem_barrier_all()
    if pe == 1:
        assert words.tolist() == [PROGRAMS * ROUNDS] * 2
        row = torch.arange(WIDTH, dtype=torch.int32) + 1000 * (ROUNDS - 1)
        assert torch.equal(data[1], row + 100000 * torch.arange(PROGRAMS, dtype=torch.int32)[:, None])
    return out.tolist()


def world(transport: str, seed: int) -> mori.world.LocalWorld:
    network = {"num_wqes": 4, "late": seed % 2 == 1}
    return mori.local_world(2, seed=seed, weak_memory=True, transport=transport, network=network, timeout_s=60)


@pytest.mark.parametrize("transport", PROVIDERS)
def test_every_interleaving_keeps_requests_apart(transport: str) -> None:
    for seed in range(6):
        fetched = world(transport, seed).run(crowd)[0]
        assert sorted(value for row in fetched for value in row) == list(range(PROGRAMS * ROUNDS)), seed


def without_release(library: Path, directory: Path) -> Path:
    """The library, which is text, with a `commit` that does not release."""
    text = library.read_text()
    body = re.search(r"^define [^\n]*6commit.*?^}", text, re.M | re.S)
    assert body
    changed, count = re.subn(r"^\s*fence release\n", "", body[0], flags=re.M)
    assert count == 2
    directory.mkdir()
    made = directory / library.name
    made.write_text(text.replace(body[0], changed))
    return made


def flood(pe: int, options: dict | None = None) -> list[int]:
    """PE 0's programs post puts as fast as they can; how many each was refused."""
    data = shmem.mori_shmem_create_tensor((64,), torch.int64)
    shmem.shmem_barrier_all()
    refused = torch.full((12,), -1, dtype=torch.int32)
    if pe == 0:
        args = (shmem.context(), refused, data.data_ptr(), data.data_ptr() + 256, 64, 4, 0)
        launch(kernels.flood_kernel, (12,), *args, num_warps=1, **(options or {}))
    shmem.shmem_barrier_all()
    return refused.tolist()


def test_a_request_that_is_not_released_is_found(tmp_path: Path) -> None:
    # bnxt_re: who rings reads of others' requests how long they are, and takes longest
    library = without_release(bitcode.specialize("gfx1201", provider="bnxt_re"), tmp_path / "amdgcn")
    found = []
    for seed in range(30):
        network = {"num_wqes": 64}
        world = mori.local_world(2, seed=seed, weak_memory=True, transport="bnxt_re", network=network, timeout_s=60)
        assert world.run(flood)[0] == [0] * 12
        try:
            world.run(flood, {"extern_libs": {abi.LIBRARY: str(library)}})
        except (NetworkError, WeakMemoryError) as e:
            found.append(str(e))
            break
    assert found
