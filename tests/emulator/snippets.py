"""Kernels for the machine from a few lines of assembly."""

from mori_triton.emulator import module
from mori_triton.emulator.machine import Event


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
# words: [0] requests, [1] answers, [2] unused. Each round: one request more, poll for its answer, then count to `think`
ASK = """
\ts_load_b64 s[2:3], s[0:1], 0x0
\tv_mov_b32_e32 v1, 0
\tv_mov_b32_e32 v2, 1
\ts_mov_b32 s6, {rounds}
round:
\ts_mov_b32 exec_lo, 1
\tglobal_atomic_add_u32 v4, v1, v2, s[2:3] th:TH_ATOMIC_RETURN scope:SCOPE_SYS
\tv_readfirstlane_b32 s7, v4
again:
\tglobal_load_b32 v3, v1, s[2:3] offset:4 scope:SCOPE_SYS
\tv_readfirstlane_b32 s5, v3
\ts_cmp_le_u32 s5, s7
\ts_cbranch_scc1 again
\ts_mov_b32 s9, {think}
think:
\ts_add_co_i32 s9, s9, -1
\ts_cmp_eq_u32 s9, 0
\ts_cbranch_scc0 think
\ts_add_co_i32 s6, s6, -1
\ts_cmp_eq_u32 s6, 0
\ts_cbranch_scc0 round
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
