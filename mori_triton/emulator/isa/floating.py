"""Vector floating-point instructions of 32 and 64 bits.

Hardware's approximations (rcp, rsq, sqrt, exp, log: within one unit in the last place) are the host's exact or nearly
exact functions here. Division needs no such licence: its scale, fmas and fixup steps do what the hardware does, so a
quotient is correctly rounded.
"""

from __future__ import annotations

from mori_triton.emulator.ir import Val
from mori_triton.emulator.isa.integer import Formula

# exponent bits, mantissa bits
_FORMAT = {16: (5, 10), 32: (8, 23), 64: (11, 52)}


def fma(a: Val, b: Val, c: Val) -> Val:
    return a.intr("fma", b, c)


def _odd(near: Val, shrink: Val, inexact: Val) -> Val:
    """Round to odd what was rounded to nearest: toward zero, then the last bit set if anything was lost.

    A second rounding, to a narrower format, then gives what a single one would have given.
    """
    return ((near.i() - shrink.zext(near.bits)) | inexact.zext(near.bits)).f()


def to_odd(exact: Val) -> Val:
    """fp64 to fp32, rounded to odd."""
    near = exact.fconv(32)
    back = near.fconv(64)
    return _odd(near, back.intr("fabs").cmp("ogt", exact.intr("fabs")), back.cmp("one", exact))


def fma_odd(a: Val, b: Val, c: Val) -> Val:
    """a * b + c of fp32 or narrower numbers in fp64, rounded to odd."""
    p, c = a.fconv(64) * b.fconv(64), c.fconv(64)
    s = p + c
    # what the sum lost, exactly (the product lost nothing)
    part = s - p
    lost = (p - (s - part)) + (c - part)
    shrink = lost.cmp("one", 0.0) & (lost.i() ^ s.i()).cmp("slt", 0)
    return _odd(s, shrink, lost.cmp("one", 0.0))


def is_nan(a: Val) -> Val:
    return a.cmp("uno", a)


def quiet(a: Val) -> Val:
    """The same NaN, not signalling."""
    return (a.i() | 1 << (_FORMAT[a.bits][1] - 1)).f()


def is_signalling(a: Val) -> Val:
    return is_nan(a) & (a.i() & 1 << (_FORMAT[a.bits][1] - 1)).cmp("eq", 0)


def exponent(a: Val) -> Val:
    """The biased exponent as an integer."""
    ebits, mbits = _FORMAT[a.bits]
    return (a.i() >> mbits) & ((1 << ebits) - 1)


def is_denormal(a: Val) -> Val:
    return exponent(a).cmp("eq", 0) & (a.i() << 1).cmp("ne", 0)


def _number(name: str) -> Formula:
    """Minimum or maximum that prefers a number to a NaN; -0 < +0. In older GPUs' IEEE mode a signalling NaN wins."""

    def f(a: Val, b: Val) -> Val:
        r = a.intr(name, b)
        if a.fn.module.ieee:
            a, b = a.splat(b.lanes), b.splat(a.lanes)
            r = is_signalling(a).pick(quiet(a), is_signalling(b).pick(quiet(b), r))
        return r

    return f


fmax, fmin = _number("maximumnum"), _number("minimumnum")


def maximum(a: Val, b: Val) -> Val:
    """Maximum that passes a NaN on."""
    return a.intr("maximum", b)


def minimum(a: Val, b: Val) -> Val:
    """Minimum that passes a NaN on."""
    return a.intr("minimum", b)


def three(two: Formula) -> Formula:
    return lambda a, b, c: two(two(a, b), c)


def chain(inner: Formula, outer: Formula) -> Formula:
    """outer(inner(a, b), c)"""
    return lambda a, b, c: outer(inner(a, b), c)


def med3(a: Val, b: Val, c: Val) -> Val:
    """The middle one; with a NaN among them, the minimum."""
    middle = fmax(fmin(a, b), fmin(fmax(a, b), c))
    return (is_nan(a) | is_nan(b) | is_nan(c)).pick(fmin(fmin(a, b), c), middle)


def _dx9_zero(a: Val, b: Val) -> Val:
    return a.cmp("oeq", 0.0) | b.cmp("oeq", 0.0)


def fract(a: Val) -> Val:
    return a + -a.intr("floor")


def ldexp(a: Val, n: Val) -> Val:
    return a.intr("ldexp", n)


def _normalised(a: Val) -> tuple[Val, Val]:
    """(value with a normal exponent, number of binary places it was moved by)"""
    small = is_denormal(a)
    return small.pick(a * 2.0**64, a), small


def frexp_mant(a: Val) -> Val:
    """Mantissa in [0.5, 1) with the sign; zero, infinity and NaN as they are."""
    ebits, mbits = _FORMAT[a.bits]
    x, _ = _normalised(a)
    half = (x.i() & ~(((1 << ebits) - 1) << mbits)) | ((1 << (ebits - 1)) - 2) << mbits
    special = exponent(a).cmp("eq", (1 << ebits) - 1) | (a.i() << 1).cmp("eq", 0)
    return special.pick(a, half.f())


def frexp_exp(a: Val) -> Val:
    """Exponent that goes with `frexp_mant`; 0 for zero, infinity and NaN."""
    ebits, _ = _FORMAT[a.bits]
    x, moved = _normalised(a)
    e = exponent(x) - ((1 << (ebits - 1)) - 2) - moved.pick(x.i().const(64), 0)
    special = exponent(a).cmp("eq", (1 << ebits) - 1) | (a.i() << 1).cmp("eq", 0)
    return special.pick(0, e).trunc(32)


# division: width -> (step of scaling, exponent difference of a quotient near the largest number, exponent of a tiny
# numerator, exponent difference of a quotient that underflows)
_DIVISION = {32: (64, 96, 23, -150), 64: (128, 768, 53, -1075)}


def div_scale(a: Val, den: Val, num: Val) -> tuple[Val, Val]:
    """a (the numerator or the denominator) scaled so that the next steps neither overflow nor lose bits.

    The flag tells `div_fmas` to scale the quotient back.
    """
    step, near_max, tiny, _ = _DIVISION[a.bits]
    ebits, mbits = _FORMAT[a.bits]
    lanes = a.lanes or den.lanes or num.lanes
    a, den, num = a.splat(lanes), den.splat(lanes), num.splat(lanes)
    up, down = a * 2.0**step, a * 2.0**-step
    scales_den, scales_num = a.cmp("oeq", den), a.cmp("oeq", num)
    top = (1 << ebits) - 1
    # the reciprocal of a denominator above 2 ** (bias - 1) is denormal
    rcp_denormal = (den.i() & ((1 << (a.bits - 1)) - 1)).cmp("ugt", (top - 2) << mbits) & exponent(den).cmp("ne", top)
    quotient_denormal = is_denormal(num / den)
    difference = exponent(num) - exponent(den)
    # the first case that holds decides
    value = exponent(num).cmp("sle", tiny).pick(up, a)
    value = quotient_denormal.pick(scales_num.pick(up, a), value)
    value = rcp_denormal.pick(down, value)
    value = (rcp_denormal & quotient_denormal).pick(scales_den.pick(down, a), value)
    value = is_denormal(den).pick(up, value)
    large = difference.cmp("sge", near_max)
    value = large.pick(scales_den.pick(up, a), value)
    zero = num.cmp("oeq", 0.0) | den.cmp("oeq", 0.0)
    value = zero.pick((a.i().const(top << mbits | 1 << (mbits - 1))).f(), value)
    return value, ~zero & (large | (~is_denormal(den) & quotient_denormal))


def div_fmas(a: Val, b: Val, c: Val, scaled: Val) -> Val:
    """a * b + c; where `scaled`, times the power of two that undoes `div_scale`, rounded once."""
    step, _, _, _ = _DIVISION[c.bits]
    lanes = a.lanes or b.lanes or c.lanes or scaled.lanes
    a, b, c = a.splat(lanes), b.splat(lanes), c.splat(lanes)
    r = fma(a, b, c)
    large = exponent(c).cmp("ugt", (1 << (_FORMAT[c.bits][0] - 1)) - 1)
    if c.bits == 32:
        exact = fma_odd(a, b, c)
        factor = large.pick(exact.const(2.0**step), exact.const(2.0**-step))
        return scaled.pick((exact * factor).fconv(32), r)
    # fp64 has no wider format to be exact in: a denormal quotient is rounded twice
    part = large.pick(r.const(2.0 ** (step // 2)), r.const(2.0 ** -(step // 2)))
    overflowed = ~large & r.intr("fabs").cmp("oeq", float("inf"))
    return scaled.pick(overflowed.pick(fma(a * part, b * part, c * part * part), r * part * part), r)


def div_fixup(q: Val, den: Val, num: Val) -> Val:
    """The quotient q with its sign and the special cases put right."""
    underflow = _DIVISION[q.bits][3] if q.bits > 16 else None
    ebits, mbits = _FORMAT[q.bits]
    lanes = q.lanes or den.lanes or num.lanes
    q, den, num = q.splat(lanes), den.splat(lanes), num.splat(lanes)
    sign_bit, top = 1 << (q.bits - 1), ((1 << ebits) - 1) << mbits
    sign = (den.i() ^ num.i()) & sign_bit
    infinity, nan = sign | top, den.i().const(sign_bit | top | 1 << (mbits - 1))
    den_mag, num_mag = den.i() & (sign_bit - 1), num.i() & (sign_bit - 1)
    den_zero, num_zero = den_mag.cmp("eq", 0), num_mag.cmp("eq", 0)
    den_inf, num_inf = den_mag.cmp("eq", top), num_mag.cmp("eq", top)
    r = (q.i() & (sign_bit - 1)) | sign
    if underflow is not None:
        # steps before this one overflowed
        r = exponent(q).cmp("eq", (1 << ebits) - 1).pick(infinity, r)
        r = (exponent(num) - exponent(den)).cmp("slt", underflow).pick(sign, r)
    r = (den_inf | num_zero).pick(sign, r)
    r = (den_zero | num_inf).pick(infinity, r)
    r = ((den_zero & num_zero) | (den_inf & num_inf)).pick(nan, r)
    r = is_nan(den).pick(quiet(den).i(), r)
    return is_nan(num).pick(quiet(num).i(), r).f()


FLOATING: dict[str, tuple[str, Formula]] = {
    "subrev_f32": ("f<-ff", lambda a, b: b - a),
    "sub_f32": ("f<-ff", lambda a, b: a - b),
    "fmaak_f32": ("f<-fff", fma),
    "fmamk_f32": ("f<-fff", fma),
    "fmaak_f64": ("d<-ddd", fma),
    "fmamk_f64": ("d<-ddd", fma),
    "mul_dx9_zero_f32": ("f<-ff", lambda a, b: _dx9_zero(a, b).pick(0.0, a * b)),
    "fma_dx9_zero_f32": ("f<-fff", lambda a, b, c: _dx9_zero(a, b).pick(c, fma(a, b, c))),
    "rcp_iflag_f32": ("f<-f", lambda a: 1.0 / a),
    "exp_f32": ("f<-f", lambda a: a.intr("exp2")),
    "log_f32": ("f<-f", lambda a: a.intr("log2")),
    "max3_num_f32": ("f<-fff", three(fmax)),
    "min3_num_f32": ("f<-fff", three(fmin)),
    "med3_num_f32": ("f<-fff", med3),
    "maximum3_f32": ("f<-fff", three(maximum)),
    "minimum3_f32": ("f<-fff", three(minimum)),
    "maxmin_num_f32": ("f<-fff", chain(fmax, fmin)),
    "minmax_num_f32": ("f<-fff", chain(fmin, fmax)),
    "maximumminimum_f32": ("f<-fff", chain(maximum, minimum)),
    "minimummaximum_f32": ("f<-fff", chain(minimum, maximum)),
}
for _t, _n in (("f", "f32"), ("d", "f64")):
    FLOATING |= {
        f"add_{_n}": (f"{_t}<-{_t}{_t}", lambda a, b: a + b),
        f"mul_{_n}": (f"{_t}<-{_t}{_t}", lambda a, b: a * b),
        f"fma_{_n}": (f"{_t}<-{_t}{_t}{_t}", fma),
        f"fmac_{_n}": (f"{_t}<-{_t}{_t}D", fma),
        f"max_num_{_n}": (f"{_t}<-{_t}{_t}", fmax),
        f"min_num_{_n}": (f"{_t}<-{_t}{_t}", fmin),
        f"maximum_{_n}": (f"{_t}<-{_t}{_t}", maximum),
        f"minimum_{_n}": (f"{_t}<-{_t}{_t}", minimum),
        f"rcp_{_n}": (f"{_t}<-{_t}", lambda a: 1.0 / a),
        f"rsq_{_n}": (f"{_t}<-{_t}", lambda a: 1.0 / a.intr("sqrt")),
        f"sqrt_{_n}": (f"{_t}<-{_t}", lambda a: a.intr("sqrt")),
        f"rndne_{_n}": (f"{_t}<-{_t}", lambda a: a.intr("rint")),
        f"floor_{_n}": (f"{_t}<-{_t}", lambda a: a.intr("floor")),
        f"ceil_{_n}": (f"{_t}<-{_t}", lambda a: a.intr("ceil")),
        f"trunc_{_n}": (f"{_t}<-{_t}", lambda a: a.intr("trunc")),
        f"fract_{_n}": (f"{_t}<-{_t}", fract),
        f"ldexp_{_n}": (f"{_t}<-{_t}i", ldexp),
        f"frexp_mant_{_n}": (f"{_t}<-{_t}", frexp_mant),
        f"frexp_exp_i32_{_n}": (f"i<-{_t}", frexp_exp),
        f"div_scale_{_n}": (f"{_t}m<-{_t}{_t}{_t}", div_scale),
        # the flag is always vcc, never an operand
        f"div_fmas_{_n}": (f"{_t}<-{_t}{_t}{_t}m", div_fmas),
        f"div_fixup_{_n}": (f"{_t}<-{_t}{_t}{_t}", div_fixup),
    }
