"""`CudaDriver` between two GPUs that reach each other: threads of one process, and processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CudaDriver
from mori_triton.host.heap import SymmetricHeap
from tests.host.worlds import run_threads

NUM_GPUS = torch.cuda.device_count() if torch.version.cuda else 0
pytestmark = [
    pytest.mark.gpu1,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two NVIDIA GPUs, there are {NUM_GPUS}"),
]

ROOT = Path(__file__).parents[2]
MB = 1 << 20
MODES = pytest.mark.parametrize("heap_mode", ["static_heap", "vmm"])


@MODES
def test_memory_of_the_other_gpu(heap_mode):
    owner, peer = CudaDriver(0, heap_mode=heap_mode), CudaDriver(1, heap_mode=heap_mode)
    here = torch.cuda.current_device()
    base = owner.alloc(4 * MB, exportable=True)
    assert peer.import_handle(owner.export_handle(base + 256)) == base + 256
    # memory of GPU 0, as a tensor of GPU 1: operations on it run there
    there = peer.tensor(base + 256, (1000,), torch.int32)
    assert there.device == torch.device("cuda", 1)
    own = torch.arange(1000, dtype=torch.int32, device="cuda:1")
    there.copy_(own)
    there.add_(own)
    peer.synchronize()
    mine = owner.tensor(base + 256, (1000,), torch.int32)
    assert mine.device == torch.device("cuda", 0)
    assert mine.equal(2 * torch.arange(1000, dtype=torch.int32, device="cuda:0"))
    peer.copy(base, base + 256 + 4, 8)
    assert owner.read(base, 8) == peer.read(base + 260, 8) == (2).to_bytes(4, "little") + (4).to_bytes(4, "little")
    assert torch.cuda.current_device() == here
    peer.close_import(base + 256)
    peer.close()
    owner.close()


@MODES
def test_heaps_of_threads_on_two_gpus(heap_mode):
    group = ThreadGroup(2, timeout_s=30)

    def program(pe):
        driver = CudaDriver(pe, heap_mode=heap_mode)
        heap = SymmetricHeap(driver, group.bootstrap(pe), 4 * MB)
        rows = heap.tensor((2, 500), torch.float32, "rows")
        rows.fill_(pe)
        driver.synchronize()
        heap.bootstrap.barrier()
        theirs = heap.peer_tensor(rows[1], 1 - pe)
        assert (theirs.device.index, rows.device.index) == (pe, pe)
        assert theirs.eq(1 - pe).all()
        theirs.fill_(10 + pe)
        driver.synchronize()
        heap.bootstrap.barrier()
        seen = rows[:, 3].tolist()
        heap.disconnect()
        heap.bootstrap.barrier()
        heap.close()
        driver.close()
        return seen

    assert run_threads(2, program, timeout_s=60) == [[0.0, 11.0], [1.0, 10.0]]


@MODES
def test_a_process_on_the_other_gpu(heap_mode):
    program = """
import sys
from mori_triton.host.drivers import CudaDriver
driver = CudaDriver(1, heap_mode=sys.argv[1])
place = driver.import_handle(bytes.fromhex(sys.argv[2]))
own = driver.alloc(64)
driver.copy(own, place, 16)
print(driver.read(own, 16).decode())
driver.memset(place, 66, 16)
driver.close_import(place)
driver.close()
"""
    owner = CudaDriver(0, heap_mode=heap_mode)
    base = owner.alloc(MB, exportable=True)
    owner.write(base + 512, b"from the owner..")
    handle = owner.export_handle(base + 512).hex()
    command = [sys.executable, "-c", program, heap_mode, handle]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "from the owner..\n", done.stderr
    assert owner.read(base + 512, 17) == b"B" * 16 + b"\0"
    owner.close()
