"""Floating-point formats of 4, 6 and 8 bits."""

from __future__ import annotations

from typing import NamedTuple

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.convert import to_bf8, to_fp8, to_small_float


class Small(NamedTuple):
    """bits in all, bits of mantissa, bias of the exponent and largest number of the OCP form.

    gfx942's "fnuz" forms of 8 bits have a bias larger by one.
    """

    bits: int
    mantissa: int
    bias: int
    top: float


SMALL = {
    "fp8": Small(8, 3, 7, 448.0),
    "bf8": Small(8, 2, 15, 57344.0),
    "fp6": Small(6, 3, 1, 7.5),
    "bf6": Small(6, 2, 3, 28.0),
    "fp4": Small(4, 1, 1, 6.0),
}
# by the number that modifiers of instructions use
FORMATS = tuple(SMALL)
# formats of the factors that gfx1250's products take: an exponent, e5m3 without a sign, e4m3
SCALES = ("E8", "E5M3", "E4M3")


def widen(v: Val, form: str, fnuz: bool = False) -> Val:
    """The low bits of each i32 as fp32, exactly."""
    bits, mantissa, bias, _ = SMALL[form]
    fnuz = fnuz and bits == 8
    if form == "bf8" and not fnuz:
        # the high half of an fp16, infinities and NaNs too
        return (v << 8).trunc(16).f().fconv(32)
    magnitude, sign = v & ((1 << (bits - 1)) - 1), (v << (32 - bits)) & 0x80000000
    # put in place, the exponent is off by the difference of the biases; so are denormals
    x = (magnitude << (23 - mantissa)).f() * 2.0 ** (127 - bias - fnuz)
    x = (x.i() | sign).f()
    if bits < 8:
        return x
    nan = (v & 0xFF).cmp("eq", 0x80) if fnuz else magnitude.cmp("eq", 0x7F)
    return nan.pick(float("nan"), x)


def narrow(x: Val, form: str) -> Val:
    """fp32 to the target's format as an i32, to nearest even, saturated."""
    if form in ("fp8", "bf8"):
        return (to_fp8(x) if form == "fp8" else to_bf8(x)) & 0xFF
    bits, mantissa, bias, top = SMALL[form]
    return to_small_float(x, mantissa, bias, top, bits=bits)


def widen_scale(v: Val, form: str) -> Val:
    """A factor, the low byte of each i32 (the rest 0): as an exponent of 2, 128 for a NaN (E8), else as fp32."""
    if form == "E8":
        return v - 127
    if form == "E4M3":
        return widen(v, "fp8")
    return v.cmp("eq", 0xFF).pick(float("nan"), (v << 20).f() * 2.0**112)
