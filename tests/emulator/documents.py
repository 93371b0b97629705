"""AMD's ISA documents as `Pseudocode`, with the places put right where the printed text cannot be what is meant."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from mori_triton.emulator import isa
from tests.emulator.pcode import Pseudocode
from tests.emulator.pcode_num import BUILTINS, Num, encode, float8, is_nan, round_like

# tinygrad needs Python 3.11; with 3.10 the tests that use the documents are skipped
CDNA = pytest.importorskip("tinygrad.runtime.autogen.amd.cdna.str_pcode").PCODE
RDNA4 = pytest.importorskip("tinygrad.runtime.autogen.amd.rdna4.str_pcode").PCODE

# mnemonic -> [(text, its replacement)]. Why:
#  rndne: the text loses the sign of a zero result; the instruction implements rint of IEEE 754
#  frexp_exp: the mantissa of a denormal number is normalised, so its exponent has to be as well
#  ldexp_f16: the power of two does not overflow before it is multiplied
#  div_scale: without a case that fits the operand passes unscaled; the reciprocal meant is the one in the operand's
#    format; a denominator whose reciprocal is denormal is scaled down (up, it would overflow), and div_fmas undoes it;
#    each lane has its own flag
#  div_fmas: the factor undoes div_scale, so it is 2**64 (2**128), down for small quotients, and there is one rounding
#  div_fixup: a denominator that is infinite or NaN was dealt with before, so the overflow meant is the quotient's
#  cvt_pk_rtz: rounding is a mode there, an own function here
_CORRECTIONS: dict[str, list[tuple[str, str]]] = {
    "v_ldexp_f16": [("16'F(2.0F ** 32'I(S1.i16))", "2.0F ** 32'I(S1.i16)")],
}
for _name in ("v_cvt_pk_rtz_f16_f32", "v_cvt_pkrtz_f16_f32", "s_cvt_pk_rtz_f16_f32"):
    _CORRECTIONS[_name] = [("f32_to_f16(", "f32_to_f16_rtz("), ("ROUND_TOWARD_ZERO", "ROUND_NEAREST_EVEN")]
for _f, _step, _bias in (("f16", 0, 15), ("f32", 64, 127), ("f64", 128, 1023)):
    _CORRECTIONS[f"v_rndne_{_f}"] = _CORRECTIONS[f"s_rndne_{_f}"] = [("", f"D0.{_f} = rint(S0.{_f})")]
    _CORRECTIONS[f"v_frexp_exp_i32_{_f}"] = [(f"exponent(S0.{_f}) - {_bias} + 1", f"frexp_exponent(S0.{_f})")]
    _scaling = "VCC = 0x1LL;\nif S0.{0} == S1.{0} then\n// Only scale the denominator\nD0.{0} = ldexp(S0.{0}, {1})\n"
    _CORRECTIONS[f"v_div_scale_{_f}"] = [
        ("VCC = 0x0LL;", f"VCC = 0x0LL;\nD0.{_f} = S0.{_f};"),
        (f"1.0 / 64'F(S1.{_f}) == DENORM.f64", f"1.0F / S1.{_f} == DENORM.{_f}"),
        (_scaling.format(_f, _step) + "endif\nelsif 1.0", _scaling.format(_f, -_step) + "endif\nelsif 1.0"),
        ("VCC = 0x1LL", "VCC.u64[laneId] = 1'1U"),
    ]
    _CORRECTIONS[f"v_div_fixup_{_f}"] = [
        (f"elsif exponent(S1.{_f}) == {2 * _bias + 1} then", f"elsif exponent(S0.{_f}) == {2 * _bias + 1} then")
    ]
    _sources = f"(S0.{_f}, S1.{_f}, S2.{_f})"
    _CORRECTIONS[f"v_div_fmas_{_f}"] = [
        (f"2.0F ** 32 * fma{_sources}", f"fma_scaled{_sources}"),
        (f"2.0 ** 64 * fma{_sources}", f"fma_scaled{_sources}"),
    ]


def _fma_scaled(a: Num, b: Num, c: Num) -> Num:
    step = 64 if c.width == 32 else 128
    x, y, z = a.value(), b.value(), c.value()
    if not all(map(math.isfinite, (x, y, z))):
        return BUILTINS["fma"](a, b, c)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        return BUILTINS["fma"](a, b, c)
    large = BUILTINS["exponent"](c).value() > (127 if c.width == 32 else 1023)
    return Num(encode(exact * Fraction(2) ** (step if large else -step), c.width), c.width, "F")


def _toward_zero(x: Num) -> Num:
    near = BUILTINS["f32_to_f16"](x)
    if is_nan(x.bits, 32) or abs(near.value()) <= abs(x.value()):
        return near
    return Num(near.bits - 1, 16, "F")


def _frexp_exponent(x: Num) -> Num:
    v = x.value()
    return Num(0 if v == 0 else math.frexp(v)[1], 32, "I")


def _maximum(sign: int):
    def f(a: Num, b: Num) -> Num:
        for x in (a, b):
            if is_nan(x.bits, x.width):
                return BUILTINS["cvtToQuietNAN"](x)
        # -0 < +0, so compare zeros by sign
        keys = [(sign * x.value(), -sign * (x.bits >> (x.width - 1))) for x in (a, b)]
        return a if keys[0] >= keys[1] else b

    return f


_COMMON = {
    "rint": round_like(round),
    "frexp_exponent": _frexp_exponent,
    "fma_scaled": _fma_scaled,
    "f32_to_f16_rtz": _toward_zero,
    "v_maximum_f32": _maximum(1),
    "v_minimum_f32": _maximum(-1),
    "v_maximum3_f16": lambda a, b, c: _maximum(1)(_maximum(1)(a, b), c),
    "v_minimum3_f16": lambda a, b, c: _maximum(-1)(_maximum(-1)(a, b), c),
}
_OCP = {
    "f32_to_fp8": lambda x: Num(float8(x.value(), 3, 7, 448.0, infinite=False, fnuz=False), 8, "B"),
    "f32_to_bf8": lambda x: Num(float8(x.value(), 2, 15, 57344.0, infinite=True, fnuz=False), 8, "B"),
}
_FNUZ = {
    "f32_to_fp8": lambda x: Num(float8(x.value(), 3, 8, 240.0, infinite=False, fnuz=True), 8, "B"),
    "f32_to_bf8": lambda x: Num(float8(x.value(), 2, 16, 57344.0, infinite=False, fnuz=True), 8, "B"),
}


def _corrected(table: dict, functions: dict) -> Pseudocode:
    p = Pseudocode(table, functions)
    for name, pairs in _CORRECTIONS.items():
        for old, new in pairs:
            if name in p.texts:
                p.texts[name] = p.texts[name].replace(old, new) if old else new
    return p


PCODE = {"gfx1201": _corrected(RDNA4, _COMMON | _OCP), "gfx942": _corrected(CDNA, _COMMON | _FNUZ)}


def spellings(arch: str, prefix: str) -> dict[str, str]:
    """Canonical name -> the mnemonic of this GPU that has pseudocode."""
    found: dict[str, str] = {}
    for name in PCODE[arch].texts:
        if name.startswith(prefix):
            found.setdefault(isa.canonical(name)[2:], name)
    return found
