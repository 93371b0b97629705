"""Combine codecs, bit for bit against torch and element by element against the error bound of `ops.formats`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import ArgumentError
from mori_triton.ops import EpDispatchCombineKernelType as KernelType
from mori_triton.ops.combine_codec import sum_rows_torch
from mori_triton.ops.config import PAYLOAD_DTYPES
from mori_triton.ops.formats import CODECS, QUANT_TYPES, encode_rows
from tests.ops.codec_cases import (
    CodecCase,
    check_codec_case,
    combine_input,
    config_of,
    expert_row,
    ids_of,
    owners,
    run_codec_case,
    same_bits,
    sent_tokens,
    start,
)

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


@pytest.mark.parametrize("hidden", [1, 2, 6, 7, 40, 128, 129, 1000, 2880])
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


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize(
    "more",
    [
        {"config": (("kernel_type", KernelType.IntraNodeLL),)},
        {"config": (("deterministic", True),)},
        {"split": True},
        {"sent": torch.float8_e4m3fn, "scales": (2, torch.float32)},
    ],
    ids=["IntraNodeLL", "deterministic", "split", "fp8 sent"],
)
def test_every_way(quant: str, more: dict[str, Any]) -> None:
    run(CodecCase(quant, "wide", num_pes=2, **more))


def wire(pe: int, case: CodecCase) -> None:
    """What lies in the buffers that peers read, against the reference."""
    op = start(case, pe)
    ids = ids_of(case, 0, pe)
    op.dispatch(sent_tokens(case, 0, pe), None, None, ids)
    sources, positions = op.decode_send_flat_idx(op.get_dispatch_src_token_pos())
    pairs = list(zip(sources.tolist(), positions.tolist(), strict=True))
    rows = combine_input(op, case, 0, pairs)
    op.combine(rows, None, ids)
    codes, scales = encode_rows(rows[: len(pairs)], case.quant)
    assert len(pairs) > 0
    assert torch.equal(op._buffers.view("combine_in", torch.uint8, *codes.shape), codes)
    if scales is not None:
        found = op._buffers.view("combine_in_scales", torch.float32, *scales.shape)
        assert torch.equal(found.nan_to_num(-1.0), scales.nan_to_num(-1.0))
        # the rows of no token are left alone
        rest = op._layout["combine_in_scales"].num_bytes // 4
        assert bool(op._buffers.view("combine_in_scales", torch.float32, rest)[scales.numel() :].isnan().all())
    op.close()


@pytest.mark.parametrize("values", ["wide", "zeros", "nan"])
@pytest.mark.parametrize("quant", QUANTS)
def test_wire_format(quant: str, values: str) -> None:
    """Codes and scales of docs/formats.md, packed by the width of the call."""
    case = CodecCase(quant, values, hidden=301, num_pes=2, num_tokens=4)
    local_world(2, heap_size="16M").run(wire, case)


# -- what is refused


def accepted(case: CodecCase, **changes: Any) -> bool:
    """Whether the config can be made; a refusal that does not say what would do counts as none."""
    try:
        config_of(case, 0, **changes)
    except ArgumentError as error:
        return "want" not in str(error)
    return True


@pytest.mark.parametrize("kernel_type", list(KernelType), ids=lambda t: t.name)
def test_c5_a_config_works_or_is_refused(kernel_type: KernelType) -> None:
    """Kernel type x codec x dtype: what the constructor takes, a round with a bfloat16 combine shows to work."""
    dtypes = (*PAYLOAD_DTYPES, torch.float64, torch.int8)
    base = CodecCase("none", "wide", num_pes=2, num_tokens=2, hidden=40, rounds=1)
    table = {}
    for quant in (*QUANT_TYPES, "fp8", "int8_blockwise", ""):
        for dtype in dtypes:
            case = dataclasses.replace(base, quant=quant, sent=torch.uint8 if dtype is torch.int8 else dtype)
            table[quant, dtype] = accepted(case, kernel_type=kernel_type, data_type=dtype, max_token_type_size=8)
    quants, payloads = {
        KernelType.IntraNode: (QUANT_TYPES, PAYLOAD_DTYPES),
        KernelType.IntraNodeLL: (QUANT_TYPES, PAYLOAD_DTYPES),
        KernelType.IntraNodeRDNA4: (("none",), (torch.bfloat16, torch.float16)),
    }.get(kernel_type, ((), ()))
    for (quant, dtype), taken in table.items():
        assert taken == (quant in quants and dtype in payloads), (quant, dtype)
    # one op of each codec, with every payload dtype in turn as what is sent
    for i, dtype in enumerate(payloads):
        quant = quants[i % len(quants)]
        run(dataclasses.replace(base, quant=quant, sent=dtype, config=(("kernel_type", kernel_type),)))


def test_what_a_config_with_a_codec_needs() -> None:
    case = CodecCase("fp8_blockwise")
    with pytest.raises(ArgumentError, match="use_external_inp_buf: want True"):
        config_of(case, 0, use_external_inp_buf=False)
    with pytest.raises(ArgumentError, match="max_token_type_size: want >= 2"):
        config_of(case, 0, data_type=torch.float8_e4m3fn, max_token_type_size=1)
    with pytest.raises(ArgumentError, match="quant_type: want one of: none, fp8_direct_cast, fp8_blockwise, fp4_block"):
        config_of(case, 0, quant_type="fp8")
    assert {**CODECS, "none": None}.keys() == set(QUANT_TYPES)


def refusals(pe: int, case: CodecCase) -> list[str]:
    """Combine what the codec does not take, then a good combine on the same op."""
    op, messages = start(case, pe), []
    ids = ids_of(case, 0, pe)
    op.dispatch(sent_tokens(case, 0, pe), None, None, ids)
    sources, positions = op.decode_send_flat_idx(op.get_dispatch_src_token_pos())
    pairs = list(zip(sources.tolist(), positions.tolist(), strict=True))
    rows = combine_input(op, case, 0, pairs)
    registered = op.get_registered_combine_input_buffer(case.dtype, case.hidden)
    for given, named in (
        (rows.float()[:, : case.hidden // 2].contiguous(), {}),
        (rows.half(), {}),
        (rows.to(torch.float8_e4m3fn), {}),
        (registered, {}),
        (rows, {"use_external_inp_buf": 0}),
    ):
        with pytest.raises(ArgumentError) as caught:
            op.combine(given, None, ids, **named)
        messages.append(str(caught.value))
    combined, _ = op.combine(rows, None, ids)
    for token, mine in enumerate(ids):
        to = owners(mine, case.num_pes)
        if to:
            want = sum_rows_torch(torch.stack([expert_row(case, 0, p, pe, token) for p in to]), case.quant)
            assert same_bits(combined[token], want)
    op.close()
    return messages


@pytest.mark.parametrize("quant", QUANTS)
def test_what_combine_refuses_with_a_codec(quant: str) -> None:
    """MORI's rules: bfloat16, and not the registered buffer. MORI ignores fp8_direct_cast where they do not hold."""
    case = CodecCase(quant, num_pes=2, weights=False, config=(("max_token_type_size", 4),))
    for messages in local_world(2, heap_size="16M").run(refusals, case):
        dtype = f"input.dtype: want torch.bfloat16, which quant_type='{quant}' encodes"
        assert [dtype in m for m in messages] == [True] * 3 + [False] * 2, messages
        assert 'an op with quant_type="none" takes every payload dtype' in messages[0]
        assert "got the registered buffer" in messages[3]
        assert "use_external_inp_buf is off" in messages[4]
