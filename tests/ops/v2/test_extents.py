"""The staging buffer at its limits: nothing behind or before it is touched, and all that is in it is used."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import pytest
import torch

from mori_triton import local_world
from mori_triton.errors import KernelFault
from mori_triton.host import state as host_state
from mori_triton.ops.dispatch_combine_v2 import EpArena, EpDispatchCombineConfig, EpDispatchPlan
from mori_triton.ops.dispatch_combine_v2.staging import MAX_BLOCKS, MAX_TOP_K, host_bytes

pytestmark = pytest.mark.cpu

# every extent at its largest: a block for each of 512 tokens, 16 ids, all rows to the last slot of the last PE
TOKENS, SCALE_BYTES = MAX_BLOCKS, 4
PAGE, PROT_NONE, CANARY = mmap.PAGESIZE, 0, 0xA5


class Guarded:
    """The last `num_bytes` before a page that nobody may touch, all ones; a canary from a page's start up to them."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = mmap.mmap(-1, -(-num_bytes // PAGE) * PAGE + PAGE)
        whole = np.frombuffer(self._memory, np.uint8)
        begin = len(whole) - PAGE - num_bytes
        self.address = whole.ctypes.data + begin
        self.canary, self.bytes = whole[:begin], whole[begin : begin + num_bytes]
        self.canary[:] = CANARY
        self.bytes[:] = 255
        guard = ctypes.c_void_p(self.address + num_bytes)
        assert ctypes.CDLL(None).mprotect(guard, ctypes.c_size_t(PAGE), PROT_NONE) == 0

    def region(self, plan: EpDispatchPlan, name: str, dtype: Any) -> np.ndarray:
        offset, num_bytes = plan.info["staging_layout"][name]
        return self.bytes[offset : offset + num_bytes].view(dtype)


def config(pe: int) -> EpDispatchCombineConfig:
    return EpDispatchCombineConfig(
        rank=pe, world_size=2, hidden_dim=8, max_num_inp_token_per_rank=TOKENS, num_experts_per_rank=MAX_TOP_K,
        num_experts_per_token=MAX_TOP_K, scale_dim=1, scale_type_size=SCALE_BYTES,
    )  # fmt: skip


def test_largest_shapes_beside_a_guard_page() -> None:
    def program(pe: int) -> tuple[int, list[int]]:
        arena = EpArena(config(pe))
        plan = EpDispatchPlan(arena, block_num=MAX_BLOCKS)
        guarded = Guarded(plan.info["staging_bytes"])
        plan.bind(staging_base=guarded.address, staging_bytes=plan.info["staging_bytes"])
        tokens = torch.arange(TOKENS, dtype=torch.int16).view(-1, 1).expand(-1, 8).contiguous()
        ids = (MAX_TOP_K + torch.arange(MAX_TOP_K, dtype=torch.int32)).expand(TOKENS, -1).contiguous()
        weights = (1000.0 * pe + torch.arange(TOKENS))[:, None].expand(-1, MAX_TOP_K).contiguous()
        scales = (1000 * pe + torch.arange(TOKENS, dtype=torch.int32))[:, None].contiguous()
        out, out_weights, out_scales, out_ids, total = plan.launch(
            input=tokens.view(torch.bfloat16), weights=weights, scales=scales, indices=ids
        )
        assert (guarded.canary == CANARY).all()
        # the last entry of each extent was used
        assert guarded.region(plan, "counts", np.int32)[2 * MAX_BLOCKS - 1] == 1
        assert (guarded.region(plan, "counts", np.int32)[0::2] == 0).all()
        assert len(np.unique(guarded.region(plan, "bases", np.int32)[1::2])) == TOKENS
        staged = guarded.region(plan, "sources", np.int32)
        # this PE's rows, all in the last PE's part
        assert (staged[: 2 * TOKENS] == -1).all()
        assert sorted(staged[2 * TOKENS :][staged[2 * TOKENS :] >= 0]) == list(range(pe * TOKENS, (pe + 1) * TOKENS))
        if staged[-1] >= 0:
            assert guarded.region(plan, "indices", np.int32)[-1] == 2 * MAX_TOP_K - 1
            assert guarded.region(plan, "weights", np.float32)[-1] == 1000 * pe + staged[-1] % TOKENS
            assert guarded.region(plan, "scales", np.int32)[-32] == 1000 * pe + staged[-1] % TOKENS
        if pe == 1:
            assert int(total) == 2 * TOKENS
            source = arena.get_dispatch_src_token_pos()
            assert sorted(source.tolist()) == list(range(2 * TOKENS))
            value = source // TOKENS * 1000 + source % TOKENS
            assert torch.equal(out.view(torch.int16)[:, 0].int(), source % TOKENS)
            assert torch.equal(out_weights, value[:, None].expand(-1, MAX_TOP_K).float())
            assert torch.equal(out_scales[:, 0], value)
            assert torch.equal(out_ids, ids[:1].expand(2 * TOKENS, -1))
        host_state.current().bootstrap.barrier("looked at")
        return int(staged[-1] >= 0), [int(total)]

    last, totals = zip(*local_world(2, heap_size="4M").run(program), strict=True)
    # one PE was given the last slot
    assert sum(last) == 1
    assert totals == ([0], [2 * TOKENS])


def test_the_emulated_device_stops_what_the_guard_page_would(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is a region too short, and that nobody has checked: the first store behind it is a fault."""

    def program(pe: int) -> None:
        arena = EpArena(config(pe))
        plan = EpDispatchPlan(arena, block_num=MAX_BLOCKS)
        guarded = Guarded(plan.info["staging_layout"]["counts"][0])
        unchecked = host_bytes(guarded.address, len(guarded.bytes))
        monkeypatch.setattr(plan, "_staging", lambda base, num_bytes: unchecked)
        tokens, weights = torch.zeros(TOKENS, 8, dtype=torch.bfloat16), torch.zeros(TOKENS, MAX_TOP_K)
        scales, ids = torch.zeros(TOKENS, 1), torch.zeros(TOKENS, MAX_TOP_K, dtype=torch.int32)
        with pytest.raises(KernelFault, match="dispatch_stage_kernel"):
            plan.launch(input=tokens, weights=weights, scales=scales, indices=ids)
        assert (guarded.canary == CANARY).all()

    local_world(2, heap_size="4M").run(program)
