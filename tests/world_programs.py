"""Kernels and programs for worlds on any device: the CPU, GPUs that are played, and real ones."""

import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch, load
from mori_triton.host import state


@triton.jit(do_not_specialize=["value"])
def tell_kernel(ctx, signal_ptr, value):
    """Set the word of the PE to my right."""
    dev.signal_set(ctx, signal_ptr, value, (dev.my_pe(ctx) + 1) % dev.n_pes(ctx))


@triton.jit(do_not_specialize=["value"])
def wait_kernel(ctx, signal_ptr, out_ptr, value):
    """out = what the wait for the PE to my left saw."""
    n = dev.n_pes(ctx)
    tl.store(out_ptr, dev.wait_ge(ctx, signal_ptr, value, (dev.my_pe(ctx) + n - 1) % n, 0))


@triton.jit(do_not_specialize=["value"])
def put_right_kernel(ctx, x_ptr, value):
    """Store to the PE to my right; nothing says when it is there."""
    tl.store(dev.remote_ptr(ctx, x_ptr, (dev.my_pe(ctx) + 1) % dev.n_pes(ctx)), value.to(tl.int64))


@triton.jit
def copy_kernel(x_ptr, out_ptr):
    tl.store(out_ptr, tl.load(x_ptr))


@triton.jit
def round_kernel(ctx, signal_ptr, epoch_ptr, x_ptr, out_ptr):
    """One round of a ring whose number is in memory: my x becomes my right neighbour's out."""
    me, n = dev.my_pe(ctx), dev.n_pes(ctx)
    epoch = tl.load(epoch_ptr) + 1
    tl.store(dev.remote_ptr(ctx, out_ptr, (me + 1) % n), tl.load(x_ptr))
    dev.signal_set(ctx, signal_ptr, epoch, (me + 1) % n)
    if dev.wait_ge(ctx, signal_ptr, epoch, (me + n - 1) % n) >= epoch:
        tl.store(epoch_ptr, epoch)
        tl.store(x_ptr, tl.load(out_ptr) + 1)
    dev.barrier_all(ctx)


def words(num=1):
    tensor = shmem.mori_shmem_create_tensor((num,), torch.int64)
    tensor.zero_()
    shmem.shmem_barrier_all()
    return tensor


def ring_of_rounds(pe, n, rounds, replays):
    """x after some replays of a graph of some rounds, with another x before each replay, and what it should be."""
    here = mori.current_world()
    x = words()
    # nothing that torch may have to load while a peer's kernel waits: what is below waits for all
    x.fill_(100)
    signal, epoch, out = words(), words(), words()

    def step():
        for _ in range(rounds):
            launch(round_kernel, (1,), shmem.context(), signal, epoch, x, out)
        return x

    here.preload(lambda: load(round_kernel, shmem.context(), signal, epoch, x, out))
    step()
    shmem.shmem_barrier_all()
    results = [int(x)]
    graph = here.graph(step)
    # capturing runs nothing
    assert int(epoch) == rounds
    for replay in range(replays):
        x.fill_(1000 * replay + 10 * pe)
        shmem.shmem_barrier_all()
        assert graph.replay() is x
        state.current().driver.synchronize()
        results.append(int(x))
        shmem.shmem_barrier_all()
    assert int(epoch) == rounds * (1 + replays)
    wanted = [100 + rounds] + [1000 * replay + 10 * ((pe - rounds) % n) + rounds for replay in range(replays)]
    return results == wanted or (results, wanted)
