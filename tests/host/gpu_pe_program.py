"""What processes of test_cuda_driver_processes_gpu1.py run.

`python -m tests.host.gpu_pe_program world <rank> <id> <id>`: one of two PEs. Prints the heap mode of each world that
was fine, then "end". `forget <id>`, `fault <id>`: a PE alone that ends badly.
"""

import os
import sys

import torch
import triton
import triton.language as tl

from mori_triton import shmem as mori
from mori_triton.device import shmem
from mori_triton.device.prepared import prepare
from mori_triton.errors import DriverError
from mori_triton.host import state

ROUNDS = 5


@triton.jit(do_not_specialize=["ctx", "data_ptr", "signal_ptr", "out_ptr", "epoch"])
def exchange_kernel(ctx, data_ptr, signal_ptr, out_ptr, epoch, BLOCK: tl.constexpr):
    """Write a row to the other PE, signal, wait for its own, copy it; a barrier, so that the row may be used again."""
    offs = tl.arange(0, BLOCK)
    me = shmem.my_pe(ctx)
    there = shmem.remote_ptr(ctx, data_ptr, 1 - me)
    tl.store(there + offs, 1000 * epoch + 100 * me + offs)
    shmem.signal_set(ctx, signal_ptr, epoch, 1 - me)
    if shmem.wait_ge(ctx, signal_ptr, epoch, 1 - me, 0) >= epoch:
        tl.store(out_ptr + offs, tl.load(data_ptr + offs))
    shmem.barrier_all(ctx)


def world(rank: int, unique_id: str) -> None:
    mori.shmem_init_attr(mori.MORI_SHMEM_INIT_WITH_UNIQUEID, rank, 2, bytes.fromhex(unique_id))
    here, other = state.current(), 1 - rank
    assert (here.driver.name, here.driver.device_index) == ("cuda", torch.cuda.current_device())
    tensor = mori.mori_shmem_create_tensor((4, 1000), torch.bfloat16)
    signal = mori.mori_shmem_create_tensor((1,), torch.int64)
    row = mori.mori_shmem_create_tensor((256,), torch.int64)
    tensor.fill_(rank + 1)
    signal.zero_()
    mori.shmem_barrier_all()
    theirs = mori.symm_mori_shmem_tensor(tensor[1:3], other)
    assert theirs.device == tensor.device
    assert theirs.data_ptr() != tensor[1].data_ptr()
    assert theirs.eq(other + 1).all()
    theirs[1].fill_(10 + rank)
    mori.shmem_barrier_all()
    assert tensor[2].eq(10 + other).all()
    assert tensor[1].eq(rank + 1).all()
    out = torch.full((256,), -1, dtype=torch.int64, device="cuda")
    # loaded before anybody waits
    exchange = prepare(exchange_kernel, mori.context(), row, signal, out, 1, BLOCK=256)
    mori.shmem_barrier_all()
    for epoch in range(1, 1 + ROUNDS):
        exchange((1,), mori.context(), row, signal, out, epoch)
        assert out.equal(1000 * epoch + 100 * other + torch.arange(256, device="cuda")), (epoch, out)
    mori.shmem_barrier_all()
    mori.shmem_finalize()


@triton.jit(do_not_specialize=["address"])
def stray_kernel(address):
    tl.store(tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32)), 1)


def alone(unique_id: str) -> torch.Tensor:
    mori.shmem_init_attr(mori.MORI_SHMEM_INIT_WITH_UNIQUEID, 0, 1, bytes.fromhex(unique_id))
    return mori.mori_shmem_create_tensor((100,), torch.float32).fill_(1)


def forget(unique_id: str) -> None:
    """A program that does not finalize, and whose tensors live as long as it."""
    globals()["kept"] = alone(unique_id)[3:]
    say("end")


def fault(unique_id: str) -> None:
    """A kernel that writes where it must not: every call says so, and taking the world down ends."""
    kept = alone(unique_id)
    stray_kernel[(1,)](64)
    for call in (mori.shmem_barrier_all, mori.shmem_finalize):
        try:
            call()
        except DriverError as error:
            say("CUDA_ERROR_ILLEGAL_ADDRESS" if "CUDA_ERROR_ILLEGAL_ADDRESS" in str(error) else str(error))
    del kept
    say("end")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "world":
        rank, *ids = rest
        for mode, unique_id in zip(("static_heap", "vmm"), ids, strict=True):
            os.environ["MORI_SHMEM_MODE"] = mode
            world(int(rank), unique_id)
            say(mode)
        say("end")
    else:
        {"forget": forget, "fault": fault}[what](*rest)


if __name__ == "__main__":
    main()
