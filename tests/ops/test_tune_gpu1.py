"""Tuning on one GPU that several PEs share: graphs, events, and tables that an op there then uses."""

from __future__ import annotations

import pytest
import torch

from mori_triton import local_world, ops
from mori_triton.ops.tune import Problem, tune
from mori_triton.ops.tuning_tables import load_table

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]
DEVICE = "hip" if torch.version.hip else "cuda"


def test_a_small_run(tmp_path, monkeypatch):
    num_pes = torch.cuda.device_count() + 1
    problem = Problem(
        "IntraNode", num_pes, 256, 2, 4 * num_pes, (16,), ("bf16", "fp8_e4m3"), ("none", "fp8_blockwise")
    )  # fmt: skip
    outcomes = tune(problem, device=DEVICE, out=tmp_path, budget_s=5.0)
    assert [o.decision for o in outcomes] == ["new"] * 5
    # how many shapes the budget is enough for, and what a copy takes, depends on who else uses the machine
    assert all(o.floor_us > 0.0 and o.num_measured >= 1 for o in outcomes)
    (path,) = tmp_path.glob(f"*-shared_IntraNode_ep{num_pes}_dispatch.json")
    rule = next(r for r in load_table(path, "dispatch").rules if r.dtype == "bf16")
    assert rule.latency_us is not None
    assert 0.0 < rule.latency_us < 10_000.0
    monkeypatch.setenv("MORI_EP_LAUNCH_CONFIG_MODE", "AUTO")
    monkeypatch.setenv("MORI_EP_TUNING_CONFIG", str(tmp_path))

    def program(pe):
        op = ops.EpDispatchCombineOp(problem.config(pe, "none"))
        shape = op.get_launch_config(is_dispatch=True)
        op.close()
        return shape

    shapes = local_world(num_pes, DEVICE).run(program)
    assert shapes == [(rule.block_num, 0, rule.num_warps)] * num_pes
