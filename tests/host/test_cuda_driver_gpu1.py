"""`CudaDriver` on one NVIDIA GPU: memory, tensors, streams and graphs, and heaps while kernels run."""

from __future__ import annotations

import time

import pytest
import torch
import triton
import triton.language as tl

from mori_triton import abi
from mori_triton.device import externs as mori
from mori_triton.device import shmem
from mori_triton.device.prepared import prepare
from mori_triton.errors import DriverError, PeerTimeout
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import CudaDriver, MemoryKind
from mori_triton.host.heap import SymmetricHeap
from tests.host.cuda_gpu import MB, MODES, NEEDS_NVIDIA, check_held, held_before  # noqa: F401

pytestmark = NEEDS_NVIDIA
# about a second on a GPU of 2 GHz
SLEEP_CYCLES = 2_000_000_000


@pytest.fixture
def driver():
    made = CudaDriver()
    yield made
    made.close()


def test_pci_address(driver) -> None:
    found = torch.cuda.get_device_properties(driver.device_index)
    wanted = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    assert driver.pci_address == wanted


# memory


@pytest.mark.parametrize("kind", list(MemoryKind))
@pytest.mark.parametrize("num_bytes", [1, 1000, 3 * MB])
def test_memory_is_zeroed_each_time(driver, kind, num_bytes):
    for _ in range(3):
        address = driver.alloc(num_bytes, kind=kind)
        assert address % 256 == 0
        assert driver.read(address, num_bytes) == bytes(num_bytes)
        driver.memset(address, 0xAB, num_bytes)
        driver.free(address)


@MODES
def test_exportable_memory_is_aligned(heap_mode):
    driver = CudaDriver(heap_mode=heap_mode)
    for num_bytes in (1, 3 * MB, 64 * MB):
        address = driver.alloc(num_bytes, exportable=True)
        assert address % (2 * MB) == 0
        assert driver.read(address, num_bytes) == bytes(num_bytes)
        driver.free(address)
    driver.close()


def test_write_read_copy_memset(driver):
    for kind in MemoryKind:
        one, two = driver.alloc(4096, kind=kind), driver.alloc(4096, kind=kind)
        data = bytes(i % 251 for i in range(4096))
        driver.write(one, data)
        driver.copy(two + 1, one + 2, 4000)
        driver.memset(two + 100, 0x7F, 3)
        assert driver.read(one, 4096) == data
        expected = bytearray(b"\0" + data[2:4002] + bytes(95))
        expected[100:103] = b"\x7f" * 3
        assert driver.read(two, 4096) == bytes(expected)


def test_copies_come_after_the_threads_stream_and_before_what_follows(driver):
    address = driver.alloc(4 * MB)
    tensor = driver.tensor(address, (MB,), torch.int32)
    stream, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        tensor.fill_(7)
        assert driver.read(address + 4 * MB - 4, 4) == b"\7\0\0\0"
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        tensor.fill_(8)
        driver.memset(address, 1, 4)
        driver.write(address + 4, b"\2\2\2\2")
    with torch.cuda.stream(other):
        assert tensor[:3].tolist() == [0x01010101, 0x02020202, 8]


def test_copies_wait_for_no_other_stream(driver):
    address = driver.alloc(64)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLEEP_CYCLES)
        busy = torch.cuda.Event()
        busy.record()
    with torch.cuda.stream(torch.cuda.Stream()):
        driver.write(address, b"x")
        assert driver.read(address, 1) == b"x"
    assert not busy.query()
    driver.synchronize()
    assert busy.query()


def test_errors_carry_the_drivers_text(driver):
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2 \(\d+ bytes on cuda:0\): CUDA_ERROR_OUT_OF_MEMORY: out of"):
        driver.alloc(1 << 45)
    with pytest.raises(DriverError, match=r"cuMemsetD8Async \(16 bytes at 0x8 on cuda:0\): CUDA_ERROR_INVALID_VALUE"):
        driver.memset(8, 0, 16)
    with pytest.raises(DriverError, match=r"cuda:99.*CUDA_ERROR_INVALID_DEVICE"):
        CudaDriver(99)
    # the context is as good as before
    assert driver.read(driver.alloc(8), 8) == bytes(8)
    assert torch.ones(3, device="cuda").sum().item() == 3


# tensors

DTYPES = [
    torch.uint8, torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2,
    *([torch.float4_e2m1fn_x2] if hasattr(torch, "float4_e2m1fn_x2") else []),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_type(driver, dtype):
    data = bytes(i % 2 for i in range(480))
    address = driver.alloc(512)
    driver.write(address + 32, data)
    tensor = driver.tensor(address + 32, (2, 240 // dtype.itemsize), dtype)
    assert tensor.data_ptr() == address + 32
    assert (tensor.dtype, tensor.device, tensor.is_contiguous()) == (dtype, torch.device("cuda", 0), True)
    assert tensor.view(torch.uint8).flatten().cpu().numpy().tobytes() == data
    tensor.view(torch.uint8).zero_()
    assert driver.read(address + 32, 480) == bytes(480)
    empty = driver.tensor(address, (0, 7), dtype)
    assert (empty.shape, empty.dtype, empty.device) == ((0, 7), dtype, torch.device("cuda", 0))


def test_a_tensor_outlives_its_driver():
    """It is stale, not a crash: it keeps its memory, which goes back with the last view."""
    driver = CudaDriver()
    address = driver.alloc(64 * MB, exportable=True)
    rows = driver.tensor(address, (16 * MB,), torch.float32)
    row = rows[5:7]
    del rows
    driver.close()
    row.fill_(2).mul_(row)
    assert row.tolist() == [4.0, 4.0]
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    del row
    assert torch.cuda.mem_get_info()[0] - before == 64 * MB


def test_a_tensor_of_host_memory(driver):
    address = driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    words, view = driver.tensor(address, (8,), torch.int64), driver.host_view(address, 64).cast("q")
    view[3] = 42
    words[4] = words[3] + 1
    torch.cuda.synchronize()
    assert list(view) == [0, 0, 0, 42, 43, 0, 0, 0]


# host and device at the same time


@triton.jit
def handshake_kernel(words_ptr, out_ptr, LIMIT: tl.constexpr):
    """Say 1 in word 0, wait for 2 in word 1."""
    tl.atomic_xchg(words_ptr, 1, sem="release", scope="sys")
    seen = tl.load(words_ptr + 1, volatile=True)
    turns = 0
    while (seen < 2) & (turns < LIMIT):
        seen = tl.load(words_ptr + 1, volatile=True)
        turns += 1
    tl.store(out_ptr, seen)


def test_fine_grained_memory_is_shared_while_a_kernel_runs(driver):
    address = driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    words, view = driver.tensor(address, (2,), torch.int64), driver.host_view(address, 16).cast("q")
    out = torch.full((1,), -1, dtype=torch.int64, device="cuda")
    for _ in range(3):
        view[0] = view[1] = 0
        handshake_kernel[(1,)](words, out, LIMIT=1 << 24)
        until = time.monotonic() + 20
        while view[0] != 1 and time.monotonic() < until:
            pass
        assert view[0] == 1
        assert not torch.cuda.current_stream().query(), "the kernel has ended without an answer"
        view[1] = 2
        assert out.item() == 2


@triton.jit(do_not_specialize=["ctx", "signal_ptr", "value"])
def wait_kernel(ctx, signal_ptr, value):
    shmem.wait_ge(ctx, signal_ptr, value, 0, 0)


def test_errors_are_seen_while_kernels_run(driver):
    heap = SymmetricHeap(driver, ThreadGroup(1).bootstrap(0), MB, timeout_s=0.05)
    signal = heap.tensor((1,), torch.int64, "signal")
    signal.fill_(6)
    wait = prepare(wait_kernel, heap.ctx, signal, 7)
    for _ in range(20):
        assert not heap.errors_pending()
        wait((1,), heap.ctx, signal, 7)
        torch.cuda._sleep(SLEEP_CYCLES // 10)
        until = time.monotonic() + 20
        while not heap.errors_pending() and time.monotonic() < until:
            pass
        assert not torch.cuda.current_stream().query(), "the host has seen the error only after the kernels' end"
        with pytest.raises(PeerTimeout, match=r"signal of PE 0, expected >= 7, saw 6"):
            heap.check_errors()
        assert not torch.cuda.current_stream().query(), "taking the error has waited for the kernels"
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10_000):
        heap.errors_pending()
    assert time.perf_counter() - start < 0.02
    heap.close()


# streams, events, graphs, modules


def test_streams_events_and_graphs(driver):
    first, second, event = driver.create_stream(), driver.create_stream(), driver.create_event()
    # loads its kernel, which must not happen while a stream is captured
    tensor = torch.zeros(1000, device="cuda").mul_(2)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.ExternalStream(first)):
        torch.cuda._sleep(SLEEP_CYCLES // 4)
        tensor.fill_(5)
    driver.record_event(event, first)
    driver.wait_event(second, event)
    with torch.cuda.stream(torch.cuda.ExternalStream(second)):
        tensor.add_(1)
    driver.stream_synchronize(second)
    assert tensor.eq(6).all()
    assert driver.capture_id(first) == 0
    driver.begin_capture(first)
    with torch.cuda.stream(torch.cuda.ExternalStream(first)):
        tensor.mul_(2)
    found = driver.capture_id(first)
    assert found != 0
    graph = driver.end_capture(first)
    for _ in range(3):
        driver.launch_graph(graph, first)
    driver.stream_synchronize(first)
    assert tensor.eq(48).all()
    driver.begin_capture(first)
    assert driver.capture_id(first) not in (0, found)
    driver.destroy_graph(driver.end_capture(first))
    driver.destroy_graph(graph)
    driver.destroy_event(event)
    driver.destroy_stream(first)
    driver.destroy_stream(second)


@triton.jit(do_not_specialize=["out_ptr"])
def names_kernel(out_ptr):
    """MORI's names, which find the context by a global variable of the module."""
    tl.store(out_ptr, mori.my_pe())
    tl.store(out_ptr + 1, mori.n_pes())


def test_the_global_variable_of_a_tritons_module(driver):
    out = torch.full((2,), -1, dtype=torch.int32, device="cuda")
    names = prepare(names_kernel, out)
    module = names.compiled.module
    address, num_bytes = driver.module_global(module, abi.CONTEXT_SYMBOL)
    assert num_bytes == 8
    assert driver.read(address, 8) == bytes(8)
    group = ThreadGroup(1)
    heap = SymmetricHeap(driver, group.bootstrap(0), MB)
    driver.write(address, heap.ctx_address.to_bytes(8, "little"))
    names((1,), out)
    assert out.tolist() == [0, 1]
    with pytest.raises(DriverError, match=r"global variable 'gone' on cuda:0.*CUDA_ERROR_NOT_FOUND"):
        driver.module_global(module, "gone")
    heap.close()


def test_no_memory_is_held_after_these_tests(held_before):  # noqa: F811
    check_held(held_before)
