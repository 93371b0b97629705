"""Launch shapes: the pure function that chooses them, and the rule that it chooses by."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from mori_triton import env, local_world, ops
from mori_triton.errors import ArgumentError
from mori_triton.host import state as host_state
from mori_triton.ops import tuning
from mori_triton.ops.tuning import EpLaunchConfig, launch_config
from mori_triton.ops.tuning_tables import DTYPE_NAMES, EpTuningTables, TuningRule, TuningTable, save_table

pytestmark = pytest.mark.cpu

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def rule(num_tokens: int, block_num: int, **changes) -> TuningRule:
    fields = {"dtype": "bf16", "hidden_dim": 7168, "topk": 8, "warp_per_block": 8, **changes}
    return TuningRule(num_tokens=num_tokens, block_num=block_num, **fields)


def table(*rules: TuningRule) -> TuningTable:
    return TuningTable(Path("hand-made"), tuple(rules))


def blocks(t: TuningTable, *call) -> int | None:
    found = t.lookup(*call)
    return None if found is None else found.block_num


# ---------------------------------------------------------------------------------------------------- built-in shapes
def powers(shape: EpLaunchConfig) -> list[int]:
    return [v for k, v in dataclasses.asdict(shape).items() if not k.endswith("_programs")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
@pytest.mark.parametrize("num_tokens", [0, 1, 128, 4096, 1 << 17])
@pytest.mark.parametrize("row_bytes", [1, 14336, 65536])
def test_built_in_shapes_are_launchable(device, phase, num_tokens, row_bytes):
    shape = launch_config(device, phase, num_tokens, row_bytes, dtype=torch.uint8, top_k=8)
    assert all(v >= 1 and v & (v - 1) == 0 for v in powers(shape)), shape
    assert shape.num_programs >= 1
    assert shape.stage_programs >= 1
    assert shape.num_warps <= 16


@pytest.mark.parametrize("kernel_type", ["IntraNode", "IntraNodeLL"])
@pytest.mark.parametrize("num_tokens", [1, 4096])
def test_built_in_pieces_have_16_bytes_for_each_thread_of_any_gpu(num_tokens, kernel_type):
    for phase in ("dispatch", "combine"):
        shape = launch_config("cuda", phase, num_tokens, 14336, dtype=BF16, top_k=8, kernel_type=kernel_type)
        assert shape.piece_bytes >= 64 * 16 * shape.num_warps
        assert shape.stage_piece_bytes >= 64 * 16 * shape.stage_warps


def test_a_small_batch_is_routed_by_more_programs():
    small, large = (launch_config("cuda", "dispatch", n, 14336, dtype=BF16, top_k=8) for n in (128, 4096))
    assert small.route_tokens < large.route_tokens


def test_one_kernel_for_all_takes_single_tokens():
    """IntraNodeLL's dispatch; its combine is IntraNode's."""
    call = {"dtype": BF16, "top_k": 8}
    shape = launch_config("cuda", "dispatch", 128, 14336, **call, kernel_type="IntraNodeLL")
    assert (shape.route_tokens, shape.num_programs) == (1, 1024)
    kinds = ("IntraNode", "IntraNodeLL")
    combines = [launch_config("cuda", "combine", 128, 14336, **call, kernel_type=kind) for kind in kinds]
    assert combines[0] == combines[1]


@pytest.mark.parametrize("device", ["cuda", "hip"])
@pytest.mark.parametrize(("hidden", "tile"), [(1024, 512), (2047, 512), (2048, 1024), (7168, 1024)])
def test_rdna4_takes_tiles_and_single_tokens_of_few(device, hidden, tile):
    call = {"row_bytes": 2 * hidden, "dtype": BF16, "top_k": 8, "kernel_type": "IntraNodeRDNA4"}
    for num_tokens in (1, 256):
        combine = launch_config(device, "combine", num_tokens, **call)
        assert combine.piece_bytes == combine.stage_piece_bytes == 2 * tile
        # 16 bytes for each thread, also of waves of 64
        assert (combine.num_warps, combine.stage_warps) == (tile // 512, 1)
        assert combine.stage_programs == 264
        dispatch = launch_config(device, "dispatch", num_tokens, **call)
        assert dispatch.num_programs >= num_tokens
        assert (dispatch.route_tokens, dispatch.piece_bytes, dispatch.stage_warps) == (1, 4096, 2)
    for phase in ("dispatch", "combine"):
        more = [launch_config(device, phase, num_tokens, **call) for num_tokens in (257, 16384)]
        assert more[0] == more[1]
    assert launch_config(device, "dispatch", 257, **call).route_tokens == 4
    combine = launch_config(device, "combine", 257, **call)
    assert (combine.stage_programs, combine.stage_warps) == (528, 1)


def test_explicit_numbers_win_over_everything():
    ruled = EpTuningTables(table(rule(128, 77)), table(rule(128, 78, zero_copy=True, quant_type="none")))
    for phase, tables in itertools.product(("dispatch", "combine"), (None, ruled)):
        call = {"dtype": BF16, "top_k": 8, "zero_copy": True, "tables": tables}
        shape = launch_config("cuda", phase, 128, 14336, **call, block_num=5, warp_per_block=2)
        assert (shape.num_programs, shape.stage_programs) == (5, 5)
        assert (shape.num_warps, shape.stage_warps, shape.route_warps) == (2, 2, 2)
        free = launch_config("cuda", phase, 128, 14336, **call)
        assert launch_config("cuda", phase, 128, 14336, **call, block_num=5).num_warps == free.num_warps
        assert launch_config("cuda", phase, 128, 14336, **call, warp_per_block=1).num_programs == free.num_programs


@pytest.mark.parametrize(
    ("name", "value"),
    [("block_num", 0), ("block_num", -2), ("warp_per_block", 0), ("warp_per_block", 3), ("warp_per_block", 32),
     ("phase", "reduce")],
)  # fmt: skip
def test_a_bad_argument_is_named(name, value):
    arguments = {"phase": "dispatch", "dtype": BF16, "top_k": 8, name: value}
    with pytest.raises(ArgumentError, match=f"{name}: want .*, got {value}"):
        launch_config("cuda", num_tokens=1, row_bytes=2, **arguments)


# ------------------------------------------------------------------------------------------------------------- lookup
def test_the_fewest_tokens_that_are_enough_else_the_most():
    t = table(rule(64, 1), rule(256, 2), rule(4096, 3))
    wanted = {0: 1, 1: 1, 64: 1, 65: 2, 256: 2, 257: 3, 4096: 3, 4097: 3, 10**6: 3}
    assert {n: blocks(t, BF16, n, 7168, 8) for n in wanted} == wanted


def test_passes_from_narrow_to_wide():
    both, hidden = rule(64, 1), rule(64, 2, topk=4)
    topk, neither = rule(64, 3, hidden_dim=2048), rule(64, 4, hidden_dim=4096, topk=4)
    assert blocks(table(neither, topk, hidden, both), BF16, 64, 7168, 8) == 1
    assert blocks(table(neither, topk, hidden), BF16, 64, 7168, 8) == 2
    assert blocks(table(neither, topk), BF16, 64, 7168, 8) == 3
    assert blocks(table(neither), BF16, 64, 7168, 8) == 4
    # a rule without a top-k, as most of MORI's have, is one of the second pass
    assert blocks(table(topk, rule(64, 5, topk=None)), BF16, 64, 7168, 8) == 5
    # the number of tokens is looked at within a pass, never across
    assert blocks(table(rule(1, 6), rule(64, 7, topk=4)), BF16, 64, 7168, 8) == 6


def test_of_several_hidden_sizes_the_nearest_and_never_the_first_in_the_file():
    rules = [rule(64, 1, hidden_dim=1024), rule(64, 2, hidden_dim=4096), rule(64, 3, hidden_dim=8192)]
    for order in itertools.permutations(rules):
        assert blocks(table(*order), BF16, 64, 5000, 8) == 2
        # as near to the one as to the other: the smaller
        assert blocks(table(*order), BF16, 64, 6144, 8) == 2


def test_dtype_zero_copy_and_codec_are_exact():
    t = table(
        rule(64, 1, zero_copy=True, quant_type="none"),
        rule(64, 2, zero_copy=False, quant_type="none"),
        rule(64, 3, zero_copy=False, quant_type="fp8_direct_cast"),
    )
    assert blocks(t, BF16, 64, 7168, 8, True, "none") == 1
    assert blocks(t, BF16, 64, 7168, 8, False, "none") == 2
    assert blocks(t, BF16, 64, 7168, 8, False, "fp8_direct_cast") == 3
    assert blocks(t, BF16, 64, 7168, 8, True, "fp8_direct_cast") is None
    assert blocks(t, FP8, 64, 7168, 8, True, "none") is None
    # a dtype that no table can name
    assert blocks(t, torch.int8, 64, 7168, 8, True, "none") is None


def test_no_rule_leaves_the_built_in_shape():
    tables = EpTuningTables(table(rule(64, 1, dtype="fp4")), None)
    for phase in ("dispatch", "combine"):
        call = {"dtype": BF16, "top_k": 8}
        ruled, free = (launch_config("cuda", phase, 9, 14336, **call, tables=t) for t in (tables, None))
        assert ruled == free


def test_a_rule_of_ours_sets_every_number():
    mine = rule(
        64,
        11,
        warp_per_block=2,
        piece_bytes=512,
        route_tokens=1,
        route_warps=4,
        stage_programs=12,
        stage_piece_bytes=256,
        stage_warps=1,
    )  # fmt: skip
    shape = launch_config(
        "cuda", "dispatch", 64, 14336, dtype=BF16, top_k=8, tables=EpTuningTables(table(mine), None)
    )  # fmt: skip
    assert shape == EpLaunchConfig(11, 512, 2, 1, 4, 12, 256, 1)


@pytest.mark.parametrize(("warps", "want"), [(1, 1), (3, 2), (4, 4), (15, 8), (16, 16), (31, 16)])
def test_a_rule_of_moris_keeps_our_pieces_and_rounds_warps_down(warps, want):
    tables = EpTuningTables(table(rule(64, 72, warp_per_block=warps, topk=None)), None)
    call = {"dtype": BF16, "top_k": 8}
    ruled, free = (launch_config("cuda", "dispatch", 64, 14336, **call, tables=t) for t in (tables, None))
    assert (ruled.num_programs, ruled.num_warps, ruled.stage_programs, ruled.stage_warps) == (72, want, 72, want)
    assert (ruled.piece_bytes, ruled.route_tokens) == (free.piece_bytes, free.route_tokens)


_RULES = st.lists(
    st.builds(
        TuningRule,
        dtype=st.sampled_from(["bf16", "fp8_e4m3"]),
        num_tokens=st.sampled_from([1, 2, 64, 100, 4096]),
        hidden_dim=st.sampled_from([1024, 4096, 7168]),
        topk=st.sampled_from([None, 1, 8]),
        block_num=st.integers(1, 10**6),
        warp_per_block=st.integers(1, 16),
        zero_copy=st.booleans(),
        quant_type=st.sampled_from(["none", "fp8_blockwise"]),
    ),
    max_size=14,
    unique_by=lambda r: r.key,
)


@settings(deadline=None, max_examples=300)
@given(
    rules=_RULES, n=st.integers(0, 5000), hidden=st.sampled_from([1, 1024, 2560, 7168, 9999]),
    topk=st.sampled_from([1, 4, 8]), dtype=st.sampled_from([BF16, FP8]), data=st.data(),
)  # fmt: skip
def test_lookup_finds_what_the_rule_says(rules, n, hidden, topk, dtype, data):
    """Against the rule as docs/tuning.md words it, one candidate after the other; and the file's order is no matter."""
    found = table(*rules).lookup(dtype, n, hidden, topk, True, "none")
    usable = [r for r in rules if (r.dtype, r.zero_copy, r.quant_type) == (DTYPE_NAMES[dtype], True, "none")]

    def rank(r: TuningRule) -> tuple:
        """Smaller is better; no two rules of a file rank the same."""
        matches_hidden, matches_topk = r.hidden_dim == hidden, r.topk == topk
        narrow = {(True, True): 0, (True, False): 1, (False, True): 2, (False, False): 3}[matches_hidden, matches_topk]
        enough = (0, r.num_tokens) if r.num_tokens >= n else (1, -r.num_tokens)
        near = abs(r.hidden_dim - hidden), r.hidden_dim, abs((r.topk or 0) - topk), r.topk or 0
        return narrow, enough, near

    assert (found is None) == (not usable)
    if usable:
        assert found == min(usable, key=rank)
    assert table(*data.draw(st.permutations(rules))).lookup(dtype, n, hidden, topk, True, "none") == found


# -------------------------------------------------------------------------------------------------- from settings
def state(**environ: str) -> SimpleNamespace:
    """What `tables_for` looks at of a PE's state."""
    names = {"MODE": "MORI_EP_LAUNCH_CONFIG_MODE", "FILE": "MORI_EP_TUNING_CONFIG"}
    return SimpleNamespace(settings=env.snapshot({names[k]: v for k, v in environ.items()}), n_pes=2, rendezvous=None)


def test_manual_mode_opens_nothing_and_auto_looks_for_the_emulated_devices_own(tmp_path):
    cpu = torch.device("cpu")
    missing = str(tmp_path / "missing")
    assert tuning.tables_for(state(FILE=missing), cpu, "IntraNode") is None
    with pytest.raises(ArgumentError, match=f"MORI_EP_TUNING_CONFIG: want .*, got '{missing}'"):
        tuning.tables_for(state(MODE="AUTO", FILE=missing), cpu, "IntraNode")
    here = state(MODE="AUTO", FILE=str(tmp_path))
    assert tuning.tables_for(here, cpu, "IntraNode") == EpTuningTables(None, None)
    assert tuning.device_names(cpu, "gfx942") == ("gfx942", "emulated")
    save_table(
        tmp_path / "gfx1201_emulated_IntraNode_ep2_combine.json",
        {"phase": "combine"},
        [rule(1, 3, zero_copy=True, quant_type="none")],
    )
    tables = tuning.tables_for(here, cpu, "IntraNode")
    assert tables is not None
    assert tables.dispatch is None
    assert blocks(tables.combine, BF16, 1, 7168, 8, True, "none") == 3


@pytest.mark.parametrize("value", [None, 1.5, "8"])
@pytest.mark.parametrize("name", ["block_num", "warp_per_block"])
def test_a_number_that_is_none_is_named(name, value):
    with pytest.raises(ArgumentError, match=f"{name}: want -1.*, got {value}"):
        launch_config("cuda", "dispatch", 4, 32, dtype=BF16, top_k=2, **{name: value})


def test_an_op_that_cannot_read_its_table_takes_nothing_of_the_heap(tmp_path, monkeypatch):
    (tmp_path / "gfx1201_emulated_IntraNode_ep2_dispatch.json").write_text("{")
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(tmp_path))
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")

    def program(pe):
        heap = host_state.current().heap
        free_bytes = heap.free_bytes
        with pytest.raises(ArgumentError, match="the tuning table is not JSON"):
            ops.EpDispatchCombineOp(ops.EpDispatchCombineConfig(BF16, pe, 2, 16, 0, 0, 2, 4, 2, 2))
        return free_bytes - heap.free_bytes

    assert local_world(2).run(program) == [0, 0]


@pytest.mark.parametrize(("mode", "want"), [("AUTO", (3, 0, 1)), ("MANUAL", None), (None, None)])
def test_an_op_takes_its_table_in_auto_mode_only(tmp_path, monkeypatch, mode, want):
    """And runs with it; what the caller names wins."""
    for phase in ("dispatch", "combine"):
        codec = {"zero_copy": False, "quant_type": "none"} if phase == "combine" else {}
        rules = [rule(4, 3, hidden_dim=16, topk=2, warp_per_block=1, **codec)]
        save_table(tmp_path / f"gfx1201_emulated_IntraNode_ep2_{phase}.json", {"phase": phase}, rules)
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(tmp_path))
    if mode is not None:
        monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", mode)

    def program(pe):
        op = ops.EpDispatchCombineOp(ops.EpDispatchCombineConfig(BF16, pe, 2, 16, 0, 0, 2, 4, 2, 2))
        shapes = [op.get_launch_config(is_dispatch) for is_dispatch in (True, False)]
        assert op.get_launch_config(True, 5, 0, 2) == (5, 0, 2)
        tokens = torch.full((4, 16), 1.0 + pe, dtype=BF16)
        ids = torch.tensor([[0, 2]] * 4, dtype=torch.int32)
        out, _, _, _, total = op.dispatch(tokens, None, None, ids)
        assert int(total[0]) == 8
        assert torch.equal(op.combine(out.clone(), None, ids)[0], 2 * tokens)
        op.close()
        return shapes

    built_in = [launch_config("cpu", phase, 4, 32, dtype=BF16, top_k=2) for phase in ("dispatch", "combine")]
    expected = [want or (shape.num_programs, 0, shape.num_warps) for shape in built_in]
    assert local_world(2).run(program) == [expected, expected]
