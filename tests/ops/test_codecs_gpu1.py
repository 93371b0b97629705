"""On one GPU: conversions of every number, the codecs and the payload dtypes, with the same checks as without one.

Each test runs in the same form on the emulated device, but for sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch

from mori_triton import emulator, local_world, ops
from mori_triton.ops.combine_codec import sum_rows_torch
from mori_triton.ops.formats import CODECS, FORMAT_OF_DTYPE, FORMATS, combine_error_bound
from mori_triton.world import current_world
from tests.ops.codec_cases import (
    CodecCase,
    bfloat16_rows,
    check_codec_case,
    combine_input,
    config_of,
    expert_row,
    generator,
    ids_of,
    owners,
    run_codec_case,
    same_bits,
    sent_tokens,
    start,
)
from tests.ops.format_kernels import all_bytes, all_numbers, float32_samples, run_decode, run_encode
from tests.ops.on_both import LL, on_both

SMALL = tuple(FORMAT_OF_DTYPE)


@pytest.fixture
def kernels_on(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where kernels that are launched by hand run."""
    device = request.getfixturevalue("device")
    active = emulator.activate("gfx1201") if device == "cpu" else None
    yield device
    if active is not None:
        active.deactivate()


def bits(values: torch.Tensor) -> list[int]:
    values = values.cpu()
    return torch.where(values.isnan(), torch.nan, values).view(torch.int32).tolist()


@on_both
@pytest.mark.parametrize("name", FORMATS)
def test_conversions_of_every_number(name: str, device: str, kernels_on: str) -> None:
    """The GPU's bits are the CPU's, for every code, every 16-bit number and every float32 around a rounding."""
    form, codes = FORMATS[name], all_bytes()
    for word, tile in ((torch.uint8, False), (torch.uint16, False), (torch.uint32, False), (torch.uint32, True)):
        assert bits(run_decode(codes.to(device), name, word, tile)) == bits(form.decode(codes)), (word, tile)
    for values in (all_numbers(torch.bfloat16), all_numbers(torch.float16), float32_samples(name)):
        got, want = run_encode(values.to(device), name).cpu(), form.encode(values)
        assert torch.equal(got, want), values.dtype


def run(case: CodecCase, device: str) -> None:
    layout = ops.ep_buffer_layout(config_of(case, 0))
    world = local_world(case.num_pes, device, heap_size=layout.num_bytes + (8 << 20), timeout_s=20.0)
    check_codec_case(case, world.run(run_codec_case, case))


# few shapes, as every one is compiled for
WIDE = {"values": "wide", "hidden": 7168, "num_pes": 4, "num_tokens": 8, "top_k": 8}
ODD = {"hidden": 1001, "num_pes": 3, "top_k": 8, "num_tokens": 8}
CASES = (
    *(CodecCase(quant, **WIDE) for quant in CODECS),
    CodecCase("fp8_blockwise", **{**WIDE, "values": "nan", "num_pes": 8}, config=LL),
    CodecCase("fp4_blockwise", "nan", sent=torch.float8_e4m3fn, scales=(7, torch.float32), split=True, **ODD),
    CodecCase("fp8_direct_cast", "infinite", sent=torch.float8_e4m3fn, scales=(7, torch.float32), **ODD),
    CodecCase("fp8_blockwise", "tiny", sent=torch.float8_e4m3fn, scales=(7, torch.float32), **ODD),
    *(CodecCase(dtype=d, sent=torch.float8_e4m3fn, **{**WIDE, "values": "nan"}) for d in SMALL),
    CodecCase(dtype=SMALL[0], sent=SMALL[0], registered=True, scales=(7, torch.float32), values="nan", **ODD),
)


@on_both
@pytest.mark.parametrize("case", CASES, ids=str)
def test_codecs_and_payloads(case: CodecCase, device: str) -> None:
    if device == "cpu":
        tokens = min(case.num_tokens, 3)
        case = dataclasses.replace(case, hidden=min(case.hidden, 264), num_tokens=tokens, num_pes=min(case.num_pes, 3))
    run(case, device)


def graph_program(pe: int, case: CodecCase, rounds: int) -> list[torch.Tensor]:
    """One capture of dispatch and combine, replayed with other rows in the same memory."""
    op = start(case, pe)
    ids = ids_of(case, 0, pe).to(op.device)
    tokens = sent_tokens(case, 0, pe).to(op.device)
    op.dispatch(tokens, None, None, ids)
    sources, positions = op.decode_send_flat_idx(op.get_dispatch_src_token_pos().cpu())
    pairs = list(zip(sources.tolist(), positions.tolist(), strict=True))
    rows = combine_input(op, case, 0, pairs)
    op.combine(rows, None, ids)

    def step() -> torch.Tensor:
        *_, handle = op.dispatch(tokens, None, None, ids, return_routing=True)
        return op.combine(rows, None, ids, routing=handle)[0]

    step()
    graph = current_world().graph(step)
    found = []
    for index in range(1, rounds):
        rows.copy_(combine_input(op, case, index, pairs))
        found.append(graph.replay().cpu().clone()[: len(ids)])
    return found


@on_both
@pytest.mark.parametrize("quant", ["fp8_blockwise"])
def test_replays_of_a_graph(quant: str, device: str) -> None:
    """The order of rows is the same in every replay: rows are sorted by source."""
    case = CodecCase(quant, "wide", 1024, weights=False, config=(("deterministic", True),))
    rounds = 4
    layout = ops.ep_buffer_layout(config_of(case, 0))
    world = local_world(case.num_pes, device, heap_size=layout.num_bytes + (8 << 20), timeout_s=20.0)
    results = world.run(graph_program, case, rounds)
    for pe in range(case.num_pes):
        for index in range(1, rounds):
            for token, mine in enumerate(ids_of(case, 0, pe)):
                to = owners(mine, case.num_pes)
                if to:
                    rows = torch.stack([expert_row(case, index, p, pe, token) for p in to])
                    assert same_bits(results[pe][index - 1][token], sum_rows_torch(rows, quant)), (pe, index, token)


@on_both
@pytest.mark.parametrize("quant", CODECS)
def test_the_references_on_this_device(quant: str, device: str) -> None:
    """Users may call them on GPU tensors: codes, scales and bounds are those of the CPU."""
    rows = torch.stack([bfloat16_rows("wide", 1000, generator(i)) for i in range(8)])
    there = rows.to(device)
    for mine, theirs in zip(ops.formats.encode_rows(rows, quant), ops.formats.encode_rows(there, quant), strict=True):
        assert mine is None or torch.equal(mine, theirs.cpu())
    # float64 sums over the rows, in an order of the device's own
    torch.testing.assert_close(
        combine_error_bound(there, quant).cpu(), combine_error_bound(rows, quant), rtol=1e-12, atol=0.0
    )
