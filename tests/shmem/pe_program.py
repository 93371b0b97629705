"""What each process of tests/shmem/test_processes.py runs: `python -m tests.shmem.pe_program <unique id> <directory>`.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as torchrun sets them. Prints one line for each part that is fine.
"""

import os
import re
import signal
import sys

import pytest
import torch
import torch.distributed as dist
import triton
import triton.language as tl

from mori_triton import shmem as mori
from mori_triton.device import shmem
from mori_triton.device.launch import launch
from mori_triton.errors import ArgumentError, KernelFault, MoriError, PeerTimeout, StateError
from mori_triton.host import state


@triton.jit
def ring_kernel(ctx, data_ptr, seen_ptr, signal_ptr, TAG: tl.constexpr):
    me = shmem.my_pe(ctx)
    n = shmem.n_pes(ctx)
    right = tl.where(me == n - 1, 0, me + 1)
    left = tl.where(me == 0, n - 1, me - 1)
    tl.store(shmem.remote_ptr(ctx, data_ptr + tl.arange(0, 64), right), me * 1000 + tl.arange(0, 64))
    shmem.signal_add(ctx, signal_ptr, 1, right)
    shmem.wait_ge(ctx, signal_ptr, 1, left, TAG)
    tl.store(seen_ptr + tl.arange(0, 64), tl.load(data_ptr + tl.arange(0, 64)))


@triton.jit
def waits_for_nothing_kernel(ctx, signal_ptr, TAG: tl.constexpr):
    shmem.wait_ge(ctx, signal_ptr, 5, 1, TAG)


@triton.jit
def spinning_kernel(ptr):
    while tl.atomic_add(ptr, 0) == 0:
        pass


@triton.jit
def stray_kernel(ptr):
    tl.store(ptr.to(tl.pointer_type(tl.int32)), 1)


def say(text):
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def raises(kind, text, call, *args):
    with pytest.raises(kind) as caught:
        call(*args)
    assert text in str(caught.value), caught.value


def ring(n_pes):
    pe = mori.shmem_mype()
    assert mori.shmem_npes() == n_pes
    data = mori.mori_shmem_create_tensor((64,), torch.int32)
    signal_word = mori.mori_shmem_create_tensor((1,), torch.int64)
    data.fill_(-1)
    signal_word.zero_()
    seen = torch.full((64,), -7, dtype=torch.int32)
    mori.shmem_barrier_all()
    launch(ring_kernel, (1,), mori.context(), data, seen, signal_word, TAG=70001)
    state.current().heap.check_errors()
    left = (pe - 1) % n_pes
    assert seen.tolist() == [left * 1000 + i for i in range(64)], seen
    mori.shmem_barrier_all()
    mori.mori_shmem_free_tensor(data)
    mori.mori_shmem_free_tensor(signal_word)


def unique_id_world(rank, n, unique_id):
    """Several worlds one after another from ids that this test's own process made, then one of PE 0."""
    assert mori.shmem_init_attr(mori.MORI_SHMEM_INIT_WITH_UNIQUEID, rank, n, unique_id) == 0
    ring(n)
    # a limit set now comes too late for this world
    os.environ["MORI_TRITON_WAIT_TIMEOUT"] = "0.2"
    assert state.current().timeout_s == 30
    del os.environ["MORI_TRITON_WAIT_TIMEOUT"]
    assert mori.shmem_finalize() == 0
    raises(StateError, "finalized", mori.shmem_finalize)
    say("unique id")


def group_world(rank, n):
    dist.init_process_group("gloo", rank=rank, world_size=n)
    for _ in range(5):
        assert mori.shmem_torch_process_group_init("default") == 0
        assert mori.shmem_torch_process_group_init("default") == 0
        assert (mori.shmem_mype(), mori.shmem_npes()) == (rank, n)
        mori.shmem_malloc(1024)
        assert mori.shmem_finalize() == 0
    raises(ArgumentError, "got 'nonsense'", mori.shmem_torch_process_group_init, "nonsense")
    say("default group")
    for name, ranks in (("last two", [2, 3]), ("three and one", [3, 1])):
        group = dist.new_group(ranks)
        if rank in ranks:
            torch._C._distributed_c10d._register_process_group(name, group)
            mori.shmem_torch_process_group_init(name)
            assert mori.shmem_mype() == dist.get_rank(group)
            ring(2)
            mori.shmem_finalize()
            torch._C._distributed_c10d._unregister_process_group(name)
        else:
            raises(ArgumentError, "group", mori.shmem_torch_process_group_init, group)
        dist.barrier()
    say("subgroups")
    group = dist.new_group()
    os.environ["MORI_BOOTSTRAP_TIMEOUT"] = "1"
    if rank != 3:
        with pytest.raises(PeerTimeout) as caught:
            mori.shmem_torch_process_group_init(group)
        # a PE that the backend keeps waiting for rank 3 when the id is handed round cannot join either
        assert re.search(r"PEs? [0-2, ]*3 of 4 did not join within 1 s|did not hear", str(caught.value)), caught.value
    os.environ["MORI_BOOTSTRAP_TIMEOUT"] = "60"
    dist.barrier()
    say("missing PE")


def kernel_errors():
    here = state.current()
    assert here.timeout_s == 0.2
    word = mori.mori_shmem_create_tensor((3,), torch.int64)
    word.zero_()
    mori.shmem_barrier_all()
    if here.pe == 0:
        launch(waits_for_nothing_kernel, (1,), mori.context(), word[2:], TAG=70002)
        raises(
            PeerTimeout,
            f"waiting for PE 1: allocation 0+16 of PE {here.pe}, expected >= 5, saw 0",
            here.heap.check_errors,
        )
        raises(PeerTimeout, "spinning_kernel", lambda: spinning_kernel[(1,)](word))
        raises(KernelFault, "stray_kernel", lambda: stray_kernel[(1,)](here.heap.base + here.heap.num_bytes))
    mori.shmem_barrier_all()
    say("kernel errors")


def main():
    rank, n = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    unique_id_world(rank, n, bytes.fromhex(sys.argv[1]))
    group_world(rank, n)
    os.environ["MORI_TRITON_WAIT_TIMEOUT"] = "0.2"
    mori.shmem_torch_process_group_init(dist.group.WORLD)
    kernel_errors()
    if rank == 2:
        say("dying")
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        mori.shmem_barrier_all()
    except PeerTimeout as error:
        say(f"peer: {error}")
    try:
        mori.shmem_finalize()
    except MoriError as error:
        say(f"finalize: {type(error).__name__}")
    say("done")
    # without dist.destroy_process_group, and with a PE that has died: exit has to be clean all the same


if __name__ == "__main__":
    main()
