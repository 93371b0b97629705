"""The machine and its scheduler below Triton: order, determinism, arguments, faults, deadlocks, places."""

import ctypes
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton.emulator import device, jit, launch, machine, module, scheduler
from mori_triton.emulator import state as lay
from mori_triton.emulator.machine import Event, Machine
from mori_triton.errors import ArgumentError, Deadlock, KernelFault, PeerTimeout, StateError

pytestmark = pytest.mark.cpu


def kernel(body, *, arch="gfx1201", args=(), lds=0, name="k"):
    """A module from a few lines of assembly; `args`: (bytes, kind) of each kernel argument."""
    lines, at = [], 0
    for size, kind in args:
        at = -(-at // size) * size
        lines.append(f"      - .offset:         {at}\n        .size:           {size}\n        .value_kind:     {kind}")
        at += size
    text = f"""
\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
\t.text
{name}:
{body}
\t.amdhsa_kernel {name}
\t\t.amdhsa_group_segment_fixed_size {lds}
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
{chr(10).join(lines)}
    .group_segment_fixed_size: {lds}
...
\t.end_amdgpu_metadata
"""
    return module.Module(module.load_code(text))


ADD_ONE = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_cmp_eq_u32_e32 vcc_lo, 0, v0
\ts_and_saveexec_b32 s4, vcc_lo
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\tglobal_atomic_add_u32 v1, v2, s[2:3] scope:SCOPE_SYS
\ts_endpgm
"""
POINTER = (8, "global_buffer")
SPIN = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
again:
\tglobal_load_b32 v2, v1, s[2:3] scope:SCOPE_SYS
\tv_readfirstlane_b32 s5, v2
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 again
\ts_endpgm
"""
BARRIER_OF_SOME = """
\tv_readfirstlane_b32 s5, v0
\ts_cmp_eq_u32 s5, 0
\ts_cbranch_scc1 wait
spin:
\ts_sleep 1
\ts_branch spin
wait:
\ts_barrier_signal -1
\ts_barrier_wait -1
\ts_endpgm
"""


def finish(m, *launches):
    """Run to the end of all launches; the events on the way."""
    for x in launches:
        m.submit(x)
    events = []
    while m.launches:
        events.append(m.run(10_000))
        if events[-1] == Event.FINISHED:
            m.finished()
        assert events[-1] in (Event.FINISHED, Event.LIMIT)
    return events


def test_structures_agree_with_the_compiled_scheduler():
    machine._functions()
    words = (ctypes.c_uint64 * 13).from_address(_global("mori_emulator_layout"))
    control, state = launch.LaunchControl, machine.SchedulerState
    assert list(words) == [
        lay.SCC, lay.COUNT, lay.FN, lay.LAUNCH, 512 + 8 * 21, lay.WEAK, 48, 32,
        ctypes.sizeof(control), control.ended.offset, ctypes.sizeof(state), state.quiet_polls.offset,
        lay.CLOCK_READS,
    ]  # fmt: skip


def _global(name):
    with jit._lock:
        return jit._start().get_global_value_address(name)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("groups", "waves", "resident"), [(1, 1, 64), (5, 3, 2), (200, 1, 64), (130, 2, 1)])
def test_every_workgroup_runs_once(seed, groups, waves, resident):
    k, count = kernel(ADD_ONE, args=[POINTER]), np.zeros(1, np.uint32)
    m = Machine(seed, resident=resident)
    finish(m, launch.Launch(k, (groups, 1, 1), [count], num_warps=waves))
    assert count[0] == groups
    assert m.instructions >= 5 * groups * waves


def test_launches_of_several_sizes_share_a_machine():
    k, count, m = kernel(ADD_ONE, args=[POINTER]), np.zeros(3, np.uint32), Machine(7)
    finish(m, *(launch.Launch(k, (30 * (i + 1), 1, 1), [count[i:]], num_warps=1 + i) for i in range(3)))
    assert count.tolist() == [30, 60, 90]
    finish(m, launch.Launch(k, (500, 1, 1), [count], num_warps=4))
    assert count[0] == 530


def test_an_empty_launch_has_ended_when_it_is_submitted():
    m, x = Machine(), launch.Launch(kernel(ADD_ONE, args=[POINTER]), (0, 3, 1), [np.zeros(1)])
    m.submit(x)
    assert x.control.ended == 1
    assert not m.launches


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 40), st.integers(1, 4))
def test_a_seed_repeats_exactly(seed, groups, waves):
    def once(s):
        k, count, m = kernel(ADD_ONE, args=[POINTER]), np.zeros(1, np.uint32), Machine(s, quantum=(1, 8))
        finish(m, launch.Launch(k, (groups, 1, 1), [count], num_warps=waves))
        assert count[0] == groups
        return m.trace_hash, m.instructions, m.switches

    assert once(seed) == once(seed)


def test_seeds_differ():
    def once(seed):
        k, m = kernel(ADD_ONE, args=[POINTER]), Machine(seed, quantum=(1, 8))
        finish(m, launch.Launch(k, (20, 1, 1), [np.zeros(1, np.uint32)], num_warps=2))
        return m.trace_hash

    assert len({once(seed) for seed in range(20)}) == 20


def test_virtual_time_is_the_number_of_instructions():
    body = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\ts_sendmsg_rtn_b64 s[4:5], sendmsg(MSG_RTN_GET_REALTIME)
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, s4
\tglobal_store_b32 v1, v2, s[2:3]
\ts_endpgm
"""
    out, m = np.zeros(1, np.uint32), Machine(1)
    m.state.clock = 1000
    finish(m, launch.Launch(kernel(body, args=[POINTER]), (1, 1, 1), [out], num_warps=1))
    assert 1000 <= out[0] <= 1006
    assert m.instructions == 1006


# ------------------------------------------------------------------------------------------------------- faults
def test_a_fault_names_everything():
    body = ADD_ONE.replace("v_mov_b32_e32 v1, 0", "v_mov_b32_e32 v1, 64")
    k, m = kernel(body, args=[POINTER], name="bad"), Machine(1)
    x = launch.Launch(k, (3, 1, 1), [np.zeros(4, np.uint32)], num_warps=1, names=["counter"])
    m.submit(x)
    assert m.run(1000) == Event.FAULT
    found, error = m.fault()
    assert found is x
    text = str(error)
    for part in ("global access outside every registered range", "bad, workgroup", "wave 0", "`global_atomic_add_u32",
                 "line ", "past the end of argument counter"):  # fmt: skip
        assert part in text, text
    m.retire(x)
    assert m.state.num_ready == 0


def test_a_jump_to_nowhere_is_a_fault():
    body = "\ts_mov_b32 s2, 0x1234\n\ts_mov_b32 s3, 0\n\ts_setpc_b64 s[2:3]\n"
    x = launch.Launch(kernel(body), (1, 1, 1), [], num_warps=1)
    with pytest.raises(KernelFault, match="jump to an unknown address"):
        scheduler.Parallel().execute(x)


def test_arguments_have_to_fit():
    with pytest.raises(ArgumentError, match="arguments of k: want 1, got 2"):
        launch.Launch(kernel(ADD_ONE, args=[POINTER]), (1, 1, 1), [0, 0])
    with pytest.raises(ArgumentError, match="argument 0: want a CPU tensor, a number or None, got str"):
        launch.Launch(kernel(ADD_ONE, args=[POINTER]), (1, 1, 1), ["x"])


VALUES = {
    "i1": (st.booleans(), 1, int),
    "i8": (st.integers(-128, 127), 1, None),
    "i16": (st.integers(-(2**15), 2**15 - 1), 2, None),
    "i32": (st.integers(-(2**31), 2**31 - 1), 4, None),
    "u32": (st.integers(0, 2**32 - 1), 4, None),
    "i64": (st.integers(-(2**63), 2**63 - 1), 8, None),
    "u64": (st.integers(0, 2**64 - 1), 8, None),
    "fp16": (st.floats(), 2, np.float16),
    "bf16": (st.floats(width=32), 2, None),
    "fp32": (st.floats(), 4, np.float32),
    "fp64": (st.floats(), 8, np.float64),
}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5), st.data())
def test_arguments_are_laid_out_as_the_code_says(types, data):
    """The argument block against numpy and torch, at the offsets of the code's metadata."""
    import torch

    values = [data.draw(VALUES[kind][0]) for kind in types]
    k = kernel("\ts_endpgm", args=[(VALUES[kind][1], "by_value") for kind in types])
    x = launch.Launch(k, (1, 1, 1), values, types=tuple(types))
    for (offset, size, _), kind, value in zip(k.code.args, types, values, strict=True):
        got = x.kernarg[offset : offset + size].tobytes()
        if kind == "bf16":
            want = torch.tensor(value, dtype=torch.float32).bfloat16().view(torch.int16).numpy().tobytes()
            if math.isnan(value):
                want = got if np.frombuffer(got, np.uint16)[0] & 0x7FFF > 0x7F80 else want
        elif VALUES[kind][2] in (np.float16, np.float32, np.float64):
            with np.errstate(over="ignore"):
                want = VALUES[kind][2](value).tobytes()
            if math.isnan(value):
                got, want = np.isnan(np.frombuffer(got, VALUES[kind][2])), [True]
        else:
            want = int(value).to_bytes(size, "little", signed=value < 0)
        assert got == want


def test_numbers_of_unknown_type_go_by_size():
    k = kernel("\ts_endpgm", args=[(4, "by_value"), (8, "by_value"), (2, "by_value"), (8, "global_buffer")])
    x = launch.Launch(k, (1, 1, 1), [1.5, -2.0, np.float32(0.5), None])
    assert (
        x.kernarg[:18].tobytes()
        == np.float32(1.5).tobytes() + bytes(4) + np.float64(-2).tobytes() + np.float16(0.5).tobytes()
    )


def test_scratch_that_triton_asks_for():
    """Two more pointers than arguments: Triton's global and profile scratch, per workgroup."""
    k = kernel("\ts_endpgm", args=[POINTER] * 3)
    x = launch.Launch(k, (3, 1, 1), [0], scratch=(256, 0))
    address, profile = x.kernarg[8:24].view(np.uint64)
    assert address % 16 == 0
    assert profile == 0
    assert (int(address), int(address) + 3 * 256, "Triton's scratch") in x.named_ranges


@pytest.mark.parametrize(
    ("arch", "grid", "num_warps", "message"),
    [
        ("gfx1201", (1, 1, 1), 33, "num_warps: want 1 to 32 on gfx1201, got 33"),
        ("gfx942", (1, 1, 1), 17, "num_warps: want 1 to 16 on gfx942, got 17"),
        # both numbers share a register: one too large would be taken for another workgroup
        ("gfx1201", (1, 65536, 1), 1, r"grid\[1\]: want 0 to 65535 on gfx1201, got 65536"),
        ("gfx1250", (1, 1, 65536), 1, r"grid\[2\]: want 0 to 65535 on gfx1250, got 65536"),
        ("gfx942", (-1, 1, 1), 1, r"grid\[0\]: want 0 to 2147483647 on gfx942, got -1"),
    ],
)
def test_what_no_gpu_would_launch_is_refused(arch, grid, num_warps, message):
    k = kernel("\ts_endpgm", arch=arch)
    with pytest.raises(ArgumentError, match=message):
        launch.Launch(k, grid, [], num_warps=num_warps)


def test_static_and_dynamic_local_memory_add_up():
    for static, shared, want in ((0, 0, 0), (8, 0, 8), (0, 100, 100), (8, 100, 116), (16, 64, 80)):
        k = kernel("\ts_endpgm", lds=static)
        assert launch.Launch(k, (1, 1, 1), [], shared=shared).kind.lds_bytes == want


# ----------------------------------------------------------------------------------------------------- deadlocks
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
def in_threads(coordinator, *bodies):
    """Run one function per host thread under the coordinator; the results, or the error of each."""
    import threading

    results = [None] * len(bodies)

    def main(host, body):
        try:
            host.begin()
            results[host.index] = body(host)
        except BaseException as error:
            results[host.index] = error
            coordinator.fail(error)
        finally:
            host.end()

    threads = [threading.Thread(target=main, args=pair) for pair in zip(coordinator.hosts, bodies, strict=True)]
    for thread in threads:
        thread.start()
    coordinator.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return results


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


# ------------------------------------------------------------------------------------------------------ devices
def test_devices_are_not_shared_and_keep_their_architecture():
    a, b = device.acquire("gfx1201", 3), device.acquire("gfx1201", 3)
    assert not {d.number for d in a} & {d.number for d in b}
    assert device.default_device("gfx1201") not in a + b
    device.release(a)
    assert device.acquire("gfx1201", 1)[0] in a
    device.release(b)
    for d in a:
        assert device.device(d.number) is d
        assert d.arch == "gfx1201"
    device.release(a)


def test_ranges_are_named_and_taken_back():
    (d,) = device.acquire("gfx942", 1)
    d.allow(0x1000, 0x100, "first")
    d.allow(0x3000, 0x100, "second")
    assert device.nearest(d.ranges, 0x1104).startswith("nearest: 4 bytes past the end of first")
    assert device.nearest(d.ranges, 0x2FF0).startswith("nearest: 16 bytes before second")
    assert device.nearest(d.ranges, 0x10FC).startswith("the access starts 4 bytes before the end of first")
    assert device.nearest([], 5) == "nothing is allocated"
    d.disallow(0x1000)
    with pytest.raises(StateError):
        d.disallow(0x1000)
    with pytest.raises(ArgumentError, match="num_bytes: want more than 0, got 0"):
        d.allow(0x1000, 0, "empty")
    device.release([d])
    assert d.ranges == []


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 20)), max_size=8))
def test_merged_ranges_cover_the_same_bytes(spans):
    ranges = [(low, low + size, "x") for low, size in spans]
    merged = launch.merge(ranges)
    assert merged == sorted(merged)
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(merged))
    covered = {byte for low, high in merged for byte in range(low, high)}
    assert covered == {byte for low, high, _ in ranges for byte in range(low, high)}


def test_module_variables_belong_to_one_module():
    text = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1201"
\t.text
k:
\ts_endpgm
\t.amdhsa_kernel k
\t.end_amdhsa_kernel
\t.type\tfirst,@object
\t.data
first:
\t.quad\t7
\t.size\tfirst, 8
\t.type\tsecond,@object
second:
\t.quad\tfirst+4
\t.size\tsecond, 8
"""
    code = module.load_code(text)
    a, b = module.Module(code), module.Module(code)
    a.write("first", (99).to_bytes(8, "little"))
    a.write("no such variable", bytes(8))
    assert a.symbol("first", np.uint64)[0] == 99
    assert b.symbol("first", np.uint64)[0] == 7
    for m in (a, b):
        address, num_bytes = m.symbol_address("first")
        assert num_bytes >= 8
        assert ctypes.c_uint64.from_address(address).value == m.symbol("first", np.uint64)[0]
        assert m.symbol("second", np.uint64)[0] == address + 4
    with pytest.raises(KeyError):
        a.symbol_address("third")
