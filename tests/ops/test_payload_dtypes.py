"""Payloads of 8- and 4-bit floats: dispatched byte by byte, summed in float32 and rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.ops.formats import FORMAT_OF_DTYPE
from tests.ops.codec_cases import CodecCase, check_codec_case, run_codec_case

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


@pytest.mark.parametrize("hidden", [1, 2, 4, 6, 9, 64, 72, 128, 129, 200, 1440, 3600])
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
