"""The assembly parser: instructions, operands, modifiers, directives, data, relocations."""

from __future__ import annotations

import pytest

from mori_triton.emulator import asm
from mori_triton.emulator.state import EXEC, TTMP, VCC, Operand

pytestmark = pytest.mark.cpu

TEXT = """\t.amdgcn_target "amdgcn-amd-amdhsa-unknown-gfx1201"
\t.amdhsa_code_object_version 5
\t.text
\t.globl\tkernel
\t.type\tkernel,@function
kernel:                                 ; @kernel
.Lfunc_begin0:
; %bb.0:
\ts_load_b64 s[4:5], s[0:1], 0x8 nv       ; a comment
\tv_mov_b32_e32 v1, 0
.LBB0_1:
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
\t.section\t.rodata,"a",@progbits
\t.p2align\t6, 0x0
\t.amdhsa_kernel kernel
\t\t.amdhsa_group_segment_fixed_size 16
\t\t.amdhsa_wavefront_size32 1
\t.end_amdhsa_kernel
\t.text
\t.type\tmori_shmem_context,@object
\t.section\t.bss,"aw",@nobits
mori_shmem_context:
\t.quad\t0
\t.size\tmori_shmem_context, 8
\t.type\ttable,@object
\t.data
table:
\t.long\t4294967295
\t.short\t258
\t.byte\t7
\t.zero\t1
\t.quad\tmori_shmem_context+4
\t.size\ttable, 16
\t.type\tname,@object
name:
\t.asciz\t"a;\\"b\\001\\n"
\t.size\tname, 6
\t.section\t.AMDGPU.csdata,"",@progbits
\t.amdgpu_metadata
---
amdhsa.kernels:
  - .args:
      - .address_space:  global
        .offset:         0
        .size:           8
        .value_kind:     global_buffer
      - .offset:         8
        .size:           4
        .value_kind:     by_value
      - .offset:         16
        .size:           4
        .value_kind:     hidden_block_count_x
    .group_segment_fixed_size: 16
...
\t.end_amdgpu_metadata
"""


def test_program():
    p = asm.parse(TEXT)
    assert (p.arch, p.name, p.warp_size) == ("gfx1201", "kernel", 32)
    assert [i.mn for i in p.insts] == ["s_load_b64", "v_mov_b32_e32", "s_cbranch_scc1", "s_endpgm"]
    assert (p.insts[0].line, p.insts[0].ops, p.insts[0].mods) == (9, ["s[4:5]", "s[0:1]", "0x8"], {"nv": ""})
    assert p.labels == {"kernel": 0, ".Lfunc_begin0": 0, ".LBB0_1": 2}
    assert p.functions == {"kernel"}
    assert p.directives["group_segment_fixed_size"] == "16"
    assert p.args == [(0, 8, "global_buffer"), (8, 4, "by_value"), (16, 4, "hidden_block_count_x")]


def test_data():
    p = asm.parse(TEXT)
    assert p.symbols == {"mori_shmem_context": 0, "table": 64, "name": 128}
    assert p.data[64:72] == b"\xff\xff\xff\xff\x02\x01\x07\x00"
    assert p.relocs == [(72, "mori_shmem_context", 4)]
    assert bytes(p.data[128:]) == b'a;"b\x01\n\x00'


@pytest.mark.parametrize(
    ("text", "ops", "mods"),
    [
        ("global_inv scope:SCOPE_SYS", [], {"scope": "SCOPE_SYS"}),
        ("s_endpgm", [], {}),
        ("buffer_inv sc0 sc1", [], {"sc0": "", "sc1": ""}),
        ("global_load_b32 v1, v[2:3], off offset:-16 th:TH_LOAD_NT", ["v1", "v[2:3]", "off"],
         {"offset": "-16", "th": "TH_LOAD_NT"}),
        ("v_pk_fma_f32 v[0:1], v[2:3], s[4:5], v[0:1] op_sel_hi:[1,0,1]", ["v[0:1]", "v[2:3]", "s[4:5]", "v[0:1]"],
         {"op_sel_hi": "[1,0,1]"}),
        ("v_add_u32_dpp v1, v2, v2 quad_perm:[1,0,3,2] row_mask:0xf bound_ctrl:1", ["v1", "v2", "v2"],
         {"quad_perm": "[1,0,3,2]", "row_mask": "0xf", "bound_ctrl": "1"}),
        ("s_sendmsg_rtn_b64 s[2:3], sendmsg(MSG_RTN_GET_REALTIME)", ["s[2:3]", "sendmsg(MSG_RTN_GET_REALTIME)"], {}),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1", ["hwreg(HW_REG_MODE, 23, 1)", "1"], {}),
    ],
)  # fmt: skip
def test_instruction(text, ops, mods):
    inst = asm.parse_inst(text, 1)
    assert (inst.ops, inst.mods) == (ops, mods)


def test_dual_issue():
    inst = asm.parse_inst("v_dual_mov_b32 v0, v1 :: v_dual_mul_f32 v2, 0.5, v3", 4)
    assert (inst.mn, inst.ops, inst.dual.mn, inst.dual.ops) == (
        "v_dual_mov_b32",
        ["v0", "v1"],
        "v_dual_mul_f32",
        ["v2", "0.5", "v3"],
    )


@pytest.mark.parametrize(
    ("text", "kind", "idx"),
    [
        ("v7", "v", 7), ("v[8:11]", "v", 8), ("a3", "v", 103), ("s5", "s", 5), ("ttmp9", "s", TTMP + 9),
        ("vcc_lo", "s", VCC), ("exec_hi", "s", EXEC + 1), ("m0", "s", 125), ("null", "null", 0), ("off", "null", 0),
        ("src_scc", "scc", 0), ("foo@rel32@lo+4", "sym", 0),
    ],
)  # fmt: skip
def test_operand(text, kind, idx):
    o = Operand(text, areg_base=100)
    assert (o.kind, o.idx) == (kind, idx)


def test_operand_modifiers():
    o = Operand("-|v3|")
    assert (o.kind, o.idx, o.neg, o.abs) == ("v", 3, True, True)
    assert Operand("sext(v1)").sext
    assert Operand("neg(v1)").neg
    assert [Operand(f"v4.{h}").half for h in "lh"] == ["l", "h"]


@pytest.mark.parametrize(
    ("text", "bits", "letter", "want"),
    [
        ("-1", 32, "i", 0xFFFFFFFF), ("-16", 64, "q", (1 << 64) - 16), ("0x80000000", 64, "q", 0x80000000),
        ("1.0", 32, "f", 0x3F800000), ("1.0", 64, "d", 0x3FF0000000000000), ("-4.0", 16, "e", 0xC400),
        ("0.15915494", 32, "f", 0x3E22F983), ("0x40590000", 64, "d", 0x4059000000000000), ("64", 64, "d", 64),
    ],
)  # fmt: skip
def test_immediate(text, bits, letter, want):
    assert Operand(text).bits(bits, letter) == want


def test_literal_of_a_signed_64_bit_operand():
    assert Operand("0xffffff85").signed_literal == -123
    assert Operand("7").signed_literal == 7


def test_registers_beyond_255():
    """The whole number stands in a comment; the encoding has its low 8 bits."""
    text = "v_pk_fma_f32 v[8:9] /*v[264:265]*/, v[2:3], v[18:19], v[20:21] /*v[276:277]*/ op_sel_hi:[0,1,1]"
    i = asm.parse_inst(text, 1)
    assert i.ops == ["v[264:265]", "v[2:3]", "v[18:19]", "v[276:277]"]
    assert i.mods == {"op_sel_hi": "[0,1,1]"}
    assert asm.parse_inst("v_mov_b32_e32 v20 /*v276*/, 0", 1).ops == ["v276", "0"]
    with pytest.raises(ValueError, match="v20"):
        asm.parse_inst("v_mov_b32_e32 v20 /*v277*/, 0", 1)
