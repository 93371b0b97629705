"""Payloads of 8- and 4-bit floats: dispatched byte by byte, summed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.ops.formats import FORMAT_OF_DTYPE, QUANT_TYPES
from tests.ops.codec_cases import CodecCase, check_codec_case, run_codec_case, run_rounds, start

pytestmark = pytest.mark.cpu

SMALL = tuple(FORMAT_OF_DTYPE)
WIDE = (torch.float32, torch.bfloat16, torch.float16)


def run(case: CodecCase, **options: Any) -> None:
    results = local_world(case.num_pes, heap_size="16M", **options).run(run_codec_case, case)
    check_codec_case(case, results)


@pytest.mark.parametrize("registered", [False, True], ids=["external", "registered"])
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_round_trip(dtype: torch.dtype, registered: bool) -> None:
    """Random bytes, every NaN among them."""
    run(CodecCase(values="nan", dtype=dtype, sent=dtype, registered=registered, rounds=3, top_k=9))


@pytest.mark.parametrize("hidden", [1, 2, 4, 9, 72, 128, 129, 2440])
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_row_sizes(dtype: torch.dtype, hidden: int) -> None:
    run(CodecCase(dtype=dtype, sent=dtype, hidden=hidden, num_pes=2, rounds=1))


@pytest.mark.parametrize("dtype", [*WIDE, *SMALL], ids=str)
@pytest.mark.parametrize("sent", [*WIDE, *SMALL], ids=str)
def test_one_dtype_out_another_back(sent: torch.dtype, dtype: torch.dtype) -> None:
    """Dispatch's bytes are exact whatever is in them; combine's dtype is its input's."""
    run(CodecCase(dtype=dtype, sent=sent, num_pes=2, rounds=2))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_other_gpus(dtype: torch.dtype, arch: str) -> None:
    """Nothing asks a GPU what it can convert: fnuz sums on gfx1201 too, OCP on gfx942 (H1, H2, H3)."""
    run(CodecCase(dtype=dtype, sent=dtype, num_pes=2, hidden=150), arch=arch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_weak_memory(dtype: torch.dtype, seed: int) -> None:
    run(CodecCase(dtype=dtype, sent=dtype, num_pes=2, num_tokens=2), seed=seed, weak_memory=True)


SCALES = (
    (1, torch.uint8), (3, torch.uint8), (7, torch.float8_e4m3fn), (9, torch.float16), (1, torch.bfloat16),
    (1, torch.float32), (56, torch.float32), (5, torch.int64), (3, torch.complex64),
)  # fmt: skip


@pytest.mark.parametrize("scales", SCALES, ids=str)
def test_scale_rows_of_any_width(scales: tuple[int, torch.dtype]) -> None:
    """They are opaque: entries of 1, 2, 4 and 8 bytes, rows of 1, 3 and 7 bytes and of 56 x 4."""
    run(CodecCase(dtype=torch.bfloat16, sent=torch.float8_e4m3fn, scales=scales, num_pes=2))


def widths(pe: int, cases: list[CodecCase]) -> list[Any]:
    op = start(cases[0], pe)
    outcomes = [run_rounds(op, case) for case in cases]
    op.close()
    return outcomes


@pytest.mark.parametrize("quant", QUANT_TYPES)
def test_c8_rows_get_narrower_and_wider_again(quant: str) -> None:
    """Rows, wire rows and scales are packed by the width of the call, not of the config."""
    shapes = [(300, torch.bfloat16), (129, torch.bfloat16), (256, torch.bfloat16)]
    if quant == "none":
        shapes += [(129, SMALL[0]), (256, torch.float32)]
    cases = [CodecCase(quant, hidden=h, dtype=d, num_pes=2, config=(("max_token_type_size", 4),)) for h, d in shapes]
    results = local_world(2, heap_size="16M").run(widths, cases)
    for index, case in enumerate(cases):
        check_codec_case(case, [result[index] for result in results])
