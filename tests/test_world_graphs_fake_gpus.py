"""Preloading and graphs in worlds on GPUs, without one: what each PE does alone, and what one thread does for all."""

import gc
import threading
import time
import weakref

import pytest
import torch

import mori_triton as mori
from mori_triton import shmem
from mori_triton.device.launch import launch, load
from mori_triton.errors import PeerTimeout, StateError
from mori_triton.host import state
from tests.fake_gpu_worlds import fake, world  # noqa: F401
from tests.fake_gpus import FakeGpus
from tests.world_programs import ring_of_rounds, tell_kernel, wait_kernel, words

pytestmark = pytest.mark.cpu


def wait_then_load(pe, preloaded):
    """PE 0's kernel waits for PE 1, which has to load a kernel first."""
    signal, out = words(), torch.full((1,), -1)

    def turn():
        load(tell_kernel, shmem.context(), signal, 1)

    if preloaded:
        mori.current_world().preload(turn)
    if pe == 0:
        launch(wait_kernel, (1,), shmem.context(), signal, out, 3)
    state.current().meet("PE 0 waits")
    if pe == 1:
        launch(tell_kernel, (1,), shmem.context(), signal, 3)
    shmem.shmem_barrier_all()
    return int(out)


def test_loading_while_a_peer_waits_and_before():
    # so that compiling is no part of it
    assert world(2).run(wait_then_load, True) == [3, -1]
    with pytest.raises(PeerTimeout, match=r"on PE 0 waiting for PE 1: allocation 0 of PE 0, expected >= 3, saw 0"):
        world(2, timeout_s=0.5).run(wait_then_load, False)


def test_preload_is_one_pe_after_the_other_on_idle_devices(fake):  # noqa: F811
    order, at_once = [], threading.Lock()

    def load():
        assert at_once.acquire(blocking=False)
        pe = shmem.shmem_mype()
        order.append(pe)
        time.sleep(0.02)
        launch(tell_kernel, (1,), shmem.context(), signals[pe], 9)
        at_once.release()
        return 10 * pe

    signals = {}

    def program(pe):
        signals[pe] = words()
        result = mori.current_world().preload(load)
        # what a turn launched is done when it ends
        return result, int(signals[pe])

    assert world(3).run(program) == [(0, 9), (10, 9), (20, 9)]
    assert order == [0, 1, 2]
    order.clear()


@pytest.mark.parametrize("gpus", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_graph_of_chained_rounds(n, gpus, monkeypatch):
    monkeypatch.setattr(FakeGpus, "count", gpus)
    run = world(n) if gpus else mori.local_world(n)
    assert run.run(ring_of_rounds, n, 5, 2) == [True] * n


def test_a_step_is_captured_as_its_pe():
    def program(pe):
        seen = []

        def step():
            seen.append((shmem.shmem_mype(), threading.current_thread().name))
            # no rendezvous while one thread stands for all
            state.current().meet("a step")
            return pe

        graph = mori.current_world().graph(step)
        return seen, graph.replay(), graph.cuda_graph is not None

    assert world(2).run(program) == [([(0, "PE 0")], 0, True), ([(1, "PE 0")], 1, True)]
    assert mori.local_world(2).run(program) == [([(0, "PE 0")], 0, False), ([(1, "PE 1")], 1, False)]


def test_a_step_that_fails_names_its_pe():
    def program(pe):
        def step():
            if pe == 1:
                raise KeyError("in my step")

        mori.current_world().graph(step)

    with pytest.raises(KeyError, match="in my step") as caught:
        world(3).run(program)
    assert "raised by PE 1 of 3" in str(getattr(caught.value, "__notes__", caught.value.__cause__))


def test_a_step_must_not_make_collective_calls():
    def program(pe):
        mori.current_world().graph(shmem.shmem_barrier_all)

    start = time.monotonic()
    with pytest.raises(StateError, match=r"shmem_barrier_all .* of PE 0: world.graph: a step must not make collective"):
        world(2).run(program)
    assert time.monotonic() - start < 5


def test_a_graph_of_a_world_that_is_gone():
    """Its kernels have the addresses of memory that was given back."""
    graphs = {}
    gone = r"WorldGraph.replay: the memory that the graph uses was given back: shmem was finalized since"

    def program(pe):
        x = words()
        graphs[pe] = mori.current_world().graph(lambda: launch(tell_kernel, (1,), shmem.context(), x, 1))
        graphs[pe].replay()
        shmem.shmem_finalize()
        with pytest.raises(StateError, match="shmem was finalized"):
            graphs[pe].replay()
        shmem.shmem_init_attr(1, pe, 2, bytes(128))
        with pytest.raises(StateError, match=gone):
            graphs[pe].replay()

    def another(pe):
        with pytest.raises(StateError, match=gone):
            graphs[pe].replay()

    world(2).run(program)
    world(2).run(another)


def test_a_graph_that_the_program_drops_is_gone():
    def program(pe):
        used = threading.Event()
        graph = mori.current_world().graph(used.is_set)
        there = weakref.ref(graph), weakref.ref(used)
        del graph, used
        shmem.shmem_barrier_all()
        gc.collect()
        return [one() for one in there]

    assert world(2).run(program) == [[None, None]] * 2
