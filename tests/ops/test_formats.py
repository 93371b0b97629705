"""Every code and every 16-bit number through the kernels, the torch references and torch's own types."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import emulator
from mori_triton.errors import ArgumentError
from mori_triton.ops.formats import E2M1, E4M3FN, E4M3FNUZ, FORMAT_OF_DTYPE, FORMATS, Format
from tests.ops.format_kernels import all_bytes, all_numbers, float32_samples, run_decode, run_encode

pytestmark = pytest.mark.cpu

ARCHS = ("gfx1201", "gfx942")
NAMES = tuple(FORMATS)
WORDS = (torch.uint8, torch.uint16, torch.uint32)
# what the sixteen codes of e2m1 mean, as the OCP Microscaling Formats specification lists them
E2M1_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


@pytest.fixture
def on(request: pytest.FixtureRequest) -> Any:
    """The architecture that kernels of the test run on."""
    active = emulator.activate(request.param)
    yield request.param
    active.deactivate()


on_archs = pytest.mark.parametrize("on", ARCHS, indirect=True)


def bits(values: torch.Tensor) -> list[Any]:
    """What two arrays that hold the same have in common: one NaN is as good as another, a zero has a sign."""
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32).tolist()


def nearest(values: np.ndarray, form: Format) -> np.ndarray:
    """Codes by looking at all of them: the nearest, of two equally near the even one. float64 holds every distance."""
    table = form.table.double().numpy()[: 1 << (form.bits - 1)]
    table = np.where(np.isnan(table), np.inf, table)
    with np.errstate(invalid="ignore"):
        distance = np.abs(table[None, :] - np.minimum(np.abs(values.astype(np.float64)), form.max)[:, None])
    distance = np.where(np.isnan(distance), np.inf, distance)
    # of two that are equally near, the odd one is no candidate
    candidate = distance == distance.min(1)[:, None]
    candidate[:, 1::2] &= candidate.sum(1)[:, None] == 1
    code = candidate.argmax(1)
    negative = np.signbit(values) & ((code > 0) | form.signed_zero)
    return (code + negative * (1 << (form.bits - 1))).astype(np.uint8)


@pytest.mark.parametrize("form", [E4M3FN, E4M3FNUZ], ids=str)
def test_every_byte_means_what_torch_says(form: Format) -> None:
    """H1: the two e4m3 formats differ in every byte but zero."""
    codes = torch.arange(256, dtype=torch.uint8)
    assert form.dtype is not None
    assert bits(form.decode(codes)) == bits(codes.view(form.dtype).float())
    # torch's type of the other kind reads something else, but for zero
    other = {E4M3FN: E4M3FNUZ, E4M3FNUZ: E4M3FN}[form]
    same = [a == b for a, b in zip(bits(form.decode(codes)), bits(other.decode(codes)), strict=True)]
    assert [i for i, equal in enumerate(same) if equal] == [0]


def test_the_sixteen_codes_of_e2m1() -> None:
    assert bits(E2M1.table) == bits(torch.tensor(E2M1_VALUES))
    # two a byte, the first in the low nibble
    assert bits(E2M1.decode(torch.tensor([0x21, 0x8F], dtype=torch.uint8))) == bits(
        torch.tensor([0.5, 1.0, -6.0, -0.0])
    )
    assert E2M1.encode(torch.tensor([0.5, 1.0, -6.0, -0.0])).tolist() == [0x21, 0x8F]
    with pytest.raises(ArgumentError, match=r"values.shape\[-1\]: want even"):
        E2M1.encode(torch.zeros(2, 3))


def test_limits() -> None:
    assert [(f.max, f.smallest) for f in FORMATS.values()] == [(448.0, 2.0**-9), (240.0, 2.0**-10), (6.0, 0.5)]
    assert FORMAT_OF_DTYPE[torch.float8_e4m3fn] is E4M3FN
    assert FORMAT_OF_DTYPE[torch.float8_e4m3fnuz] is E4M3FNUZ
    assert E2M1.dtype is None or FORMAT_OF_DTYPE[torch.float4_e2m1fn_x2] is E2M1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", [E4M3FN, E4M3FNUZ], ids=str)
def test_references_round_as_torch_does(form: Format, dtype: torch.dtype) -> None:
    """torch's casts saturate or not, by its version; so they are given what is within the range."""
    values = all_numbers(dtype).float()
    assert form.dtype is not None
    want = values.clamp(-form.max, form.max).to(form.dtype).view(torch.uint8)
    # a NaN's sign is not kept here
    want = torch.where(values.isnan(), 0x7F if form.signed_zero else 0x80, want)
    assert torch.equal(form.encode(values), want)


@pytest.mark.parametrize("name", NAMES)
def test_references_take_the_nearest(name: str) -> None:
    form, values = FORMATS[name], float32_samples(name)
    values = torch.where(values.isnan(), 0.0, values)
    want = nearest(values.numpy(), form)
    if form.bits == 4:
        want = want[0::2] | (want[1::2] << 4)
    assert form.encode(values).tolist() == want.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_what_has_no_nearest(name: str) -> None:
    form = FORMATS[name]
    values = torch.tensor([torch.inf, -torch.inf, torch.nan, -torch.nan, 1e38, -1e38, -0.0, -(2.0**-140)])
    codes = form.encode(values)
    wanted = {
        "e4m3fn": [0x7E, 0xFE, 0x7F, 0x7F, 0x7E, 0xFE, 0x80, 0x80],
        "e4m3fnuz": [0x7F, 0xFF, 0x80, 0x80, 0x7F, 0xFF, 0x00, 0x00],
        # there is no NaN: +6
        "e2m1": [0xF7, 0x77, 0xF7, 0x88],
    }
    assert codes.tolist() == wanted[name]


@pytest.mark.parametrize("name", NAMES)
def test_a_number_of_the_format_stays_itself(name: str) -> None:
    form = FORMATS[name]
    codes = torch.arange(256, dtype=torch.uint8)
    back = form.encode(form.decode(codes))
    # e4m3fn has two NaNs, one of which is made
    assert back.tolist() == [0x7F if name == "e4m3fn" and code == 0xFF else code for code in range(256)]


@on_archs
@pytest.mark.parametrize("word", WORDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_decode_every_byte(name: str, word: torch.dtype, on: str) -> None:
    codes = all_bytes()
    for tile in (False, True):
        assert bits(run_decode(codes, name, word, tile)) == bits(FORMATS[name].decode(codes)), tile


@on_archs
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_encode_every_16_bit_number(name: str, dtype: torch.dtype, on: str) -> None:
    values = all_numbers(dtype)
    assert torch.equal(run_encode(values, name), FORMATS[name].encode(values))


@on_archs
@pytest.mark.parametrize("name", NAMES)
def test_kernels_encode_float32(name: str, on: str) -> None:
    values = float32_samples(name)
    assert torch.equal(run_encode(values, name), FORMATS[name].encode(values))
