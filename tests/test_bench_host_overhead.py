"""The host-time benchmark runs, checks, and takes down what it says; on the emulated device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from bench import bench_host_overhead as bench
from bench import problem
from bench.report import read_rows

pytestmark = pytest.mark.cpu

SMALL = ["--device", "cpu", "--tokens", "3", "--hidden", "48", "--experts", "4", "--topk", "2", "--calls", "3"]
SMALL += ["--cores", "0"]


def run(*more: str) -> str:
    app = bench.typer.Typer()
    app.command()(bench.main)
    result = CliRunner().invoke(app, [*SMALL, *more], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_a_run_times_launches_calls_and_replays(tmp_path: Path) -> None:
    text = run("--pes", "1,2", "--kernel-type", "IntraNode", "--out", str(tmp_path))
    (path,) = tmp_path.glob("*.jsonl")
    rows = read_rows(path)
    assert [row["what"] for row in rows if row["kind"] == "launch"] == [
        "prepared, 1 argument",
        "by @triton.jit, 1 argument",
        "prepared, 25 arguments",
        "by @triton.jit, 25 arguments",
    ]
    calls = [(row["pes"], row["what"]) for row in rows if row["kind"] == "call"]
    assert calls == [(pes, what) for pes in (1, 2) for what in ("dispatch", "combine", "replay of both")]
    for row in rows:
        assert row["calls"] == 3
        assert 0 < row["least_us"] <= row["median_us"] <= row["p90_us"]
    (drawn,) = tmp_path.glob("*.png")
    assert drawn.stem == path.stem
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert "prepared, 25 arguments" in text
    assert "top-2 of 4" in text


def test_of_a_call_the_slowest_pe_counts() -> None:
    first, second = bench.Timings(), bench.Timings()
    first.us, second.us = {"dispatch": [1.0, 5.0]}, {"dispatch": [3.0, 2.0]}
    joint = bench.together([first, second])
    assert joint.us == {"dispatch": [3.0, 5.0]}
    (row,) = joint.summary()
    assert (row["median_us"], row["least_us"], row["calls"]) == (4.0, 3.0, 2)
    assert row["p90_us"] == pytest.approx(float(np.percentile([3.0, 5.0], 90)))


def test_a_wrong_element_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(pe: int, rows: torch.Tensor, out: torch.Tensor, num_rows: int) -> None:
        out[:num_rows] = problem.expert(pe, rows[:num_rows])
        out[0, 0] += 1

    monkeypatch.setattr(problem, "run_experts", spoilt)
    with pytest.raises(AssertionError, match="combined tokens"):
        run("--pes", "1", "--kernel-type", "IntraNode")
