"""The benchmark of the device library runs, compares what it moves, and counts instructions; on the emulated device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bench import bench_shmem as bench
from bench import sass
from bench.report import read_rows

pytestmark = pytest.mark.cpu


def test_a_run_measures_every_scope_and_world(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench.main(
        "cpu", "16,8192", 2, pes="2,3", warps="2", rounds=3, replays=2, only_sass=False, out=tmp_path, commit=None
    )
    (path,) = tmp_path.glob("*.jsonl")
    rows = read_rows(path)
    puts = [row for row in rows if row["kind"] == "put"]
    assert [(row["scope"], row["bytes"]) for row in puts] == [(s, n) for s in bench.SCOPES for n in (16, 8192)]
    assert [row["programs"] for row in puts] == [1, 1, 1, 1, 1, 2]
    signals = [(row["what"], row["pes"]) for row in rows if row["kind"] == "signal"]
    assert signals == [("barrier", 2), ("round trip", 2), ("barrier", 3)]
    for row in rows:
        if row["kind"] in ("put", "signal"):
            assert 0 < row["median_us"] <= row["p90_us"]
            assert row["repeats"] == 2
    assert {row["what"] for row in rows if row["kind"] == "sass"} == set(sass.KERNELS)
    printed = capsys.readouterr().out
    assert "Puts of two PEs to each other" in printed
    assert str(path) in printed.replace("\n", "")


def test_a_put_that_does_not_come_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __call__(self, *args: object) -> None: ...

    monkeypatch.setattr(bench, "prepare", lambda *args, **kwargs: Nothing())
    with pytest.raises(AssertionError, match="16 bytes are not what PE"):
        bench.main("cpu", "16", 1, pes="", warps="", rounds=1, replays=1, only_sass=False, out=None, commit=None)


def test_the_slowest_pe_of_each_replay_counts() -> None:
    stamps = {0: np.array([[0, 2000], [10, 1010]]), 1: np.array([[500, 1500], [0, 8000]])}
    assert bench.slowest(stamps, 2).us.tolist() == [1.0, 4.0]


@pytest.mark.compile
def test_instructions_by_hand_do_the_same_with_fewer() -> None:
    found = {row["what"]: row for row in sass.rows()}
    ours, theirs, empty = (found[what]["instructions"] for what in ("mori_triton", "by hand", "an empty kernel"))
    assert 0 < empty < theirs < ours < 5 * theirs
    assert {row["shared_bytes"] for row in found.values()} == {0}
    # it loads and stores 16 bytes, fences and signals at system scope
    cubin = sass.cross_compile(sass.by_hand_kernel, sass.SIGNATURE, arch=sass.ARCH).asm["cubin"]
    names = sass.instructions(cubin)
    assert {"LDG.E.128", "STG.E.128"} <= set(names)
    assert any(name.startswith("MEMBAR") and "SYS" in name for name in names)
    assert any(name.startswith(("RED", "ATOM")) for name in names)
