"""The kernels of a dispatch compile for every GPU at the largest layout, and hold what the protocol needs."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from triton.runtime.jit import mangle_type

from mori_triton import local_world
from mori_triton.device.launch import TARGETS, cross_compile
from mori_triton.device.prepared import Asked, recording
from mori_triton.ops.dispatch_combine_v2 import EpArena, EpDispatchCombineConfig, EpDispatchPlan
from mori_triton.ops.dispatch_combine_v2.staging import allocate_staging, staging_constants, staging_layout
from mori_triton.ops.tuning import launch_config
from tests.ops.test_compile import SENDS, WORDS

pytestmark = pytest.mark.compile

HIDDEN, TOP_K, SCALES = 7168, 8, 56
PES, MOST = 32, 8192
DEFAULT = ("gfx1250", "sm_90")
OWN_MEMORY = r"^\s*(\.bss|\.comm|\.section\s+\.(bss|data)|(\.visible )?\.global \.)"


def asked_for(pe: int) -> dict[str, Asked]:
    """What `prepare` is asked for by a dispatch, with the launch shape of a GPU, by kernel."""
    cfg = EpDispatchCombineConfig(
        rank=pe, world_size=1, hidden_dim=HIDDEN, max_num_inp_token_per_rank=8, num_experts_per_rank=32,
        num_experts_per_token=TOP_K, scale_dim=SCALES, scale_type_size=4,
    )  # fmt: skip
    arena = EpArena(cfg)
    shape = launch_config("hip", "dispatch", MOST, 2 * HIDDEN, dtype=torch.bfloat16, top_k=TOP_K)
    arena._set_launch("dispatch", shape)
    plan = EpDispatchPlan(arena)
    plan.bind(staging_base=allocate_staging(arena.staging, arena.device))
    with recording() as asked:
        plan.launch(
            input=torch.zeros(8, HIDDEN, dtype=torch.bfloat16), weights=torch.zeros(8, TOP_K),
            scales=torch.zeros(8, SCALES), indices=torch.zeros(8, TOP_K, dtype=torch.int32),
        )  # fmt: skip
    return {one.kernel.__name__: one for one in asked}


@pytest.fixture(scope="module")
def asked() -> dict[str, Asked]:
    return local_world(1, heap_size="4M").run(asked_for)[0]


def build(one: Asked, arch: str, **changes: Any) -> Any:
    """Compiled for a PE of EP32 with 8192 tokens, whose buffers no machine here could hold."""
    constexprs = {param.name for param in one.kernel.params if param.is_constexpr}
    signature = {name: mangle_type(value) for name, value in one.values.items() if name not in constexprs}
    constants = {name: value for name, value in one.values.items() if name in constexprs}
    constants |= staging_constants(staging_layout(PES, 0, 4 * SCALES, MOST)) | changes
    return cross_compile(one.kernel, signature, constants, arch=arch, **one.options)


def text_of(built: Any, arch: str) -> str:
    return built.asm["ptx" if arch.startswith("sm_") else "amdgcn"]


@pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=[] if arch in DEFAULT else [pytest.mark.slow]) for arch in sorted(TARGETS)]
)
def test_ep32_with_8192_tokens_compiles(arch: str, asked: dict[str, Asked]) -> None:
    layout = staging_layout(PES, 0, 4 * SCALES, MOST)
    assert layout.num_bytes > 3 << 30
    assert layout["bases"].offset > 1 << 31
    stage = build(asked["dispatch_stage_kernel"], arch, BLOCK_P=PES, BLOCK_T=2)
    # where a region lies past 2^31, its offset is a 64-bit one
    assert f"{layout['bases'].offset} : i64" in stage.asm["ttir"]
    words = WORDS[arch]
    assert re.search(words["add"], text_of(stage, arch), re.MULTILINE)
    send = text_of(build(asked["dispatch_send_kernel"], arch), arch)
    for what in SENDS:
        assert re.search(words[what], send, re.MULTILINE), what
    for text in (text_of(stage, arch), send):
        spilled = re.search(r"\.vgpr_spill_count: *(\d+)", text)
        assert spilled is None or spilled[1] == "0"
        # the module reserves no memory of its own
        assert not re.search(OWN_MEMORY, text, re.MULTILINE)
        preloaded = re.search(r"\.amdhsa_user_sgpr_kernarg_preload_length (\d+)", text)
        assert preloaded is None or int(preloaded[1]) < 30
