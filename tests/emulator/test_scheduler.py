"""Who runs when and when nothing can: standstills and time limits, many host threads under one seed."""

import random
import time

import numpy as np
import pytest

from mori_triton.emulator import launch, scheduler
from mori_triton.emulator.machine import VIRTUAL_JUMP, Event, Machine
from mori_triton.errors import Deadlock, PeerTimeout
from tests.emulator.hosts import in_threads
from tests.emulator.snippets import ADD_ONE, ASK, BARRIER_OF_SOME, POINTER, SPIN, finish, kernel

pytestmark = pytest.mark.cpu


def test_polling_for_ever_becomes_quiet():
    m, x = Machine(5), launch.Launch(kernel(SPIN, args=[POINTER]), (2, 1, 1), [np.zeros(1, np.uint32)], num_warps=2)
    m.submit(x)
    events = []
    while not events or events[-1] == Event.LIMIT:
        events.append(m.run(100_000))
    assert events[-1] == Event.QUIET
    assert m.instructions < 1_000_000
    lines = m.waiting_waves()
    assert len(lines) == 4
    assert all("k, workgroup" in line and "line " in line for line in lines)


def test_polling_between_barriers_becomes_quiet():
    """Shorter between barriers than any quantum: no turn ends but at a barrier."""
    body = SPIN.replace("\ts_cmp_eq_u32 s5, 0", "\ts_barrier_signal -1\n\ts_barrier_wait -1\n\ts_cmp_eq_u32 s5, 0")
    m = Machine(5, quantum=(50, 60))
    m.submit(launch.Launch(kernel(body, args=[POINTER]), (2, 1, 1), [np.zeros(1, np.uint32)], num_warps=2))
    for _ in range(20):
        if (event := m.run(100_000)) != Event.LIMIT:
            break
    assert event == Event.QUIET


COUNTED_POLLS = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\ts_mov_b32 s6, {polls}
again:
\tglobal_load_b32 v2, v1, s[2:3] scope:SCOPE_SYS
\tv_readfirstlane_b32 s5, v2
\ts_add_co_i32 s6, s6, -1
\ts_cmp_eq_u32 s6, 0
\ts_cbranch_scc0 again
\tglobal_store_b32 v1, v0, s[2:3] offset:4 scope:SCOPE_SYS
\ts_endpgm
"""


def test_a_loop_that_counts_its_polls_is_no_standstill():
    """Beside waves that poll for ever, and one that waits for what the counting loop stores."""
    words = np.zeros(3, np.uint32)
    counts = launch.Launch(kernel(COUNTED_POLLS.format(polls=50_000), args=[POINTER]), (1, 1, 1), [words], num_warps=1)
    waits = launch.Launch(kernel(SPIN, args=[POINTER]), (2, 1, 1), [words[2:]], num_warps=2)
    m = Machine(5)
    m.submit(counts)
    m.submit(waits)
    while (event := m.run(100_000)) == Event.LIMIT:
        pass
    assert event == Event.FINISHED
    assert m.finished() is counts
    while (event := m.run(100_000)) == Event.LIMIT:
        pass
    assert event == Event.QUIET


def test_a_loop_that_counts_in_local_memory_is_no_standstill():
    """Between two rounds its registers are the same."""
    body = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\tds_store_b32 v1, v1
again:
\tds_add_u32 v1, v2
\tds_load_b32 v3, v1
\tv_readfirstlane_b32 s5, v3
\ts_cmp_ge_u32 s5, 0x40000
\ts_movk_i32 s5, 0
\tv_mov_b32_e32 v3, 0
\tglobal_load_b32 v4, v1, s[2:3] scope:SCOPE_SYS
\ts_cbranch_scc0 again
\ts_endpgm
"""
    x = launch.Launch(kernel(body, args=[POINTER], lds=4), (1, 1, 1), [np.zeros(1, np.uint32)], num_warps=1)
    assert Event.FINISHED in finish(Machine(5), x)


def test_a_loop_that_counts_for_ever_becomes_quiet():
    body = COUNTED_POLLS.format(polls=0x7FFFFFFF)
    m = Machine(5)
    m.submit(launch.Launch(kernel(body, args=[POINTER]), (1, 1, 1), [np.zeros(2, np.uint32)], num_warps=1))
    while (event := m.run(1_000_000)) == Event.LIMIT:
        pass
    assert event == Event.QUIET


@pytest.mark.parametrize("body", ["again:\n\ts_branch again", "again:\n\ts_not_b32 s4, s4\n\ts_branch again"])
def test_loops_that_do_nothing_become_quiet(body):
    m = Machine(5)
    m.submit(launch.Launch(kernel(body), (2, 1, 1), [], num_warps=2))
    while (event := m.run(1_000_000)) == Event.LIMIT:
        assert m.instructions < 100_000_000
    assert event == Event.QUIET


def test_long_work_without_a_store_is_no_standstill():
    """Neither for the waves that work nor for those that wait at a barrier or in LDS for them."""
    body = """
\tv_mov_b32_e32 v2, 0
\tv_mov_b32_e32 v3, 1
\tv_readfirstlane_b32 s5, v0
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 work
poll:
\tds_load_b32 v1, v2
\tv_readfirstlane_b32 s6, v1
\ts_cmp_eq_u32 s6, 0
\ts_cbranch_scc1 poll
\ts_movk_i32 s5, 0
work:
\ts_mov_b32 s4, 0x400000
next:
\ts_add_co_i32 s4, s4, -1
\ts_cmp_lg_u32 s4, 0
\ts_cbranch_scc1 next
\tds_store_b32 v2, v3
back:
\ts_cmp_eq_u32 s5, 0
\ts_endpgm
"""
    m, x = Machine(5), launch.Launch(kernel(body, lds=64), (1, 1, 1), [], num_warps=2)
    assert Event.FINISHED in finish(m, x)
    assert m.instructions > 20_000_000


@pytest.mark.parametrize("seed", [None, 5])
def test_many_barriers_are_no_standstill(seed):
    """Work between barriers, without a store for long, beside a workgroup that polls for its end."""
    body = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\ts_cmp_eq_u32 ttmp9, 0
\ts_cbranch_scc1 poll
\ts_movk_i32 s4, 0x3000
work:
\ts_barrier_signal -1
\ts_barrier_wait -1
\ts_add_i32 s4, s4, -1
\ts_cmp_lg_u32 s4, 0
\ts_cbranch_scc1 work
\tglobal_atomic_add_u32 v1, v2, s[2:3] scope:SCOPE_SYS
\ts_endpgm
poll:
\tglobal_load_b32 v3, v1, s[2:3] scope:SCOPE_SYS
\tv_readfirstlane_b32 s5, v3
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 poll
\ts_endpgm
"""
    count, start = np.zeros(1, np.uint32), time.monotonic()
    m, x = Machine(seed), launch.Launch(kernel(body, args=[POINTER]), (2, 1, 1), [count], num_warps=2)
    m.submit(x)
    while (event := m.run(10_000_000)) != Event.FINISHED:
        assert event == Event.LIMIT
    assert count[0] == 64
    # no naps while a workgroup works
    assert time.monotonic() - start < 5


def test_a_barrier_that_cannot_be_met_is_reported():
    # the first wave waits at a barrier, the second only sleeps
    m, x = Machine(5), launch.Launch(kernel(BARRIER_OF_SOME), (1, 1, 1), [], num_warps=2)
    m.submit(x)
    while (event := m.run(100_000)) == Event.LIMIT:
        pass
    assert event == Event.QUIET
    assert "wave 1, line" in m.waiting_waves()[0]
    assert "wave 0 at a barrier" in m.waiting_waves()[1]


def test_own_spin_loops_end_at_the_time_limit_when_others_may_write():
    x = launch.Launch(kernel(SPIN, args=[POINTER], name="spins"), (1, 1, 1), [np.zeros(1, np.uint32)], num_warps=1)
    with pytest.raises(PeerTimeout, match=r"nothing changed for 0.2 s\n  spins, workgroup 0, wave 0, line"):
        scheduler.Parallel(timeout_s=0.2).execute(x)


def test_a_launch_ends_when_another_thread_says_so():
    import threading

    executor = scheduler.Parallel()
    x = launch.Launch(kernel(SPIN, args=[POINTER]), (1, 1, 1), [np.zeros(1, np.uint32)], num_warps=1)
    timer = threading.Timer(0.05, executor.abort)
    timer.start()
    with pytest.raises(scheduler.Aborted, match="was ended"):
        executor.execute(x)
    with pytest.raises(scheduler.Aborted, match="was not started"):
        executor.execute(x)
    timer.join()


def test_a_thread_may_answer_in_a_parallel_world():
    """What agents are under a seed are threads here: kernels see what they write, and time out when they stop."""
    import threading

    words, stop, draw = np.zeros(3, np.uint32), threading.Event(), random.Random(1)

    def serve():
        while not stop.wait(draw.uniform(0, 0.02)):
            if words[1] < min(words[0], 20):
                words[1] += 1

    thread = threading.Thread(target=serve)
    thread.start()
    executor = scheduler.Parallel(timeout_s=0.3)
    rounds = launch.Launch(kernel(ASK.format(rounds=20, think=1), args=[POINTER]), (1, 1, 1), [words], num_warps=1)
    executor.execute(rounds)
    assert words.tolist() == [20, 20, 0]
    one_more = launch.Launch(kernel(ASK.format(rounds=1, think=1), args=[POINTER]), (1, 1, 1), [words], num_warps=1)
    with pytest.raises(PeerTimeout, match=r"nothing changed for 0\.3 s"):
        executor.execute(one_more)
    stop.set()
    thread.join()


def test_more_waves_than_fit_are_counted():
    m = Machine(5, resident=2)
    m.submit(launch.Launch(kernel(SPIN, args=[POINTER]), (9, 1, 1), [np.zeros(1, np.uint32)], num_warps=20))
    m.run(1000)
    lines = m.waiting_waves()
    assert len(lines) == 18
    assert lines[0] == "k: 7 workgroups wait for one of 2 places"
    assert lines[-1] == "k: and 24 more waves"
    assert len(m.waiting_waves(limit=99)) == 41


# -------------------------------------------------------------------------------------------------- coordinator
def test_exactly_one_host_runs_at_a_time_and_the_seed_decides_which():
    def order(seed):
        coordinator, trace, turn = scheduler.Coordinator(3, seed), [], []

        def body(host):
            for i in range(5):
                assert not turn
                turn.append(host.index)
                trace.append((host.index, i))
                turn.pop()
                host.wait(lambda: True, "a turn")

        assert in_threads(coordinator, body, body, body) == [None] * 3
        return tuple(trace), coordinator.trace_hash

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(6)}) == 6


def test_hosts_that_wait_for_ever_are_a_deadlock():
    coordinator = scheduler.Coordinator(2, 1)
    first, second = in_threads(
        coordinator, lambda host: host.wait(lambda: False, "PE 0 waits for a miracle"), lambda host: None
    )
    # whoever finds out; the world raises the cause
    found = first.__cause__ if isinstance(first, scheduler.Aborted) else first
    assert isinstance(found, Deadlock)
    assert "PE 0 waits for a miracle" in str(found)
    assert second is None


def test_a_kernel_waits_for_what_another_hosts_kernel_writes():
    flag, spin, write = np.zeros(1, np.uint32), kernel(SPIN, args=[POINTER]), kernel(ADD_ONE, args=[POINTER])
    for seed in range(5):
        flag[0] = 0
        coordinator = scheduler.Coordinator(2, seed)
        results = in_threads(
            coordinator,
            lambda host: host.execute(launch.Launch(spin, (4, 1, 1), [flag], num_warps=1)),
            lambda host: host.execute(launch.Launch(write, (1, 1, 1), [flag], num_warps=1)),
        )
        assert results == [None, None]
        assert flag[0] == 1


THINK_AFTER_SPIN = (
    SPIN.removesuffix("\ts_endpgm\n")
    + """
\ts_mov_b32 s6, 200000
think:
\ts_add_co_i32 s6, s6, -1
\ts_cmp_eq_u32 s6, 0
\ts_cbranch_scc0 think
\tv_mov_b32_e32 v2, 7
\tglobal_store_b32 v1, v2, s[2:3] offset:4 scope:SCOPE_SYS
\ts_endpgm
"""
)


@pytest.mark.parametrize("waves", [1, 3])
def test_a_host_may_write_what_waves_poll_that_nothing_else_could_help(waves):
    """What was known of the waves before is no longer so: they have time to think, and store late."""
    words, think = np.zeros(2, np.uint32), kernel(THINK_AFTER_SPIN, args=[POINTER])
    for seed in range(3):
        words[:] = 0
        coordinator = scheduler.Coordinator(2, seed)

        def writes(host, coordinator=coordinator):
            idle = []
            while not any(idle):
                # asked before each switch
                host.wait(lambda: idle.append(coordinator._device_idle) is None, "a turn")
            words[0] = 1

        def launches(host):
            host.execute(launch.Launch(think, (1, 1, 1), [words], num_warps=waves))

        assert in_threads(coordinator, launches, writes) == [None, None]
        assert words.tolist() == [1, 7]
        # or every wait with a limit would have reached it
        assert coordinator.machine.instructions < VIRTUAL_JUMP


def test_a_failing_host_ends_the_others():
    flag = np.zeros(1, np.uint32)
    spin = kernel(SPIN, args=[POINTER])

    def fails(host):
        raise ValueError("no")

    coordinator = scheduler.Coordinator(3, 2)
    results = in_threads(
        coordinator,
        lambda host: host.execute(launch.Launch(spin, (1, 1, 1), [flag], num_warps=1)),
        fails,
        lambda host: host.wait(lambda: False, "nothing"),
    )
    assert [type(r) for r in results] == [scheduler.Aborted, ValueError, scheduler.Aborted]
    assert results[0].__cause__ is results[1]
