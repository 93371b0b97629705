"""Kernels and programs for worlds whose PEs reach each other through a network, on any device."""

import numpy as np
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch, load
from mori_triton.host import state


@triton.jit(do_not_specialize=["num_bytes", "stride", "epoch"])
def exchange_kernel(ctx, inbox_ptr, outbox_ptr, back_ptr, signal_ptr, counter_ptr, seen_ptr, num_bytes, stride, epoch):
    """One round: my outbox's slot p goes to slot `me` of p's inbox, and from there back into my slot p of `back`.

    Every PE adds its number + 1 to everybody's counter, and keeps the last value it saw.
    """
    me, n = dev.my_pe(ctx), dev.n_pes(ctx)
    for step in range(0, n):
        pe = (me + step) % n
        dev.put_signal(
            ctx,
            inbox_ptr + me * stride,
            outbox_ptr + pe * stride,
            num_bytes,
            signal_ptr + me,
            1,
            dev.SIGNAL_ADD,
            pe,
            epoch,
        )
        tl.store(seen_ptr, dev.atomic_fetch_add(ctx, counter_ptr, (me + 1).to(tl.int64), pe, epoch + 1))
    dev.wait_all_ge(ctx, signal_ptr, n, epoch)
    # what I get is what I have put, on another queue pair: nothing orders the two but this
    dev.quiet(ctx)
    for step in range(0, n):
        pe = (me + step) % n
        dev.get_nbi(ctx, back_ptr + pe * stride, inbox_ptr + me * stride, num_bytes, pe)
    dev.quiet(ctx)
    dev.barrier_all(ctx)


@triton.jit(do_not_specialize=["value"])
def put_kernel(ctx, x_ptr, status_ptr, value, peer):
    """x of `peer` = mine; 0, or -1 if that failed."""
    status = dev.put(ctx, x_ptr, x_ptr, 64, peer)
    tl.store(status_ptr, status + dev.quiet(ctx) + value)


@triton.jit
def put_and_leave_kernel(ctx, x_ptr, peer):
    dev.put_nbi(ctx, x_ptr, x_ptr, 64, peer)


@triton.jit
def wait_kernel(ctx, signal_ptr, peer):
    dev.wait_ge(ctx, signal_ptr, 1, peer, 0)


def symmetric(num, dtype=torch.uint8):
    tensor = shmem.mori_shmem_create_tensor((num,), dtype)
    tensor.zero_()
    return tensor


def message(source, target, epoch, num_bytes):
    """What PE `source` sends to PE `target` in a round, as numpy makes it."""
    return np.random.default_rng([source, target, epoch]).integers(1, 256, num_bytes, dtype=np.uint8)


def exchange(pe, sizes):
    """Rounds of messages of these sizes among all PEs; checks every byte, those outside messages too."""
    n, stride = shmem.shmem_npes(), -(-max(sizes) // 16) * 16 + 16
    inbox, outbox, back = (symmetric(n * stride) for _ in range(3))
    signals, counter, seen = symmetric(n, torch.int64), symmetric(1, torch.int64), symmetric(1, torch.int64)
    shmem.shmem_barrier_all()
    if state.current().rendezvous is not None:
        # PEs share a GPU: nobody may load it while a peer's kernel waits
        arguments = shmem.context(), inbox, outbox, back, signals, counter, seen, 0, stride, 1
        mori.current_world().preload(lambda: load(exchange_kernel, *arguments))
    for epoch, num_bytes in enumerate(sizes, 1):
        inbox.fill_(0xEE)
        back.fill_(0xEE)
        for peer in range(n):
            outbox[peer * stride :][:num_bytes] = torch.from_numpy(message(pe, peer, epoch, num_bytes)).to(
                outbox.device
            )
        shmem.shmem_barrier_all()
        launch(
            exchange_kernel, (1,),
            shmem.context(), inbox, outbox, back, signals, counter, seen, num_bytes, stride, epoch,
        )  # fmt: skip
        shmem.shmem_barrier_all()
        want, returned = (np.full((n, stride), 0xEE, np.uint8) for _ in range(2))
        for peer in range(n):
            want[peer, :num_bytes] = message(peer, pe, epoch, num_bytes)
            returned[peer, :num_bytes] = message(pe, peer, epoch, num_bytes)
        np.testing.assert_array_equal(inbox.cpu().numpy().reshape(n, stride), want)
        np.testing.assert_array_equal(back.cpu().numpy().reshape(n, stride), returned)
        assert signals.tolist() == [epoch] * n
        assert int(counter) == epoch * n * (n + 1) // 2
        assert int(counter) - int(seen) > pe, "somebody's addition is missing in what was seen"
    return counter.item()
