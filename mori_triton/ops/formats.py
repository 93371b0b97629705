"""The small floating-point formats that tokens may have, or travel in: what they hold, references, error bounds.

Two uses. A payload of dtype float8_e4m3fn, float8_e4m3fnuz or float4_e2m1fn_x2 travels as it is, and combine sums it in
float32 and rounds once. A combine *codec* (`quant_type`) turns bfloat16 rows into such numbers for the way only. The
kernels are in `ops.kernels.formats` and `ops.kernels.combine_codec`; docs/formats.md describes both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from mori_triton.errors import check_tensor, require

# elements that share a scale in the blockwise codecs
BLOCK = 128
# a scale is never smaller: its reciprocal is finite, and products with codes, however a kernel shifts those, are normal
MIN_SCALE = 2.0**-100


@dataclass(frozen=True)
class Format:
    """A floating-point format of 4 or 8 bits: sign, exponent, `mantissa_bits` of fraction; subnormals, no infinity."""

    name: str  # FORMAT of the kernels
    dtype: torch.dtype | None  # of tensors that hold it; None: this torch has no such dtype
    bits: int
    mantissa_bits: int
    min_exponent: int  # of the smallest normal number
    nan: int | None  # the code that a NaN becomes, None: there is none
    signed_zero: bool  # whether the code of -0 is -0

    @cached_property
    def table(self) -> torch.Tensor:
        """float32 `[2 ** bits]`: the value of every code."""
        sign_bit = 1 << (self.bits - 1)
        values = []
        for code in range(2 * sign_bit):
            exponent, mantissa = divmod(code % sign_bit, 1 << self.mantissa_bits)
            if exponent:
                mantissa += 1 << self.mantissa_bits
            value = math.ldexp(mantissa, max(exponent, 1) - 1 + self.min_exponent - self.mantissa_bits)
            is_nan = self.nan is not None and self.nan == (code % sign_bit if self.signed_zero else code)
            values.append(math.copysign(math.nan if is_nan else value, -1.0 if code >= sign_bit else 1.0))
        return torch.tensor(values, dtype=torch.float32)

    @cached_property
    def max(self) -> float:
        """The largest number."""
        return float(self.table.nan_to_num().max())

    @property
    def smallest(self) -> float:
        """The smallest positive number, the spacing of the subnormal ones."""
        return math.ldexp(1.0, self.min_exponent - self.mantissa_bits)

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """float32 values, exact. `codes` uint8: one a byte, or for a 4-bit format two a byte in the last dimension, the
        first in the low nibble.
        """
        check_tensor("codes", codes, torch.uint8, (None,) * codes.dim())
        table = self.table.to(codes.device)
        if self.bits == 8:
            return table[codes.long()]
        return table[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """The inverse of `decode`: to nearest, ties to even, beyond the largest number: the largest.

        Infinities become the largest number too. A NaN stays a NaN, without its sign; e2m1 has none and takes +6. Two a
        byte for a 4-bit format: the last dimension of `values` must be even then.
        """
        require(values.is_floating_point(), "values.dtype", "a floating-point dtype", values.dtype)
        exact = values.double().abs()
        steps = torch.round(exact.clamp(max=self.max) / self.spacing(exact)) * self.spacing(exact)
        # codes of positive numbers are in the order of their values
        positive = self.table[: 1 << (self.bits - 1)].nan_to_num(math.inf).double().to(values.device)
        codes = torch.searchsorted(positive, steps.nan_to_num().contiguous())
        negative = torch.signbit(values) & ((codes > 0) | self.signed_zero)
        codes = torch.where(negative, codes + (1 << (self.bits - 1)), codes)
        codes = torch.where(exact.isnan(), (1 << (self.bits - 1)) - 1 if self.nan is None else self.nan, codes)
        codes = codes.to(torch.uint8)
        if self.bits == 4:
            require(codes.shape[-1] % 2 == 0, "values.shape[-1]", "even, as two share a byte", codes.shape[-1])
            codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
        return codes

    def spacing(self, values: torch.Tensor) -> torch.Tensor:
        """float64: the distance of neighbouring numbers around each value. Twice the most that rounding moves it, as
        long as it is not beyond the largest number.
        """
        exponent = torch.frexp(values.double().abs().clamp(self.smallest, self.max)).exponent - 1
        return _power_of_two(exponent.clamp(min=self.min_exponent) - self.mantissa_bits)


E4M3FN = Format("e4m3fn", torch.float8_e4m3fn, 8, 3, -6, nan=0x7F, signed_zero=True)
E4M3FNUZ = Format("e4m3fnuz", torch.float8_e4m3fnuz, 8, 3, -7, nan=0x80, signed_zero=False)
E2M1 = Format("e2m1", getattr(torch, "float4_e2m1fn_x2", None), 4, 1, 0, nan=None, signed_zero=True)
FORMATS = {form.name: form for form in (E4M3FN, E4M3FNUZ, E2M1)}
FORMAT_OF_DTYPE = {form.dtype: form for form in FORMATS.values() if form.dtype is not None}


@dataclass(frozen=True)
class Codec:
    """How a combine's bfloat16 rows travel."""

    format: Format
    scaled: bool  # a float32 scale for each BLOCK elements


# MORI's names. "none": rows travel as they are
CODECS = {
    "fp8_direct_cast": Codec(E4M3FN, scaled=False),
    "fp8_blockwise": Codec(E4M3FN, scaled=True),
    "fp4_blockwise": Codec(E2M1, scaled=True),
}
QUANT_TYPES = ("none", *CODECS)


def codec_of(quant_type: str) -> Codec:
    """The codec of a `quant_type` other than "none". Raises ArgumentError for an unknown name."""
    require(quant_type in CODECS, "quant_type", f"one of: {', '.join(CODECS)}", repr(quant_type))
    return CODECS[quant_type]


def num_blocks(hidden: int) -> int:
    """Scales of a row of `hidden` elements."""
    return -(-hidden // BLOCK)


def encode_rows(rows: torch.Tensor, quant_type: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What travels for bfloat16 rows: reference of `combine_encode_kernel`.

    Args:
        rows: `[..., h]` bfloat16.
        quant_type: a key of `CODECS`.

    Returns:
        uint8 `[..., h]` (e4m3fn) or `[..., ceil(h / 2)]` (e2m1, a missing last element is 0), and float32 scales `[...,
        ceil(h / 128)]` or None. A scale is the largest magnitude of its block divided by the format's largest number,
        at least `MIN_SCALE`, and 1 for a block of zeros. An infinity counts as the largest bfloat16 number, so it
        comes back as that; a NaN does not count, except that e2m1, which has no NaN, gives a block with one the scale
        NaN: the whole block comes back NaN.
    """
    codec = codec_of(quant_type)
    check_tensor("rows", rows, torch.bfloat16, (None,) * rows.dim())
    h, wide = rows.shape[-1], num_blocks(rows.shape[-1]) * BLOCK
    blocks = torch.nn.functional.pad(rows.float(), (0, wide - h)).unflatten(-1, (-1, BLOCK))
    scales = None
    if codec.scaled:
        biggest = torch.tensor(torch.finfo(torch.bfloat16).max, dtype=torch.float32)
        largest = blocks.abs().minimum(biggest).nan_to_num(0.0).amax(-1)
        scales = (largest / torch.full_like(largest, codec.format.max)).clamp(min=MIN_SCALE)
        scales = torch.where(largest == 0, 1.0, scales)
        if codec.format.nan is None:
            scales = torch.where(blocks.isnan().any(-1), torch.nan, scales)
        blocks = blocks * (1.0 / scales)[..., None]
    num_bytes = -(-h * codec.format.bits // 8)
    return codec.format.encode(blocks.flatten(-2))[..., :num_bytes].contiguous(), scales


def decode_rows(codes: torch.Tensor, scales: torch.Tensor | None, quant_type: str, hidden: int) -> torch.Tensor:
    """float32 `[..., hidden]`: what the receiver adds up. The inverse of `encode_rows` but for what rounding took."""
    values = codec_of(quant_type).format.decode(codes)[..., :hidden]
    if scales is not None:
        values = values * scales.repeat_interleave(BLOCK, -1)[..., :hidden]
    return values


def codec_error_bound(rows: torch.Tensor, quant_type: str) -> torch.Tensor:
    """float64 `[..., h]`: the most by which `decode_rows(encode_rows(rows))` may differ from `rows`, by element.

    Half the format's spacing around `x / scale`, times the scale: at most 2^-4 of `x` where e4m3 is normal and 2^-10
    scales below; for e2m1 1/4 scale below 2, 1/2 to 4, 1 to 6. What a direct cast saturates, `|x| - 448`, is added.
    Roundings in float32 (scale's reciprocal, product, product with the scale) add 2^-22 of `x`. Infinite where `x` is
    not finite.
    """
    codec = codec_of(quant_type)
    check_tensor("rows", rows, torch.bfloat16, (None,) * rows.dim())
    exact = rows.double().abs()
    scale = torch.ones_like(exact)
    if codec.scaled:
        _, scales = encode_rows(rows, quant_type)
        assert scales is not None
        scale = scales.double().repeat_interleave(BLOCK, -1)[..., : rows.shape[-1]]
    lost = (exact / scale - codec.format.max * (1 + 2.0**-22)).clamp(min=0.0)
    bound = scale * (torch.where(lost > 0, lost, codec.format.spacing(exact / scale) / 2)) + exact * 2.0**-22
    return torch.where(rows.isfinite() & scale.isfinite(), bound, torch.inf)


def combine_error_bound(rows: torch.Tensor, quant_type: str = "none") -> torch.Tensor:
    """float64 `[..., h]`: the most by which combine's output may differ from the exact sum of a token's rows.

    Args:
        rows: `[U, ..., h]`: the rows that the token's `U` distinct PEs hand to combine, bfloat16 with a codec; float32,
            bfloat16 or float16 without.
        quant_type: the config's.

    Returns:
        The rows' codec errors, plus the roundings of `U` float32 additions (each half a unit of 2^-23 of the magnitudes
        added up so far), plus one rounding of the sum to the dtype of `rows`. Infinite where a row is not finite or the
        sum may round to infinity.
    """
    exact = rows.double()
    lost = torch.zeros_like(exact) if quant_type == "none" else codec_error_bound(rows, quant_type)
    magnitudes, error = (exact.abs() + lost).sum(0), lost.sum(0)
    # the first addition, to zero, is exact; the factor covers the magnitudes' own growth by rounding
    error = error + (rows.shape[0] - 1) * 2.0**-24 * magnitudes * (1 + 2.0**-20)
    largest = exact.sum(0).abs() + error
    info = torch.finfo(rows.dtype)
    # half a unit in the last place of the largest that the sum may be
    exponent = torch.frexp(largest.clamp(min=info.tiny)).exponent - 1
    if rows.dtype != torch.float32:
        error = error + info.eps / 2 * _power_of_two(exponent)
    return torch.where((largest < info.max) & exact.isfinite().all(0), error, torch.inf)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """float64, exact on every device (torch.ldexp goes by float32 powers)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
