"""Worlds on one GPU: several PEs as threads and streams, and graphs of all of them."""

from __future__ import annotations

import gc
import time

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch, load
from mori_triton.errors import StateError
from mori_triton.host import state
from tests.gpu_world_programs import DEVICE, NEEDS_GPU, graph_only, ring, world
from tests.world_programs import copy_kernel, put_right_kernel, ring_of_rounds, round_kernel, words

pytestmark = NEEDS_GPU


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_ring(n):
    assert world(n).run(ring, 7) == [True] * n


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_a_graph_of_five_chained_rounds(n):
    assert world(n).run(ring_of_rounds, n, 5, 3) == [True] * n


def test_the_same_program_on_cpu_and_gpu():
    def program(pe):
        shmem.shmem_barrier_all()
        return shmem.shmem_mype(), shmem.shmem_npes(), ring(pe, 4)

    on_gpu = world(3).run(program)
    assert on_gpu == mori.local_world(3).run(program) == [(pe, 3, True) for pe in range(3)]
    # Triton is back on the GPU
    assert world(3).run(program) == on_gpu
    assert mori.local_world(1, device="auto").device == DEVICE


def test_where_pes_are():
    def program(pe):
        here = state.current()
        x = words()
        return torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream, here.driver.name, x.device.index

    found = world(4).run(program)
    gpus = torch.cuda.device_count()
    assert [entry[0] for entry in found] == [pe % gpus for pe in range(4)]
    assert len({entry[1] for entry in found}) == 4
    assert 0 not in {entry[1] for entry in found}
    assert [entry[3] for entry in found] == [pe % gpus for pe in range(4)]
    assert {entry[2] for entry in found} == {DEVICE}
    assert torch.cuda.current_stream().cuda_stream == 0


def test_preload_gives_turns():
    order = []

    def program(pe):
        def turn():
            order.append(pe)
            time.sleep(0.01)
            return torch.randn(4, device="cuda").sum().item()

        return mori.current_world().preload(turn) != 0.0

    assert world(3).run(program) == [True] * 3
    assert order == [0, 1, 2]


def test_a_barrier_on_the_stream():
    def program(pe):
        x, out, seen = words(), words(), []
        ctx, n = shmem.context(), shmem.shmem_npes()

        def turn():
            load(put_right_kernel, ctx, x, 1)
            load(copy_kernel, x, out)
            out.clone()

        mori.current_world().preload(turn)
        for step in range(1, 21):
            launch(put_right_kernel, (1,), ctx, x, 100 * step + pe)
            shmem.shmem_barrier_on_stream()
            launch(copy_kernel, (1,), x, out)
            shmem.shmem_barrier_on_stream(torch.cuda.current_stream())
            seen.append(out.clone())
        return [int(value) for value in seen] == [100 * step + (pe - 1) % n for step in range(1, 21)]

    for n in (1, 2, 8):
        assert world(n).run(program) == [True] * n


def test_memory_that_a_step_allocates_belongs_to_the_graph():
    def program(pe):
        x = torch.full((1 << 16,), float(pe), device="cuda")

        def step():
            doubled = x * 2
            # freed in the step and used again for the next
            return (doubled + 1).sqrt(), doubled

        step()
        graph = mori.current_world().graph(step)
        # what the step has freed is still the graph's, on every GPU
        torch.cuda.empty_cache()
        results = []
        for value in (3.0, 4.0):
            x.fill_(value + pe)
            other = torch.empty(1 << 16, device="cuda").fill_(-1.0)
            root, doubled = graph.replay()
            results.append(bool((root == (doubled + 1).sqrt()).all()) and doubled[7].item() == 2 * (value + pe))
            assert other[5].item() == -1.0
        return results

    assert world(3).run(program) == [[True, True]] * 3


def test_an_old_graph_that_is_garbage_when_the_next_is_captured():
    def program(pe):
        x = torch.zeros(4, device="cuda")
        loop = []

        def step():
            # enough new objects for a collection in the middle of the capture
            kept = [[i] for i in range(5000)]
            return x.add_(len(kept))

        step()
        for _ in range(4):
            # only the collector frees it
            loop = [mori.current_world().graph(step)]
            loop.append(loop)
        loop[0].replay()
        return x.tolist()

    assert gc.isenabled()
    assert world(2).run(program) == [[10000.0] * 4] * 2
    assert gc.isenabled()


def test_one_thread_may_replay_the_graph():
    """As a benchmark does: PE 0 launches, the others wait on the host."""

    def program(pe):
        signal_word, epoch, x, out = words(), words(), words(), words()
        mori.current_world().preload(lambda: load(round_kernel, shmem.context(), signal_word, epoch, x, out))

        def step():
            launch(round_kernel, (1,), shmem.context(), signal_word, epoch, x, out)

        step()
        shmem.shmem_barrier_all()
        graph = mori.current_world().graph(step)
        if pe == 0:
            for _ in range(10):
                graph.cuda_graph.replay()
            torch.cuda.synchronize()
        shmem.shmem_barrier_all()
        step()
        shmem.shmem_barrier_all()
        return int(epoch)

    assert world(3).run(program) == [12] * 3


@pytest.mark.parametrize("n", [2, 8])
def test_a_graph_of_kernels_that_were_only_loaded(n):
    assert world(n).run(graph_only, n) == [True] * n


def test_the_emulated_device_and_gpus_take_turns():
    active = mori.emulator.activate()
    try:
        with pytest.raises(StateError, match="emulated device"):
            world(1).run(ring, 1)
    finally:
        active.deactivate()
    assert world(1).run(ring, 1) == [True]
