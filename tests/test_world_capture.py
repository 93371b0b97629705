"""What a capture leaves in torch's allocators, also one that cannot be ended: torch's own code around fakes of them.

The fakes do what c10/cuda/CUDACachingAllocator.cpp, ATen/cuda/CUDAGraph.cpp and ATen/cuda/MemPool.cpp of torch do.
"""

import contextlib
import gc
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
import torch

from mori_triton.world import gpus

pytestmark = pytest.mark.cpu


class Allocators:
    """Torch's allocators of two GPUs: captures that are underway by device, and who keeps a pool's memory there."""

    def __init__(self):
        self.underway = defaultdict(list)
        self.users = Counter()
        self.num_pools = 0
        # the calling thread's
        self.device, self.streams = 0, {index: f"before on {index}" for index in range(3)}
        # what torch ends the process for
        self.aborts = []

    def handle(self):
        self.num_pools += 1
        return (0, self.num_pools)

    def begin(self, device, pool):
        assert pool not in self.underway[device]
        self.underway[device].append(pool)
        self.users[device, pool] += 1

    def end(self, device, pool):
        if pool not in self.underway[device]:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway[device].remove(pool)

    def release(self, device, pool):
        if self.users[device, pool] <= 0:
            raise RuntimeError("uc >= 0 INTERNAL ASSERT FAILED")
        self.users[device, pool] -= 1

    @contextlib.contextmanager
    def on(self, stream):
        before = self.device, self.streams[stream.device.index]
        self.device = stream.device.index
        self.streams[self.device] = stream.name
        try:
            yield
        finally:
            self.device, self.streams[stream.device.index] = before


@pytest.fixture
def torchs(monkeypatch):
    """Torch with fake GPUs."""
    made = Allocators()

    class Graph:
        spoilt = ended = False

        def capture_begin(self, pool=None, **how):
            self.at = made.device, pool or made.handle()
            made.begin(*self.at)

        def capture_end(self):
            # in this order
            if self.spoilt:
                raise RuntimeError("operation failed due to a previous error during capture")
            made.end(*self.at)
            self.ended = True

        def __del__(self):
            if self.ended:
                made.release(*self.at)

    class Device:
        def __init__(self, device):
            self.index = device.index

        def __enter__(self):
            self.before, made.device = made.device, self.index

        def __exit__(self, *how):
            made.device = self.before

    class Pool:
        def __init__(self):
            self.id, self.device = made.handle(), made.device
            made.users[self.device, self.id] += 1

        def __del__(self):
            made.release(self.device, self.id)
            made.aborts += [device for (device, pool) in made.users if pool == self.id and made.underway[device]]

    monkeypatch.setattr(gpus, "_spoilt", [])
    for name, there in {
        "CUDAGraph": Graph, "MemPool": Pool, "stream": made.on, "device": Device, "graph_pool_handle": made.handle,
        "synchronize": lambda: None, "empty_cache": lambda: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, there)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    for where in (torch._C, torch.cuda.memory):
        monkeypatch.setattr(where, "_cuda_beginAllocateCurrentThreadToPool", made.begin)
        monkeypatch.setattr(where, "_cuda_endAllocateToPool", made.end)
        monkeypatch.setattr(where, "_cuda_releasePool", made.release)
    return made


def capture(*devices):
    streams = [SimpleNamespace(device=torch.device("cuda", index), name=f"PE {pe}") for pe, index in enumerate(devices)]
    return gpus.Gpus.capture(None, streams[0], streams)


def users(torchs):
    return sorted(device for (device, _), count in torchs.users.items() for _ in range(count))


def test_a_graph_keeps_its_memory_on_every_gpu(torchs):
    with capture(0, 1, 0, 1, 2) as captured:
        assert [len(torchs.underway[device]) for device in range(3)] == [1, 1, 1]
    assert not any(torchs.underway.values())
    # or torch would give away what a replay uses
    assert users(torchs) == [0, 1, 2]
    del captured
    gc.collect()
    assert users(torchs) == []
    assert torchs.aborts == []
    assert (torchs.device, torchs.streams) == (0, Allocators().streams)


@pytest.mark.parametrize("devices", [(0,), (0, 0), (0, 1), (1, 0), (0, 1, 2)])
def test_nothing_is_underway_after_a_capture_that_cannot_be_ended(torchs, devices):
    def step(captured):
        captured.graph.spoilt = True
        raise RuntimeError("a step's")

    with pytest.raises(RuntimeError, match="previous error during capture") as caught, capture(*devices) as captured:
        step(captured)
    assert str(caught.value.__context__) == "a step's"
    assert not any(torchs.underway.values())
    assert (torchs.device, torchs.streams) == (0, Allocators().streams)
    # while the error is there its frames are: a later graph may come and go
    with capture(*devices) as later:
        pass
    del later
    gc.collect()
    assert torchs.aborts == []
    # and the failed one's memory goes with the error
    del captured, caught
    gc.collect()
    assert users(torchs) == []
    assert torchs.aborts == []
    # pinned memory may still ask for it
    assert len(gpus._spoilt) == 1


def test_a_capture_that_ends_in_spite_of_an_error(torchs):
    with pytest.raises(KeyError, match="a step's"), capture(0, 1) as captured:
        raise KeyError("a step's")
    assert not any(torchs.underway.values())
    assert users(torchs) == [0, 1]
    assert gpus._spoilt == []
    del captured
    gc.collect()
    assert users(torchs) == []
    assert torchs.aborts == []


def test_a_capture_that_does_not_begin(torchs, monkeypatch):
    def broken():
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    with pytest.raises(RuntimeError, match="an illegal memory access"), capture(0, 1):
        raise AssertionError("not reached")
    assert users(torchs) == []
