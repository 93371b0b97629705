"""`bench/bench_rdna4_ep.py` on the emulated device, tiny and untimed; its baseline, its checks and its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bench import bench_rdna4_ep, report
from bench.rdna4 import backends, dense, summary, timing
from bench.rdna4.dense import HeapCollectives
from bench.rdna4.summary import Entry, summarise
from mori_triton import local_world, ops
from mori_triton.errors import ArgumentError
from tests.ops import rdna4_checks as checks
from tests.ops.rdna4_checks import Point

pytestmark = pytest.mark.cpu

PUBLISHED = Path(__file__).parents[1] / "bench" / "rdna4" / "published.json"
TINY: dict[str, Any] = {
    "device": "cpu", "pes": "2,4", "topks": "2", "hidden_sizes": "64", "tokens": "3,5", "experts": 8, "warmup": 1,
    "rounds": 3, "samples": 2, "commit": "abc",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- a whole run
@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run's file."""
    output = tmp_path_factory.mktemp("measurements") / "new" / "rdna4.jsonl"
    bench_rdna4_ep.main(**TINY, output=output)
    return output


def test_a_run_keeps_raw_samples_and_what_follows_from_them(run: Path) -> None:
    rows = report.read_rows(run)
    raw = {(r["world_size"], r["tokens"], r["backend"]): r for r in rows if r["kind"] == "samples"}
    names = ("mori", "dense, push", "dense, pull")
    assert set(raw) == {(n, t, name) for n in (2, 4) for t in (3, 5) for name in names}
    for row in raw.values():
        us = np.array(row["samples_us"])
        assert us.shape == (3, 2)
        assert (us > 0).all()
        assert row["p50_us"] == pytest.approx(sorted(us.flat)[2:4] @ np.array([0.5, 0.5]))
        assert row["round_p50_us"] == pytest.approx(us.mean(1))
        assert row["correct"]
        assert row["error"] is None
    pairs = [row for row in rows if row["kind"] == "pair"]
    assert len(pairs) == 8
    for row in pairs:
        ours, theirs = (raw[row["world_size"], row["tokens"], name] for name in ("mori", row["baseline"]))
        assert (row["mori_us"], row["baseline_us"]) == (ours["p50_us"], theirs["p50_us"])
        assert row["speedup"] == pytest.approx(theirs["p50_us"] / ours["p50_us"])
        assert row["reduction_percent"] == pytest.approx(100 - 100 * ours["p50_us"] / theirs["p50_us"])
        spreads = [max(r["round_p50_us"]) / min(r["round_p50_us"]) for r in (ours, theirs)]
        assert row["spread"] == pytest.approx(max(spreads))
        assert row["floor_us"] == pytest.approx(row["mori_bytes"] / row["copy_gbs"] / 1e3)
        assert row["ratio"] == pytest.approx(row["mori_us"] / row["floor_us"])
    assert {(r["world_size"], r["baseline"], r["correct"], r["points"]) for r in rows if r["kind"] == "summary"} == {
        (n, f"dense, {form}", 2, 2) for n in (2, 4) for form in dense.FORMS
    }
    assert run.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_measurements_are_not_overwritten(run: Path) -> None:
    before = run.read_bytes()
    with pytest.raises(FileExistsError):
        bench_rdna4_ep.main(**TINY, output=run)
    assert run.read_bytes() == before


def test_wrong_arguments_are_refused_before_there_is_a_file(tmp_path: Path) -> None:
    for changes, said in (
        ({"dtypes": "fp32"}, "fp32"),
        ({"weights": "maybe"}, "maybe"),
        ({"experts": 7}, "a multiple of 2"),
        ({"samples": 0}, "samples"),
        ({"tokens": "100000"}, "on the CPU"),
    ):
        with pytest.raises(ArgumentError, match=said):
            bench_rdna4_ep.main(**{**TINY, **changes}, output=tmp_path / "x.jsonl")
    assert list(tmp_path.iterdir()) == []


def wrong_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ops.EpDispatchCombineOp.dispatch

    def dispatch(self: Any, *args: Any, **named: Any) -> Any:
        out = true(self, *args, **named)
        # others get what they should: they go on where this PE's check ends
        if self.config.rank == 1:
            out[0].view(torch.int16)[0, 7] ^= 1
        return out

    monkeypatch.setattr(ops.EpDispatchCombineOp, "dispatch", dispatch)


def wrong_combine(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ops.EpDispatchCombineOp.combine

    def combine(self: Any, *args: Any, **named: Any) -> Any:
        out = true(self, *args, **named)
        if self.config.rank == 1:
            out[0].view(torch.int16)[1, 7] ^= 1
        return out

    monkeypatch.setattr(ops.EpDispatchCombineOp, "combine", combine)


def wrong_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    true = HeapCollectives.all_gather

    def all_gather(self: Any, x: torch.Tensor) -> None:
        true(self, x)
        if self.form == "push" and self.state.pe == 0:
            self.gathered[-1] += 1

    monkeypatch.setattr(HeapCollectives, "all_gather", all_gather)


def wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    true = HeapCollectives.reduce_scatter

    def reduce_scatter(self: Any) -> None:
        true(self)
        if self.form == "pull" and self.state.pe == 0:
            self.out[-1] += 1

    monkeypatch.setattr(HeapCollectives, "reduce_scatter", reduce_scatter)


@pytest.mark.parametrize(
    ("plant", "backend", "said"),
    [
        (wrong_dispatch, "mori", "PE 1: tokens from PE"),
        (wrong_combine, "mori", "1 of"),
        (wrong_gather, "dense, push", "PE 0: dense, push: gathered tokens of PE 1"),
        (wrong_sum, "dense, pull", "PE 0: dense, pull: sums"),
    ],
)
def test_a_wrong_backend_is_found_and_not_timed(
    plant: Any, backend: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    output = tmp_path / "x.jsonl"
    with pytest.raises(SystemExit) as ended:
        bench_rdna4_ep.main(**{**TINY, "pes": "2", "tokens": "3"}, output=output)
    assert ended.value.code == 1
    rows = report.read_rows(output)
    raw = {row["backend"]: row for row in rows if row["kind"] == "samples"}
    assert said in raw[backend]["error"]
    for name, row in raw.items():
        assert (row["samples_us"] is None) == (name == backend)
    for row in rows:
        if row["kind"] == "summary":
            assert row["correct"] == (0 if backend in ("mori", row["baseline"]) else 1)


# --------------------------------------------------------------------------------------------------------- the baseline
def collective_rounds(pe: int, form: str, num: int, dtype: torch.dtype) -> None:
    wire = HeapCollectives(form, num, dtype, 3)
    for index in range(3):
        generator = torch.Generator().manual_seed(index)
        xs = torch.randn(wire.n_pes, num, generator=generator).to(dtype)
        partial = torch.randn(wire.n_pes, wire.n_pes, num, generator=generator).to(dtype)
        wire.gathered.fill_(torch.nan)
        wire.out.fill_(torch.nan)
        wire.state.bootstrap.barrier("poisoned")
        wire.all_gather(xs[pe])
        assert torch.equal(wire.gathered.view(-1, num), xs)
        wire.partial.copy_(partial[pe].view(-1))
        wire.reduce_scatter()
        want = torch.zeros(num)
        for theirs in partial:
            want += theirs[pe].float()
        assert torch.equal(wire.out, want.to(dtype))
    wire.close()


@pytest.mark.parametrize(("form", "num_pes"), [("push", 2), ("pull", 2), ("push", 4), ("pull", 4)])
def test_the_baseline_gathers_and_sums(form: str, num_pes: int) -> None:
    # one element more than three programs' blocks of 4096, and fewer than one
    for num, dtype in ((3 * 4096 + 16, torch.bfloat16), (16, torch.float16)):
        local_world(num_pes, heap_size="4M").run(collective_rounds, form, num, dtype)


@pytest.mark.parametrize("form", dense.FORMS)
def test_the_baseline_in_weak_memory(form: str) -> None:
    for seed in range(3):
        world = local_world(2, heap_size="4M", seed=seed, weak_memory=True)
        world.run(collective_rounds, form, 4096 + 32, torch.bfloat16)


# --------------------------------------------------------------------------------------------------- method and numbers
def test_rounds_alternate_and_the_slowest_pe_counts() -> None:
    called: list[str] = []

    def sample(name: str) -> timing.Sample:
        def take() -> float:
            called.append(name)
            return float(len(called))

        return take

    def gather(mine: dict[str, Any]) -> list[dict[str, Any]]:
        # another PE is slower in the first sample of every round
        other = {name: [[rows[0] + 100, rows[1] - 1] for rows in rounds] for name, rounds in mine.items()}
        return [mine, other]

    us = timing.alternate({"a": sample("a"), "b": sample("b")}, timing.Method(1, 3, 2), gather)
    assert called == ["a", "b", *"aabb", *"bbaa", *"aabb"]
    assert us["a"].tolist() == [[103, 4], [109, 10], [111, 12]]
    assert us["b"].tolist() == [[105, 6], [107, 8], [113, 14]]
    assert summary.p50(us["a"]) == 57.5
    assert summary.spread(us["a"]) == pytest.approx(61.5 / 53.5)


def test_a_summary_by_hand() -> None:
    entries = [
        Entry(2, 64, 8, 50.0, 100.0),
        Entry(2, 64, 16, 100.0, 80.0, spread=1.21),
        Entry(2, 128, 8, 100.0, 100.0),
        Entry(2, 128, 16, None, 90.0),
    ]
    found = summarise(entries)
    assert (found.points, found.correct, found.faster, found.unstable) == (4, 3, 1, 1)
    # reductions 50, -25 and 0; speed-ups 2, 0.8 and 1
    assert found.median_reduction_percent == 0
    assert found.geomean_speedup == pytest.approx(1.6 ** (1 / 3))
    assert found.least_speedup == 0.8
    assert str(found).startswith(
        "correct 3/4, MORI faster 1/4, median latency reduction 0.00 %, geomean speed-up 1.170"
    )
    assert "correct 0/1" in str(summarise(entries[3:]))


@pytest.mark.parametrize("world", [2, 4])
def test_a_summary_of_the_published_tables_is_the_published_one(world: int) -> None:
    published = json.loads(PUBLISHED.read_text())
    rows = [row for row in published["entries"] if row["world_size"] == world]
    entries = [Entry(world, row["hidden_size"], row["tokens"], row["mori_us"], row["rccl_us"]) for row in rows]
    assert len({(entry.hidden_size, entry.tokens) for entry in entries}) == 60
    for row, entry in zip(rows, entries, strict=True):
        # times are given to a hundredth of a microsecond
        assert entry.reduction_percent == pytest.approx(row["reduction_percent"], abs=0.02)
    found, said = summarise(entries), published["summary"][str(world)]
    assert (found.faster, found.correct) == (said["faster"], said["of"])
    assert round(found.median_reduction_percent or 0, 2) == said["median_reduction_percent"]
    assert round(found.geomean_speedup or 0, 3) == said["geomean_speedup"]


def test_bytes_by_hand() -> None:
    point = Point(2, "bf16", 2, 16, 3, True, experts=4)
    # PE 0's tokens go to PE 0, to both, to PE 1; PE 1's to both, nowhere, PE 1: 7 rows, 3 of them to the other PE
    ids = [[[0, 1], [1, 2], [3, 2]], [[0, 3], [-1, -1], [2, -1]]]
    everyone = [checks.Sent(torch.zeros(3, 16), None, torch.tensor(rows)) for rows in ids]
    moved = backends.moved_by_op(point, everyone)
    assert moved == backends.Moved(memory=(6 + 7 + 2 * 3 + 7 + 6) * 32, links=2 * 3 * 32)
    assert backends.moved_by_dense(point, "pull") == backends.Moved((6 + 12 + 12 + 6) * 32, 2 * 6 * 32)
    assert backends.moved_by_dense(point, "push") == backends.Moved((6 + 12 + 12 + 12 + 6) * 32, 2 * 6 * 32)


# ----------------------------------------------------------------------- the way it goes on GPUs, on GPUs that are none
def test_graphs_of_all_pes_are_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mori_triton.world import gpu, gpus
    from tests.fake_gpus import FakeGpus, FakeGraph

    replayed: list[int] = []
    true = FakeGraph.replay
    monkeypatch.setattr(FakeGraph, "replay", lambda self: (replayed.append(1), true(self))[1])
    monkeypatch.setattr(FakeGpus, "made", [], raising=False)
    monkeypatch.setattr(gpu, "Gpus", FakeGpus)
    monkeypatch.setattr(gpus, "check_available", lambda device: None)
    results = report.Results("rdna4-ep", None, report.environment("abc", "cpu"))
    points = [Point(2, "fp16", 2, 64, 4, True, experts=8)]
    bench_rdna4_ep.in_world(points, results, 1, timing.Method(1, 2, 2), "cuda", 1.0)
    assert [row["error"] for row in results.of("pair")] == [None, None]
    # three backends: warm-ups, and two rounds of two samples
    assert len(replayed) == 3 * (1 + 4)
