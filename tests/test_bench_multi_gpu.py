"""`bench/bench_multi_gpu.sh` as a command, with two processes; and what it says of a run."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.multi_gpu import check
from bench.multi_gpu.compare import link_bytes, verdicts
from bench.multi_gpu.ways import check_sums
from bench.problem import Inputs, Problem, destinations, expert, inputs
from mori_triton import emulator, ops

ROOT = Path(__file__).parents[1]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": ".", **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, cwd=ROOT, env=given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.cpu), pytest.param("cuda", marks=[pytest.mark.gpu1, needs_gpu])]
)
def test_every_part_with_two_processes(device: str, tmp_path: Path) -> None:
    done = run("bash", "bench/bench_multi_gpu.sh", "--device", device, "--pes", "2", "--tiny", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
    checks = [row for row in rows if row["kind"] == "check"]
    assert {row["mode"] for row in checks} == {"static_heap", "vmm"}
    assert len(checks) == 6
    assert all(row["wrong"] == 0 and row["pes"] == 2 for row in checks)
    times = [row for row in rows if row["kind"] == "compare"]
    assert {row["dtype"] for row in times} == {"bf16", "fp8"}
    assert len({row["way"] for row in times}) == 5
    assert all(0 < row["median_us"] <= row["p90_us"] for row in times)
    assert {row["how"] for row in times if row["ours"]} == {
        "eager",
        *(["graph", "graph of 5"] if device != "cpu" else []),
    }
    assert all(row["link_bytes"] > 0 for row in times)
    assert len(list(tmp_path.glob("*.png"))) == 2
    (pair,) = [json.loads(line) for line in (tmp_path / "rdna4-ep2.jsonl").read_text().splitlines()][2:3]
    assert (pair["kind"], pair["error"]) == ("pair", None)
    assert pair["baseline"].endswith("all-gather + reduce-scatter")


@pytest.mark.cpu
def test_a_wrong_element_fails_the_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    # what torchrun sets, for a group of this process alone
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in {**alone, "MORI_SHMEM_HEAP_SIZE": "64M"}.items():
        monkeypatch.setenv(name, value)
    activate, dispatch, active = emulator.activate, ops.EpDispatchCombineOp.dispatch, []

    def activated(*arch: str) -> Any:
        one = activate(*arch)
        # the command itself ends with its process; what shmem takes it gives back
        if not arch:
            active.append(one)
        return one

    monkeypatch.setattr(emulator, "activate", activated)

    def wrong(self: Any, *args: Any) -> Any:
        out = dispatch(self, *args)
        row = out[0].view(torch.uint8)[0]
        row[3] = row[3] ^ 1
        return out

    monkeypatch.setattr(ops.EpDispatchCombineOp, "dispatch", wrong)
    monkeypatch.setattr(check, "MATRIX", check.MATRIX[:1])
    try:
        with pytest.raises(SystemExit) as end:
            check.main(device="cpu", rounds=1, tiny=True)
    finally:
        for one in active:
            one.deactivate()
    assert end.value.code == 1
    text = capsys.readouterr().out
    assert text.count("wrong elements") == 1
    assert "1 problems among 1 PEs on emulated devices: 1 failed" in text


@pytest.mark.cpu
@pytest.mark.parametrize(("options", "says"), [(["--what"], "unknown option --what"), (["--device", "tpu"], "got tpu")])
def test_a_bad_option_is_named(options: list[str], says: str) -> None:
    done = run("bash", "bench/bench_multi_gpu.sh", *options)
    assert done.returncode == 2
    assert says in done.stderr


# ------------------------------------------------------------------------------------------------------------ verdicts
def row(what: str, us: float, ours: bool, ratio: float | None = None, **more: Any) -> dict[str, Any]:
    times = {"what": what, "median_us": us, "ours": ours, "link_ratio": ratio, "speedup": 200.0 / us if ours else 1.0}
    return {"kind": "compare", "how": "graph", "tokens": 4096, "dtype": "bf16", "way": "W", **times, **more}


@pytest.mark.cpu
def test_verdicts():
    both = "dispatch + combine"
    rows = [
        row("dispatch", 50.0, True, ratio=0.9), row("dispatch", 60.0, True, ratio=0.8), row("dispatch", 70.0, False),
        row("combine", 50.0, True, ratio=0.7), row("combine", 10.0, False),
        row(both, 100.0, True), row(both, 200.0, False), row(both, 90.0, False, how="eager"),
        row(both, 50.0, True, tokens=128), row(both, 40.0, False, tokens=128), row(both, 60.0, False, tokens=128),
    ]  # fmt: skip
    assert verdicts(rows) == [
        "NOT met: 128 tokens, bf16, dispatch + combine: 50.0 µs, the best of the others 40.0 µs",
        "met: 4096 tokens, bf16, dispatch (W): 0.900 of the peer copy rate, want 0.85",
        "NOT met: 4096 tokens, bf16, combine (W): 0.700 of the peer copy rate, want 0.85",
        "met: 4096 tokens, bf16, dispatch + combine: 100.0 µs, the best of the others 200.0 µs",
        "2.83 times as fast as all-gather + reduce-scatter, geometric mean of 2",
    ]
    assert verdicts([]) == []


@pytest.mark.cpu
def test_link_bytes_are_those_of_the_busiest_pe():
    """Two PEs of 2 experts, k = 1; PE 0 sends 3 of its 3 tokens away, PE 1 one of its 3."""
    problem = Problem(2, 3, hidden=8, top_k=1, experts=4)
    ids = [torch.tensor([[2], [3], [2]]), torch.tensor([[0], [2], [3]])]
    everyone = [Inputs(torch.zeros(3, 8), torch.zeros(3, 1), None, i.to(torch.int32)) for i in ids]
    assert link_bytes(problem, everyone) == {"dispatch": 3 * 16, "combine": 3 * 16, "dispatch + combine": 6 * 16}


@pytest.mark.cpu
def test_sums_of_other_libraries_may_round_and_not_be_wrong():
    problem = Problem(4, 5, hidden=16, top_k=3, experts=8)
    mine = inputs(problem, 1, torch.device("cpu"))
    to = destinations(problem, mine.indices)
    exact = sum(to[:, pe, None] * expert(pe, mine.tokens).double() for pe in range(4))
    check_sums(problem, mine, exact.to(torch.bfloat16), "right")
    off = exact.to(torch.bfloat16)
    off[2] = 0
    with pytest.raises(AssertionError, match="zero row: sums are wrong"):
        check_sums(problem, mine, off, "zero row")
    missing = exact - to[:, 3, None] * expert(3, mine.tokens).double()
    with pytest.raises(AssertionError, match="a PE left out"):
        check_sums(problem, mine, missing.to(torch.bfloat16), "a PE left out")
