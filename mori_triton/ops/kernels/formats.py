"""Small floating-point formats in kernels: exact decoding to float32, encoding to nearest even. Same bits on every GPU.

Everything is integer and fp16/fp32 arithmetic that all targets round alike; no GPU's conversion instruction is used, as
those differ in what they take (gfx942 knows e4m3fnuz only) and in how they saturate. `FORMAT` is a name of
`ops.formats.FORMATS`; docs/formats.md describes the formats. The references are in `ops.formats`.
"""

import triton
import triton.language as tl


@triton.jit
def _as_halves(pair):
    """The two fp16 numbers in a 32-bit word, low one first."""
    low = (pair & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low, high


@triton.jit
def _spread_e4m3(words, FORMAT: tl.constexpr):
    """Bytes 0 and 2 of each word, and 1 and 3, as pairs of fp16 numbers too small by a power of two.

    An e4m3 number has a shorter exponent than fp16 and no more mantissa, so its bits are those of an fp16 number once
    they are moved: subnormal ones become subnormal ones. What is left is the difference of the exponents' biases. A NaN
    gets exponent bits that an fp16 NaN has.
    """
    magnitude = words & 0x7F7F7F7F
    if FORMAT == "e4m3fn":
        # bit 7 of a byte: 1 exactly if the magnitude is 0x7F
        nan = (magnitude + 0x01010101) & 0x80808080
    else:
        tl.static_assert(FORMAT == "e4m3fnuz")
        # bit 7 of a byte: 1 exactly if the byte is 0x80
        nan = words & ~(magnitude + 0x7F7F7F7F) & 0x80808080
        magnitude = magnitude | (nan - (nan >> 7))
    # bit 7, now above the exponent, makes the fp16 exponent all ones
    magnitude = magnitude | nan
    even = ((magnitude & 0x00FF00FF) << 7) | ((words << 8) & 0x80008000)
    odd = ((magnitude >> 1) & 0x7F807F80) | (words & 0x80008000)
    return even, odd


@triton.jit
def _spread_e2m1(words, I: tl.constexpr):
    """Elements I and I + 4 (of 8) of each word as a pair of fp16 numbers too small by 2^14."""
    nibble = words << (12 - 4 * I)
    return (nibble & 0x80008000) | ((nibble >> 3) & 0x0E000E00)


@triton.jit
def unpack(words, FORMAT: tl.constexpr):
    """Packed numbers as float32, each too small by the same power of two, not in order: for sums over many rows.

    A sum of them `in_order`, times `lift(FORMAT)`, is bit for bit the sum of the exact values: nothing comes near
    float32's limits, nor does it after products with scales of at least `ops.formats.MIN_SCALE`. Two that come out of
    one register are neighbours here, which saves what ordering them would cost.

    Args:
        words: uint8, uint16 or uint32 of any shape; the lowest bits hold the first element.
        FORMAT: "e4m3fn", "e4m3fnuz" or "e2m1".

    Returns:
        float32 `[*words.shape, ...]`: as many trailing dimensions of size 2 as it takes to hold a word's elements.
    """
    NUM_BYTES: tl.constexpr = words.dtype.primitive_bitwidth // 8
    words = words.to(tl.uint32)
    if FORMAT == "e2m1":
        e0, e4 = _as_halves(_spread_e2m1(words, 0))
        e1, e5 = _as_halves(_spread_e2m1(words, 1))
        if NUM_BYTES == 1:
            found = tl.join(e0, e1)
        else:
            e2, e6 = _as_halves(_spread_e2m1(words, 2))
            e3, e7 = _as_halves(_spread_e2m1(words, 3))
            found = tl.join(tl.join(e0, e2), tl.join(e1, e3))
            if NUM_BYTES == 4:
                found = tl.join(found, tl.join(tl.join(e4, e6), tl.join(e5, e7)))
    else:
        even, odd = _spread_e4m3(words, FORMAT)
        e0, e2 = _as_halves(even)
        e1, e3 = _as_halves(odd)
        if NUM_BYTES == 1:
            found = e0
        elif NUM_BYTES == 2:
            found = tl.join(e0, e1)
        else:
            found = tl.join(tl.join(e0, e1), tl.join(e2, e3))
    return found.to(tl.float32)


@triton.jit
def in_order(values, FORMAT: tl.constexpr, NUM_BYTES: tl.constexpr):
    """What `unpack` made of words of `NUM_BYTES` bytes, with each word's elements in order. Nothing moves.

    `words` had one or two dimensions.
    """
    # the last dimension tells the halves of a register apart: the most significant bit of an element's position
    if NUM_BYTES == 4:
        rank: tl.constexpr = len(values.shape)
        if FORMAT == "e2m1" and rank == 4:
            values = tl.permute(values, [0, 3, 1, 2])
        elif FORMAT == "e2m1":
            values = tl.permute(values, [0, 1, 4, 2, 3])
        elif rank == 3:
            values = tl.permute(values, [0, 2, 1])
        else:
            values = tl.permute(values, [0, 1, 3, 2])
    return values


@triton.jit
def lift(FORMAT: tl.constexpr):
    """What `unpack` leaves out: 2 to the difference between fp16's exponent bias and the format's."""
    factor: tl.constexpr = 16384.0 if FORMAT == "e2m1" else 256.0 if FORMAT == "e4m3fn" else 128.0
    return factor


@triton.jit
def decode(words, FORMAT: tl.constexpr):
    """Exact float32 values of packed numbers, in order; arguments and shape as for `unpack`."""
    return in_order(unpack(words, FORMAT) * lift(FORMAT), FORMAT, words.dtype.primitive_bitwidth // 8)


@triton.jit
def encode(values, FORMAT: tl.constexpr):
    """Nearest numbers of a format, ties to even, beyond the largest: the largest. An infinity becomes the largest too.

    A NaN of either sign becomes the format's NaN (0x7F, 0x80); e2m1 has none and takes +6, as NVIDIA's conversion does.
    -0 keeps its sign where the format has one (not e4m3fnuz).

    Args:
        values: float32 of any shape.
        FORMAT: "e4m3fn", "e4m3fnuz" or "e2m1".

    Returns:
        uint8 codes of the same shape; of e2m1 in the low nibble, see `pack_nibbles`.
    """
    tl.static_assert(FORMAT == "e2m1" or FORMAT == "e4m3fn" or FORMAT == "e4m3fnuz")  # noqa: PLR1714 - Triton's "in"
    MANTISSA: tl.constexpr = 1 if FORMAT == "e2m1" else 3
    MIN_EXPONENT: tl.constexpr = 0 if FORMAT == "e2m1" else -6 if FORMAT == "e4m3fn" else -7
    # bits of 6.0, 448.0 or 240.0
    LARGEST: tl.constexpr = 0x40C00000 if FORMAT == "e2m1" else 0x43E00000 if FORMAT == "e4m3fn" else 0x43700000
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clamped = tl.minimum(magnitude, LARGEST)
    # a power of two in whose binade float32 has the spacing that the format has around the value, so that the sum
    # rounds to the format: its low bits count that spacing
    rounder = (tl.maximum(clamped, (MIN_EXPONENT + 127) << 23) & 0x7F800000) + (SHIFT << 23)
    rounded = clamped.to(tl.float32, bitcast=True) + rounder.to(tl.float32, bitcast=True)
    code = rounded.to(tl.int32, bitcast=True) - rounder
    # the binade, counted from the subnormal one
    code += (rounder >> SHIFT) - ((MIN_EXPONENT + 127 + SHIFT) << MANTISSA)
    if FORMAT == "e2m1":
        code = code | ((bits >> 28) & 0x8)
        code = tl.where(magnitude > 0x7F800000, 0x7, code)
    elif FORMAT == "e4m3fn":
        code = code | ((bits >> 24) & 0x80)
        # whatever its sign: NVIDIA's conversions from fp16 lose it, AMD's keep it
        code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    else:
        code = tl.where(code == 0, 0, code | ((bits >> 24) & 0x80))
        code = tl.where(magnitude > 0x7F800000, 0x80, code)
    return code.to(tl.uint8)


@triton.jit
def pack_nibbles(codes):
    """`[..., 2]` 4-bit codes to `[...]` bytes, the first in the low nibble."""
    low, high = tl.split(codes)
    return low | (high << 4)
