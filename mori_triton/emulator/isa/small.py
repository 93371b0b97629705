"""Floating-point formats of 4, 6 and 8 bits."""

from __future__ import annotations

from typing import NamedTuple

from mori_triton.emulator.ir import Val


class Small(NamedTuple):
    """bits in all, bits of mantissa, bias of the exponent (the OCP form's; one more in gfx942's "fnuz" form)."""

    bits: int
    mantissa: int
    bias: int


SMALL = {
    "fp8": Small(8, 3, 7),
    "bf8": Small(8, 2, 15),
    "fp6": Small(6, 3, 1),
    "bf6": Small(6, 2, 3),
    "fp4": Small(4, 1, 1),
}
# by the number that modifiers of instructions use
FORMATS = tuple(SMALL)


def widen(v: Val, form: str, fnuz: bool = False) -> Val:
    """The low bits of each i32 as fp32, exactly."""
    bits, mantissa, bias = SMALL[form]
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
