"""Vector conversions between number formats."""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.integer import Formula


def to_bf16(a: Val) -> Val:
    """fp32 to bf16 as i16, to nearest even; NaNs stay NaNs."""
    u = a.i()
    r = (u + ((u >> 16) & 1) + 0x7FFF) >> 16
    return a.cmp("uno", a).pick((u >> 16) | 0x40, r).trunc(16)


def to_half_toward_zero(a: Val) -> Val:
    """fp32 to fp16, rounded toward zero; what overflows becomes the largest number."""
    h = a.fconv(16)
    grew = h.fconv(32).intr("fabs").cmp("ogt", a.intr("fabs"))
    return grew.pick(h.i() - 1, h.i())


def pair(low: Val, high: Val) -> Val:
    """Two 16-bit integers in one register."""
    return low.zext(32) | (high.zext(32) << 16)


def to_small_float(x: Val, mantissa: int, bias: int, top: float, *, bits: int = 8, fnuz: bool = False) -> Val:
    """fp32 to a float of 8 bits or fewer, to nearest even, saturated at `top`.

    fnuz: one NaN (0x80), no negative zero, no infinity. A NaN becomes 0 where a format has none.
    """
    drop = 23 - mantissa
    u, nan = x.i(), x.cmp("uno", x)
    sign, mag = (u >> (32 - bits)) & (1 << (bits - 1)), (u & 0x7FFFFFFF).f()
    mag = mag.cmp("ogt", top).pick(top, mag)
    m = mag.i()
    normal = ((m + ((m >> drop) & 1) + ((1 << (drop - 1)) - 1)) >> drop) - ((127 - bias) << mantissa)
    # below the smallest normal number the code is the value in units of the smallest denormal one
    small = (mag * 2.0 ** (bias - 1 + mantissa)).intr("rint").intr("fptoui.sat", ret=m)
    code = mag.cmp("olt", 2.0 ** (1 - bias)).pick(small, normal)
    code = code.cmp("eq", 0).pick(0, code | sign) if fnuz else code | sign
    return nan.pick(0 if bits < 8 else 0x80 if fnuz else sign | 0x7F, code)


def to_fp8(x: Val) -> Val:
    """fp32 to e4m3 of the target: gfx942's fnuz form or the OCP one."""
    return to_small_float(x, 3, 8, 240.0, fnuz=True) if x.fn.module.fnuz else to_small_float(x, 3, 7, 448.0)


def to_bf8(x: Val) -> Val:
    """fp32 to e5m2 likewise; the OCP form has infinities, which the saturating conversion keeps."""
    if x.fn.module.fnuz:
        return to_small_float(x, 2, 16, 57344.0, fnuz=True)
    code = to_small_float(x, 2, 15, 57344.0)
    infinite = x.intr("fabs").cmp("oeq", float("inf"))
    return infinite.pick(((x.i() >> 24) & 0x80) | 0x7C, code)


def _pair8(f: Formula) -> Formula:
    return lambda a, b: (f(a) | (f(b) << 8)).trunc(16)


def to_int(a: Val, signed: bool, bits: int = 32) -> Val:
    """Truncate to an integer; out of range saturates, NaN gives 0."""
    return a.intr("fptosi.sat" if signed else "fptoui.sat", ret=Val(a.fn, "", bits, a.lanes))


def _limit(a: Val, low: int, high: int) -> Val:
    return a.cmp("slt", low).pick(low, a.cmp("sgt", high).pick(high, a)).trunc(16)


CONVERT: dict[str, tuple[str, Formula]] = {
    "cvt_f32_u32": ("f<-i", lambda a: a.utof()),
    "cvt_f32_i32": ("f<-i", lambda a: a.stof()),
    "cvt_u32_f32": ("i<-f", lambda a: to_int(a, False)),
    "cvt_i32_f32": ("i<-f", lambda a: to_int(a, True)),
    "cvt_nearest_i32_f32": ("i<-f", lambda a: to_int((a + 0.5).intr("floor"), True)),
    "cvt_floor_i32_f32": ("i<-f", lambda a: to_int(a.intr("floor"), True)),
    "cvt_f64_u32": ("d<-i", lambda a: a.utof(64)),
    "cvt_f64_i32": ("d<-i", lambda a: a.stof(64)),
    "cvt_u32_f64": ("i<-d", lambda a: to_int(a, False)),
    "cvt_i32_f64": ("i<-d", lambda a: to_int(a, True)),
    "cvt_f64_f32": ("d<-f", lambda a: a.fconv(64)),
    "cvt_f32_f64": ("f<-d", lambda a: a.fconv(32)),
    "cvt_f32_f16": ("f<-e", lambda a: a.fconv(32)),
    "cvt_f16_f32": ("e<-f", lambda a: a.fconv(16)),
    "cvt_f16_u16": ("e<-h", lambda a: a.zext(32).utof().fconv(16)),
    "cvt_f16_i16": ("e<-h", lambda a: a.sext(32).stof().fconv(16)),
    "cvt_u16_f16": ("h<-e", lambda a: to_int(a.fconv(32), False, 16)),
    "cvt_i16_f16": ("h<-e", lambda a: to_int(a.fconv(32), True, 16)),
    "cvt_f32_bf16": ("f<-h", lambda a: (a.zext(32) << 16).f()),
    "cvt_pk_bf16_f32": ("i<-ff", lambda a, b: pair(to_bf16(a), to_bf16(b))),
    "cvt_pk_f16_f32": ("i<-ff", lambda a, b: pair(a.fconv(16).i(), b.fconv(16).i())),
    "cvt_pk_rtz_f16_f32": ("i<-ff", lambda a, b: pair(to_half_toward_zero(a), to_half_toward_zero(b))),
    "cvt_pk_i16_f32": ("i<-ff", lambda a, b: pair(to_int(a, True, 16), to_int(b, True, 16))),
    "cvt_pk_u16_f32": ("i<-ff", lambda a, b: pair(to_int(a, False, 16), to_int(b, False, 16))),
    "cvt_pk_i16_i32": ("i<-ii", lambda a, b: pair(_limit(a, -32768, 32767), _limit(b, -32768, 32767))),
    "cvt_pk_u16_u32": (
        "i<-ii",
        lambda a, b: pair(*(x.cmp("ugt", 65535).pick(65535, x).trunc(16) for x in (a, b))),
    ),
    "cvt_pk_fp8_f32": ("h<-ff", _pair8(to_fp8)),
    "cvt_pk_bf8_f32": ("h<-ff", _pair8(to_bf8)),
}
for _i in range(4):
    CONVERT[f"cvt_f32_ubyte{_i}"] = ("f<-i", lambda a, shift=8 * _i: ((a >> shift) & 255).utof())
