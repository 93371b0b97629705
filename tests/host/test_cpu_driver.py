"""The CPU driver: memory, handles between processes, tensors."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.drivers import CpuDriver, MemoryKind, identity

pytestmark = pytest.mark.cpu

ROOT = Path(__file__).parents[2]


def test_alloc_is_aligned_and_zero():
    driver = CpuDriver()
    for alignment in (1, 256, 4096, 1 << 21, 1 << 30):
        address = driver.alloc(5000, alignment=alignment, kind=MemoryKind.UNCACHED)
        assert address % max(alignment, 4096) == 0
        assert driver.read(address, 5000) == bytes(5000)
        driver.memset(address, 0xAB, 5000)
        driver.write(address + 4990, b"0123456789")
        driver.copy(address, address + 4990, 10)
        assert driver.read(address, 11) == b"0123456789\xab"
        driver.free(address)
    for bad in (
        {"num_bytes": 0},
        {"num_bytes": -1},
        {"num_bytes": 8, "alignment": 3},
        {"num_bytes": 8, "alignment": 0},
    ):
        with pytest.raises(ArgumentError):
            driver.alloc(**bad)
    with pytest.raises(DriverError, match="not an allocation"):
        driver.free(address)
    with pytest.raises(DriverError, match="not an allocation"):
        driver.export_handle(address)


def test_refused_by_the_system():
    for driver in (CpuDriver(), CpuDriver(shared=True)):
        with pytest.raises(DriverError, match=r"[Cc]annot allocate memory|File too large|Invalid argument"):
            driver.alloc(1 << 60, exportable=True)
        assert driver._owned == {}


def test_tensor_keeps_its_pages():
    driver = CpuDriver()
    address = driver.alloc(4096)
    tensor = driver.tensor(address + 16, (3, 2), torch.bfloat16)
    driver.write(address + 16, b"\x80\x3f" * 6)
    assert tensor.eq(1).all()
    assert tensor.data_ptr() == address + 16
    driver.free(address)
    driver.close()
    tensor.add_(1)
    assert tensor[1:].sum() == 8
    with pytest.raises(DriverError, match="not inside one allocation"):
        driver.tensor(address, (4,), torch.int32)
    address = driver.alloc(64)
    with pytest.raises(DriverError, match="not inside one allocation"):
        driver.tensor(address, (17,), torch.int32)


def test_import_within_the_process():
    for shared in (False, True):
        owner, user = CpuDriver(shared=shared), CpuDriver(shared=shared)
        address = owner.alloc(64, exportable=True)
        handle = owner.export_handle(address)
        assert user.import_handle(handle) == user.import_handle(handle) == address
        user.close_import(address)
        assert user.tensor(address, (4,), torch.int32).sum() == 0
        user.close_import(address)
        with pytest.raises(DriverError, match="not imported"):
            user.close_import(address)
        owner.free(address)
        with pytest.raises(DriverError, match="has freed it"):
            user.import_handle(handle)


def test_module_global():
    class Module:
        def symbol_address(self, name):
            return {"here": (4096, 8)}[name]

    driver = CpuDriver()
    assert driver.module_global(Module(), "here") == (4096, 8)
    with pytest.raises(DriverError, match="no global variable 'gone'"):
        driver.module_global(Module(), "gone")
    with pytest.raises(ArgumentError, match="int"):
        driver.module_global(7, "here")


OWNER = """
import sys, time
from mori_triton.host.drivers import CpuDriver
driver = CpuDriver(shared=sys.argv[1] == "shared")
address = driver.alloc(1 << 16, alignment=1 << 16, exportable=True)
driver.write(address, b"from the owner")
print(driver.export_handle(address).hex(), flush=True)
sys.stdin.readline()
print(driver.read(address, 4).decode(), flush=True)
driver.end_export(address)
sys.stdin.readline()
"""


def start_owner(kind):
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, kind], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    return process, bytes.fromhex(process.stdout.readline())


def shared_segments():
    return sorted(name for name in os.listdir("/dev/shm") if "mori" in name)


def test_another_process():
    before = shared_segments()
    process, handle = start_owner("shared")
    driver = CpuDriver(shared=True)
    try:
        address = driver.import_handle(handle)
        assert address % (1 << 16) == 0
        assert driver.read(address, 14) == b"from the owner"
        driver.write(address, b"mine")
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "mine\n"
        # the owner has ended the export after its answer
        limit = time.monotonic() + 5
        while os.path.exists(f"/proc/{process.pid}/fd/{json.loads(handle)['fd']}") and time.monotonic() < limit:
            time.sleep(0.01)
        with pytest.raises(DriverError, match=f"process {process.pid}: "):
            driver.import_handle(handle)
        # killed, it takes nothing from us and leaves nothing behind
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        assert driver.read(address, 4) == b"mine"
        with pytest.raises(DriverError, match="it has ended"):
            driver.import_handle(handle)
        assert shared_segments() == before
        driver.close_import(address)
    finally:
        process.kill()
        process.wait()


def test_i15_threads_that_start_together_are_one_process(monkeypatch):
    """The first heaps of a process, made by its PEs at once: each has to see that the others are its own threads."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(50):
            monkeypatch.setattr(identity, "_identities", {})
            start = threading.Barrier(8)

            def ask(_, start=start):
                start.wait()
                return identity.process_identity()

            with ThreadPoolExecutor(8) as pool:
                assert len(set(pool.map(ask, range(8)))) == 1
    finally:
        sys.setswitchinterval(interval)


def test_handles_that_cannot_be_opened():
    process, handle = start_owner("private")
    driver = CpuDriver(shared=True)
    try:
        with pytest.raises(DriverError, match="did not ask for shared memory"):
            driver.import_handle(handle)
    finally:
        process.kill()
        process.wait()
    own = CpuDriver(shared=True)
    address = own.alloc(64, exportable=True)
    fields = json.loads(own.export_handle(address)) | {"process": "another"}
    with pytest.raises(DriverError, match="out of date"):
        driver.import_handle(json.dumps(fields | {"inode": 1}).encode())
    with pytest.raises(DriverError, match="another container"):
        driver.import_handle(json.dumps(fields | {"namespace": "pid:[1]"}).encode())
    # the same fields, unchanged, do open
    assert driver.import_handle(json.dumps(fields).encode()) != address
