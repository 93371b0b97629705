"""`local_world` on the CPU when a PE fails: what is raised, that all PEs end, and that nothing is left behind."""

import gc
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
import triton

from mori_triton import local_world, shmem
from mori_triton.errors import Deadlock, HeapError, PeerTimeout, StateError
from tests.cpu_world_programs import notes, ring, spin_kernel, symmetric

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("seed", [None, 2])
def test_an_exception_in_one_pe_ends_the_others_and_is_raised(seed):
    ended = []

    def program(pe):
        if pe == 2:
            symmetric((1,), torch.int32)
            raise KeyError("mine")
        try:
            flag = symmetric((1,), torch.int32)
            if pe == 0:
                spin_kernel[(1,)](flag, num_warps=1)
            shmem.shmem_barrier_all()
        except BaseException as error:
            ended.append(type(error).__mro__[1])
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="mine") as caught:
        local_world(3, seed=seed, timeout_s=60).run(program)
    assert time.monotonic() - start < 20
    assert len(ended) == 2
    assert notes(caught.value) == "raised by PE 2 of 3"


def test_the_world_is_usable_after_a_failure():
    world = local_world(2)
    with pytest.raises(ZeroDivisionError):
        world.run(lambda pe: 1 // (1 - pe))
    assert world.run(ring, 1) == [True, True]


def test_ctrl_c_ends_the_world():
    def program(pe):
        spin_kernel[(1,)](torch.zeros(1, dtype=torch.int32), num_warps=1)

    threads = set(threading.enumerate())
    timer = threading.Timer(1.0, signal.raise_signal, [signal.SIGINT])
    # a process that was started in the background ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            local_world(2, timeout_s=60).run(program)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    for _ in range(50):
        if set(threading.enumerate()) <= threads:
            break
        time.sleep(0.1)
    assert set(threading.enumerate()) <= threads
    assert local_world(2).run(ring, 1) == [True, True]


@pytest.mark.parametrize("seed", [None, 1])
def test_a_thread_that_cannot_be_started_ends_the_world(seed, monkeypatch):
    start, before = threading.Thread.start, threading.active_count()

    def refuse_pe_1(thread):
        if thread.name == "PE 1":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_pe_1)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="can't start new thread"):
        local_world(3, seed=seed).run(ring, 1)
    assert time.monotonic() - begin < 5
    monkeypatch.undo()
    assert threading.active_count() <= before
    assert local_world(2, seed=seed).run(ring, 1) == [True, True]


@pytest.mark.parametrize("seed", [None, 1])
def test_pes_in_different_collectives(seed):
    def program(pe):
        if pe:
            shmem.shmem_malloc(64)
        else:
            shmem.shmem_barrier_all()

    with pytest.raises((StateError, HeapError), match=r"PE 0: .*barrier.*PE 1: .*malloc"):
        local_world(2, seed=seed).run(program)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_pe_that_leaves_early_is_missed(seed):
    def program(pe):
        if pe == 0:
            shmem.shmem_barrier_all()

    with pytest.raises((Deadlock, PeerTimeout, StateError), match=r"PE 1|finalize"):
        local_world(2, seed=seed, timeout_s=5).run(program)


def test_a_heap_that_is_too_small_says_so():
    def program(pe):
        shmem.shmem_malloc(1 << 20)

    with pytest.raises(HeapError, match=r"no room.*heap_size="):
        local_world(2, heap_size="64K").run(program)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_is_left_behind():
    def program(pe):
        x = symmetric((8 << 20,), torch.uint8)
        x.fill_(1)
        shmem.shmem_barrier_all()
        assert ring(pe, 1)

    world = local_world(4)
    world.run(program)
    gc.collect()
    threads, before = set(threading.enumerate()), resident_bytes()
    for _ in range(5):
        world.run(program)
    with pytest.raises(ValueError, match="stop"):
        world.run(lambda pe: (program(pe), (_ for _ in ()).throw(ValueError("stop"))))
    gc.collect()
    assert set(threading.enumerate()) == threads
    assert resident_bytes() - before < 48 << 20
    assert triton.runtime.driver._active is None
