"""`bench/bench_intranode.py` on the emulated device, tiny and untimed; and that its checks see what is wrong."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import bench_intranode, floor, problem, record, report
from bench.problem import Inputs, Problem
from mori_triton.errors import ArgumentError

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[1]


def bench(*args: str) -> str:
    command = [sys.executable, str(ROOT / "bench" / "bench_intranode.py"), "--device", "cpu", *args]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


SIZES = {"pes": 2, "tokens": 3, "hidden": 256, "topk": 2, "experts": 8, "chain": 2, "replays": 2}
TINY = [text for name, size in SIZES.items() for text in (f"--{name}", str(size))]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A whole run: what it printed, and its directory."""
    out = tmp_path_factory.mktemp("measurements")
    return bench(*TINY, "--commit", "abc", "--out", str(out), "--scaling", "2,4", "--worlds", "1,4"), out


def test_a_run_times_every_phase_in_every_way(run: tuple[str, Path]) -> None:
    (path,) = run[1].glob("*.jsonl")
    rows = report.read_rows(path)
    rounds = [row for row in rows if row["kind"] == "round"]
    kinds = {(row["kernel_type"], row["dtype"]) for row in rounds}
    assert kinds == {(kind, dtype) for kind in ("IntraNode", "IntraNodeLL") for dtype in ("bf16", "fp8")}
    for kind, dtype in kinds:
        got = {(r["what"], r["how"]) for r in rounds if (r["kernel_type"], r["dtype"]) == (kind, dtype)}
        pairs, alone = (
            ("dispatch + combine", "dispatch + external combine"),
            ("dispatch", "combine", "external combine"),
        )
        for what in (*pairs, *alone):
            # two zero-copy combines in a row there are none
            chains = (1,) if what == "combine" else (1, 2)
            assert {how for name, how in got if name == what} >= {
                f"graph of {chain}, {by}" for chain in chains for by in ("host clock", "stamps")
            }
        assert {(what, "phase in a graph of 2") for what in alone} <= got
        assert {(what, "eager, host clock") for what in pairs} <= got
    for row in rounds:
        assert 0 < row["median_us"] <= row["p90_us"]
        assert row["ratio"] == pytest.approx(row["median_us"] / row["floor_us"])
        assert row["floor_us"] == pytest.approx(row["bytes"] / row["copy_gbs"] / 1e3)
        assert row["gbs"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
        # measured elsewhere, on another device
        assert row["peer_us"] is None
        assert row["commit"] == "abc"
        assert row["command"].startswith("python3 bench/bench_intranode.py --device cpu")
    assert {row["tokens"] for row in rows if row["kind"] == "scaling"} == {2, 4}
    assert {row["pes"] for row in rows if row["kind"] == "worlds"} == {1, 4}


def test_a_run_prints_tables_and_draws(run: tuple[str, Path]) -> None:
    printed, out = run
    assert "2 PEs, 3 tokens each, hidden 256, top-2 of 8, fp8, IntraNodeLL" in printed
    assert "ps/byte" in printed
    (picture,) = out.glob("*.png")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_becomes_a_page(run: tuple[str, Path]) -> None:
    (path,) = run[1].glob("*.jsonl")
    page = record.page(path)
    for text in (
        "--device cpu --pes 2",
        "| commit | abc |",
        "## 2 PEs, 3 tokens",
        "| dispatch + combine |",
        "![",
        ".png)",
    ):
        assert text in page
    assert "None" not in page
    written = record.write(path, run[1] / "page.md")
    assert written.read_text() == page
    with pytest.raises(FileExistsError):
        record.write(path, written)


def test_a_codec_has_no_zero_copy(tmp_path: Path) -> None:
    few = {"pes": 2, "tokens": "3", "hidden": 384, "topk": 2, "experts": 8, "chain": 2, "replays": 1}
    kinds = {"dtype": "bf16", "kernel_type": "IntraNode", "codec": "fp8_blockwise,fp4_blockwise"}
    bench_intranode.main(device="cpu", out=tmp_path, scaling="", worlds="", **few, **kinds)
    (path,) = tmp_path.glob("*.jsonl")
    rows = [row for row in report.read_rows(path) if row["kind"] == "round"]
    assert {row["codec"] for row in rows} == {"fp8_blockwise", "fp4_blockwise"}
    assert {row["what"] for row in rows} == {"dispatch", "external combine", "dispatch + external combine"}
    assert "combine fp4_blockwise" in record.page(path)


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    for changes, said in (
        ({"dtype": "fp7"}, "fp7"),
        ({"codec": "fp5"}, "fp5"),
        ({"pes": 3, "experts": 8}, "a multiple of 3"),
        ({}, "on the CPU"),
    ):
        with pytest.raises(ArgumentError, match=said):
            bench_intranode.main(device="cpu", out=tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------ the checks against planted faults
class Round:
    """What a right op would return, made by plain indexing."""

    def __init__(self, dtype: str = "bf16") -> None:
        self.problem = Problem(3, 7, hidden=64, top_k=4, experts=12, dtype=dtype)
        self.everyone = [problem.inputs(self.problem, pe, torch.device("cpu")) for pe in range(3)]
        self.pe, capacity = 1, 21
        sent = [(s, t) for s, mine in enumerate(self.everyone) for t in range(7) if self.goes(mine, t)]
        sent = [sent[i] for i in torch.randperm(len(sent), generator=torch.Generator().manual_seed(1)).tolist()]
        self.sources = torch.full((capacity,), -1, dtype=torch.int32)
        self.sources[: len(sent)] = torch.tensor([7 * s + t for s, t in sent])

        def received(name: str) -> torch.Tensor | None:
            whole = [getattr(mine, name) for mine in self.everyone]
            if whole[0] is None:
                return None
            out = torch.full((capacity, whole[0].shape[1] * whole[0].itemsize), 255, dtype=torch.uint8)
            for row, (source, token) in enumerate(sent):
                out[row] = whole[source][token].view(torch.uint8)
            return out.view(whole[0].dtype)

        self.total = torch.tensor([len(sent)], dtype=torch.int32)
        self.out = [*(received(name) for name in ("tokens", "weights", "scales", "indices")), self.total]

    def goes(self, mine: Inputs, token: int) -> bool:
        return any(i // 4 == self.pe for i in mine.indices[token].tolist())

    def check(self) -> None:
        problem.check_dispatch(self.problem, self.everyone, self.pe, self.sources, tuple(self.out), poisoned=True)


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_check_of_dispatch_passes_what_is_right(dtype: str) -> None:
    Round(dtype).check()


def flip(tensor: torch.Tensor, row: int) -> None:
    tensor.view(torch.uint8)[row, -1] ^= 1


FAULTS = {
    "a bit of a token": lambda r: flip(r.out[0], 3),
    "a bit of a weight": lambda r: flip(r.out[1], 0),
    "a bit of a scale": lambda r: flip(r.out[2], int(r.total) - 1),
    "an id": lambda r: flip(r.out[3], 2),
    "one row less": lambda r: r.total.sub_(1),
    "one row more": lambda r: r.total.add_(1),
    "a row twice": lambda r: r.sources[0].copy_(r.sources[1]),
    "two rows exchanged": lambda r: r.sources[:2].copy_(r.sources[:2].flip(0)),
    "a write behind the last row": lambda r: flip(r.out[0], int(r.total)),
    "a source behind the last row": lambda r: r.sources[-1].fill_(0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_of_dispatch_sees(fault: str) -> None:
    this = Round("fp8")
    FAULTS[fault](this)
    with pytest.raises(AssertionError, match="PE 1"):
        this.check()


def test_the_checks_of_combine_see_a_bit_and_agree_with_numpy() -> None:
    from tests.ops import reference

    this = Problem(3, 7, hidden=64, top_k=4, experts=12)
    mine = problem.inputs(this, 2, torch.device("cpu"))
    want = torch.zeros(7, 64)
    for token, ids in enumerate(mine.indices.numpy()):
        for owner in reference.owners(ids, 3, 4):
            want[token] += problem.expert(owner, mine.tokens[token : token + 1])[0].float()
    out = want.to(torch.bfloat16)
    problem.check_combine(this, mine, out)
    out.view(torch.int16)[5, 63] ^= 1
    with pytest.raises(AssertionError, match=r"1 of 448 wrong, first at \(5, 63\)"):
        problem.check_combine(this, mine, out)


def test_the_check_of_sums_takes_rows_from_their_slots() -> None:
    this = Problem(2, 4, hidden=16, top_k=2, experts=4)
    mine = Inputs(torch.zeros(4, 16), torch.zeros(4, 2), None, torch.tensor([[0, 1], [3, 0], [2, 3], [1, 2]]))
    # PE 1's tokens are 4 to 7; PE 0 got its tokens 0, 1, 3 and PE 1 its tokens 1, 2, 3, among rows of PE 0
    sources = [torch.tensor([7, 0, 4, 5]), torch.tensor([5, 7, 2, 6])]
    rows = [torch.randn(5, 16).to(torch.bfloat16) for _ in range(2)]
    slots = [[(0, 2)], [(1, 0), (0, 3)], [(1, 3)], [(0, 0), (1, 1)]]
    out = torch.stack([sum((rows[p][s].float() for p, s in of), torch.zeros(16)) for of in slots]).to(torch.bfloat16)
    problem.check_summed(this, 1, sources, rows, mine, out)
    rows[1][3, 2] += 1
    with pytest.raises(AssertionError, match="summed"):
        problem.check_summed(this, 1, sources, rows, mine, out)


# ------------------------------------------------------------------ the way it goes on GPUs, on GPUs that are none
@pytest.mark.parametrize("kernel_type", ["IntraNode", "IntraNodeLL"])
def test_graphs_of_all_pes_are_captured_replayed_and_checked(kernel_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench import clock, measure
    from mori_triton.host import state
    from mori_triton.world import gpu, gpus
    from tests.fake_gpus import FakeGpus, FakeGraph

    replayed = []

    def times(launch: Any, repeats: int, after: Any) -> clock.Times:
        def go() -> None:
            launch()
            state.current().driver.synchronize()

        replayed.append(launch.__self__)
        return clock.host_times(go, repeats, after)

    monkeypatch.setattr(FakeGpus, "made", [], raising=False)
    monkeypatch.setattr(gpu, "Gpus", FakeGpus)
    monkeypatch.setattr(gpus, "check_available", lambda device: None)
    monkeypatch.setattr(clock, "event_times", times)
    this = Problem(3, 5, hidden=264, top_k=4, experts=12, kernel_type=kernel_type)
    rows = measure.measure(this, measure.Method("cuda", chain=2, replays=2), floor.Rates(1.0, 1.0))
    # two pairs as a chain, by phases and as one round; three phases alone, two of them also as a chain
    assert len(replayed) == 2 * 3 + 3 + 2
    assert all(isinstance(graph, FakeGraph) for graph in replayed)
    assert {row["chain"] for row in rows if row["how"].startswith("graph of")} == {1, 2}
