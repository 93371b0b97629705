"""The config, the sizes that follow from it, and MORI's names, argument order and defaults."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mori_triton import ops
from mori_triton.errors import ArgumentError
from tests.ops import reference
from tests.ops.cases import Case, config_of

pytestmark = pytest.mark.cpu

MORI = json.loads((Path(__file__).parent / "mori_ops_api.json").read_text())
# MORI's methods that belong to kernel types, routing handles and adapters still to come
NOT_YET = {
    "dispatch_standard_moe",
    "combine_standard_moe",
    "convert_dispatch_output",
    "convert_combine_input",
    "get_debug_time_buf",
    "get_debug_time_offset",
}


def config(**changes: Any) -> ops.EpDispatchCombineConfig:
    return config_of(Case(num_pes=4, hidden=64, scales=(4, 4)), 1, **changes)


def test_config_fields_are_moris() -> None:
    ours = {}
    for field in dataclasses.fields(ops.EpDispatchCombineConfig):
        kind = field.type.removeprefix("torch.") if field.type == "torch.dtype" else field.type
        default = "" if field.default is dataclasses.MISSING else f" = {field.default!r}"
        if isinstance(field.default, ops.EpDispatchCombineKernelType):
            default = f" = EpDispatchCombineKernelType.{field.default.name}"
        ours[field.name] = f"{'torch.' if kind == 'dtype' else ''}{kind}{default}"
    # the one field that MORI does not have comes last
    assert list(ours.items()) == [*MORI["EpDispatchCombineConfig"].items(), ("deterministic", "bool = False")]


def test_method_signatures_are_moris() -> None:
    missing = set()
    for name, signature in MORI["EpDispatchCombineOp"].items():
        method = getattr(ops.EpDispatchCombineOp, name, None)
        if method is None:
            missing.add(name)
            continue
        bare = inspect.signature(method)
        bare = bare.replace(
            parameters=[p.replace(annotation=p.empty) for p in bare.parameters.values()],
            return_annotation=inspect.Signature.empty,
        )
        assert str(bare) == signature, name
    assert missing == NOT_YET


def test_kernel_type_values_are_moris_and_one_more() -> None:
    assert {t.name: int(t) for t in ops.EpDispatchCombineKernelType} == {
        "IntraNode": 0,
        "InterNode": 1,
        "InterNodeV1": 2,
        "InterNodeV1LL": 3,
        "AsyncLL": 4,
        "IntraNodeLL": 5,
        "IntraNodeRDNA4": 6,
    }


def test_c5_what_cannot_work_is_refused_at_construction() -> None:
    for kind, quant, dtype in itertools.product(
        ops.EpDispatchCombineKernelType,
        ("none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise", "nonsense"),
        (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.float64),
    ):
        works = (
            kind.name in ("IntraNode", "IntraNodeLL")
            and quant != "nonsense"
            and dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        )
        arguments = {"kernel_type": kind, "quant_type": quant, "data_type": dtype, "max_token_type_size": 8}
        if works:
            config(**arguments)
        else:
            with pytest.raises(ArgumentError, match=r"(kernel_type: want one of: IntraNode|quant_type|data_type)"):
                config(**arguments)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 4),
        ("rank", -1),
        ("rank", None),
        ("world_size", 0),
        ("hidden_dim", 0),
        ("hidden_dim", 2.0),
        ("scale_dim", -1),
        ("scale_type_size", -4),
        ("max_token_type_size", 1),
        ("max_num_inp_token_per_rank", 0),
        ("num_experts_per_rank", 0),
        ("num_experts_per_token", 0),
        ("num_experts_per_token", 129),
        ("max_total_recv_tokens", -1),
        ("max_num_inp_token_per_rank", 2**29),
        ("num_experts_per_rank", 2**30),
    ],
)
def test_a_field_out_of_range_names_itself(field: str, value: Any) -> None:
    with pytest.raises(ArgumentError) as caught:
        config(**{field: value})
    text = str(caught.value)
    assert field in text or "receive rows" in text
    assert "got" in text


def test_b10_the_owner_of_every_id() -> None:
    for pes, each in ((1, 3), (4, 1), (8, 7), (3, 10)):
        ours = config_of(Case(num_pes=pes, experts_per_pe=each), 0)
        for expert in range(-3, pes * each + 3):
            want = reference.owners(torch.tensor([expert]).numpy(), pes, each)
            assert ops.expert_owner(expert, ours) == (want[0] if want else -1)


def test_a12_receive_cap_is_the_ceiling_of_the_share() -> None:
    # (cap, M, PEs) -> rows of one PE
    for (cap, most, pes), rows in {
        (0, 16, 4): 16,
        (1, 16, 4): 1,
        (32, 16, 4): 8,
        (33, 16, 4): 9,
        (64, 16, 4): 16,
        (1000, 16, 4): 16,
    }.items():
        ours = config_of(Case(num_pes=pes, max_tokens=most), 0, max_total_recv_tokens=cap)
        assert (ours.max_recv_per_rank, ours.max_recv) == (rows, rows * pes)


def regions_do_not_overlap(layout: ops.EpBufferLayout) -> bool:
    ends = [(r.offset, r.offset + r.num_bytes) for r in layout.regions]
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ends)) and ends[-1][1] <= layout.num_bytes


@pytest.mark.parametrize("scales", [(0, 0), (5, 4)])
@pytest.mark.parametrize("num_pes", [1, 3, 8, 72])
def test_d2_no_two_buffers_share_memory(num_pes: int, scales: tuple[int, int]) -> None:
    ours = config_of(Case(num_pes=num_pes, hidden=7, scales=scales), 0)
    layout = ops.ep_buffer_layout(ours)
    assert regions_do_not_overlap(layout)
    assert all(r.offset % 256 == 0 for r in layout.regions)
    rows, k = ours.max_recv, ours.num_experts_per_token
    want = {
        "recv_tokens": rows * 7 * 2,
        "combine_in": rows * 7 * 2,
        "combine_out": 5 * 7 * 2,
        "recv_weights": rows * k * 4,
        "recv_indices": rows * k * 4,
        "recv_scales": rows * scales[0] * scales[1],
        "recv_sources": rows * 4,
        "forward": 5 * k * 4,
    }
    assert {name: layout[name].num_bytes for name in want} == want
    with pytest.raises(KeyError):
        _ = layout["nonsense"]


def test_d2_the_check_sees_an_overlap() -> None:
    layout = ops.ep_buffer_layout(config())
    first, second, *rest = layout.regions
    moved = dataclasses.replace(second, offset=first.offset + first.num_bytes - 1)
    assert not regions_do_not_overlap(dataclasses.replace(layout, regions=(first, moved, *rest)))


def test_d17_every_writer_and_reader_have_a_word_of_their_own() -> None:
    for num_pes in (2, 3, 8, 64):
        layout = ops.ep_buffer_layout(config_of(Case(num_pes=num_pes), 0))
        words = [
            layout[name].offset + 8 * writer
            for name in ("dispatch_signals", "combine_signals")
            for writer in range(num_pes)
        ]
        assert len(set(words)) == 2 * num_pes
        assert all(w % 8 == 0 for w in words)
        assert layout["dispatch_signals"].num_bytes == layout["combine_signals"].num_bytes == 8 * num_pes


def test_d14_one_layout_whatever_pe_asks() -> None:
    """Sender and receiver name one byte alike: every offset follows from what is equal on all PEs, and slots decode."""
    for num_pes in range(2, 65):
        for experts in (1, 48, 512):
            case = Case(num_pes=num_pes, experts_per_pe=experts, hidden=24, scales=(3, 1))
            layouts = {ops.ep_buffer_layout(config_of(case, pe)) for pe in (0, num_pes // 2, num_pes - 1)}
            assert len(layouts) == 1
            (layout,), ours = layouts, config_of(case, 0)
            assert regions_do_not_overlap(layout)
            assert ours.max_recv == num_pes * ours.max_recv_per_rank
            strides = {name: layout[name].num_bytes / ours.max_recv for name in ("recv_tokens", "recv_sources")}
            assert strides == {"recv_tokens": 24 * 2, "recv_sources": 4}
            last = (num_pes - 1) * ours.max_recv + ours.max_recv - 1
            assert divmod(last, ours.max_recv) == (num_pes - 1, ours.max_recv - 1)
            assert last < 2**31


def test_a_layout_of_many_gibibytes_does_not_wrap() -> None:
    big = config_of(Case(num_pes=32, hidden=7168, top_k=8), 0, max_num_inp_token_per_rank=65536, max_token_type_size=4)
    layout = ops.ep_buffer_layout(big)
    assert regions_do_not_overlap(layout)
    assert layout["recv_tokens"].num_bytes == 32 * 65536 * 7168 * 4 > 2**35
