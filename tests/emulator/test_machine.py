"""The machine below Triton: order, determinism, faults, places."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mori_triton.emulator import jit, launch, machine, scheduler
from mori_triton.emulator import state as lay
from mori_triton.emulator.machine import Event, Machine
from mori_triton.errors import KernelFault
from tests.emulator.snippets import ADD_ONE, POINTER, finish, kernel

pytestmark = pytest.mark.cpu


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
