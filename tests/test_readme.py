"""The code in README.md runs and prints what it says."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.cpu

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [code for kind, code in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.S | re.M) if kind == language]


def run(script: Path, code: str, environ: dict[str, str] | None = None) -> subprocess.Popen:
    script.write_text(code)
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=os.environ | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def changed(code: str, diff: str) -> str:
    """`code` with the hunks of `diff`, which an empty line ends."""
    for hunk in diff.rstrip("\n").split("\n\n"):
        lines = hunk.split("\n")
        old = "\n".join(line[1:] for line in lines if line[0] in " -")
        assert code.count(old) == 1, old
        code = code.replace(old, "\n".join(line[1:] for line in lines if line[0] in " +"))
    return code


def without_last_line(code: str) -> str:
    return code.rstrip().rsplit("\n", 1)[0] + "\n"


def check_promise(script: Path, code: str) -> None:
    """A script prints what the comment on its last line says."""
    promised = re.search(r"print\(.*\)  # (.*)", code.rstrip().rsplit("\n", 1)[1])
    assert promised
    process = run(script, code)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.strip() == promised[1]


def test_first_example(tmp_path: Path) -> None:
    check_promise(tmp_path / "ring.py", blocks("python")[0])


def test_rounds_on_gpus_or_without_one(tmp_path: Path) -> None:
    check_promise(tmp_path / "rounds.py", without_last_line(blocks("python")[0]) + blocks("python")[1])


def test_kernels_written_for_mori(tmp_path: Path) -> None:
    check_promise(tmp_path / "shift.py", blocks("python")[3])


@pytest.mark.gpu1
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: torch.cuda.is_available() is False")
def test_first_example_on_a_gpu(tmp_path: Path) -> None:
    device = "hip" if torch.version.hip else "cuda"
    check_promise(tmp_path / "ring.py", blocks("python")[0].replace('device="cpu"', f'device="{device}"'))


def test_the_bug_is_caught_as_shown(tmp_path: Path) -> None:
    (promised,) = [block for block in blocks("") if "WeakMemoryError" in block]
    process = run(tmp_path / "ring.py", changed(blocks("python")[0], blocks("diff")[0]))
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 1, stdout
    # where memory lies and how the kernel is compiled differs between runs and Triton releases
    parts = [re.split(r"0x[0-9a-f]+|line \d+ `.*?`", line) for line in promised.strip().split("\n")]
    for line in parts if hasattr(BaseException, "add_note") else parts[:-1]:
        assert re.search("^" + ".*".join(map(re.escape, line)) + "$", stderr, re.M), stderr


def test_one_process_per_pe(tmp_path: Path) -> None:
    code = without_last_line(blocks("python")[0]) + blocks("python")[2]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    # what torchrun sets
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [run(tmp_path / f"ring{rank}.py", code, shared | {"RANK": str(rank)}) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [stdout for stdout, _ in outputs] == ["1.0\n", "0.0\n"], outputs
