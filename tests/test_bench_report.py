"""What benchmarks write down: lines that stand for themselves, files that are never overwritten, tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import report

pytestmark = pytest.mark.cpu

SOME = {"command": "python3 bench/x.py", "date": "2026-11-29T10:00:00+00:00", "gpu": "NVIDIA H200"}


def test_each_line_stands_for_itself(tmp_path: Path) -> None:
    results = report.Results("intranode", tmp_path, SOME)
    results.add("round", tokens=128, median_us=61.5)
    results.add("copy", gbs=4300.0)
    assert results.path == tmp_path / "2026-11-29-intranode-h200.jsonl"
    lines = [json.loads(line) for line in results.path.read_text().splitlines()]
    assert lines == report.read_rows(results.path)
    assert lines == [
        {"bench": "intranode", "kind": "round", "tokens": 128, "median_us": 61.5, **SOME},
        {"bench": "intranode", "kind": "copy", "gbs": 4300.0, **SOME},
    ]
    assert results.of("round", tokens=128) == [
        {"bench": "intranode", "kind": "round", "tokens": 128, "median_us": 61.5}
    ]
    assert results.of("round", tokens=4096) == []


def test_a_second_run_leaves_the_first_alone(tmp_path: Path) -> None:
    for index in range(3):
        report.Results("intranode", tmp_path / "new", SOME).add("round", index=index)
    files = sorted((tmp_path / "new").iterdir())
    assert [f.name for f in files] == [f"2026-11-29-intranode-h200{tail}.jsonl" for tail in ("-2", "-3", "")]
    assert sorted(report.read_rows(f)[0]["index"] for f in files) == [0, 1, 2]


def test_without_a_directory_nothing_is_written() -> None:
    results = report.Results("intranode", None, SOME)
    results.add("round", tokens=1)
    assert results.path is None
    assert len(results.rows) == 1


def test_environment_names_what_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [str(report.ROOT / "bench" / "bench_intranode.py"), "--tokens", "1, 2", "--out", "there", "--commit=x"],
    )
    got = report.environment("abc123", device="cpu")
    assert got["command"] == "python3 bench/bench_intranode.py --tokens '1, 2'"
    assert got["commit"] == "abc123"
    assert got["gpu"] is None
    assert all(got[name] for name in ("date", "python", "torch", "triton", "cpu"))
    assert {"driver", "num_gpus"} <= set(got)
    json.dumps(got)


def test_tables_say_nothing_where_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"what": "dispatch", "us": 12.345}, {"what": "combine", "us": None}]
    columns = [report.Column("what"), report.Column("us", "median, µs", ".1f")]
    assert report.markdown(rows, columns) == "| what | median, µs |\n| --- | --- |\n| dispatch | 12.3 |\n| combine |  |"
    report.show("a title", rows, columns)
    printed = capsys.readouterr().out
    assert "a title" in printed
    assert "12.3" in printed
    assert "None" not in printed
