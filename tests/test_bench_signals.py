"""The signal benchmark runs and counts its rounds; on the emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import bench_signals as bench
from bench.report import read_rows

pytestmark = pytest.mark.cpu


def test_a_run_times_rounds_of_every_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main("cpu", "1,3", "2", rounds=4, replays=2, out=tmp_path, commit=None)
    (path,) = tmp_path.glob("*.jsonl")
    rows = read_rows(path)
    whats = ("round in a kernel", "kernel of one round")
    assert [(row["pes"], row["num_warps"], row["what"]) for row in rows] == [
        (pes, 2, what) for pes in (1, 3) for what in whats
    ]
    assert all(row["median_us"] > 0 and row["repeats"] == 2 for row in rows)
    assert "All-to-all of signals" in capsys.readouterr().out
