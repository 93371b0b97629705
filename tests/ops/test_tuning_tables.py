"""Tuning tables in files: MORI's format and names, what is refused and how, which file an op takes, writing."""

from __future__ import annotations

import json
import os

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mori_triton.errors import ArgumentError
from mori_triton.ops import tuning_tables
from mori_triton.ops.tuning_tables import TuningRule, file_name, gpu_model, load_table, open_tables, save_table

pytestmark = pytest.mark.cpu

# as a file of MORI's looks: no top-k, warps that are no power of two, keys of its own
MORI_RULE = {
    "dtype": "bf16", "num_tokens": 256, "hidden_dim": 7168, "block_num": 72, "rdma_block_num": 0, "warp_per_block": 15,
    "bandwidth_gbps": 82.62, "avg_xgmi_bandwidth_gbps": 1.5, "bandwidth_metric": "grand_mean",
}  # fmt: skip
MORI_COMBINE_RULE = {**MORI_RULE, "zero_copy": True, "quant_type": "none", "latency_us": 33.01}
HEADER = {"gpu_arch": "gfx942", "gpu_model": "mi300x", "kernel_type": "IntraNode", "ep_size": 8}


def contents(phase: str = "dispatch", rules: object = None, **changes: object) -> dict:
    default = [MORI_RULE if phase == "dispatch" else MORI_COMBINE_RULE]
    return {"version": "1.0", **HEADER, "phase": phase, "rules": default if rules is None else rules, **changes}


def write(path, data: object):
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_file_of_moris_loads(tmp_path, phase):
    (rule,) = load_table(write(tmp_path / "table.json", contents(phase)), phase).rules
    assert (rule.dtype, rule.num_tokens, rule.hidden_dim, rule.topk) == ("bf16", 256, 7168, None)
    assert (rule.block_num, rule.warp_per_block, rule.num_warps) == (72, 15, 8)
    assert (rule.bandwidth_gbps, rule.piece_bytes) == (82.62, None)
    if phase == "combine":
        assert (rule.zero_copy, rule.quant_type, rule.latency_us) == (True, "none", 33.01)


BAD_FILES = [
    ("", "not JSON"),
    ('{"version": "1.0",', "not JSON"),
    ([], "want an object with version, phase and rules, got list"),
    (contents(version="2.0"), "version: want '1.0', got '2.0'"),
    (contents(version=1.0), "version: want '1.0', got 1.0"),
    (contents("combine"), "phase: want 'dispatch', got 'combine'"),
    (contents(rules={}), "rules: want a list, got dict"),
    (contents(rules=[MORI_RULE, 3]), r"rules\[1\]: want an object, got int"),
    (
        contents(rules=[MORI_RULE, MORI_RULE]),
        r"\[1\]: want one rule for bf16, 256 tokens, hidden 7168, got a second",
    ),
]


@pytest.mark.parametrize(("data", "message"), BAD_FILES)
def test_a_malformed_file_is_named(tmp_path, data, message):
    path = write(tmp_path / "table.json", data)
    with pytest.raises(ArgumentError, match=message) as caught:
        load_table(path, "dispatch")
    assert str(path) in str(caught.value)


BAD_VALUES = {
    "dtype": [3, ""],
    "num_tokens": [0, -1, 1.5, "64", True],
    "hidden_dim": [0],
    "block_num": [0, "80"],
    "warp_per_block": [0],
    "rdma_block_num": [-1],
    "topk": [0],
    "zero_copy": [1, "true"],
    "quant_type": [0, ""],
    "bandwidth_gbps": [-1, "1", True],
    "latency_us": [-0.5],
    "piece_bytes": [0, 3, 4096.0],
    "route_tokens": [12],
    "route_warps": [3],
    "stage_programs": [0],
    "stage_piece_bytes": [3],
    "stage_warps": [3],
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k, values in BAD_VALUES.items() for v in values])
def test_a_malformed_value_names_file_rule_and_key(tmp_path, key, value):
    path = write(tmp_path / "t.json", contents("combine", [MORI_COMBINE_RULE, {**MORI_COMBINE_RULE, key: value}]))
    with pytest.raises(ArgumentError) as caught:
        load_table(path, "combine")
    assert str(caught.value).startswith(f"{path}: rules[1]: {key}: want ")
    assert str(caught.value).endswith(f", got {value!r}")


@pytest.mark.parametrize("key", ["dtype", "num_tokens", "hidden_dim", "block_num", "warp_per_block"])
@pytest.mark.parametrize("phase", ["dispatch", "combine"])
def test_a_missing_key_is_named(tmp_path, phase, key):
    whole = MORI_RULE if phase == "dispatch" else MORI_COMBINE_RULE
    for rule in ({k: v for k, v in whole.items() if k != key}, {**whole, key: None}):
        with pytest.raises(ArgumentError, match=rf"rules\[0\]: {key}: "):
            load_table(write(tmp_path / "t.json", contents(phase, [rule])), phase)


@pytest.mark.parametrize("key", ["zero_copy", "quant_type"])
def test_combine_needs_its_own_keys(tmp_path, key):
    rule = {k: v for k, v in MORI_COMBINE_RULE.items() if k != key}
    with pytest.raises(ArgumentError, match=rf"rules\[0\]: {key}: missing"):
        load_table(write(tmp_path / "t.json", contents("combine", [rule])), "combine")


def test_an_unreadable_file_is_named(tmp_path):
    with pytest.raises(ArgumentError, match=r"no\.json: the tuning table cannot be read: No such file"):
        load_table(tmp_path / "no.json", "dispatch")


# ------------------------------------------------------------------------------------------------------ which file
def test_names():
    assert file_name("gfx942", "mi300x", "IntraNode", 8, "dispatch") == "gfx942_mi300x_IntraNode_ep8_dispatch.json"
    models = {
        "AMD Instinct MI300X": "mi300x",
        "AMD Instinct MI308X OAM": "mi308x",
        "AMD Radeon AI PRO R9700": "r9700",
        "NVIDIA H200": "h200",
        "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA A100-SXM4-80GB": "a100",
        "AMD Radeon Graphics": "amd-radeon-graphics",
        "": "unknown",
    }
    assert {name: gpu_model(name) for name in models} == models


def put(directory, name: str, phase: str, block_num: int):
    rule = {**(MORI_RULE if phase == "dispatch" else MORI_COMBINE_RULE), "block_num": block_num}
    return write(directory / name, contents(phase, [rule]))


def opened(directory, **changes):
    asked = {"gpu_arch": "sm_90", "gpu_model": "h200", "kernel_type": "IntraNode", "ep_size": 8, **changes}
    tables = open_tables("auto", str(directory), **asked)
    return tuple(t and t.rules[0].block_num for t in (tables.dispatch, tables.combine))


def test_own_model_else_the_first_of_the_architecture(tmp_path):
    assert opened(tmp_path) == (None, None)
    put(tmp_path, "sm_90_emulated_IntraNode_ep8_dispatch.json", "dispatch", 9)
    assert opened(tmp_path) == (None, None), "times of the emulated device say nothing about a GPU"
    put(tmp_path, "sm_90_h20_IntraNode_ep8_dispatch.json", "dispatch", 1)
    put(tmp_path, "sm_90_h100_IntraNode_ep8_dispatch.json", "dispatch", 2)
    put(tmp_path, "sm_100_b200_IntraNode_ep8_combine.json", "combine", 3)
    put(tmp_path, "sm_90_h100_IntraNodeLL_ep8_combine.json", "combine", 4)
    put(tmp_path, "sm_90_h100_IntraNode_ep4_combine.json", "combine", 5)
    assert opened(tmp_path) == (2, None)
    put(tmp_path, "sm_90_aaa_x_IntraNode_ep8_dispatch.json", "dispatch", 10)
    assert opened(tmp_path) == (2, None), "a name that is not MORI's"
    put(tmp_path, "sm_90_h200_IntraNode_ep8_dispatch.json", "dispatch", 6)
    put(tmp_path, "sm_90_h200_IntraNode_ep8_combine.json", "combine", 7)
    assert opened(tmp_path) == (6, 7)
    assert opened(tmp_path, gpu_model="emulated") == (9, None)
    # PEs that share a GPU: their own table, else the same GPU's
    assert opened(tmp_path, gpu_model="h200-shared") == (6, 7)
    put(tmp_path, "sm_90_a10-shared_IntraNode_ep8_dispatch.json", "dispatch", 11)
    assert opened(tmp_path, gpu_model="h200-shared") == (6, 7)
    assert opened(tmp_path, gpu_model="b10-shared")[0] == 11
    assert opened(tmp_path, gpu_model="b10")[0] == 2
    put(tmp_path, "sm_90_h200-shared_IntraNode_ep8_dispatch.json", "dispatch", 12)
    assert opened(tmp_path, gpu_model="h200-shared") == (12, 7)
    assert opened(tmp_path) == (6, 7)
    assert opened(tmp_path, gpu_arch="sm_100", gpu_model="b300") == (None, 3)
    assert opened(tmp_path, kernel_type="IntraNodeLL") == (None, 4)
    assert opened(tmp_path, ep_size=4) == (None, 5)


def test_combine_of_the_kernel_type_for_small_batches(tmp_path):
    """Is IntraNode's, unless it has a table of its own."""
    put(tmp_path, "sm_90_h200_IntraNode_ep8_dispatch.json", "dispatch", 1)
    put(tmp_path, "sm_90_h200_IntraNode_ep8_combine.json", "combine", 2)
    assert opened(tmp_path, kernel_type="IntraNodeLL") == (None, 2)
    put(tmp_path, "sm_90_h100_IntraNodeLL_ep8_combine.json", "combine", 3)
    assert opened(tmp_path, kernel_type="IntraNodeLL") == (None, 3)
    assert opened(tmp_path) == (1, 2)


def test_one_file_serves_its_own_phase(tmp_path):
    assert opened(put(tmp_path, "any.json", "combine", 3)) == (None, 3)
    assert opened(put(tmp_path, "other.json", "dispatch", 4)) == (4, None)
    with pytest.raises(ArgumentError, match=r'bad.json: phase: want "dispatch" or "combine", got None'):
        opened(write(tmp_path / "bad.json", {}))


def test_a_malformed_file_that_an_op_would_use_is_an_error(tmp_path):
    write(tmp_path / "sm_90_h200_IntraNode_ep8_combine.json", "{")
    with pytest.raises(ArgumentError, match="not JSON"):
        opened(tmp_path)


def test_packaged_tables_are_what_their_names_say():
    packaged = sorted(tuning_tables.PACKAGED.glob("*.json"))
    assert {path.name for path in packaged} >= {
        f"sm_90_h200-shared_{name}.json"
        for name in ("IntraNode_ep8_dispatch", "IntraNode_ep8_combine", "IntraNodeLL_ep8_dispatch")
    }
    for path in packaged:
        data = json.loads(path.read_text())
        parts = (data["gpu_arch"], data["gpu_model"], data["kernel_type"], data["ep_size"], data["phase"])
        assert path.name == file_name(*parts)
        assert load_table(path, data["phase"]).rules


# --------------------------------------------------------------------------------------------------------- writing
_POWERS = st.sampled_from([None, 1, 16, 8192])
_RULES = st.lists(
    st.builds(
        TuningRule,
        dtype=st.sampled_from(["bf16", "fp4"]), num_tokens=st.integers(1, 2**20), hidden_dim=st.integers(1, 2**16),
        block_num=st.integers(1, 4096), warp_per_block=st.integers(1, 64), rdma_block_num=st.integers(0, 9),
        topk=st.none() | st.integers(1, 128), zero_copy=st.booleans(), quant_type=st.sampled_from(["none", "x"]),
        bandwidth_gbps=st.none() | st.floats(0, 1e6), latency_us=st.none() | st.floats(0, 1e6),
        piece_bytes=_POWERS, route_tokens=_POWERS, route_warps=_POWERS, stage_piece_bytes=_POWERS, stage_warps=_POWERS,
    ),
    max_size=8, unique_by=lambda r: r.key,
)  # fmt: skip


@settings(deadline=None, max_examples=50)
@given(rules=_RULES)
def test_what_is_written_is_read_back(tmp_path_factory, rules):
    path = tmp_path_factory.mktemp("tables") / "new" / "table.json"
    save_table(path, {**HEADER, "phase": "combine"}, rules)
    assert sorted(load_table(path, "combine").rules, key=lambda r: r.key) == sorted(rules, key=lambda r: r.key)
    assert os.listdir(path.parent) == ["table.json"]


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    header = {**HEADER, "phase": "dispatch"}
    save_table(path, header, [TuningRule("bf16", 1, 2, 3, 4)])
    before = path.read_bytes()
    with pytest.raises(ArgumentError, match="rules\\[1\\]: want one rule"):
        save_table(path, header, [TuningRule("bf16", 1, 2, 3, 4)] * 2)

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="disk full"):
        save_table(path, header, [TuningRule("bf16", 1, 2, 30, 4)])
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["table.json"]
