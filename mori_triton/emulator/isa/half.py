"""Vector instructions on 16-bit floats and integers.

A 16-bit operation computes wider and rounds once: fp32 holds every fp16 sum, product, quotient and root well enough,
fp64 every fused multiply-add.
"""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.floating import (
    chain,
    div_fixup,
    fma_odd,
    fmax,
    fmin,
    fract,
    maximum,
    med3,
    minimum,
    three,
    to_odd,
)
from mori_triton.emulator.isa.integer import Formula, med3_int, minmax, three_int


def fma_half(a: Val, b: Val, c: Val) -> Val:
    """By way of fp32, since hosts have no conversion from fp64 to fp16."""
    return to_odd(fma_odd(a, b, c)).fconv(16)


def _wide(name: str) -> Formula:
    """An intrinsic in fp32."""
    return lambda a: a.fconv(32).intr(name).fconv(16)


def _ldexp(a: Val, n: Val) -> Val:
    # beyond these limits fp16 holds nothing but zero and infinity, and fp32 is exact within them
    n = n.sext(32)
    n = n.cmp("slt", -60).pick(-60, n.cmp("sgt", 60).pick(60, n))
    return a.fconv(32).intr("ldexp", n).fconv(16)


def _pack(a: Val, b: Val) -> Val:
    return a.i().zext(32) | (b.i().zext(32) << 16)


def _saturate_bytes(a: Val) -> Val:
    """Both signed halves to unsigned bytes."""
    low, high = (x.cmp("slt", 0).pick(0, x.cmp("sgt", 255).pick(255, x)) for x in (a.trunc(16), (a >> 16).trunc(16)))
    return low | (high << 8)


HALF: dict[str, tuple[str, Formula]] = {
    # floats
    "add_f16": ("e<-ee", lambda a, b: a + b),
    "sub_f16": ("e<-ee", lambda a, b: a - b),
    "subrev_f16": ("e<-ee", lambda a, b: b - a),
    "mul_f16": ("e<-ee", lambda a, b: a * b),
    "fma_f16": ("e<-eee", fma_half),
    "fmac_f16": ("e<-eeD", fma_half),
    "fmaak_f16": ("e<-eee", fma_half),
    "fmamk_f16": ("e<-eee", fma_half),
    "max_num_f16": ("e<-ee", fmax),
    "min_num_f16": ("e<-ee", fmin),
    "max3_num_f16": ("e<-eee", three(fmax)),
    "min3_num_f16": ("e<-eee", three(fmin)),
    "med3_num_f16": ("e<-eee", med3),
    "maximum_f16": ("e<-ee", maximum),
    "minimum_f16": ("e<-ee", minimum),
    "maximum3_f16": ("e<-eee", three(maximum)),
    "minimum3_f16": ("e<-eee", three(minimum)),
    "maxmin_num_f16": ("e<-eee", chain(fmax, fmin)),
    "minmax_num_f16": ("e<-eee", chain(fmin, fmax)),
    "maximumminimum_f16": ("e<-eee", chain(maximum, minimum)),
    "minimummaximum_f16": ("e<-eee", chain(minimum, maximum)),
    "rcp_f16": ("e<-e", lambda a: (1.0 / a.fconv(32)).fconv(16)),
    "sqrt_f16": ("e<-e", _wide("sqrt")),
    "rsq_f16": ("e<-e", lambda a: (1.0 / a.fconv(32).intr("sqrt")).fconv(16)),
    "exp_f16": ("e<-e", _wide("exp2")),
    "log_f16": ("e<-e", _wide("log2")),
    "floor_f16": ("e<-e", _wide("floor")),
    "ceil_f16": ("e<-e", _wide("ceil")),
    "trunc_f16": ("e<-e", _wide("trunc")),
    "rndne_f16": ("e<-e", _wide("rint")),
    "fract_f16": ("e<-e", lambda a: fract(a.fconv(32)).fconv(16)),
    "ldexp_f16": ("e<-eh", _ldexp),
    "div_fixup_f16": ("e<-eee", div_fixup),
    "pack_b32_f16": ("i<-ee", _pack),
    # integers
    "mov_b16": ("h<-h", lambda a: a),
    "cndmask_b16": ("h<-hhm", lambda a, b, m: m.pick(b, a)),
    "add_nc_u16": ("h<-hh", lambda a, b: a + b),
    "sub_nc_u16": ("h<-hh", lambda a, b: a - b),
    "subrev_nc_u16": ("h<-hh", lambda a, b: b - a),
    "add_nc_i16": ("h<-hh", lambda a, b: a + b),
    "sub_nc_i16": ("h<-hh", lambda a, b: a - b),
    "mul_lo_u16": ("h<-hh", lambda a, b: a * b),
    "mad_u16": ("h<-hhh", lambda a, b, c: a * b + c),
    "mad_i16": ("h<-hhh", lambda a, b, c: a * b + c),
    "mad_u32_u16": ("i<-hhi", lambda a, b, c: a.zext(32) * b.zext(32) + c),
    "mad_i32_i16": ("i<-hhi", lambda a, b, c: a.sext(32) * b.sext(32) + c),
    "not_b16": ("h<-h", lambda a: ~a),
    "and_b16": ("h<-hh", lambda a, b: a & b),
    "or_b16": ("h<-hh", lambda a, b: a | b),
    "xor_b16": ("h<-hh", lambda a, b: a ^ b),
    "lshlrev_b16": ("h<-hh", lambda a, b: b << (a & 15)),
    "lshrrev_b16": ("h<-hh", lambda a, b: b >> (a & 15)),
    "ashrrev_i16": ("h<-hh", lambda a, b: b.sar(a & 15)),
    "cvt_i32_i16": ("i<-h", lambda a: a.sext(32)),
    "cvt_u32_u16": ("i<-h", lambda a: a.zext(32)),
    "sat_pk_u8_i16": ("h<-i", _saturate_bytes),
}
for _name, _lt, _gt in (("i16", "slt", "sgt"), ("u16", "ult", "ugt")):
    HALF |= {
        f"min_{_name}": ("h<-hh", minmax(_lt)),
        f"max_{_name}": ("h<-hh", minmax(_gt)),
        f"min3_{_name}": ("h<-hhh", three_int(_lt)),
        f"max3_{_name}": ("h<-hhh", three_int(_gt)),
        f"med3_{_name}": ("h<-hhh", med3_int(_lt, _gt)),
    }

# on gfx9 most 16-bit instructions clear the other half of their destination; the rest, and all of gfx12, preserve it
CLEARS_HIGH_HALF = frozenset(
    [
        f"{op}_f16"
        for op in [
            "add",
            "sub",
            "subrev",
            "mul",
            "fmac",
            "max_num",
            "min_num",
            "rcp",
            "sqrt",
            "rsq",
            "exp",
            "log",
            "floor",
            "ceil",
            "trunc",
            "rndne",
            "fract",
        ]
    ]
    + ["ldexp_f16", "frexp_mant_f16", "cvt_f16_f32", "cvt_f16_u16", "cvt_f16_i16", "cvt_u16_f16", "cvt_i16_f16"]
    + ["add_nc_u16", "sub_nc_u16", "subrev_nc_u16", "mul_lo_u16", "lshlrev_b16", "lshrrev_b16", "ashrrev_i16"]
    + ["min_i16", "max_i16", "min_u16", "max_u16", "sat_pk_u8_i16"]
)
