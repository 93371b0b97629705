"""The examples for authors of kernels: what they print and return on every kind of world, and in processes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mori_triton as mori
from tests.host.proxy.ucx import needs_ucx

EXAMPLES = Path(__file__).parent.parent / "examples"
RING, ALLREDUCE, GEMM = "02_ring_put", "03_allreduce", "04_allgather_gemm"
RUNS = [(RING, []), (ALLREDUCE, ["--way", "read"]), (ALLREDUCE, ["--way", "put"]), (GEMM, [])]
IDS = ["ring", "read", "put", "gemm"]
GOOD = {RING: "all rows are there", ALLREDUCE: "the sum is exact", GEMM: "the product is exact"}
# those that a network can carry
SENT = [(RING, ["--row-bytes", "4096"]), (ALLREDUCE, ["--way", "put"]), (GEMM, [])]
SENT_IDS = ["ring", "put", "gemm"]
NETWORKS = ("mlx5", "bnxt_re", "ionic", pytest.param("proxy", marks=needs_ucx))


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(module: ModuleType, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    return module.main()


@pytest.mark.cpu
@pytest.mark.parametrize("name", list(GOOD))
def test_examples_are_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 120


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "options"), RUNS, ids=IDS)
@pytest.mark.parametrize(("n", "arch"), [(1, "gfx1201"), (4, "gfx1201"), (3, "gfx942")])
def test_on_the_emulated_device(name, options, n, arch, monkeypatch, capsys) -> None:
    where = ["--device", "cpu", "--pes", str(n), "--arch", arch]
    assert run_main(load(name), options + where, monkeypatch) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1].strip() for line in lines] == [GOOD[name]] * n
    assert lines[-1].startswith(f"PE {n - 1} of {n}")


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "options"), SENT, ids=SENT_IDS)
@pytest.mark.parametrize("transport", NETWORKS)
def test_over_each_network(name, options, transport, monkeypatch, capsys) -> None:
    n, arch = (3, "gfx942") if transport in ("bnxt_re", "proxy") else (2, "gfx1201")
    where = ["--device", "cpu", "--pes", str(n), "--arch", arch, "--transport", transport]
    assert run_main(load(name), options + where, monkeypatch) == 0
    assert capsys.readouterr().out.count(GOOD[name]) == n


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")


@pytest.mark.gpu1
@needs_gpu
@pytest.mark.parametrize(("name", "options"), RUNS, ids=IDS)
@pytest.mark.parametrize("n", [1, 4])
def test_on_a_gpu(name, options, n, monkeypatch, capsys) -> None:
    assert run_main(load(name), [*options, "--pes", str(n)], monkeypatch) == 0
    assert capsys.readouterr().out.count(GOOD[name]) == n


@pytest.mark.gpu1
@needs_gpu
@pytest.mark.parametrize(("name", "options"), SENT, ids=SENT_IDS)
@pytest.mark.parametrize("transport", NETWORKS)
def test_on_a_gpu_over_each_network(name, options, transport, monkeypatch, capsys) -> None:
    assert run_main(load(name), [*options, "--pes", "3", "--transport", transport], monkeypatch) == 0
    assert capsys.readouterr().out.count(GOOD[name]) == 3


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "options"), RUNS, ids=IDS)
def test_nothing_is_seen_too_early(name: str, options: list[str]) -> None:
    module = load(name)
    program, arguments = {
        RING: lambda: (module.all_gather, (256,)),
        ALLREDUCE: lambda: (module.all_reduce, (options[1], 200)),
        GEMM: lambda: (module.all_gather_gemm, (32, 32, 32)),
    }[name]()
    # over a network its card is one more device that must see what was released, and releases what it writes
    ways = ["p2p", "mlx5"] if (name, options) != RUNS[1] else ["p2p"]
    for seed, way in itertools.product(range(4), ways):
        late = None if way == "p2p" else {"late": seed % 2 == 1}
        world = mori.local_world(
            2 if late else 3, device="cpu", heap_size="1M", seed=seed, weak_memory=True, transport=way, network=late
        )
        assert world.run(program, *arguments, world.preload) == [True] * world.n, (seed, way)


@pytest.mark.cpu
@pytest.mark.parametrize(("name", "options"), RUNS, ids=IDS)
def test_a_wrong_result_is_an_exit_status(name, options, monkeypatch, capsys) -> None:
    module = load(name)
    # the kernel does nothing
    monkeypatch.setattr(module, "launch", lambda *args, **kwargs: None)
    assert run_main(module, [*options, "--device", "cpu", "--pes", "2"], monkeypatch) == 1
    assert capsys.readouterr().out.count("WRONG") == 2


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (RING, ["--row-bytes", "6"], "--row-bytes: want a multiple of 4, got 6"),
        (ALLREDUCE, ["--count", "0"], "--count: want 1 or more, got 0"),
        (ALLREDUCE, ["--device", "tpu"], "device: want"),
        (RING, ["--arch", "gfx90a"], "arch: want gfx942"),
        (ALLREDUCE, ["--way", "read", "--transport", "ionic"], "--way read: want mapped memory, got --transport ionic"),
        (GEMM, ["--shape", "64", "48", "64"], "--shape: want multiples of 32, got 64 48 64"),
        (GEMM, ["--transport", "efa"], "argument --transport: invalid choice"),
    ],
)
def test_options_that_cannot_be(name, options, message, monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        run_main(load(name), options, monkeypatch)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), [RUNS[0], *RUNS[2:]], ids=["ring", "put", "gemm"])
def test_one_process_per_pe(name: str, options: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # what torchrun sets
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(EXAMPLES / f"{name}.py"), *options],
            env=os.environ | shared | {"RANK": str(rank), "MORI_SHMEM_HEAP_SIZE": "4M"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [stdout for stdout, _ in outputs] == [f"PE {rank} of 2: {GOOD[name]}\n" for rank in range(2)], outputs
