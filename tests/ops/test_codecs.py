"""Combine codecs, bit for bit against torch and element by element against the error bound of `ops.formats`."""

from __future__ import annotations

from typing import Any

import pytest

from mori_triton import local_world
from tests.ops.codec_cases import CodecCase, check_codec_case, run_codec_case

pytestmark = pytest.mark.cpu

QUANTS = ("fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")
VALUES = (
    "normal", "wide", "outlier", "large", "tiny", "huge", "denormal", "one denormal", "zeros", "powers", "halves",
    "infinite", "nan", "all infinite",
)  # fmt: skip


def run(case: CodecCase, **options: Any) -> None:
    results = local_world(case.num_pes, heap_size="16M", **options).run(run_codec_case, case)
    check_codec_case(case, results)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("quant", QUANTS)
def test_values(quant: str, values: str) -> None:
    run(CodecCase(quant, values, rounds=1))


@pytest.mark.parametrize("hidden", [1, 2, 3, 6, 7, 40, 64, 127, 128, 129, 136, 1000, 2880])
@pytest.mark.parametrize("quant", QUANTS)
def test_row_sizes(quant: str, hidden: int) -> None:
    """Blocks that are not full, rows and wire rows of every alignment, several pieces a row, an odd last nibble."""
    run(CodecCase(quant, "wide", hidden, num_pes=2, rounds=1))


@pytest.mark.parametrize("num_pes", [1, 2, 5, 8])
@pytest.mark.parametrize("quant", QUANTS)
def test_worlds(quant: str, num_pes: int) -> None:
    """Uneven tokens, PEs without any, tokens that go nowhere, more ids than a chunk, buffers that are used again."""
    run(CodecCase(quant, num_pes=num_pes, top_k=9, num_tokens=4, rounds=3))


@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx1250"])
@pytest.mark.parametrize("quant", QUANTS)
def test_other_gpus(quant: str, arch: str) -> None:
    run(CodecCase(quant, "wide", hidden=300, num_pes=2, weights=False), arch=arch)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("quant", QUANTS)
def test_weak_memory(quant: str, seed: int) -> None:
    """Codes, scales and weights of a row are all covered by the one signal."""
    run(CodecCase(quant, num_pes=2, num_tokens=2, hidden=130), seed=seed, weak_memory=True)
