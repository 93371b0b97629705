"""Memory of peers by drivers of GPUs, on doubles of their libraries: handles, descriptors, mappings, heaps."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import threading

import pytest

from mori_triton.errors import ArgumentError, DriverError
from mori_triton.host.bootstrap.threads import ThreadGroup
from mori_triton.host.drivers import MemoryKind, cuda_api, hip_api
from mori_triton.host.drivers.cuda import CudaDriver
from mori_triton.host.heap import SymmetricHeap
from tests.host.fake_gpu import INVALID, FakeGpus, fake_driver
from tests.host.worlds import run_threads

pytestmark = pytest.mark.cpu

MB = 1 << 20


@pytest.fixture(params=["cuda", "hip"])
def kind(request):
    return request.param


def elsewhere(handle: bytes) -> bytes:
    """A handle as a peer in another process would have made it."""
    return json.dumps(json.loads(handle) | {"process": "another"}).encode()


def closed(driver, gpus) -> dict:
    driver.close()
    del driver
    gc.collect()
    return gpus.left()


def test_k8_handles_of_slices(kind):
    """IPC opens the whole allocation, wherever the address points: the driver adds the offset."""
    owner, gpus = fake_driver(kind)
    peer, _ = fake_driver(kind, gpus=gpus)
    base = owner.alloc(100, exportable=True)
    # nobody else's memory is in what the handle stands for
    assert gpus.memory["device"][base] == 2 * MB
    handles = [owner.export_handle(base + offset) for offset in (0, 16, 99)]
    assert [peer.import_handle(handle) - base for handle in handles] == [0, 16, 99]
    for handle in handles:
        peer.close_import(base + json.loads(handle)["offset"])
    foreign = [elsewhere(handle) for handle in handles]
    assert [peer.import_handle(handle) - base for handle in foreign] == [0, 16, 99]
    assert gpus.opened[base] == 3
    assert [call[2] for call in gpus.of("ipc_open")] == [cuda_api.IPC_MEM_LAZY_ENABLE_PEER_ACCESS] * 3
    assert peer.import_handle(foreign[0]) == base
    for address in (base, base, base + 16, base + 99):
        peer.close_import(address)
    with pytest.raises(DriverError, match="not imported"):
        peer.close_import(base)
    assert gpus.opened[base] == 0
    peer.close()
    del peer
    assert set(closed(owner, gpus)) <= {"contexts"}


def test_import_within_the_process(kind):
    owner, gpus = fake_driver(kind, 0)
    peer, _ = fake_driver(kind, 1, gpus=gpus)
    base = owner.alloc(64, exportable=True)
    handle = owner.export_handle(base)
    assert peer.import_handle(handle) == peer.import_handle(handle) == base
    assert not gpus.of("ipc_open")
    # each device is made to reach the other's memory once, and it is no error that it does already
    assert gpus.access == ({(1, 0xC0000 + 10)} if kind == "cuda" else {(1, 0)})
    assert len(gpus.of("enable_peer_access")) == 2
    assert kind == "cuda" or gpus.last_error == 0
    peer.close_import(base)
    owner.free(base)
    # the peer holds it still
    assert base in gpus.memory["device"]
    peer.close_import(base)
    assert not gpus.memory["device"]
    with pytest.raises(DriverError, match="their owner in this process has freed them"):
        peer.import_handle(handle)
    # also when other memory is at the same address now
    gpus.next_address = base
    assert owner.alloc(64, exportable=True) == base
    with pytest.raises(DriverError, match="their owner in this process has freed them"):
        peer.import_handle(handle)
    with pytest.raises(DriverError, match="not allocated as exportable"):
        owner.export_handle(owner.alloc(64))
    gpus.fail["enable_peer_access"] = INVALID
    again = owner.export_handle(owner.alloc(64, exportable=True))
    with pytest.raises(DriverError, match=r"EnablePeerAccess .*invalid argument"):
        peer.import_handle(again)


def test_no_peer_access(kind):
    gpus = FakeGpus((cuda_api if kind == "cuda" else hip_api).FUNCTIONS, peers=False)
    owner, _ = fake_driver(kind, 0, gpus=gpus)
    peer, _ = fake_driver(kind, 1, gpus=gpus)
    with pytest.raises(
        DriverError, match=rf"{kind}:1 cannot load from and store to memory of {kind}:0: no peer access"
    ):
        peer.import_handle(owner.export_handle(owner.alloc(64, exportable=True)))
    same, _ = fake_driver(kind, 0, gpus=gpus)
    assert same.import_handle(owner.export_handle(owner.alloc(64, exportable=True)))


@pytest.mark.parametrize(("heap_mode", "step"), [("static_heap", "ipc_get"), ("vmm", "map_export")])
def test_where_memory_cannot_be_exported_threads_do_without(kind, heap_mode, step):
    owner, gpus = fake_driver(kind, 0, heap_mode=heap_mode)
    peer, _ = fake_driver(kind, 1, gpus=gpus, heap_mode=heap_mode)
    base = owner.alloc(64, exportable=True)
    gpus.fail[step] = INVALID
    handle = owner.export_handle(base)
    assert peer.import_handle(handle) == base
    with pytest.raises(DriverError, match=r"another process: it could not export it: .*invalid argument"):
        peer.import_handle(elsewhere(handle))


def test_devices_of_two_kinds_do_not_mix():
    owner, _ = fake_driver("cuda")
    peer, _ = fake_driver("hip")
    with pytest.raises(DriverError, match="import of memory of a cuda device by hip:0"):
        peer.import_handle(owner.export_handle(owner.alloc(64, exportable=True)))


@pytest.mark.parametrize("version", [70_051_831, 70_100_000])
def test_mappings(kind, version):
    gpus = FakeGpus((cuda_api if kind == "cuda" else hip_api).FUNCTIONS, version=version)
    open_before = len(os.listdir("/proc/self/fd"))
    owner, _ = fake_driver(kind, 0, gpus=gpus, heap_mode="vmm")
    peer, _ = fake_driver(kind, 1, gpus=gpus, heap_mode="vmm")
    base = owner.alloc(3 * MB, kind=MemoryKind.UNCACHED, exportable=True)
    allocation = cuda_api.MEM_ALLOCATION_TYPE_PINNED if kind == "cuda" else hip_api.MEM_ALLOCATION_TYPE_UNCACHED
    assert list(gpus.memory["handles"].values()) == [(4 * MB, allocation, 1, 0)]
    assert (base, 0, 3) in gpus.access
    assert owner.read(base, 3 * MB) == bytes(3 * MB)
    # what is not for peers is plain memory
    plain = owner.alloc(64)
    assert plain in gpus.memory["device"]
    handle = owner.export_handle(base + 256)
    # a thread of this process: the same address, which its device is let into
    assert peer.import_handle(handle) == base + 256
    assert (base, 1, 3) in gpus.access
    peer.close_import(base + 256)
    # another process: the descriptor is handed over, as often as it is asked for
    first, second = peer.import_handle(elsewhere(handle)), peer.import_handle(elsewhere(handle))
    assert first != second
    by_value = kind == "cuda" or version >= 70_100_000
    assert all((argument < 1 << 16) == by_value for _, argument, _ in gpus.of("map_import"))
    assert {(first - 256, 1, 3), (second - 256, 1, 3)} <= gpus.access
    owner.end_export(base)
    owner.end_export(base)
    with pytest.raises(DriverError, match="its process has ended"):
        peer.import_handle(elsewhere(handle))
    peer.close_import(first)
    gpus.calls.clear()
    peer.close_import(second)
    assert gpus.keys() == ["synchronize", "unmap", "map_unreserve", "map_release"]
    # without end_export too
    handle = owner.export_handle(base)
    owner.free(base)
    with pytest.raises(DriverError, match="its process has ended"):
        peer.import_handle(elsewhere(handle))
    owner.free(plain)
    assert not any(gpus.memory.values())
    gpus.exports.clear()
    assert len(os.listdir("/proc/self/fd")) == open_before


@pytest.mark.parametrize("step", ["map_granularity", "map_create", "map_reserve", "map", "map_access", "memset"])
def test_a_mapping_that_fails_leaves_nothing(kind, step):
    driver, gpus = fake_driver(kind, heap_mode="vmm")
    gpus.fail[step] = INVALID
    with pytest.raises(DriverError, match="invalid argument"):
        driver.alloc(64, exportable=True)
    assert not any(gpus.memory.values())


def test_a_descriptor_of_a_driver_that_closes(kind):
    driver, gpus = fake_driver(kind, heap_mode="vmm")
    driver.export_handle(driver.alloc(64, exportable=True))
    driver.export_handle(driver.alloc(64, exportable=True))
    before = threading.active_count()
    driver.close()
    assert threading.active_count() == before - 2
    assert not any(gpus.memory.values())


@pytest.mark.parametrize("heap_mode", ["static_heap", "vmm"])
def test_a_heap_on_a_gpu(kind, heap_mode, monkeypatch):
    """The heap and its tables, all PEs threads of this process; nothing is left when it is closed."""
    gpus = FakeGpus((cuda_api if kind == "cuda" else hip_api).FUNCTIONS)
    group = ThreadGroup(3, timeout_s=5)

    def program(pe):
        driver, _ = fake_driver(kind, pe % 2, gpus=gpus, heap_mode=heap_mode)
        heap = SymmetricHeap(driver, group.bootstrap(pe), 5 * MB)
        address = heap.malloc(64)
        # nobody hands out memory any more
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("mori_triton-")]
        driver.write(address, bytes([pe] * 64))
        heap.bootstrap.barrier()
        seen = [driver.read(heap.peer_address(address, peer), 1)[0] for peer in range(3)]
        raw = driver.read(heap.ctx_address, 128)
        errors = int.from_bytes(raw[48:56], "little")
        assert errors in gpus.memory["host"]
        heap.bootstrap.barrier()
        # kernels write there, and the host sees it without a call of the library
        before = len(gpus.calls)
        pending = [heap.errors_pending()]
        ctypes.c_uint64.from_address(errors).value = 1
        pending.append(heap.errors_pending())
        records = heap.take_errors()
        pending.append(heap.errors_pending())
        assert len(gpus.calls) == before
        heap.bootstrap.barrier()
        heap.close()
        driver.close()
        return seen, pending, records

    for seen, pending, records in run_threads(3, program):
        assert seen == [0, 1, 2]
        assert pending == [False, True, False]
        assert records == ([], 1)
    gc.collect()
    assert gpus.left() == {}


def test_a_heap_gives_back_what_it_can(kind):
    driver, gpus = fake_driver(kind)
    heap = SymmetricHeap(driver, ThreadGroup(1).bootstrap(0), MB)
    gpus.fail["mem_free"] = INVALID
    with pytest.raises(DriverError, match="invalid argument"):
        heap.close()
    assert not gpus.memory["host"]
    assert len(gpus.of("mem_free")) == 2
    heap.close()


def test_errors_of_the_heap_name_each_pe(kind):
    gpus = FakeGpus((cuda_api if kind == "cuda" else hip_api).FUNCTIONS)
    group = ThreadGroup(2, timeout_s=5)

    def program(pe):
        driver, _ = fake_driver(kind, pe, gpus=gpus)
        with pytest.raises(Exception, match=r"could not be set up \(PE 0: .*out of memory; PE 1: .*out of memory\)"):
            SymmetricHeap(driver, group.bootstrap(pe), 1 << 51)
        driver.close()

    run_threads(2, program)
    gc.collect()
    assert gpus.left() == {}


def test_modes():
    with pytest.raises(ArgumentError, match="heap_mode: want static_heap or vmm, got 'isolation'"):
        CudaDriver(0, heap_mode="isolation", library=fake_driver("cuda")[0]._gpu.library)
