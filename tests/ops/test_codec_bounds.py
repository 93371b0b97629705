"""The error bounds of `ops.formats`: they hold for every element, and hold for nothing that is much worse."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mori_triton.errors import ArgumentError
from mori_triton.ops import formats
from mori_triton.ops.combine_codec import sum_rows_torch
from mori_triton.ops.formats import (
    CODECS,
    codec_error_bound,
    combine_error_bound,
    decode_rows,
    encode_rows,
)
from tests.ops.codec_cases import bfloat16_rows, generator

pytestmark = pytest.mark.cpu

FINITE = (
    "normal", "wide", "outlier", "large", "tiny", "huge", "denormal", "one denormal", "zeros", "powers", "halves",
)  # fmt: skip


def rows_of(values: str, num_rows: int, hidden: int = 1000) -> torch.Tensor:
    return torch.stack([bfloat16_rows(values, hidden, generator("bound", values, i)) for i in range(num_rows)])


def round_trip(rows: torch.Tensor, quant: str) -> torch.Tensor:
    return decode_rows(*encode_rows(rows, quant), quant, rows.shape[-1])


def share(error: torch.Tensor, bound: torch.Tensor) -> float:
    """The largest part of its bound that an element's error takes."""
    return float(torch.where(error == 0, 0.0, error / bound).max())


@pytest.mark.parametrize("values", FINITE)
@pytest.mark.parametrize("quant", CODECS)
def test_no_element_is_further_off(quant: str, values: str) -> None:
    rows = rows_of(values, 200)
    bound = codec_error_bound(rows, quant)
    error = (round_trip(rows, quant).double() - rows.double()).abs()
    assert bool((error <= bound).all())
    if values in ("normal", "wide", "outlier"):
        # halfway between two numbers of the format somewhere, or saturated: the bound is not generous
        assert share(error, bound) > 0.99


@pytest.mark.parametrize("quant", CODECS)
def test_the_bound_as_documented(quant: str) -> None:
    """2^-4 of the element where e4m3 is normal, 2^-10 scales below; a quarter, half or whole scale for e2m1."""
    codec, rows = CODECS[quant], rows_of("wide", 200)
    _, scales = encode_rows(rows, quant)
    scale = torch.ones(200, 1000) if scales is None else scales.repeat_interleave(128, -1)[:, :1000]
    exact = rows.double().abs()
    within = exact / scale <= codec.format.max
    if codec.format.bits == 8:
        simple = torch.maximum(exact * 2.0**-4, scale.double() * 2.0**-10)
    else:
        step = torch.where(exact < 2 * scale, 0.25, torch.where(exact < 4 * scale, 0.5, 1.0))
        simple = step * scale.double()
    simple = simple + exact * 2.0**-21
    bound = codec_error_bound(rows, quant)
    assert bool((bound <= simple)[within].all())
    # of 8 bits it is as tight as half the spacing, which the simple form exceeds by up to two
    assert bool((bound >= simple / 2.001)[within].all())


@pytest.mark.parametrize("num_rows", [1, 2, 8])
@pytest.mark.parametrize("values", FINITE)
@pytest.mark.parametrize("quant", formats.QUANT_TYPES)
def test_no_sum_is_further_off(quant: str, values: str, num_rows: int) -> None:
    rows = rows_of(values, 40 * num_rows).view(num_rows, 40, 1000)
    bound = combine_error_bound(rows, quant)
    error = (sum_rows_torch(rows, quant).double() - rows.double().sum(0)).abs()
    finite = bound.isfinite()
    assert bool((error <= bound)[finite].all())
    assert bool(finite.all()) or values == "huge"
    # numbers of the format, where the scale is 1
    exact = {
        "powers": ("none", "fp8_direct_cast", "fp8_blockwise"),
        "halves": ("none", "fp8_direct_cast", "fp4_blockwise"),
    }
    if num_rows == 1 and quant in exact.get(values, ()):
        assert not error.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_without_a_codec(dtype: torch.dtype) -> None:
    rows = torch.randn(8, 64, 512, generator=generator("plain")).to(dtype)
    bound = combine_error_bound(rows)
    error = (sum_rows_torch(rows).double() - rows.double().sum(0)).abs()
    assert bool((error <= bound).all())
    if dtype != torch.float32:
        assert share(error, bound) > 0.9


# -- a bound that lets a fault through proves nothing


def worse(monkeypatch: pytest.MonkeyPatch, fault: str, rows: torch.Tensor, quant: str) -> torch.Tensor:
    """The round trip of a codec with a fault."""
    codec = CODECS[quant]
    if fault.startswith("block of"):
        # the scales of other blocks than the bound is about
        monkeypatch.setattr(formats, "BLOCK", int(fault.rsplit(maxsplit=1)[-1]))
        found = round_trip(rows, quant)
        monkeypatch.undo()
        return found
    codes, scales = encode_rows(rows, quant)
    assert scales is not None
    if fault == "scale of the next block":
        return decode_rows(codes, scales.roll(1, -1), quant, rows.shape[-1])
    if fault.startswith("scale a bit"):
        factor = 0.8 if fault.endswith("small") else 1.25
        other = dataclasses.replace(codec, scaled=False)
        monkeypatch.setitem(formats.CODECS, quant, other)
        wrong = scales * factor
        wide = wrong.repeat_interleave(128, -1)[..., : rows.shape[-1]]
        values = codec.format.decode(codec.format.encode(rows.float() / wide))
        monkeypatch.undo()
        return values * wide
    if fault == "truncated":
        spacing = codec.format.spacing(rows.double() / scales.repeat_interleave(128, -1)[..., : rows.shape[-1]])
        wide = scales.double().repeat_interleave(128, -1)[..., : rows.shape[-1]]
        return (torch.trunc(rows.double() / wide / spacing) * spacing * wide).float()
    assert fault == "scale lost"
    return decode_rows(codes, torch.ones_like(scales), quant, rows.shape[-1])


@pytest.mark.parametrize(
    "fault",
    [
        "block of 64", "block of 256", "scale of the next block", "scale a bit small", "scale a bit large", "truncated",
        "scale lost",
    ],
)  # fmt: skip
@pytest.mark.parametrize("quant", ["fp8_blockwise", "fp4_blockwise"])
def test_faults_exceed_the_bound(quant: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On unit normal data, in one row of 7168 columns; also after a sum of eight rows."""
    rows = rows_of("normal", 8, 7168)
    wrong = worse(monkeypatch, fault, rows, quant).double()
    beyond = (wrong - rows.double()).abs() > codec_error_bound(rows, quant)
    assert bool(beyond.any(-1).all()), "in every row"
    if fault in ("scale of the next block", "scale lost"):
        summed = (wrong.sum(0) - rows.double().sum(0)).abs() > combine_error_bound(rows, quant)
        assert bool(summed.any())


# -- values that have no bound


def test_c4_direct_cast_saturates() -> None:
    """Beyond 448 a direct cast gives 448, and no NaN; blockwise it is as near as anywhere."""
    rows = torch.tensor([[449.0, 448.0, -1e4, 3e38, 2.0**-9, 2.0**-10, -(2.0**-11), 240.0]], dtype=torch.bfloat16)
    direct = round_trip(rows, "fp8_direct_cast")
    assert direct.tolist() == [[448.0, 448.0, -448.0, 448.0, 2.0**-9, 0.0, -0.0, 240.0]]
    bound = codec_error_bound(rows, "fp8_direct_cast")
    # the bound tells: it is what is lost
    assert float(bound[0, 2]) >= float(rows[0, 2].abs()) - 448
    outlier = rows_of("outlier", 50)
    kept = ((round_trip(outlier, "fp8_blockwise").double() - outlier.double()).abs() / 1e4).max()
    lost = ((round_trip(outlier, "fp8_direct_cast").double() - outlier.double()).abs() / 1e4).max()
    assert float(kept) < 2.0**-5
    assert float(lost) > 0.95


@pytest.mark.parametrize("quant", CODECS)
def test_h4_rows_of_nothing_but(quant: str) -> None:
    """Zeros, infinities, one denormal, NaN: scales are finite but where a whole block is NaN."""
    biggest = torch.finfo(torch.bfloat16).max
    zeros = torch.zeros(1, 128, dtype=torch.bfloat16)
    infinite, one, nan = torch.full_like(zeros, -torch.inf), zeros.clone(), zeros.clone()
    one[0, 5], nan[0, 5] = 2.0**-133, torch.nan
    for rows in (zeros, infinite, one, nan):
        _, scales = encode_rows(rows, quant)
        all_nan = quant == "fp4_blockwise" and rows is nan
        assert scales is None or bool(scales.isfinite().all()) != all_nan
        assert scales is None or bool((scales >= formats.MIN_SCALE).all()) != all_nan
    assert not round_trip(zeros, quant).any()
    largest = 448.0 if quant == "fp8_direct_cast" else biggest
    assert bool((round_trip(infinite, quant).to(torch.bfloat16) == -largest).all())
    assert torch.nonzero(round_trip(one, quant)).shape[0] <= 1
    assert float(round_trip(one, quant).abs().max()) in (0.0, 2.0**-133)
    expected = 128 if quant == "fp4_blockwise" else 1
    assert int(round_trip(nan, quant).isnan().sum()) == expected
    assert bool(codec_error_bound(infinite, quant).isinf().all())


def test_arguments() -> None:
    rows = torch.zeros(2, 128)
    with pytest.raises(ArgumentError, match="quant_type: want one of: fp8_direct_cast, fp8_blockwise, fp4_blockwise"):
        encode_rows(rows.bfloat16(), "none")
    for call in (encode_rows, codec_error_bound, combine_error_bound):
        with pytest.raises(ArgumentError, match=r"rows.dtype: want torch.bfloat16, got torch.float32"):
            call(rows, "fp8_blockwise")
