"""`local_world` on the CPU: results, determinism, arguments."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import mori_triton as mori
from mori_triton import local_world, shmem
from mori_triton.device import shmem as dev
from mori_triton.device.launch import launch
from mori_triton.errors import ArgumentError, KernelFault, StateError, WeakMemoryError
from mori_triton.host import state
from tests.cpu_world_programs import ring, symmetric

pytestmark = pytest.mark.cpu


@triton.jit
def scan_kernel(ctx, x_ptr, out_ptr, signal_ptr, BLOCK: tl.constexpr):
    """A running sum through LDS between two operations whose own LDS lies in front of Triton's."""
    i = tl.arange(0, BLOCK)
    dev.signal_add(ctx, signal_ptr, 1, dev.my_pe(ctx))
    total = tl.cumsum(tl.load(x_ptr + i), 0)
    seen = dev.wait_ge(ctx, signal_ptr, 1, dev.my_pe(ctx), 0)
    tl.store(out_ptr + i, tl.flip(total, 0) + seen)


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


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
@pytest.mark.parametrize("seed", [None, 0, 5])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_ring_of_puts_and_signals(n, seed, arch):
    assert local_world(n, arch=arch, seed=seed).run(ring, 3) == [True] * n


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "gfx950", "gfx1250"])
@pytest.mark.parametrize("num_warps", [1, 4])
def test_local_memory_of_the_device_library_and_of_triton(arch, num_warps):
    def program(pe):
        signal = symmetric((1,), torch.int64)
        x, out = torch.arange(512) * 3 - pe, torch.full((512,), -1)
        launch(scan_kernel, (1,), shmem.context(), x, out, signal, BLOCK=512, num_warps=num_warps)
        return torch.equal(out, x.cumsum(0).flip(0) + 1)

    assert local_world(2, arch=arch, seed=1).run(program) == [True, True]


def test_weak_memory_keeps_a_correct_ring_correct():
    for seed in range(5):
        assert local_world(3, seed=seed, weak_memory=True).run(ring, 2) == [True] * 3


def late(pe, sem):
    data, flag = symmetric((1,), torch.int64), symmetric((1,), torch.int32)
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
        x = symmetric((4,), torch.int32)
        return [shmem.shmem_ptr_p2p(x.data_ptr(), pe, peer) != 0 for peer in range(4)]

    near, far = [True, True, False, False], [False, False, True, True]
    assert local_world(4, gpus_per_node=2).run(program) == [near, near, far, far]

    def stray(pe):
        x = symmetric((4,), torch.int64)
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


def test_lazy_attributes_of_the_package():
    assert mori.local_world is local_world


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
