"""`CudaDriver` in threads and in other processes, and worlds of processes on it, on one NVIDIA GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import torch

from mori_triton.host.bootstrap.tcp import new_unique_id
from mori_triton.host.drivers import CudaDriver, open_driver
from tests.host.cuda_gpu import MB, MODES, NEEDS_NVIDIA, check_held, held_before  # noqa: F401

pytestmark = NEEDS_NVIDIA

ROOT = Path(__file__).parents[2]

CYCLES = """
import gc, sys, torch
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CudaDriver, MemoryKind
from mori_triton.host.heap import SymmetricHeap

def cycle(mode):
    driver = CudaDriver(heap_mode=mode)
    heap = SymmetricHeap(driver, ThreadGroup(1).bootstrap(0), 64 << 20)
    tensor = heap.tensor((1000, 1000), torch.bfloat16)
    tensor.fill_(1)
    assert heap.ctx.device.type == "cuda"
    loose = driver.alloc(5 << 20)
    event, stream = driver.create_event(), driver.create_stream()
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    peer = CudaDriver(heap_mode=mode)
    assert peer.import_handle(driver.export_handle(heap.base)) == heap.base
    peer.close()
    heap.close()
    driver.close()

free = []
for _ in range(6):
    for mode in ("static_heap", "vmm"):
        cycle(mode)
    torch.cuda.synchronize()
    free.append(torch.cuda.mem_get_info()[0])
assert len(set(free[1:])) == 1, free
"""


def test_nothing_is_lost_from_cycle_to_cycle():
    """In a process of its own, where nothing else allocates."""
    done = subprocess.run([sys.executable, "-c", CYCLES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_driver_may_come_before_torch_is_initialised():
    program = """
from mori_triton.host.drivers import CudaDriver
import sys
driver = CudaDriver()
address = driver.alloc(64)
driver.write(address, bytes([3]) * 64)
assert "torch" not in sys.modules
import torch
assert not torch.cuda.is_initialized()
assert driver.read(address, 1) == bytes([3])
tensor = driver.tensor(address, (16,), torch.int32)
assert (tensor + torch.ones(16, dtype=torch.int32, device="cuda")).eq(0x03030304).all()
driver.close()
# still held at the end of the process
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Error" not in done.stderr


def test_threads_without_a_current_device():
    driver, failures = CudaDriver(), []
    here = torch.cuda.current_device()

    def work():
        try:
            address = driver.alloc(1000, exportable=True)
            driver.memset(address, 3, 1000)
            assert driver.read(address, 2) == b"\3\3"
            driver.free(address)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert torch.cuda.current_device() == here
    driver.close()


@MODES
def test_import_within_the_process(heap_mode):
    owner, peer = CudaDriver(heap_mode=heap_mode), CudaDriver(heap_mode=heap_mode)
    base = owner.alloc(MB, exportable=True)
    assert peer.import_handle(owner.export_handle(base)) == base
    tensor = peer.tensor(base, (4,), torch.int32)
    owner.free(base)
    owner.close()
    tensor.fill_(9)
    assert peer.read(base, 4) == b"\t\0\0\0"
    peer.close()


def test_auto_is_this_gpu():
    driver = open_driver("auto")
    assert (driver.name, driver.device_index) == ("cuda", torch.cuda.current_device())
    driver.close()


# imports what its arguments say, says what is at each place, writes there, and waits to be told to end
PEER = """
import json, sys
from mori_triton.host.drivers import CudaDriver
driver = CudaDriver(heap_mode=sys.argv[1])
for line in sys.stdin:
    handles = json.loads(line)
    if not handles:
        break
    places = [driver.import_handle(bytes.fromhex(handle)) for handle in handles]
    seen = [driver.read(place, 1)[0] for place in places]
    for number, place in enumerate(places):
        driver.memset(place + 1, 100 + number, 1)
    print(json.dumps([seen, [place - places[0] for place in places]]), flush=True)
    for place in places:
        driver.close_import(place)
driver.close()
print("closed", flush=True)
"""


@MODES
def test_k8_another_process_sees_each_slice(heap_mode):
    owner = CudaDriver(heap_mode=heap_mode)
    process = subprocess.Popen(
        [sys.executable, "-c", PEER, heap_mode], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        for _ in range(3):
            base = owner.alloc(4 * MB, exportable=True)
            for number in range(4):
                owner.memset(base + number * MB, 1 + number, 1)
            handles = [owner.export_handle(base + number * MB).hex() for number in range(4)]
            process.stdin.write(json.dumps(handles) + "\n")
            process.stdin.flush()
            seen, offsets = json.loads(process.stdout.readline())
            owner.end_export(base)
            assert seen == [1, 2, 3, 4]
            if heap_mode == "static_heap":
                assert offsets == [0, MB, 2 * MB, 3 * MB]
            assert [owner.read(base + number * MB, 3) for number in range(4)] == [
                bytes([1 + number, 100 + number, 0]) for number in range(4)
            ]
            owner.free(base)
        process.stdin.write("[]\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    owner.close()


def run_programs(*arguments, seconds=200):
    """`gpu_pe_program` once for each list of arguments, at the same time: (code, lines, errors) of each."""
    settings = {"MORI_SHMEM_HEAP_SIZE": "16M", "MORI_BOOTSTRAP_TIMEOUT": "120"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.host.gpu_pe_program", *map(str, words)],
            cwd=ROOT,
            env=os.environ | settings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for words in arguments
    ]
    try:
        outputs = [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(p.returncode, out.splitlines(), err) for p, (out, err) in zip(processes, outputs, strict=True)]


def test_worlds_of_processes():
    """Two processes: MORI_TRITON_DEVICE=auto, both ways of mapping a peer's heap, kernels that wait for each other.

    Meanwhile one that ends without finalize, and one whose kernel writes where it must not.
    """
    ids = [new_unique_id().hex() for _ in range(4)]
    *world, forgetful, faulty = run_programs(
        ("world", 0, *ids[:2]), ("world", 1, *ids[:2]), ("forget", ids[2]), ("fault", ids[3])
    )
    for code, lines, errors in world:
        assert lines == ["static_heap", "vmm", "end"], errors
        assert code == 0
    code, lines, errors = forgetful
    assert (code, lines) == (0, ["end"]), errors
    assert "Error" not in errors
    _, lines, errors = faulty
    assert lines == ["CUDA_ERROR_ILLEGAL_ADDRESS", "CUDA_ERROR_ILLEGAL_ADDRESS", "end"], errors


def test_no_memory_is_held_after_these_tests(held_before):  # noqa: F811
    check_held(held_before)
