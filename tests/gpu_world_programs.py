"""Worlds on one GPU, and programs for them."""

from __future__ import annotations

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch, load
from mori_triton.host import state
from tests.world_programs import round_kernel, tell_kernel, wait_kernel, words

NEEDS_GPU = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]
DEVICE = "hip" if torch.version.hip else "cuda"


def world(n, **settings):
    return mori.local_world(n, device=DEVICE, heap_size="4M", **{"timeout_s": 10.0, **settings})


def ring(pe, rounds):
    """Rounds of a ring without a preload: the first launch loads the kernel while peers may do the same."""
    n, x = shmem.shmem_npes(), words()
    # before the barrier that follows: torch loads this the first time, which waits for the kernels that run
    x.fill_(10 * pe)
    signal_word, epoch, out = words(), words(), words()
    for _ in range(rounds):
        launch(round_kernel, (1,), shmem.context(), signal_word, epoch, x, out)
    return int(x) == 10 * ((pe - rounds) % n) + rounds


def graph_only(pe, n):
    """Two replays of a graph of two rounds; nothing waits outside of the graph."""
    x = words()
    x.fill_(10 * pe)
    signal_word, epoch, out = words(), words(), words()

    def step():
        for _ in range(2):
            launch(round_kernel, (1,), shmem.context(), signal_word, epoch, x, out)

    mori.current_world().preload(lambda: load(round_kernel, shmem.context(), signal_word, epoch, x, out))
    graph = mori.current_world().graph(step)
    graph.replay()
    graph.replay()
    return int(x) == 10 * ((pe - 4) % n) + 4


def two_streams(pe):
    """A wait on a stream of its own does not keep the PE's other work from telling its peer."""
    signal_word, out, side, ctx = words(), words(), torch.cuda.Stream(), shmem.context()

    def turn():
        load(wait_kernel, ctx, signal_word, out, 1)
        load(tell_kernel, ctx, signal_word, 1)
        out.clone()

    mori.current_world().preload(turn)
    seen = []
    for step in range(1, 6):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            launch(wait_kernel, (1,), ctx, signal_word, out, step)
        state.current().meet("everybody waits")
        launch(tell_kernel, (1,), ctx, signal_word, step)
        torch.cuda.current_stream().wait_stream(side)
        seen.append(out.clone())
        shmem.shmem_barrier_all()
    return [int(value) for value in seen]
