"""One process per PE on the emulated device: unique id, process groups, subgroups, kernels, a PE that is killed."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mori_triton.host.bootstrap.tcp import new_unique_id

pytestmark = [pytest.mark.cpu, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NUM_PES = 4


def segments():
    return sorted(os.listdir("/dev/shm"))


def test_i1_i9_i13_worlds_of_processes():
    """Worlds again and again, subgroups without global rank 0, a PE that does not come, a PE that is killed.

    One start of four processes for all of it, since starting one takes seconds.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    before = segments()
    settings = {
        "MORI_SHMEM_HEAP_SIZE": "1M",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    unique_id = new_unique_id().hex()
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.shmem.pe_program", unique_id],
            cwd=ROOT,
            env=os.environ | settings | {"RANK": str(rank), "WORLD_SIZE": str(NUM_PES)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(NUM_PES)
    ]
    start = time.monotonic()
    try:
        outputs = [process.communicate(timeout=150 - (time.monotonic() - start)) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [stdout.split("\n") for stdout, _ in outputs]
    errors = "\n".join(f"PE {pe}: {lines[pe]}\n{stderr}" for pe, (_, stderr) in enumerate(outputs))
    parts = ["unique id", "default group", "subgroups", "missing PE", "kernel errors"]
    for pe in range(NUM_PES):
        assert lines[pe][: len(parts)] == parts, errors
        if pe == 2:
            assert processes[pe].returncode == -9, errors
            continue
        # told at once that PE 2 has died, and an exit without a trace of it
        assert lines[pe][5].startswith("peer: PE "), errors
        assert "PE 2 has died" in lines[pe][5], errors
        assert lines[pe][6:8] == ["finalize: PeerTimeout", "done"], errors
        assert processes[pe].returncode == 0, errors
        assert "Traceback" not in outputs[pe][1], errors
    # torch's own files may come and go; ours have no names at all
    assert not [name for name in set(segments()) - set(before) if "mori" in name]
