"""Spelling: one name per operation, which mnemonics do nothing here, which modifiers are understood."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

_RENAME = {
    "v_add_u32": "v_add_nc_u32",
    "v_sub_u32": "v_sub_nc_u32",
    "v_subrev_u32": "v_subrev_nc_u32",
    "v_addc_co_u32": "v_add_co_ci_u32",
    "v_subb_co_u32": "v_sub_co_ci_u32",
    "v_subbrev_co_u32": "v_subrev_co_ci_u32",
    "v_mad_u64_u32": "v_mad_co_u64_u32",
    "v_mad_i64_i32": "v_mad_co_i64_i32",
    "v_add_u16": "v_add_nc_u16",
    "v_sub_u16": "v_sub_nc_u16",
    "v_subrev_u16": "v_subrev_nc_u16",
    "v_add_i16": "v_add_nc_i16",
    "v_sub_i16": "v_sub_nc_i16",
    "v_add_i32": "v_add_nc_i32",
    "v_sub_i32": "v_sub_nc_i32",
    "v_cvt_rpi_i32_f32": "v_cvt_nearest_i32_f32",
    "v_cvt_flr_i32_f32": "v_cvt_floor_i32_f32",
    "v_cvt_pkrtz_f16_f32": "v_cvt_pk_rtz_f16_f32",
    "v_mul_legacy_f32": "v_mul_dx9_zero_f32",
    "v_ffbh_i32": "v_cls_i32",
    "v_ffbh_u32": "v_clz_i32_u32",
    "v_ffbl_b32": "v_ctz_i32_b32",
    "s_add_i32": "s_add_co_i32",
    "s_sub_i32": "s_sub_co_i32",
    "s_add_u32": "s_add_co_u32",
    "s_addc_u32": "s_add_co_ci_u32",
    "s_sub_u32": "s_sub_co_u32",
    "s_subb_u32": "s_sub_co_ci_u32",
    "s_addk_i32": "s_addk_co_i32",
    "s_ff1_i32_b32": "s_ctz_i32_b32",
    "s_ff1_i32_b64": "s_ctz_i32_b64",
    "s_flbit_i32_b32": "s_clz_i32_u32",
    "s_flbit_i32_b64": "s_clz_i32_u64",
    "s_flbit_i32": "s_cls_i32",
    "s_flbit_i32_i64": "s_cls_i32_i64",
    "s_get_pc_i64": "s_getpc_b64",
    "s_set_pc_i64": "s_setpc_b64",
    "s_swap_pc_i64": "s_swappc_b64",
}
_ATOMIC = {
    "add": "add_u",
    "sub": "sub_u",
    "and": "and_b",
    "or": "or_b",
    "xor": "xor_b",
    "swap": "swap_b",
    "cmpswap": "cmpswap_b",
    "smax": "max_i",
    "smin": "min_i",
    "umax": "max_u",
    "umin": "min_u",
}
# gfx9 access size -> gfx12; the first ending that fits
_SIZE = (
    ("dwordx16", "b512"),
    ("dwordx8", "b256"),
    ("dwordx4", "b128"),
    ("dwordx3", "b96"),
    ("dwordx2", "b64"),
    ("dword", "b32"),
    ("short_d16_hi", "d16_hi_b16"),
    ("short_d16", "d16_b16"),
    ("byte_d16_hi", "d16_hi_b8"),
    ("ushort", "u16"),
    ("sshort", "i16"),
    ("ubyte", "u8"),
    ("sbyte", "i8"),
    ("short", "b16"),
    ("byte", "b8"),
)
# canonical atomic operation -> LLVM's
ATOMIC_RMW = {"add": "add", "sub": "sub", "and": "and", "or": "or", "xor": "xor", "swap": "xchg"}

_ENCODING = re.compile(r"_(e32|e64|dpp|sdwa|e64_dpp)$")
_MINMAX = re.compile(r"(v_(?:pk_)?(?:max3?|min3?|med3))_(f16|f32|f64)$")


@lru_cache(maxsize=4096)
def canonical(mn: str) -> str:
    """One name per operation: strip encoding suffixes, map gfx9 spellings to those of gfx12."""
    mn = _ENCODING.sub("", mn)
    mn = re.sub(r"^v_dual_", "v_", mn)
    mn = _MINMAX.sub(r"\1_num_\2", mn)
    mn = re.sub(r"(and|or)n([12])(?=_)", lambda m: f"{m[1]}_not{int(m[2]) - 1}", mn)
    if re.match(r"(global|flat|buffer|s|s_buffer|scratch)_(load|store)_", mn):
        for a, b in _SIZE:
            if mn.endswith(a):
                return mn[: -len(a)] + b
    m = re.match(r"((?:global|flat|buffer)_atomic_)(\w+?)(_x2)?$", mn)
    if m and m[2] in _ATOMIC:
        return m[1] + _ATOMIC[m[2]] + ("64" if m[3] else "32")
    if mn.startswith(("ds_read", "ds_write")):
        mn = mn.replace("ds_read", "ds_load").replace("ds_write", "ds_store")
        mn = re.sub(r"2st64_b(\d+)", r"_2addr_stride64_b\1", mn)
        mn = re.sub(r"2_b(\d+)$", r"_2addr_b\1", mn)
    return _RENAME.get(mn, mn)


# no effect on values here: hints, waits (accesses complete in order), cache maintenance, freeing registers
NOP = re.compile(
    r"s_(nop|set_vgpr_msb|delay_alu|clause|wait\w*|code_end|setprio|set_inst_prefetch\w*|inst_prefetch"
    r"|ttracedata\w*|icache_inv|dcache\w*|prefetch\w*)$|v_nop$"
    r"|global_(inv|wb|wbinv|prefetch\w*)$|buffer_(inv|wbl2|gl\d_inv)$"
)

# the modifiers that each family's code looks at, or that are cache policies; any other makes an instruction unsupported
_DPP = "quad_perm|row_\\w+|wave_sh[lr]|bank_mask|bound_ctrl"
_SDWA = "src[01]_sel|dst_sel|dst_unused"
_CACHE = "th|scope|sc0|sc1|nt|glc|slc|nv"
MODIFIERS = tuple(
    (re.compile(family), re.compile(f"({allowed})$"))
    for family, allowed in (
        (r"v_mfma", "cbsz|abid|blgp|op_sel|op_sel_hi"),
        (r"v_wmma", "neg_lo|neg_hi|op_sel|op_sel_hi|matrix_[ab]_(reuse|fmt|scale|scale_fmt)"),
        (r"v_pk_", "op_sel|op_sel_hi|neg_lo|neg_hi|clamp"),
        (r"v_cvt_scale", "op_sel|scale_sel"),
        (r"v_cvt_(pk_)?f32_(fp8|bf8)", "op_sel|src0_sel"),
        (r"v_fma_mix", "op_sel|op_sel_hi|clamp"),
        (r"v_permlane", "op_sel"),
        (r"v_(readlane|readfirstlane|writelane|swap|s)_", "none"),
        (r"v_", f"op_sel|clamp|mul|div|bitop3|{_DPP}|{_SDWA}"),
        (r"s_(buffer_)?load", f"offset|scale_offset|{_CACHE}"),
        (r"s_", "none"),
        (r"ds_", "offset[01]?"),
        (r"buffer_load_b(32|96|128)$", f"offset|offen|lds|{_CACHE}"),
        (r"buffer_", f"offset|offen|{_CACHE}"),
        (r"(global|flat|scratch)_", f"offset|scale_offset|{_CACHE}"),
    )
)


def unknown_modifier(base: str, mods: Iterable[str]) -> str | None:
    """The first modifier of an instruction (by its canonical name) that nothing would look at."""
    allowed = next((ok for family, ok in MODIFIERS if family.match(base)), None)
    return next((m for m in mods if allowed is None or not allowed.match(m)), None)
