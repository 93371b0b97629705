"""`CudaDriver` and `HipDriver` on doubles of their libraries: which calls, in which order, with which values; what is
left over; what errors say. What a GPU does with them is in test_cuda_driver_gpu1.py.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import weakref
from unittest.mock import ANY

import pytest
import torch

from mori_triton.errors import ArgumentError, DriverError, StateError
from mori_triton.host.drivers import MemoryKind, cuda, cuda_api, dlpack, hip, hip_api
from tests.host.fake_gpu import INVALID, OUT_OF_MEMORY, FakeGpus, fake_driver
from tests.host.worlds import run_threads

pytestmark = pytest.mark.cpu

MB = 1 << 20


@pytest.fixture(params=["cuda", "hip"])
def kind(request):
    return request.param


def closed(driver, gpus) -> dict:
    driver.close()
    del driver
    gc.collect()
    return gpus.left()


def test_alloc_write_read_copy_free(kind):
    driver, gpus = fake_driver(kind)
    for memory in MemoryKind:
        address = driver.alloc(1000, kind=memory)
        assert driver.read(address, 1000) == bytes(1000)
        driver.write(address + 10, b"\0some\xff")
        driver.memset(address, 0x5A, 10)
        driver.copy(address + 500, address + 8, 9)
        assert driver.read(address + 499, 11) == b"\0\x5a\x5a\0some\xff\0\0"
        driver.free(address)
        assert not any(gpus.memory.values())
    address = driver.alloc(1)
    driver.write(address, b"")
    driver.copy(address, address, 0)
    assert driver.read(address, 0) == b""
    driver.free(address)
    for bad in ({"num_bytes": 0}, {"num_bytes": -1}, {"num_bytes": 8, "alignment": 3}):
        with pytest.raises(ArgumentError):
            driver.alloc(**bad)
    with pytest.raises(ArgumentError, match="value: want 0 to 255"):
        driver.memset(address, 256, 1)
    for call in (driver.free, driver.export_handle):
        with pytest.raises(DriverError, match="not an allocation"):
            call(address)
    assert closed(driver, gpus) == {}


def test_what_kinds_of_memory_are():
    driver, gpus = fake_driver("cuda")
    driver.alloc(64, kind=MemoryKind.UNCACHED)
    driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    assert gpus.of("mem_alloc") == [("out", 64)]
    assert gpus.of("host_alloc") == [("out", 64, cuda_api.MEMHOSTALLOC_PORTABLE | cuda_api.MEMHOSTALLOC_DEVICEMAP)]
    driver, gpus = fake_driver("hip")
    driver.alloc(64, kind=MemoryKind.CACHED)
    driver.alloc(64, kind=MemoryKind.UNCACHED)
    driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    assert gpus.of("mem_alloc") == [("out", 64)]
    assert gpus.of("mem_alloc_flags") == [("out", 64, 3)]
    assert gpus.of("host_alloc") == [("out", 64, 0x40000003)]
    assert driver.ticks_per_second == 100_000_000


def test_copies_are_done_when_they_return(kind, monkeypatch):
    """On the stream that torch has for the calling thread, and no other is waited for."""
    driver, gpus = fake_driver(kind, 1)
    address = driver.alloc(64)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: type("Stream", (), {"cuda_stream": 7 + index}))
    gpus.calls.clear()
    driver.write(address, b"abc")
    driver.read(address, 3)
    driver.memset(address, 0, 3)
    driver.copy(address, address + 8, 3)
    assert gpus.keys() == ["memcpy", "stream_synchronize"] * 2 + ["memset", "stream_synchronize"] + [
        "memcpy",
        "stream_synchronize",
    ]
    assert {call[-1] for call in gpus.of("memcpy") + gpus.of("memset")} == {8}
    assert set(gpus.of("stream_synchronize")) == {(8,)}
    if kind == "hip":
        assert {call[3] for call in gpus.of("memcpy")} == {hip_api.MEMCPY_DEFAULT}


def test_the_current_device_is_put_back(kind):
    gpus = FakeGpus((cuda_api if kind == "cuda" else hip_api).FUNCTIONS)
    first, _ = fake_driver(kind, 0, gpus=gpus)
    second, _ = fake_driver(kind, 1, gpus=gpus)
    me = threading.get_ident()
    first.set_current()
    address = second.alloc(64)
    assert gpus.current[me] == [0]
    gpus.fail["memset"] = INVALID
    with pytest.raises(DriverError):
        second.memset(address, 0, 64)
    assert gpus.current[me] == [0]
    second.set_current()
    # another thread, where nothing has been made current yet
    run_threads(1, lambda pe: second.free(address))
    assert gpus.current[me] == [1]


def test_errors_carry_the_librarys_text(kind):
    driver, gpus = fake_driver(kind)
    symbol = "cuMemAlloc_v2" if kind == "cuda" else "hipMalloc"
    text = rf"^{symbol} \({1 << 60} bytes on {kind}:0\): ERROR_OUT_OF_MEMORY: out of memory$"
    with pytest.raises(DriverError, match=text):
        driver.alloc(1 << 60)
    # torch would take a forgotten error for its own
    assert kind == "cuda" or gpus.last_error == 0
    with pytest.raises(DriverError, match=r"global variable 'gone' on .*named symbol not found"):
        driver.module_global(5, "gone")
    # what has been allocated before the failure is given back
    gpus.fail["memset"] = OUT_OF_MEMORY
    with pytest.raises(DriverError, match="4096 bytes at 0x"):
        driver.alloc(4096)
    assert not any(gpus.memory.values())


def test_how_many_gpus_there_are(kind, monkeypatch):
    module, api = (cuda, cuda_api) if kind == "cuda" else (hip, hip_api)
    opened = []

    def load(names):
        opened.append(list(names))
        if len(opened) == 1:
            raise DriverError("no library")
        return FakeGpus(api.FUNCTIONS, devices=3)

    monkeypatch.setattr(module, "load", load)
    module.open_library.cache_clear()
    try:
        # a driver may be installed later; one that is there is opened once
        assert [module.device_count() for _ in range(3)] == [0, 3, 3]
        assert len(opened) == 2
        assert set(api.LIBRARY_NAMES) <= set(opened[0])
        driver = (cuda.CudaDriver if kind == "cuda" else hip.HipDriver)(2)
        assert driver.device_index == 2
        driver.close()
    finally:
        module.open_library.cache_clear()


def test_no_such_gpu(kind):
    with pytest.raises(DriverError, match=rf"{kind}:2"):
        fake_driver(kind, 2)
    with pytest.raises(DriverError, match="has no function"):
        fake_driver(kind, gpus=FakeGpus({}))


def test_hip_before_6_is_refused():
    with pytest.raises(DriverError, match=r"this is HIP 5\.7; want 6\.0 or newer"):
        fake_driver("hip", gpus=FakeGpus(hip_api.FUNCTIONS, version=50_731_921))


def test_failures_of_giving_back_are_told(kind):
    driver, gpus = fake_driver(kind)
    one, two = driver.alloc(64), driver.alloc(64)
    gpus.fail["mem_free"] = INVALID
    with pytest.raises(DriverError, match=rf"{one:#x} on {kind}:0.*invalid argument"):
        driver.free(one)
    with pytest.raises(DriverError, match=f"{two:#x}"):
        driver.close()
    # told once
    driver.close()
    with pytest.raises(StateError, match="closed"):
        driver.alloc(64)


def test_views_keep_their_memory(kind):
    driver, gpus = fake_driver(kind)
    address = driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    view = driver.host_view(address + 8, 16)
    driver.write(address + 8, b"0123")
    assert bytes(view[:5]) == b"0123\0"
    view[1] = 7
    assert driver.read(address + 8, 3) == b"0\x072"
    with pytest.raises(DriverError, match="not inside one allocation"):
        driver.host_view(address + 60, 8)
    # the view needs no context of its own, but giving its memory back does
    assert set(closed(driver, gpus)) == ({"host", "contexts"} if kind == "cuda" else {"host"})
    assert view[0] == ord("0")
    del view
    assert gpus.left() == {}


def test_tensors_keep_their_memory(kind, monkeypatch):
    """By dlpack on the CPU, whose memory the doubles' memory is."""
    driver, gpus = fake_driver(kind)
    monkeypatch.setattr(type(driver), "dlpack_device", dlpack.CPU)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    address = driver.alloc(96)
    driver.write(address, bytes(range(96)))
    for dtype in (torch.uint8, torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64):
        tensor = driver.tensor(address + 16, (2, 16 // dtype.itemsize), dtype)
        assert (tensor.data_ptr(), tensor.dtype, tensor.is_contiguous()) == (address + 16, dtype, True)
        assert tensor.view(torch.uint8).flatten().tolist() == list(range(16, 48))
    del tensor
    assert driver.tensor(address, (), torch.int32).shape == ()
    with pytest.raises(DriverError, match="not inside one allocation"):
        driver.tensor(address, (25,), torch.float32)
    row = driver.tensor(address, (4, 6), torch.float32)[2]
    driver.free(address)
    assert gpus.memory["device"]
    row.fill_(3)
    row = row.t()
    assert gpus.memory["device"]
    driver.close()
    del row
    assert not gpus.memory["device"]
    assert dlpack._held == {}


def test_nothing_is_left_without_close(kind):
    driver, gpus = fake_driver(kind)
    driver.alloc(64, exportable=True)
    driver.alloc(64, kind=MemoryKind.FINE_GRAINED)
    # by reference counts alone
    gc.disable()
    try:
        gone = weakref.ref(driver)
        del driver
        assert gone() is None
        assert gpus.left() == {}
    finally:
        gc.enable()


def test_streams_events_and_graphs(kind):
    driver, gpus = fake_driver(kind)
    gpus.calls.clear()
    stream, event = driver.create_stream(), driver.create_event()
    driver.record_event(event, 0)
    driver.wait_event(stream, event)
    driver.begin_capture(stream)
    assert driver.capture_id(stream) == 1
    graph = driver.end_capture(stream)
    assert driver.capture_id(stream) == 0
    driver.launch_graph(graph, stream)
    driver.stream_synchronize(stream)
    driver.synchronize()
    assert [call for call in gpus.calls if call[0] in set(gpus.keys())] == [
        ("stream_create", "out", 1),
        ("event_create", "out", 2),
        ("event_record", event, None),
        ("stream_wait_event", stream, event, 0),
        ("capture_begin", stream, 1),
        ("capture_info", stream, "out", "out"),
        ("capture_end", stream, "out"),
        ("graph_instantiate", "out", graph - 1, 0),
        ("graph_destroy", graph - 1),
        ("capture_info", stream, "out", "out"),
        ("graph_launch", graph, stream),
        ("stream_synchronize", stream),
        ("synchronize",),
    ]
    driver.destroy_graph(graph)
    driver.destroy_event(event)
    driver.destroy_stream(stream)
    assert not any(gpus.others.values())
    gpus.fail["graph_instantiate"] = INVALID
    driver.begin_capture(0)
    with pytest.raises(DriverError):
        driver.end_capture(0)
    assert not any(gpus.others.values())


def test_module_global(kind):
    driver, gpus = fake_driver(kind)
    gpus.globals[b"mori_shmem_context"] = 0x7000
    assert driver.module_global(0xABC0, "mori_shmem_context") == (0x7000, 8)
    assert gpus.of("module_global") == [("out", "out", 0xABC0, b"mori_shmem_context")]
    with pytest.raises(ArgumentError, match="object"):
        driver.module_global(object(), "x")


def test_pci_address(kind):
    """As sysfs writes it, whatever the case of the library's text."""
    driver, gpus = fake_driver(kind, 1)
    assert driver.pci_address == "0000:1b:00.0"
    assert gpus.of("pci_bus_id")[0][2] == (11 if kind == "cuda" else 1)
    gpus.fail["pci_bus_id"] = INVALID
    with pytest.raises(DriverError, match=rf"PCIBusId \({kind}:1\): ERROR_INVALID_VALUE"):
        _ = driver.pci_address


IO = {"cuda": cuda_api.MEMHOSTREGISTER_IOMEMORY, "hip": 0}


def test_pages_of_other_devices(kind):
    """Where the kernel sees them is the library's choice, which fakes make visible."""
    driver, gpus = fake_driver(kind)
    seen = driver.map_host(0x7E0000001000, 8192, registers=True)
    assert seen == 0x7E0000001000 + 0x100000000000
    assert gpus.of("host_register") == [(0x7E0000001000, 8192, 1 | 2 | IO[kind])]
    driver.map_host(0x7E0000004000, 4096)
    assert gpus.of("host_register")[1] == (0x7E0000004000, 4096, 1 | 2)
    with pytest.raises(DriverError, match=f"HostRegister.*4096 bytes at 0x7e0000001000 on {kind}:0.*invalid argument"):
        driver.map_host(0x7E0000001000, 4096)
    driver.unmap_host(0x7E0000001000)
    assert list(gpus.memory["registered"]) == [0x7E0000004000]
    with pytest.raises(DriverError, match="unmap of 0x7e0000001000: not mapped"):
        driver.unmap_host(0x7E0000001000)
    gpus.fail["host_device_pointer"] = INVALID
    with pytest.raises(DriverError, match="HostGetDevicePointer"):
        driver.map_host(0x7E0000008000, 4096)
    assert list(gpus.memory["registered"]) == [0x7E0000004000]
    assert closed(driver, gpus) == {}


def test_dma_bufs(kind):
    driver, gpus = fake_driver(kind)
    base = driver.alloc(5 << 20, exportable=True)
    os.close(driver.export_dma_buf(base, 5 << 20))
    # all there is of it, in whole pages: 5 MiB are allocated as 6
    assert gpus.of("dma_buf") == [(ANY, base, 6 << 20, 1, 0)]
    # registering by address may do, where this does not
    gpus.fail["dma_buf"] = INVALID
    assert driver.export_dma_buf(base, 5 << 20) is None
    words = driver.alloc(4096, kind=MemoryKind.FINE_GRAINED)
    assert driver.export_dma_buf(words, 4096) is None
    del gpus.fail["dma_buf"]
    for inside in (64, 4096):
        assert driver.export_dma_buf(base + inside, 64) is None
    # whole pages of it are less than it is
    uneven = driver.alloc(2 * 4096 + 64)
    assert uneven % 4096 == 0
    assert driver.export_dma_buf(uneven, 2 * 4096 + 64) is None
    assert len(gpus.of("dma_buf")) == 2
    driver._gpu.library._functions.pop("dma_buf")
    assert driver.export_dma_buf(base, 5 << 20) is None
    assert closed(driver, gpus) == {}


def test_pinned_memory_is_for_this_process(kind):
    owner, gpus = fake_driver(kind, 0)
    peer, _ = fake_driver(kind, 1, gpus=gpus)
    base = owner.alloc(100, kind=MemoryKind.FINE_GRAINED, exportable=True)
    handle = owner.export_handle(base)
    assert peer.import_handle(handle) == base
    # every device reaches it
    assert not gpus.of("enable_peer_access")
    with pytest.raises(DriverError, match="could not export it: pinned host memory is for PEs of one process"):
        peer.import_handle(json.dumps(json.loads(handle) | {"process": "another"}).encode())
