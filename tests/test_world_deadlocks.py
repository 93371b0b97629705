"""`local_world` on the CPU when PEs wait for what never comes: deadlocks, time limits, and what is neither."""

import time

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import local_world, shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch
from mori_triton.errors import Deadlock, PeerTimeout
from tests.cpu_world_programs import notes, spin_kernel, symmetric

pytestmark = pytest.mark.cpu


@triton.jit
def wait_kernel(ctx, signal_ptr, out_ptr, want, peer):
    """out = what the wait saw."""
    tl.store(out_ptr, dev.wait_ge(ctx, signal_ptr, want, peer, 0))


@triton.jit
def poll_then_signal_kernel(ctx, flag_ptr, signal_ptr, polls):
    """Look for a flag a number of times, then tell PE 1."""
    for _ in range(polls):
        tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys")
    dev.signal_set(ctx, signal_ptr, 5, 1)


@triton.jit
def wait_all_kernel(flag_ptr):
    """A barrier of the whole grid: every program waits for every other."""
    tl.atomic_add(flag_ptr, 1, sem="release", scope="gpu")
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="gpu") < tl.num_programs(0):
        pass


def waits_for_nothing(pe):
    signal, out = symmetric((1,), torch.int64), torch.full((1,), -1)
    signal.fill_(pe)
    shmem.shmem_barrier_all()
    launch(wait_kernel, (1,), shmem.context(), signal, out, 7 + pe, (pe + 1) % 3)


def test_a_deadlock_lists_who_waits_for_what_and_is_quick():
    texts = []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(Deadlock, match="nothing can change any more") as caught:
            local_world(3, seed=11, timeout_s=3000).run(waits_for_nothing)
        assert time.monotonic() - start < 10
        texts.append(str(caught.value))
    for pe in range(3):
        assert f"on PE {pe} waiting for PE {(pe + 1) % 3}" in texts[0]
        assert f"expected >= {7 + pe}, saw {pe}" in texts[0]
    assert texts[0] == texts[1]


def test_a_wait_in_parallel_has_a_limit():
    start = time.monotonic()
    with pytest.raises(PeerTimeout) as caught:
        local_world(3, timeout_s=0.5).run(waits_for_nothing)
    assert time.monotonic() - start < 10
    text = str(caught.value) + notes(caught.value)
    assert "reached its limit" in text
    counts = [text.count(f"expected >= {7 + pe}, saw {pe}") for pe in range(3)]
    assert 1 in counts
    assert max(counts) == 1, text


def test_own_spin_loops_are_listed_with_their_instruction():
    def program(pe):
        flag = symmetric((1,), torch.int32)
        if pe:
            spin_kernel[(1,)](flag, num_warps=2)
        shmem.shmem_barrier_all()

    with pytest.raises(Deadlock, match=r"spin_kernel of PE 1, workgroup 0, wave \d.*, line \d+ `"):
        local_world(2, seed=1).run(program)
    with pytest.raises(PeerTimeout, match=r"nothing changed for .* s\n  spin_kernel of PE 1, workgroup 0, wave"):
        local_world(2, timeout_s=0.3).run(program)


def test_a_grid_must_not_wait_for_workgroups_that_have_no_place():
    from tests.emulator import kernels

    def program(pe, groups):
        flag, out = symmetric((1,), torch.int32), torch.zeros(1, dtype=torch.int32)
        # every workgroup but the first ends at once, so the last one gets a place
        kernels.wait_for_later[(groups,)](flag, out)
        # here the first 64 wait for the last
        flag.zero_()
        wait_all_kernel[(groups,)](flag)
        return out[0]

    assert local_world(1, seed=1).run(program, 60) == [7]
    with pytest.raises(Deadlock, match="wait_all_kernel of PE 0: 36 workgroups wait for one of 64 places"):
        local_world(1, seed=1).run(program, 100)


def test_many_polls_are_no_deadlock():
    """Nothing changes for long, but a kernel counts: a peer's wait must neither be listed nor see virtual time jump."""

    def program(pe):
        flag, signal = symmetric((1,), torch.int32), symmetric((1,), torch.int64)
        out = torch.full((1,), -1)
        if pe == 0:
            launch(poll_then_signal_kernel, (1,), shmem.context(), flag, signal, 30_000, num_warps=1)
        else:
            launch(wait_kernel, (1,), shmem.context(), signal, out, 5, 0)
        return out[0]

    assert local_world(2, seed=3, timeout_s=100).run(program) == [-1, 5]


def test_a_limit_that_a_kernel_handles_itself_is_no_deadlock():
    from tests.emulator import kernels

    def program(pe):
        flag, out = symmetric((1,), torch.int32), torch.full((2,), -1, dtype=torch.int32)
        kernels.wait_with_limit[(1,)](flag, out, 10**9, GFX12=True, num_warps=1)
        return out.tolist()

    assert local_world(2, seed=1).run(program) == [[0, 1], [0, 1]]
