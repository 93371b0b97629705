"""Control flow, resuming, calls, symbols, and what the lifter refuses."""

from __future__ import annotations

import ctypes
import hashlib

import numpy as np
import pytest

from mori_triton.emulator import asm, jit, runtime, state
from mori_triton.emulator.lift import Lifter
from mori_triton.errors import UnsupportedInstruction
from tests.emulator.harness import Wave, program

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["v_mov_b32 v0, 0", "v_frobnicate_b32 v1, v2"], "line 5: `v_frobnicate_b32 v1, v2`: no semantics"),
        (["v_add_f32 v0, v1, v2 shiny:1"], "modifier shiny"),
        (["s_mov_b32 s0, s1 nv"], "modifier nv"),
        (["v_add_f32 v0, v1, v2 op_sel:[1,0]"], "op_sel"),
        (["v_mov_b32 v0, src_shared_base"], "operand src_shared_base"),
        (["v_smfmac_f32_32x32x16_f16 v[0:15], v[16:17], v[18:21], v22"], "no semantics"),
        (["v_pk_add_f16 v0, v1, v2 clamp"], "clamp"),
        (["v_add_nc_u64 v[0:1], v[2:3], v[4:5] clamp"], "modifier on a 64-bit integer result"),
        (["v_add3_u32 v0, v1, v2"], "operand count"),
        (["s_add_co_i32 s0, s1, s2, s3"], "operand count"),
        (["v_add_u32_dpp v0, v1, v2 row_share:3 fi:1"], "modifier fi"),
        (["s_setreg_imm32_b32 hwreg(HW_REG_WAVE_MODE, 0, 2), 1"], "rounding or denormal mode"),
        (["s_denorm_mode 0"], "rounding or denormal mode"),
        (["s_getreg_b32 s0, hwreg(HW_REG_TRAPSTS)"], "hardware register TRAPSTS"),
        (["s_barrier_wait -3"], "barrier"),
        (["s_sendmsg_rtn_b32 s0, sendmsg(MSG_RTN_GET_DOORBELL)"], "no semantics"),
        (["s_sendmsg sendmsg(MSG_SAVEWAVE)"], "message"),
        (["s_load_b32 null, s[0:1], 0x0"], "destination null"),
        (["v_mov_b32_e32 v0, v1 row_shl:1"], "modifier row_shl"),
        (["v_mov_b32_e32 v0, v1 dst_sel:BYTE_0"], "modifier dst_sel"),
        (["v_cmp_lt_f32_e64 s0, v1, v2 clamp"], "clamp on a compare"),
        (["v_s_exp_f32 s0, s1 mul:2"], "modifier mul"),
        (["v_readlane_b32 s0, v1, s2 clamp"], "modifier clamp"),
        (["v_fma_mix_f32 v0, v1, v2, v3 neg_lo:[1,0,0]"], "modifier neg_lo"),
        (["v_pk_add_f16 v0, -v1, v2"], "sign modifier"),
        (["v_pk_add_u16 v0, v1, v2 neg_lo:[1,0]"], "sign modifier"),
        (["v_mov_b32_dpp v0, v1 row_bcast:7"], "dpp control"),
        (["s_cbranch_scc1 .Lnowhere"], ".Lnowhere"),
        (["s_mov_b32 s0, nothing@rel32@lo+4"], ""),
    ],
)
def test_refused(lines, message):
    """By name, operands and line of the text; nothing is skipped silently."""
    with pytest.raises(UnsupportedInstruction) as e:
        Lifter(program("gfx1201", lines)).lift()
    assert lines[-1] in str(e.value)
    assert message in str(e.value)
    assert e.value.mnemonic == lines[-1].split()[0]
    assert e.value.line == 3 + len(lines)


def test_usual_modes_are_accepted():
    lines = ["s_setreg_imm32_b32 hwreg(HW_REG_WAVE_MODE, 2, 2), 0", "s_denorm_mode 15", "s_round_mode 0x0"]
    lines += [
        "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1",
        "s_setreg_imm32_b32 hwreg(HW_REG_WAVE_MODE, 2, 2), 0x5000",
        "s_setreg_imm32_b32 hwreg(HW_REG_WAVE_SCHED_MODE, 0, 2), 2",
    ]
    assert Wave("gfx1201", lines).run() == state.DONE


@pytest.mark.parametrize("directive", ["float_round_mode_32", "float_denorm_mode_32", "float_denorm_mode_16_64"])
def test_unusual_kernel_modes_are_refused(directive):
    with pytest.raises(UnsupportedInstruction, match=directive):
        Lifter(program("gfx1201", [], {directive: "1"}))


LOOP = """s_mov_b32 s1, 0
.Lhead:
s_add_co_i32 s1, s1, s0
s_sub_co_i32 s0, s0, 1
s_cmp_lg_u32 s0, 0
s_cbranch_scc1 .Lhead""".splitlines()


def test_loop():
    wave = Wave("gfx1201", LOOP)
    wave.s[0] = 100
    assert wave.run() == state.DONE
    assert wave.s[1] == 5050
    # 1 before the loop, 4 a round, s_endpgm
    assert int(wave.header[(state.COUNT - 512) // 8]) == 1 + 400 + 1


@pytest.mark.parametrize("budget", [1, 3, 50])
def test_stops_when_the_budget_is_used_up_and_resumes(budget):
    wave = Wave("gfx1201", LOOP)
    wave.s[0] = 100
    fn = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(wave.run_address)
    stops = 0
    while (status := fn(wave.memory.ctypes.data, budget)) == state.RUNNING:
        stops += 1
    assert (status, int(wave.s[1])) == (state.DONE, 5050)
    assert stops >= 400 // (budget + 4)


@pytest.mark.parametrize(
    ("branch", "register", "value", "taken"),
    [
        ("s_cbranch_scc0", "scc", 0, True), ("s_cbranch_scc0", "scc", 1, False), ("s_cbranch_scc1", "scc", 1, True),
        ("s_cbranch_vccz", "vcc", 0, True), ("s_cbranch_vccz", "vcc", 1 << 31, False),
        ("s_cbranch_vccnz", "vcc", 1 << 31, True), ("s_cbranch_execz", "exec", 0, True),
        ("s_cbranch_execz", "exec", 2, False), ("s_cbranch_execnz", "exec", 2, True), ("s_branch", "scc", 0, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("arch", ["gfx1201", "gfx942"])
def test_branches(branch, register, value, taken, arch):
    wave = Wave(arch, [f"{branch} .Lskip", "s_mov_b32 s0, 1", ".Lskip:", "s_nop 0"])
    if register == "scc":
        wave.scc = value
    else:
        wave.set_mask({"vcc": state.VCC, "exec": state.EXEC}[register], value)
    wave.run()
    assert int(wave.s[0]) == (0 if taken else 1)


def test_wave64_looks_at_all_of_vcc_and_exec():
    wave = Wave("gfx942", ["s_cbranch_vccz .Lskip", "s_cbranch_execz .Lskip", "s_mov_b32 s0, 1", ".Lskip:", "s_nop 0"])
    wave.set_mask(state.VCC, 1 << 40)
    wave.exec = 1 << 63
    wave.run()
    assert int(wave.s[0]) == 1


def test_barrier_sleep_and_trap_return_to_the_scheduler():
    lines = ["s_barrier_signal -1", "s_barrier_wait -1", "s_sleep 1", "v_mov_b32 v0, 1", "s_trap 2"]
    wave = Wave("gfx1201", lines)
    fn = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(wave.run_address)
    run = [fn(wave.memory.ctypes.data, 1000) for _ in range(3)]
    assert run == [state.BARRIER, state.SLEEPING, state.FAULTED]
    assert int(wave.memory[state.FAULT]) == 8
    assert int(wave.memory[state.FAULT_PC]) == 4
    assert set(range(1, 12)) == set(state.FAULTS)


FAR = """s_getpc_b64 s[52:53]
.Lpost_getpc0:
s_add_co_u32 s52, s52, (.Lfar-.Lpost_getpc0)&4294967295
s_add_co_ci_u32 s53, s53, (.Lfar-.Lpost_getpc0)>>32
s_setpc_b64 s[52:53]
s_mov_b32 s0, 1
.Lfar:
s_mov_b32 s1, 2"""


def test_long_branch():
    """Beyond the reach of s_branch the distance to the label is added to the program counter."""
    wave = Wave("gfx1201", FAR.splitlines())
    assert wave.run() == state.DONE
    assert wave.s[:2].tolist() == [0, 2]
    with pytest.raises(UnsupportedInstruction, match="s_getpc"):
        Wave("gfx1201", FAR.replace("s_getpc_b64 s[52:53]", "s_mov_b64 s[52:53], 0").splitlines())


def test_jump_to_nowhere_is_a_fault():
    wave = Wave("gfx1201", ["s_setpc_b64 s[0:1]"])
    wave.s[0:2] = 0x1234, 0
    assert wave.run() == state.FAULTED
    assert int(wave.memory[state.FAULT]) == 4


# a call of a function, and variables reached directly and through a table
MODULE = """\t.amdgcn_target "amdgcn-amd-amdhsa--{arch}"
\t.text
\t.type\tdouble_it,@function
double_it:
\tv_add_{nc}u32_e32 v0, v0, v0
\ts_setpc_b64 s[30:31]
\t.type\tk,@function
k:
\ts_getpc_b64 s[4:5]
{hint}\ts_add_{co}u32 s4, s4, double_it@rel32@lo+{lo}
\ts_addc_u32 s5, s5, double_it@rel32@hi+{hi}
\ts_swappc_b64 s[30:31], s[4:5]
\ts_getpc_b64 s[6:7]
{hint}\ts_add_u32 s6, s6, second@rel32@lo+{lo}
\ts_addc_u32 s7, s7, second@rel32@hi+{hi}
\ts_getpc_b64 s[8:9]
{hint}\ts_add_u32 s8, s8, first@gotpcrel32@lo+{lo}
\ts_addc_u32 s9, s9, first@gotpcrel32@hi+{hi}
\ts_endpgm
\t.amdhsa_kernel k
\t.end_amdhsa_kernel
\t.type\tfirst,@object
\t.data
first:
\t.long\t1
\t.size\tfirst, 4
\t.type\tsecond,@object
second:
\t.long\t2
\t.size\tsecond, 4
"""


@pytest.mark.parametrize(("arch", "hint"), [("gfx942", ""), ("gfx1201", "\ts_wait_alu 0xfffe\n")])
def test_calls_and_symbols(arch, hint):
    """Hints between s_getpc and its literal change the addend, not the address."""
    more = 4 * bool(hint)
    text = MODULE.format(arch=arch, hint=hint, nc="nc_" * bool(hint), co="", lo=4 + more, hi=12 + more)
    prog = asm.parse(text)
    name = "call_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    lifter = Lifter(prog, name)
    source = lifter.lift()
    runtime.ensure()
    jit.load(jit.digest(text, name), lambda: (source, {}))
    raw = np.zeros(lifter.state_size + 64, np.uint8)
    memory = raw[-raw.ctypes.data % 64 :][: lifter.state_size]
    s, header = memory[:512].view(np.uint32), memory[512 : state.VREGS].view(np.uint64)
    v = memory[state.VREGS : state.VREGS + 4 * lifter.W * lifter.num_vregs].view(np.uint32).reshape(-1, lifter.W)
    s[state.EXEC : state.EXEC + lifter.W // 32] = 0xFFFFFFFF
    data = np.zeros(len(prog.data) + 16, np.uint8)
    header[(state.DATA - 512) // 8], header[(state.PC - 512) // 8] = data.ctypes.data, prog.labels["k"]
    v[0] = np.arange(lifter.W)
    fn = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64)(jit.address(name))
    assert fn(memory.ctypes.data, 1000) == state.DONE
    assert (v[0] == 2 * np.arange(lifter.W)).all()
    assert int(s[6]) | int(s[7]) << 32 == data.ctypes.data + prog.symbols["second"]
    assert int(s[8]) | int(s[9]) << 32 == data.ctypes.data + lifter.got["first"]
    assert lifter.got["first"] % 8 == 0
    assert lifter.got["first"] >= len(prog.data)


def test_clock_counts_a_hundred_million_a_second():
    wave = Wave("gfx942", ["s_memrealtime s[0:1]", "s_nop 0"])
    ticks = []
    for _ in range(2):
        wave.run()
        ticks.append(int(wave.s[0]) | int(wave.s[1]) << 32)
    assert 0 <= ticks[1] - ticks[0] < 100_000_000
    virtual = np.array([12345], np.uint64)
    wave.header[(state.CLOCK - 512) // 8] = virtual.ctypes.data
    wave.run()
    assert int(wave.s[0]) == 12345


def test_hardware_ids():
    wave = Wave("gfx942", ["s_getreg_b32 s0, hwreg(HW_REG_HW_ID, 4, 8)", "s_getreg_b32 s1, hwreg(HW_REG_XCC_ID)"])
    wave.header[(state.WAVE_ID - 512) // 8] = 0xABC
    wave.s[1] = 99
    wave.run()
    assert [int(x) for x in wave.s[:2]] == [0xAB, 0]


def test_one_helper_a_kind_of_operation():
    """Compile time: the same operation on other registers is another call of the same function."""
    lines = [f"v_add_f32 v{i}, v{i + 1}, v{i + 2}" for i in range(50)] + [
        "v_add_f32 v0, 1.0, v1",
        "v_add_f32 v0, -v2, v1",
    ]
    lifter = Lifter(program("gfx1201", lines))
    lifter.lift()
    assert len(lifter.module.fns) == 3
