"""What the codec kernels compile to: wide accesses, the protocol's fences, and few enough instructions an element."""

from __future__ import annotations

import re

import pytest
import torch
import triton
from triton.compiler import ASTSource

from mori_triton.device.launch import FP_FUSION, TARGETS, gpu_target
from tests.ops.cases import Case
from tests.ops.format_kernels import sum_kernel
from tests.ops.test_compile import SENDS, WORDS, launches

pytestmark = pytest.mark.compile

QUANTS = ("fp8_direct_cast", "fp8_blockwise", "fp4_blockwise")


@pytest.mark.parametrize("arch", sorted(TARGETS))
@pytest.mark.parametrize("quant", QUANTS)
def test_accesses_and_fences(quant: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_compiles_links_and_orders`: rows are stored before the arrival, released before the signal."""
    made = launches(Case(hidden=7168, top_k=8), monkeypatch, quant_type=quant)

    words = dict(WORDS[arch])
    if quant == "fp4_blockwise":
        # a row takes a quarter of the bytes that are encoded: a lane of many may have 8 of them to move
        half = {"x4": "x[24]", "128": "(64|128)", "v4": "v[24]"}
        for what in ("load16", "store16"):
            words[what] = re.sub(r"x4|128|v4", lambda found: half[found[0]], words[what])

    def find(name: str) -> dict[str, list[int]]:
        lines = made[name].compile(arch).splitlines()
        return {what: [i for i, line in enumerate(lines) if re.search(word, line)] for what, word in words.items()}

    at = find("combine_encode_kernel")
    assert all(at[what] for what in SENDS), [what for what in SENDS if not at[what]]
    arrival, signal = min(at["arrival"]), min(at["signal"])
    last_row = max(i for i in at["store16"] if i < arrival)
    assert any(last_row < i < arrival for i in at["device_release"])
    assert any(arrival < i < signal for i in at["release"])
    at = find("combine_decode_kernel")
    # rows are laid out for the store once, after the sum
    text = made["combine_decode_kernel"].compile(arch)
    assert len(re.findall(r"s_barrier_wait|s_barrier$|bar\.sync|barrier\.sync", text, re.MULTILINE)) <= 12
    assert at["load16"]
    assert at["store16"]
    assert not at["poll"]
    assert not at["signal"]


@pytest.mark.parametrize("quant", QUANTS)
def test_nvidia_rounds_as_the_others(quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every float operation to nearest even, subnormal numbers kept, no quotient but the exact one."""
    made = launches(Case(hidden=7168, top_k=8), monkeypatch, quant_type=quant)
    for name in ("combine_encode_kernel", "combine_decode_kernel"):
        text = made[name].compile("sm_90")
        floats = r"^\s+(?:@%p\d+ )?((?:add|sub|mul|div|fma|rcp|cvt)\.[\w.]*f(?:32|16)[\w.]*)"
        exact = {"cvt.f32.bf16", "cvt.f32.f16"}
        rounded = {"add.rn.f32", "mul.rn.f32", "div.rn.f32", "cvt.rn.bf16x2.f32", "cvt.rn.bf16.f32"}
        assert set(re.findall(floats, text, re.MULTILINE)) <= exact | rounded


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz"])
@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_payloads_are_loaded_and_stored_wide(dtype: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = launches(Case(hidden=7168, top_k=8), monkeypatch, data_type=getattr(torch, dtype))
    text = made["combine_decode_kernel"].compile(arch)
    for what in ("load16", "store16"):
        assert re.search(WORDS[arch][what], text), what


def unpack_cost(name: str, arch: str) -> float:
    """Instructions for each element of a row that a loop over rows unpacks and adds."""
    rows, block, warps = 8, 1024, 2
    constants = {"ROWS": rows, "FORMAT": name, "BLOCK": block}
    source = ASTSource(
        fn=sum_kernel,
        signature={"words_ptr": "*u32", "out_ptr": "*fp32", **dict.fromkeys(constants, "constexpr")},
        constexprs={(sum_kernel.arg_names.index(key),): value for key, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(2)},
    )
    target = gpu_target(arch)
    built = triton.compile(source, target=target, options={"num_warps": warps, "enable_fp_fusion": FP_FUSION})
    text = built.asm["ptx" if arch.startswith("sm_") else "amdgcn"]
    if arch.startswith("sm_"):
        arithmetic = r"^\s+(@%p\d+ )?(and|or|xor|lop3|shl|shr|shf|add|sub|mul|fma|cvt|selp|prmt|bfe|mad)\.[\w.]+ "
    else:
        arithmetic = r"^\s+v_(?!mov|readfirstlane|cmp|nop)\w+ "
    per_word = 8 if name == "e2m1" else 4
    elements = rows * block * per_word // (warps * target.warp_size)
    dual = len(re.findall(r"^\s+v_dual_\w+ .* :: ", text, re.MULTILINE))
    return (len(re.findall(arithmetic, text, re.MULTILINE)) + dual) / elements


@pytest.mark.parametrize("arch", ["gfx1201", "gfx942", "sm_90"])
@pytest.mark.parametrize(("name", "most"), [("e4m3fn", 6.2), ("e4m3fnuz", 7.0), ("e2m1", 5.2)])
def test_instructions_an_element(name: str, most: float, arch: str) -> None:
    """Unpacking and adding, where an H200 may issue about six before arithmetic takes longer than reading a byte."""
    assert unpack_cost(name, arch) <= most


@pytest.mark.parametrize("weights", [False, True], ids=["no weights", "weights"])
@pytest.mark.parametrize("quant", QUANTS)
def test_gfx1250_whatever_arguments_are_absent(quant: str, weights: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the test of that name in test_compile.py: with Triton 3.6, which preloads arguments, they may not fill 30."""
    made = launches(Case(hidden=24, weights=weights), monkeypatch, quant_type=quant)
    for name in ("combine_encode_kernel", "combine_decode_kernel"):
        preloaded = re.search(r"\.amdhsa_user_sgpr_kernarg_preload_length (\d+)", made[name].compile("gfx1250"))
        assert preloaded is not None
        assert int(preloaded[1]) < 30
