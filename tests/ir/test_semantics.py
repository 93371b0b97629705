"""What the operations promise under MORI's names, in worlds whose memory is as weak as the hardware's may be.

docs/semantics.md names the test of each of its statements; the last one here looks whether they exist.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import mori_triton as mori
from mori_triton import abi, shmem
from mori_triton.errors import KernelFault, PeerTimeout, WeakMemoryError
from mori_triton.ir import SIGNAL_ADD, SIGNAL_SET
from mori_triton.ir.triton import get_extern_libs
from tests.ir import kernels

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]
N = 128
QUIETS = ("quiet_thread", "quiet_thread_pe", "quiet_thread_pe_qp")
FENCES = ("fence_thread", "fence_thread_pe", "fence_thread_pe_qp")
BARRIERS = ("barrier_all_thread", "barrier_all_block")


def weak_world(seed: int, **settings: Any) -> mori.LocalWorld:
    return mori.local_world(2, device="cpu", heap_size="1M", seed=seed, weak_memory=True, **settings)


def handed_over(kernel: Any, **constants: Any) -> Any:
    """A program that returns how many wrong elements PE 1 saw, and -1 on PE 0."""

    def program(pe: int) -> int:
        dst = shmem.mori_shmem_create_tensor((N,), torch.int32)
        sig = shmem.mori_shmem_create_tensor((1,), torch.uint64)
        dst.fill_(-5)
        sig.view(torch.int64).zero_()
        shmem.shmem_barrier_all()
        src, bad = torch.full((N,), -6, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
        kernel[(1,)](src, dst, sig, bad, N=N, num_warps=2, extern_libs=get_extern_libs(), **constants)
        return int(bad[0])

    return program


@pytest.mark.parametrize("how", [*QUIETS, *FENCES, *BARRIERS, "empty_signal"])
def test_puts_and_stores_to_mapped_memory_are_covered_by(how: str) -> None:
    flag = how in QUIETS + FENCES
    for seed in range(4):
        program = handed_over(kernels.handover_kernel, HOW=how, FLAG=flag, POLL=False)
        assert weak_world(seed).run(program) == [-1, 0], seed


def faults(seeds: int, **constants: Any) -> list[str]:
    found = []
    for seed in range(seeds):
        try:
            weak_world(seed).run(handed_over(kernels.handover_kernel, **constants))
        except WeakMemoryError as error:
            found.append(str(error))
    return found


def test_an_atomic_covers_nothing() -> None:
    found = faults(8, HOW="nothing", FLAG=True, POLL=False)
    assert found
    assert all("missing: a release" in text for text in found)


def test_a_wait_acquires_and_a_poll_does_not() -> None:
    found = faults(8, HOW="quiet_thread", FLAG=True, POLL=True)
    assert found
    assert all("missing: an acquire" in text for text in found)


@pytest.mark.parametrize("scope", ["thread", "warp", "block"])
@pytest.mark.parametrize("op", [SIGNAL_SET, SIGNAL_ADD, abi.ATOMIC_SET, abi.ATOMIC_ADD])
def test_a_signal_covers_its_data(scope: str, op: int) -> None:
    for seed in range(3):
        program = handed_over(kernels.put_signal_kernel, SCOPE=scope, OP=op)
        assert weak_world(seed).run(program) == [-1, 0], seed


def test_a_pe_that_is_not_mapped_is_refused_and_named() -> None:
    def program(pe: int) -> tuple[list[list[int]], list[int]]:
        x = shmem.mori_shmem_create_tensor((5,), torch.int64)
        x.fill_(-1)
        shmem.shmem_barrier_all()
        out = torch.full((2, 4), -9)
        kernels.reach_kernel[(1,)](x, out, extern_libs=get_extern_libs())
        with pytest.raises(KernelFault, match=rf"PE {1 - pe}"):
            shmem.shmem_barrier_all()
        return out.tolist(), x.tolist()

    for pe, (out, x) in enumerate(mori.local_world(2, gpus_per_node=1, transport="p2p").run(program)):
        assert out[pe] == [1, 1, 0, -1]
        assert out[1 - pe] == [0, 0, -1, 0]
        # my own put and add, and no other
        assert x == [100 + pe if i == pe else 0 if i == 4 else -1 for i in range(5)]


def test_a_wait_at_its_limit_is_raised_on_the_host() -> None:
    def waits(pe: int) -> None:
        sig = shmem.mori_shmem_create_tensor((1,), torch.uint64)
        sig.view(torch.int64).fill_(4)
        kernels.wait_kernel[(1,)](sig, extern_libs=get_extern_libs())
        shmem.shmem_barrier_all()

    with pytest.raises(PeerTimeout, match=r"wait_until.*expected == 5, saw 4"):
        mori.local_world(1, timeout_s=0.1).run(waits)


def test_every_statement_names_tests_that_exist() -> None:
    text = (ROOT / "docs/semantics.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| what"))]
    assert len(rows) > 20
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, row
        for path, name in named:
            functions = [n.name for n in ast.parse((ROOT / path).read_text()).body if isinstance(n, ast.FunctionDef)]
            assert name in functions, (path, name)
