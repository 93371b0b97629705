"""Processes of a unique-id world that are killed: the others are told, and nothing is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from mori_triton.errors import PeerTimeout
from mori_triton.host.bootstrap.tcp import TcpBootstrap, new_unique_id

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


PROGRAM = """
    import sys, time
    from mori_triton.host.bootstrap.tcp import TcpBootstrap
    boot = TcpBootstrap(bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), timeout_s=20)
    assert boot.allgather(bytes([boot.pe])) == [bytes([pe]) for pe in range(boot.n_pes)]
    print("up", flush=True)
    time.sleep(float(sys.argv[4]))
    try:
        boot.barrier("while one dies")
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    assert "torch" not in sys.modules
"""


def start(unique_id, pe, n_pes, sleep_s=0):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), unique_id.hex(), str(pe), str(n_pes), str(sleep_s)],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_killing_one_process_ends_the_others_at_once():
    unique_id = new_unique_id()
    processes = {pe: start(unique_id, pe, 4, 60 if pe == 2 else 0) for pe in (1, 2, 3)}
    try:
        boot = TcpBootstrap(unique_id, 0, 4, timeout_s=20)
        boot.allgather(b"\0")
        assert [process.stdout.readline() for process in processes.values()] == ["up\n"] * 3
        threading.Timer(0.2, processes[2].send_signal, [signal.SIGKILL]).start()
        start_s = time.monotonic()
        with pytest.raises(PeerTimeout, match="PE 2 has died"):
            boot.barrier("while one dies")
        for pe in (1, 3):
            assert "PeerTimeout: PE" in (line := processes[pe].stdout.readline())
            assert "PE 2 has died (its connection was lost)" in line
            assert processes[pe].wait(10) == 0
        assert time.monotonic() - start_s < 5
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def test_killing_the_serving_process_ends_the_others_at_once():
    server = subprocess.Popen(
        [sys.executable, "-c", "from mori_triton.host.bootstrap.tcp import *; import time\n"
         "print(new_unique_id().hex(), flush=True); time.sleep(60)"],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    processes = []
    try:
        unique_id = bytes.fromhex(server.stdout.readline())
        processes = [start(unique_id, 1, 2)]
        boot = TcpBootstrap(unique_id, 0, 2, timeout_s=20)
        boot.allgather(b"\0")
        assert processes[0].stdout.readline() == "up\n"
        server.kill()
        start_s = time.monotonic()
        with pytest.raises(PeerTimeout, match="lost the connection to the process that made the unique id"):
            boot.barrier()
        with pytest.raises(PeerTimeout, match="lost the connection"):
            boot.barrier()
        assert "lost the connection" in processes[0].stdout.readline()
        assert time.monotonic() - start_s < 5
        boot.close()
    finally:
        for process in [server, *processes]:
            process.kill()
            process.wait()


HEAP_PROGRAM = """
    import dataclasses, os, signal, sys
    from mori_triton import env
    from mori_triton.host import state
    from mori_triton.host.bootstrap.tcp import TcpBootstrap
    from mori_triton.host.drivers import CpuDriver

    class Dies(CpuDriver):
        def import_handle(self, handle):
            os.kill(os.getpid(), signal.SIGKILL)

    pe = int(sys.argv[2])
    boot = TcpBootstrap(bytes.fromhex(sys.argv[1]), pe, 3, timeout_s=20)
    settings = dataclasses.replace(env.snapshot({}), heap_bytes=1 << 20)
    try:
        state.open_state(boot, Dies(shared=True) if pe == 1 else CpuDriver(shared=True), settings)
    except Exception as error:
        print(f"{type(error).__name__}: {error}", flush=True)
"""


def test_killed_while_heaps_are_being_mapped():
    """Before all PEs have mapped all heaps: the others get an error, and nothing is left behind."""
    unique_id, before = new_unique_id(), sorted(os.listdir("/dev/shm"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(HEAP_PROGRAM), unique_id.hex(), str(pe)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for pe in range(3)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=30)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, -signal.SIGKILL, 0]
    for pe in (0, 2):
        # PE 1 has died before or after this PE mapped its heap
        assert outputs[pe].startswith("PeerTimeout: PE"), outputs
        assert "PE 1 has died" in outputs[pe], outputs
    assert [name for name in os.listdir("/dev/shm") if name not in before and "mori" in name] == []
