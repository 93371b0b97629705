"""The RDNA4 op and its benchmark on one GPU: the selection of `test_rdna4_matrix`, and a small run, untimed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import bench_rdna4_ep, report
from mori_triton import local_world
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import Point
from tests.ops.test_rdna4_matrix import SELECTION

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]
# the shapes that MORI's own correctness run has
PUBLISHED = [
    Point(world_size, dtype, 8, hidden, capacity)
    for world_size in (2, 4)
    for dtype in ("bf16", "fp16")
    for hidden in (2048, 3072, 4096, 5120, 7168, 8192)
    for capacity in (512, 256)
]


@pytest.mark.parametrize("point", [*SELECTION, *PUBLISHED], ids=str)
def test_a_point_of_the_matrix(point: Point) -> None:
    sent = checks.sent_of(point, 0, 2, "cuda")
    torch.cuda.synchronize()
    world = local_world(point.world_size, "cuda", heap_size=checks.heap_bytes(point), timeout_s=60.0)
    world.run(checks.run_point, point, sent)


def test_a_small_run(tmp_path: Path) -> None:
    output = tmp_path / "run.jsonl"
    bench_rdna4_ep.main(
        hidden_sizes="2048", tokens="8,300", warmup=2, rounds=2, samples=3, device="cuda", pes="2,4", output=output
    )
    rows = report.read_rows(output)
    pairs = [row for row in rows if row["kind"] == "pair"]
    assert len(pairs) == 8
    assert all(row["error"] is None and row["mori_us"] > 0 and row["baseline_us"] > 0 for row in pairs)
    assert {row["gpu"] for row in rows} == {torch.cuda.get_device_name(0)}
    # microseconds of a GPU, not of the host's threads
    assert all(row["mori_us"] < 2000 for row in pairs)
