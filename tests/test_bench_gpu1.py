"""`bench_intranode.py` and `sanitize.py` on one GPU, small: every check that they make, no time asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import bench_intranode, clock, report, sanitize

pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False"),
]


def test_stamps_of_one_stream_go_up() -> None:
    stamps = torch.zeros(100, dtype=torch.int64, device="cuda")
    for index in range(len(stamps)):
        clock.stamp(stamps, index)
    steps = stamps.diff().cpu()
    assert bool((steps >= 0).all())
    # nanoseconds: a hundred launches take more than ten microseconds and less than a tenth of a second
    assert 10_000 < int(steps.sum()) < 100_000_000
    assert 0 < clock.resolution_ns(stamps.device) <= 2000


def test_a_small_run(tmp_path: Path) -> None:
    sizes = {"pes": 8, "tokens": "24", "hidden": 1024, "replays": 3, "scaling": "", "worlds": "2"}
    bench_intranode.main(device="cuda", dtype="bf16", out=tmp_path, **sizes)
    (path,) = tmp_path.glob("*.jsonl")
    rows = [row for row in report.read_rows(path) if row["kind"] == "round"]
    assert {row["kernel_type"] for row in rows} == {"IntraNode", "IntraNodeLL"}
    for row in rows:
        assert row["median_us"] > 0
        assert row["gpu"] == torch.cuda.get_device_name(0)
        assert row["copy_gbs"] > 100
        if row["how"].startswith("phase"):
            assert row["share_us"] <= row["median_us"]


@pytest.mark.parametrize("num_pes", [1, 2])
def test_the_run_for_a_sanitizer(num_pes: int) -> None:
    for name in ("bf16", "IntraNodeLL, fp8"):
        sanitize.run_world(num_pes, sanitize.VARIANTS[name], "cuda", split=num_pes > 1)
