"""Vector conversions between number formats."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.integer import Formula


def _bf16(a: Val) -> Val:
    """fp32 to bf16 in the low half, to nearest even; NaNs stay NaNs."""
    u = a.i()
    r = (u + ((u >> 16) & 1) + 0x7FFF) >> 16
    return a.cmp("uno", a).pick((u >> 16) | 0x40, r)


def _fp8(x: Val, fnuz: bool) -> Val:
    """fp32 to e4m3 with saturation. fnuz: bias 8, one NaN (0x80), no negative zero."""
    bias, top = (8, 240.0) if fnuz else (7, 448.0)
    u, nan = x.i(), x.cmp("uno", x)
    sign, mag = (u >> 24) & 0x80, (u & 0x7FFFFFFF).f()
    mag = mag.cmp("ogt", top).pick(mag.const(top), mag)
    m = mag.i()
    normal = ((m + ((m >> 20) & 1) + 0x7FFFF) >> 20) - ((127 - bias) << 3)
    small = (mag * (2.0 ** (bias + 2))).intr("rint").intr("fptoui.sat", ret=m)
    code = mag.cmp("olt", 2.0 ** (1 - bias)).pick(small, normal)
    code = code.cmp("eq", 0).pick(0, code | sign) if fnuz else code | sign
    return nan.pick(0x80 if fnuz else sign | 0x7F, code)


def to_int(a: Val, signed: bool) -> Val:
    """Truncate to an integer; out of range saturates, NaN gives 0."""
    return a.intr("fptosi.sat" if signed else "fptoui.sat", ret=Val(a.fn, "", 32, a.lanes))


CONVERT: dict[str, tuple[str, Formula]] = {
    "cvt_f32_u32": ("f<-i", lambda a: a.utof()),
    "cvt_f32_i32": ("f<-i", lambda a: a.stof()),
    "cvt_u32_f32": ("i<-f", lambda a: to_int(a, False)),
    "cvt_i32_f32": ("i<-f", lambda a: to_int(a, True)),
    "cvt_f32_f16": ("f<-h", lambda a: a.trunc(16).f().fconv(32)),
    "cvt_f32_bf16": ("f<-h", lambda a: (a << 16).f()),
    "cvt_f64_f32": ("d<-f", lambda a: a.fconv(64)),
    "cvt_f32_f64": ("f<-d", lambda a: a.fconv(32)),
    "cvt_pk_bf16_f32": ("i<-ff", lambda a, b: _bf16(a) | (_bf16(b) << 16)),
    "cvt_pk_fp8_f32": ("h<-ff", lambda a, b: _fp8(a, a.fn.module.fnuz) | (_fp8(b, a.fn.module.fnuz) << 8)),
}
