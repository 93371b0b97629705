"""`local_world` on the CPU: results, errors, order, deadlocks and time limits."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import local_world, shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch
from mori_triton.errors import (
    ArgumentError,
    Deadlock,
    HeapError,
    KernelFault,
    PeerTimeout,
    StateError,
    WeakMemoryError,
)
from mori_triton.host import state

pytestmark = pytest.mark.cpu


@triton.jit
def ring_kernel(ctx, x_ptr, signal_ptr, n, step, BLOCK: tl.constexpr):
    """Put x into the next PE's x + n, signal it, wait for the previous one."""
    next_pe = (dev.my_pe(ctx) + 1) % dev.n_pes(ctx)
    prev_pe = (dev.my_pe(ctx) + dev.n_pes(ctx) - 1) % dev.n_pes(ctx)
    i = tl.arange(0, BLOCK)
    there = dev.remote_ptr(ctx, x_ptr, next_pe)
    tl.store(there + n + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)
    dev.signal_add(ctx, signal_ptr, 1, next_pe)
    dev.wait_ge(ctx, signal_ptr, step, prev_pe, 0)


@triton.jit
def scan_kernel(ctx, x_ptr, out_ptr, signal_ptr, BLOCK: tl.constexpr):
    """A running sum through LDS between two operations whose own LDS lies in front of Triton's."""
    i = tl.arange(0, BLOCK)
    dev.signal_add(ctx, signal_ptr, 1, dev.my_pe(ctx))
    total = tl.cumsum(tl.load(x_ptr + i), 0)
    seen = dev.wait_ge(ctx, signal_ptr, 1, dev.my_pe(ctx), 0)
    tl.store(out_ptr + i, tl.flip(total, 0) + seen)


@triton.jit
def wait_kernel(ctx, signal_ptr, out_ptr, want, peer):
    """out = what the wait saw."""
    tl.store(out_ptr, dev.wait_ge(ctx, signal_ptr, want, peer, 0))


@triton.jit
def spin_kernel(flag_ptr):
    """A loop of its own, without a limit."""
    while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
        pass


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


@triton.jit
def store_kernel(address, value):
    tl.store(address.to(tl.pointer_type(tl.int64)), value)


@triton.jit
def late_kernel(data_ptr, flag_ptr, out_ptr, me, SEM: tl.constexpr):
    """PE 0 stores data and then raises a flag with `SEM`; PE 1 waits for the flag and reads the data."""
    if me == 0:
        tl.store(data_ptr, 42)
        tl.debug_barrier()
        tl.atomic_xchg(flag_ptr, 1, sem=SEM, scope="sys")
    else:
        while tl.atomic_add(flag_ptr, 0, sem="acquire", scope="sys") == 0:
            pass
        tl.store(out_ptr, tl.load(data_ptr))


def symmetric(shape, dtype, name):
    """A zeroed symmetric tensor that every PE has zeroed."""
    tensor = shmem.mori_shmem_create_tensor(shape, dtype)
    tensor.zero_()
    shmem.shmem_barrier_all()
    return tensor


def notes(error):
    """What the world added to an error; Python 3.10 has no notes."""
    return "; ".join(getattr(error, "__notes__", [str(error.__cause__)]))


def ring(pe, rounds):
    n = shmem.shmem_npes()
    x, signal = symmetric((128,), torch.int32, "x"), symmetric((1,), torch.int64, "signal")
    seen = []
    for step in range(1, rounds + 1):
        x[:64] = 1000 * step + pe
        launch(ring_kernel, (1,), shmem.context(), x, signal, 64, step, BLOCK=64)
        seen.append(x[64:].tolist() == [1000 * step + (pe - 1) % n] * 64)
        shmem.shmem_barrier_all()
    return all(seen)


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_ring_of_puts_and_signals(n, seed, arch):
    assert local_world(n, arch=arch, seed=seed).run(ring, 3) == [True] * n


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "gfx950", "gfx1250"])
@pytest.mark.parametrize("num_warps", [1, 4])
def test_local_memory_of_the_device_library_and_of_triton(arch, num_warps):
    def program(pe):
        signal = symmetric((1,), torch.int64, "signal")
        x, out = torch.arange(512) * 3 - pe, torch.full((512,), -1)
        launch(scan_kernel, (1,), shmem.context(), x, out, signal, BLOCK=512, num_warps=num_warps)
        return torch.equal(out, x.cumsum(0).flip(0) + 1)

    assert local_world(2, arch=arch, seed=1).run(program) == [True, True]


def test_weak_memory_keeps_a_correct_ring_correct():
    for seed in range(5):
        assert local_world(3, seed=seed, weak_memory=True).run(ring, 2) == [True] * 3


def late(pe, sem):
    data, flag = symmetric((1,), torch.int64, "data"), symmetric((1,), torch.int32, "flag")
    out = torch.full((1,), -1)
    heap = state.current().heap
    late_kernel[(1,)](heap.peer_tensor(data, 1), heap.peer_tensor(flag, 1), out, pe, SEM=sem)
    return int(out)


def test_weak_memory_finds_a_missing_release():
    assert {local_world(2, seed=s, weak_memory=True).run(late, "release")[1] for s in range(4)} == {42}
    # without the mode the host's strong memory hides the fault
    assert local_world(2, seed=0).run(late, "relaxed")[1] == 42
    reports = set()
    for seed in range(6):
        with contextlib.suppress(WeakMemoryError):
            local_world(2, seed=seed, weak_memory=True).run(late, "relaxed")
            continue
        reports.add(seed)
    assert reports
    with pytest.raises(WeakMemoryError, match="missing: a release of system scope on PE 0 after the store reached it"):
        local_world(2, seed=min(reports), weak_memory=True).run(late, "relaxed")


def test_results_are_indexed_by_pe_and_arguments_are_passed():
    assert local_world(3).run(lambda pe, a, b: (pe, a, b), "x", 2) == [(0, "x", 2), (1, "x", 2), (2, "x", 2)]


def test_a_world_can_run_again_and_worlds_may_follow_each_other():
    world = local_world(2, seed=1)
    assert world.run(ring, 1) == [True] * 2
    assert world.run(ring, 2) == [True] * 2
    assert local_world(3, arch="gfx942").run(ring, 1) == [True] * 3
    assert world.run(ring, 1) == [True] * 2


def test_worlds_at_once_and_nested():
    results = {}

    def inside(arch, n):
        results[arch] = local_world(n, arch=arch).run(ring, 2)

    threads = [threading.Thread(target=inside, args=pair) for pair in (("gfx1201", 2), ("gfx942", 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"gfx1201": [True] * 2, "gfx942": [True] * 3}

    def nested(pe):
        inner = local_world(2, seed=pe).run(ring, 1)
        return inner, shmem.shmem_mype(), shmem.shmem_npes()

    for seed in (None, 4):
        assert local_world(2, seed=seed).run(nested) == [([True] * 2, 0, 2), ([True] * 2, 1, 2)]


def test_pes_of_different_nodes_do_not_reach_each_other():
    def program(pe):
        x = symmetric((4,), torch.int32, "x")
        return [shmem.shmem_ptr_p2p(x.data_ptr(), pe, peer) != 0 for peer in range(4)]

    near, far = [True, True, False, False], [False, False, True, True]
    assert local_world(4, gpus_per_node=2).run(program) == [near, near, far, far]

    def stray(pe):
        x = symmetric((4,), torch.int64, "x")
        others = state.current().bootstrap.allgather(x.data_ptr().to_bytes(8, "little"))
        if pe == 0:
            store_kernel[(1,)](int.from_bytes(others[1], "little"), 5, num_warps=1)

    local_world(2, gpus_per_node=2).run(stray)
    with pytest.raises(KernelFault, match=r"store_kernel of PE 0.*nearest"):
        local_world(2, gpus_per_node=1).run(stray)


def test_finalize_and_init_again_inside():
    def program(pe):
        assert ring(pe, 1)
        shmem.shmem_finalize()
        with pytest.raises(StateError, match="finalized"):
            shmem.shmem_mype()
        shmem.shmem_init_attr(1, pe, 2, bytes(128))
        return ring(pe, 2)

    for seed in (None, 3):
        assert local_world(2, seed=seed).run(program) == [True, True]


# ------------------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize("seed", [None, 2])
def test_an_exception_in_one_pe_ends_the_others_and_is_raised(seed):
    ended = []

    def program(pe):
        if pe == 2:
            symmetric((1,), torch.int32, "flag")
            raise KeyError("mine")
        try:
            flag = symmetric((1,), torch.int32, "flag")
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


# -------------------------------------------------------------------------------------------- deadlocks and limits
def waits_for_nothing(pe):
    signal, out = symmetric((1,), torch.int64, "signal"), torch.full((1,), -1)
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
        flag = symmetric((1,), torch.int32, "flag")
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
        flag, out = symmetric((1,), torch.int32, "flag"), torch.zeros(1, dtype=torch.int32)
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
        flag, signal = symmetric((1,), torch.int32, "flag"), symmetric((1,), torch.int64, "signal")
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
        flag, out = symmetric((1,), torch.int32, "flag"), torch.full((2,), -1, dtype=torch.int32)
        kernels.wait_with_limit[(1,)](flag, out, 10**9, GFX12=True, num_warps=1)
        return out.tolist()

    assert local_world(2, seed=1).run(program) == [[0, 1], [0, 1]]


# --------------------------------------------------------------------------------------------------- determinism
def trace(seed):
    """What one seeded run of the ring did, in order: the hash of every switch, and when each PE came by."""
    from mori_triton.emulator import scheduler

    order = []

    def program(pe):
        for step in range(3):
            order.append((pe, step, scheduler.current().coordinator.trace_hash))
            assert ring(pe, 1)

    local_world(3, seed=seed).run(program)
    return order


def test_the_seed_alone_decides_everything():
    assert trace(3) == trace(3)
    assert len({str(trace(seed)) for seed in range(4)}) == 4
    code = "from tests.test_world import trace; import sys; sys.stdout.write(str(trace(3)))"
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=env, cwd=root, check=False
    )
    assert done.stdout == str(trace(3)), done.stderr[-2000:]


# ----------------------------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(("arguments", "text"), [
    ({"n": 0}, "n: want a number of PEs from 1, got 0"),
    ({"n": "2"}, "n: want a number of PEs from 1, got '2'"),
    ({"n": True}, "n: want a number of PEs from 1, got True"),
    ({"device": "tpu"}, "device: want \"cpu\", \"cuda\", \"hip\" or \"auto\", got 'tpu'"),
    ({"device": "cuda", "arch": "gfx942"}, "arch: want None on \"cuda\": it is for the emulated device .*'gfx942'"),
    ({"device": "hip", "seed": 1}, 'seed: want None on "hip".*got 1'),
    ({"device": "cuda", "weak_memory": True, "seed": None}, 'weak_memory: want False on "cuda".*got True'),
    ({"heap_size": "20Mabc"}, "heap_size: want .*got '20Mabc'"),
    ({"heap_size": 0}, "heap_size"),
    ({"gpus_per_node": 0}, "gpus_per_node: want None or a number from 1, got 0"),
    ({"arch": "gfx90a"}, "arch: want gfx942 or .*'gfx90a'"),
    ({"seed": 1.5}, "seed: want None or an integer, got 1.5"),
    ({"weak_memory": True}, "weak_memory: want a seed"),
    ({"weak_memory": 1, "seed": 1}, "weak_memory: want True or False, got 1"),
    ({"timeout_s": 0}, "timeout_s: want .*got 0"),
    ({"timeout_s": float("nan")}, "timeout_s: want .*got nan"),
])  # fmt: skip
def test_arguments_that_cannot_be(arguments, text):
    with pytest.raises(ArgumentError, match=text):
        local_world(**{"n": 2, **arguments})


def test_the_program_has_to_be_callable():
    with pytest.raises(ArgumentError, match="program: want a function of the PE's number, got int"):
        local_world(2).run(5)


def test_a_heap_that_is_too_small_says_so():
    def program(pe):
        shmem.shmem_malloc(1 << 20)

    with pytest.raises(HeapError, match=r"no room.*heap_size="):
        local_world(2, heap_size="64K").run(program)


# ------------------------------------------------------------------------------------------------------- leftovers
def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_nothing_is_left_behind():
    def program(pe):
        x = symmetric((8 << 20,), torch.uint8, "x")
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


def test_lazy_attributes_of_the_package():
    assert mori.local_world is local_world
