"""Values, arithmetic and built-in functions of AMD's instruction pseudocode (see pcode.py).

Independent of the emulator: floats are rounded with numpy and `fractions`, not by LLVM.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

# exponent bits, mantissa bits, numpy float and integer type of each IEEE width
_FORMATS = {16: (5, 10, np.float16, np.uint16), 32: (8, 23, np.float32, np.uint32), 64: (11, 52, np.float64, np.uint64)}


class Num:
    """`bits` of a value `width` wide; kind: U, I, B integers, F float, R exact real (`bits` is then a Fraction)."""

    __slots__ = ("bits", "kind", "width")

    def __init__(self, bits, width: int, kind: str) -> None:
        self.bits, self.width, self.kind = bits if kind == "R" else bits & ((1 << width) - 1), width, kind

    def __repr__(self) -> str:
        return f"{self.width}'{self.kind}({self.bits:#x})" if self.kind != "R" else f"R({self.bits})"

    def value(self):
        """The number meant: int, or float (Fraction for kind R)."""
        if self.kind == "F":
            return decode(self.bits, self.width)
        if self.kind == "I" and self.bits >> (self.width - 1):
            return self.bits - (1 << self.width)
        return self.bits

    def __bool__(self) -> bool:
        return bool(self.bits)


class SignedZero(Num):
    """A zero written with its sign: equal to the zero of that sign only."""

    __slots__ = ()


def decode(bits: int, width: int) -> float:
    _, _, flt, integer = _FORMATS[width]
    return float(integer(bits).view(flt))


def encode(x, width: int) -> int:
    """Bits of x (float or Fraction) rounded to nearest even."""
    if isinstance(x, Fraction):
        return _encode_exact(x, width)
    _, _, flt, integer = _FORMATS[width]
    with np.errstate(all="ignore"):
        return int(flt(x).view(integer))


def _encode_exact(x: Fraction, width: int) -> int:
    return encode_format(x, *_FORMATS[width][:2])


def encode_format(x: Fraction, ebits: int, mbits: int) -> int:
    """Bits of x in a binary format of these widths, rounded to nearest even."""
    bias, sign = (1 << (ebits - 1)) - 1, (1 << (ebits + mbits)) if x < 0 else 0
    x = abs(x)
    if x == 0:
        return sign
    e = x.numerator.bit_length() - x.denominator.bit_length()
    if Fraction(2) ** e > x:
        e -= 1
    e = max(e, 1 - bias)
    # round() takes a half to even
    scaled = round(x / Fraction(2) ** (e - mbits))
    if scaled >> (mbits + 1):
        scaled, e = scaled >> 1, e + 1
    if e > bias:
        return sign | ((1 << ebits) - 1) << mbits
    biased = e + bias if scaled >> mbits else 0
    return sign | biased << mbits | (scaled & ((1 << mbits) - 1))


def is_nan(bits: int, width: int) -> bool:
    ebits, mbits, _, _ = _FORMATS[width]
    return bits >> mbits & ((1 << ebits) - 1) == (1 << ebits) - 1 and bits & ((1 << mbits) - 1) != 0


def _signals(bits: int, width: int) -> bool:
    return is_nan(bits, width) and not bits >> (_FORMATS[width][1] - 1) & 1


def _is_denormal(x: Num) -> bool:
    ebits, mbits, _, _ = _FORMATS[x.width]
    return x.bits >> mbits & ((1 << ebits) - 1) == 0 and x.bits & ((1 << mbits) - 1) != 0


def _resize_float(x: Num, width: int) -> Num:
    """Convert between float widths; a NaN keeps the high bits of its payload, and stays signalling."""
    if x.width == width:
        return x
    if is_nan(x.bits, x.width):
        mfrom, mto = _FORMATS[x.width][1], _FORMATS[width][1]
        m = x.bits & ((1 << mfrom) - 1)
        m = m << (mto - mfrom) if mto > mfrom else m >> (mfrom - mto)
        sign, e = x.bits >> (x.width - 1), (1 << _FORMATS[width][0]) - 1
        return Num(sign << (width - 1) | e << mto | (m or 1), width, "F")
    return Num(encode(decode(x.bits, x.width), width), width, "F")


def _convert_float(x: Num, width: int) -> Num:
    """A conversion instruction: quiets a NaN."""
    if is_nan(x.bits, x.width):
        x = Num(x.bits | 1 << (_FORMATS[x.width][1] - 1), x.width, "F")
    return _resize_float(x, width)


def cast(x: Num, width: int, kind: str) -> Num:
    """`32'F(x)`, `64'U(x)`, ...: convert the number; to B, keep the bits."""
    if kind == "F":
        if x.kind == "F":
            return _resize_float(x, width)
        # an integer literal here is a bit pattern (`32'F(0xffc00000)`)
        return Num(x.bits, width, "F") if x.kind != "R" else Num(encode(x.bits, width), width, "F")
    if x.kind == "F":
        if kind == "B":
            return Num(x.bits, width, "B")
        return Num(int(x.value()), width, kind)
    return Num(x.value(), width, kind)


def _float_result(x, width: int) -> Num:
    return Num(encode(x, width), width, "F")


def _quiet_nan(width: int) -> Num:
    ebits, mbits, _, _ = _FORMATS[width]
    return Num(((1 << ebits) - 1) << mbits | 1 << (mbits - 1), width, "F")


def fma(a: Num, b: Num, c: Num) -> Num:
    x, y, z = a.value(), b.value(), c.value()
    if not all(map(math.isfinite, (x, y, z))):
        with np.errstate(all="ignore"):
            return _float_result(float(np.float64(x) * np.float64(y) + np.float64(z)), a.width)
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    if exact == 0:
        # the sign of a zero sum: negative only if both addends are
        product = math.copysign(1, x) * math.copysign(1, y)
        negative = product < 0 and math.copysign(1, z) < 0
        if (x == 0 or y == 0) and z == 0:
            return _float_result(-0.0 if negative else 0.0, a.width)
        return _float_result(0.0, a.width)
    r = _encode_exact(exact, a.width)
    return Num(r, a.width, "F")


def _arith(op: str, a: Num, b: Num) -> Num:
    if a.kind == "R" or b.kind == "R":
        return _real(op, a, b)
    width = max(a.width, b.width)
    if a.kind == "F" or b.kind == "F":
        x, y = np.float64(a.value()), np.float64(b.value())
        with np.errstate(all="ignore"):
            r = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x / y}[op]()
        return _float_result(float(r), width)
    kind = a.kind if a.kind == b.kind else "U" if "U" in (a.kind, b.kind) else a.kind
    x, y = a.value(), b.value()
    r = {"+": lambda: x + y, "-": lambda: x - y, "*": lambda: x * y, "/": lambda: x // y, "%": lambda: x % y}[op]()
    return Num(r, width, kind)


def _real(op: str, a: Num, b: Num) -> Num:
    """Arithmetic with an exact power of two, as in `S0.f32 * 2.0F ** S1.i32`: rounded once, to the float's width."""
    f, r = (a, b) if b.kind == "R" else (b, a)
    if op != "*":
        raise NotImplementedError(op)
    if f.kind == "R":
        return Num(f.bits * r.bits, 0, "R")
    x = f.value()
    if not math.isfinite(x) or x == 0:
        return f
    return Num(_encode_exact(Fraction(x) * r.bits, f.width), f.width, "F")


def _power(a: Num, b: Num) -> Num:
    return Num(Fraction(int(a.value())) ** max(-3000, min(3000, int(b.value()))), 0, "R")


def _shift(op: str, a: Num, b: Num) -> Num:
    n = b.value()
    return Num(a.value() << n if op == "<<" else a.value() >> n, a.width, a.kind)


def _compare(op: str, a: Num, b: Num) -> Num:
    if b.kind == "DENORM":
        return Num(int(_is_denormal(a)), 1, "U")
    if isinstance(b, SignedZero):
        return Num(int(a.bits == b.bits), 1, "U")
    x, y = a.value(), b.value()
    r = {
        "==": lambda: x == y,
        "!=": lambda: x != y,
        "<>": lambda: x < y or x > y,
        "<": lambda: x < y,
        "<=": lambda: x <= y,
        ">": lambda: x > y,
        ">=": lambda: x >= y,
    }[op]()
    return Num(int(r), 1, "U")


def _bitwise(op: str, a: Num, b: Num) -> Num:
    width = max(a.width, b.width)
    r = a.bits & b.bits if op == "&" else a.bits | b.bits if op == "|" else a.bits ^ b.bits
    return Num(r, width, a.kind)


BINARY: list[tuple[tuple[str, ...], Callable[[str, Num, Num], Num]]] = [
    (("||",), lambda op, a, b: Num(int(bool(a) or bool(b)), 1, "U")),
    (("&&",), lambda op, a, b: Num(int(bool(a) and bool(b)), 1, "U")),
    (("|",), _bitwise),
    (("^",), _bitwise),
    (("&",), _bitwise),
    (("==", "!=", "<>"), _compare),
    (("<", "<=", ">", ">="), _compare),
    (("<<", ">>"), _shift),
    (("+", "-"), _arith),
    (("*", "/", "%"), _arith),
    (("**",), lambda op, a, b: _power(a, b)),
]


def _saturate(x: float, low: int, high: int) -> int:
    if math.isnan(x):
        return 0
    return max(low, min(high, int(x))) if math.isfinite(x) else (high if x > 0 else low)


def _to_int(width: int, signed: bool) -> Callable[[Num], Num]:
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    kind = "I" if signed else "U"
    return lambda x: Num(_saturate(x.value(), low, high), width, kind)


def _from_int(width: int) -> Callable[[Num], Num]:
    return lambda x: Num(_encode_exact(Fraction(x.value()), width), width, "F")


def _exponent(x: Num) -> Num:
    ebits, mbits, _, _ = _FORMATS[x.width]
    return Num(x.bits >> mbits & ((1 << ebits) - 1), 32, "I")


def round_like(fn: Callable[[float], float]) -> Callable[[Num], Num]:
    def f(x: Num) -> Num:
        v = x.value()
        if not math.isfinite(v):
            return x
        return Num(encode(math.copysign(float(fn(v)), v), x.width), x.width, "F")

    return f


def _unary_math(fn: Callable[[float], float]) -> Callable[[Num], Num]:
    """A transcendental function in double, rounded."""

    def f(x: Num) -> Num:
        with np.errstate(all="ignore"):
            return _float_result(float(fn(np.float64(x.value()))), x.width)

    return f


def _clear_sign(x: Num) -> Num:
    return (
        Num(x.bits & ~(1 << (x.width - 1)), x.width, x.kind) if x.kind == "F" else Num(abs(x.value()), x.width, x.kind)
    )


def _mantissa(x: Num) -> Num:
    """Scaled to [0.5, 1), sign kept; denormals are normalised."""
    v = x.value()
    return Num(encode(math.frexp(v)[0], x.width), x.width, "F") if math.isfinite(v) and v else x


def _snorm(width: int) -> Callable[[Num], Num]:
    return lambda x: Num(
        _saturate(round(x.value() * 32767.0) if math.isfinite(x.value()) else x.value(), -32767, 32767), 16, "I"
    )


def _unorm(width: int) -> Callable[[Num], Num]:
    return lambda x: Num(
        _saturate(round(x.value() * 65535.0) if math.isfinite(x.value()) else x.value(), 0, 65535), 16, "U"
    )


def float8(x: float, mbits: int, bias: int, top: float, *, infinite: bool, fnuz: bool) -> int:
    """An 8-bit float of `mbits` mantissa bits, to nearest even, saturated at `top`; infinity only from infinity."""
    sign = 0x80 if math.copysign(1, x) < 0 else 0
    if math.isnan(x):
        return 0x80 if fnuz else sign | 0x7F
    if math.isinf(x) and infinite:
        return sign | 0x7C
    mag = min(abs(x), top)
    if mag == 0:
        return 0 if fnuz else sign
    e = max(math.frexp(mag)[1] - 1, 1 - bias)
    scaled = round(Fraction(mag) / Fraction(2) ** (e - mbits))
    if scaled >> (mbits + 1):
        scaled, e = scaled >> 1, e + 1
    code = (e + bias) << mbits | (scaled & ((1 << mbits) - 1)) if scaled >> mbits else scaled
    return 0 if code == 0 and fnuz else sign | code


BUILTINS: dict[str, Callable] = {
    "abs": _clear_sign,
    "sign": lambda x: Num(x.bits >> (x.width - 1), 1, "U"),
    "exponent": _exponent,
    "mantissa": _mantissa,
    "isNAN": lambda x: Num(int(is_nan(x.bits, x.width)), 1, "U"),
    "isSignalNAN": lambda x: Num(int(_signals(x.bits, x.width)), 1, "U"),
    "isQuietNAN": lambda x: Num(int(is_nan(x.bits, x.width) and not _signals(x.bits, x.width)), 1, "U"),
    "cvtToQuietNAN": lambda x: Num(x.bits | 1 << (_FORMATS[x.width][1] - 1), x.width, "F"),
    "isEven": lambda x: Num(int(x.value() % 2 == 0), 1, "U"),
    "fract": lambda x: _arith("-", x, round_like(math.floor)(x)),
    "fma": fma,
    "floor": round_like(math.floor),
    "trunc": round_like(math.trunc),
    "ldexp": lambda x, n: _real("*", x, _power(Num(2, 32, "I"), n)),
    "sqrt": _unary_math(np.sqrt),
    "log2": _unary_math(np.log2),
    "sin": _unary_math(np.sin),
    "cos": _unary_math(np.cos),
    "pow": lambda a, b: _unary_math(np.exp2)(b),
    "signext": lambda x: Num(Num(x.bits, x.width, "I").value(), 64, "I"),
    "signext_from_bit": lambda x, n: Num(
        Num(x.bits, n.value(), "I").value() if 0 < n.value() < x.width else (x.bits if n.value() else 0), x.width, "I"
    ),
    "f32_to_i32": _to_int(32, True),
    "f32_to_u32": _to_int(32, False),
    "f64_to_i32": _to_int(32, True),
    "f64_to_u32": _to_int(32, False),
    "f16_to_i16": _to_int(16, True),
    "f16_to_u16": _to_int(16, False),
    "v_cvt_i16_f32": _to_int(16, True),
    "v_cvt_u16_f32": _to_int(16, False),
    "f32_to_u8": lambda x: Num(_saturate(x.value(), 0, 255), 8, "U"),
    "u32_to_f32": _from_int(32),
    "i32_to_f32": _from_int(32),
    "u32_to_f64": _from_int(64),
    "i32_to_f64": _from_int(64),
    "u16_to_f16": _from_int(16),
    "i16_to_f16": _from_int(16),
    "f16_to_f32": lambda x: _convert_float(x, 32),
    "f32_to_f16": lambda x: _convert_float(x, 16),
    "f32_to_f64": lambda x: _convert_float(x, 64),
    "f64_to_f32": lambda x: _convert_float(x, 32),
    "bf16_to_f32": lambda x: Num(x.bits << 16, 32, "F"),
    "f32_to_bf16": lambda x: Num(bf16(x), 16, "BF"),
    "i16_to_i32": lambda x: Num(x.value(), 32, "I"),
    "i8_to_i32": lambda x: Num(x.value(), 32, "I"),
    "u32_to_u16": lambda x: Num(min(x.value(), 65535), 16, "U"),
    "i32_to_i16": lambda x: Num(max(-32768, min(32767, x.value())), 16, "I"),
    "f16_to_snorm": _snorm(16),
    "f32_to_snorm": _snorm(32),
    "f16_to_unorm": _unorm(16),
    "f32_to_unorm": _unorm(32),
    "s_ff1_i32_b32": lambda x: Num((x.bits & -x.bits).bit_length() - 1, 32, "I"),
    "s_ff1_i32_b64": lambda x: Num((x.bits & -x.bits).bit_length() - 1, 32, "I"),
}


def bf16(x: Num) -> int:
    if is_nan(x.bits, 32):
        return x.bits >> 16 | 0x40
    return (x.bits + 0x7FFF + (x.bits >> 16 & 1)) >> 16
