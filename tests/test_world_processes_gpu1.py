"""Worlds on one GPU in processes of their own: more streams than queues, a GPU that fails, one process for each PE."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mori_triton.host.bootstrap.tcp import new_unique_id
from tests.gpu_world_programs import DEVICE, NEEDS_GPU

pytestmark = NEEDS_GPU

ROOT = Path(__file__).parent.parent

MANY = """
from mori_triton.errors import PeerTimeout
from tests import gpu_world_programs as t
late = []
for name, n, program, wanted in (
    ("two streams of a PE", 3, lambda pe: t.two_streams(pe), [1, 2, 3, 4, 5]),
    ("two streams of each of 8 PEs", 8, lambda pe: t.two_streams(pe), [1, 2, 3, 4, 5]),
    ("16 PEs", 16, lambda pe: t.ring(pe, 3), True),
    ("16 PEs, a graph", 16, lambda pe: t.graph_only(pe, 16), True),
):
    try:
        assert t.world(n, timeout_s=2.0).run(program) == [wanted] * n, name
    except PeerTimeout:
        late.append(name)
assert not late, late
"""

STRAY = """
import time
import torch
import triton
import triton.language as tl
from mori_triton import current_world, shmem
from mori_triton.device.launch import launch, load
from tests.gpu_world_programs import world
from tests.world_programs import wait_kernel, words

@triton.jit(do_not_specialize=["address"])
def stray_kernel(address):
    tl.store(address.to(tl.int64).to(tl.pointer_type(tl.int64)), 1)

def program(pe):
    signal_word, out = words(), words()
    current_world().preload(lambda: load(wait_kernel, shmem.context(), signal_word, out, 1))
    if pe == 1:
        launch(stray_kernel, (1,), 8)
    else:
        launch(wait_kernel, (1,), shmem.context(), signal_word, out, 1)
    shmem.shmem_barrier_all()

start = time.monotonic()
try:
    world(3, timeout_s=3.0).run(program)
except RuntimeError as error:
    text = str(error) + str(getattr(error, "__notes__", error.__cause__))
    assert "ILLEGAL_ADDRESS" in text or "illegal memory access" in text, text
    assert "raised by PE" in text, text
else:
    raise AssertionError("no error")
assert time.monotonic() - start < 30
"""

ONE_PE = """
import sys
import torch
from mori_triton import shmem
from mori_triton.device.launch import launch
from mori_triton.host import state
from tests.gpu_world_programs import DEVICE, ring
from tests.world_programs import put_right_kernel, words
rank = int(sys.argv[1])
shmem.shmem_init_attr(shmem.MORI_SHMEM_INIT_WITH_UNIQUEID, rank, 2, bytes.fromhex(sys.argv[2]))
assert state.current().driver.name == DEVICE
for _ in range(2):
    assert ring(rank, 3)
x = words()
launch(put_right_kernel, (1,), shmem.context(), x, 70 + rank)
shmem.shmem_barrier_on_stream()
assert int(x) == 71 - rank
shmem.shmem_finalize()
"""


def python(*arguments, **settings):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=ROOT,
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(*processes):
    try:
        texts = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n\n".join(texts)


# CUDA asks for 8 hardware queues unless it is told otherwise; kernels that wait must not need more
def test_more_streams_than_hardware_queues():
    outputs(python("-c", MANY, CUDA_DEVICE_MAX_CONNECTIONS="8"))


def test_a_gpu_that_fails(tmp_path):
    """CUDA refuses everything after an illegal access: the world ends all the same, and so does the process."""
    script = tmp_path / "stray.py"
    script.write_text(STRAY)
    outputs(python(str(script), PYTHONPATH=str(ROOT)))


@pytest.mark.parametrize("mode", ["static_heap", "vmm"])
def test_one_process_per_pe(mode):
    unique_id = new_unique_id().hex()
    settings = {"MORI_TRITON_DEVICE": DEVICE, "MORI_SHMEM_HEAP_SIZE": "4M", "MORI_SHMEM_MODE": mode}
    outputs(*(python("-c", ONE_PE, str(rank), unique_id, **settings) for rank in range(2)))
